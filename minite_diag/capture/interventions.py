"""Another engine's captured tensors in the place of an engine's own, while it runs.

Knows torch, traces and canonical sites; no engine. An engine passes every tensor that it shows
through `hooks.pass_on`: what the module computed is recorded, what an intervention says flows on.
Invariant: an intervention that patched nothing is an error, and the number of patched tensors is
part of every result.

Two modes. `value`: the baseline's tensor itself. `correction`: the op's own error is taken out and
what it inherited stays: output + (baseline's output - the op's output on the baseline's input),
and exactly the baseline's output where the op computed exactly what it computed on that input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch

from minite_diag.canonical.names import SequenceKey, index_trace
from minite_diag.canonical.scales import public_kind
from minite_diag.canonical.tokens import read_site
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import Layout, Part
from minite_diag.errors import EngineError
from minite_diag.plan import CaptureSpec
from minite_diag.site import Site, matches
from minite_diag.trace.store import Row, Trace, TraceWriter

OperandOutput = Callable[[str, torch.Tensor, torch.dtype], torch.Tensor | None]
"""(module, input [T, K], dtype) -> the output [T, N] of a quantized linear with other operands."""

MODES: Final = ("value", "correction")
CACHE_BYTES: Final = 1 << 30
"""Donor tensors kept in memory: a bisection reads the same ones again and again."""


@dataclass(frozen=True)
class Intervention:
    """Which sites are replaced and how; `sites` as `fqn:kind`, empty for all of the baseline's.

    `local` is the folder of the trace with the target's outputs on the baseline's inputs; the mode
    `correction` needs it.
    """

    baseline: str
    mode: str = "value"
    sites: tuple[str, ...] = ()
    local: str = ""


@dataclass(frozen=True)
class Donation:
    """A token-wise tensor [rows, ...] and the positions of its rows, ascending."""

    tensor: torch.Tensor
    positions: np.ndarray[Any, Any]

    def rows(self, positions: np.ndarray[Any, Any]) -> torch.Tensor:
        """The rows of these positions, flat: [len(positions), features]."""
        at = torch.from_numpy(np.searchsorted(self.positions, positions))
        return self.tensor[at].reshape(len(at), -1)


class Donor:
    """One stored trace as a source of tensors by sequence and site."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._sites = index_trace(trace)
        self._kept: dict[tuple[SequenceKey, Site], Donation | None] = {}
        self._bytes = 0

    def find(self, key: SequenceKey, site: Site) -> Donation | None:
        """The site's token-wise tensor in position order; None where there is none."""
        where = (key, site)
        if where in self._kept:
            return self._kept[where]
        found = self._read(key, site)
        size = found.tensor.numel() * found.tensor.element_size() if found else 0
        if self._bytes + size > CACHE_BYTES:
            self._kept.clear()
            self._bytes = 0
        self._kept[where] = found
        self._bytes += size
        return found

    def _read(self, key: SequenceKey, site: Site) -> Donation | None:
        sites = self._sites.get(key)
        if sites is None or site not in sites:
            return None
        pieces = sites[site]
        if not pieces or not pieces[0].ref.file:
            return None
        found = read_site(self.trace, pieces)
        return None if found.positions is None else Donation(found.tensor, found.positions)


@dataclass(frozen=True)
class _Active:
    """One intervention with its sources open."""

    mode: str
    sites: frozenset[Site] | None
    baseline: Donor
    local: Donor | None


class _NoWriter:
    """Where a forward goes that records nothing."""

    def call(self, call: int, rows: Any) -> None:
        pass


class IntervenedRecorder(Recorder):
    """A Recorder that also knows what to put in the place of a tensor.

    Starts idle: nothing is recorded or replaced until `start`. Static tensors are never written.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(cast("TraceWriter", _NoWriter()), CaptureSpec(sites=()), layout)
        self._globs: tuple[str, ...] = ()
        self._known: dict[tuple[str, str], bool] = {}
        self._active: tuple[_Active, ...] = ()
        self._donors: dict[str, Donor] = {}
        self._call_keys: list[SequenceKey] = []
        self._call_positions = np.zeros(0, dtype=np.int64)
        self.patched = 0
        self.rows_changed = 0
        self.routed_rows = 0
        self.patched_sites: set[Site] = set()
        self.use_operands(None, ())

    def use_operands(self, output: OperandOutput | None, sites: Sequence[str]) -> None:
        """Compute these linears by `output` from now on; None ends it.

        Afterwards `inexact` holds the sites at which that gave other bits than the engine's.
        """
        self._operands = output
        self._operand_sites = frozenset(map(Site.parse, sites))
        self._inputs: dict[str, torch.Tensor] = {}
        self.inexact: set[Site] = set()

    def tensor(
        self,
        native: str,
        kind: str,
        tensor: torch.Tensor,
        row_index: torch.Tensor | None = None,
        *,
        per_call: bool = False,
    ) -> None:
        """As any Recorder; a linear's input is kept for its own output where operands change."""
        if self.active and self._operands is not None and kind == "input":
            self._inputs[native] = tensor
        super().tensor(native, kind, tensor, row_index, per_call=per_call)

    def wants(self, native: str, kind: str) -> bool:
        """Whether the current job records the site."""
        key = (native, kind)
        if key not in self._known:
            parts = self.layout.parts.get(native) or (Part(native),)
            public = public_kind(kind)
            self._known[key] = any(matches(part.fqn, public, self._globs) for part in parts)
        return self._known[key]

    def promise(self, native: str, kind: str) -> None:
        """Nothing: what a job patches and records is counted instead."""

    def static(self, native: str, kind: str, tensor: torch.Tensor) -> None:
        """Nothing: weights are in the captured trace."""

    def start(
        self,
        traces: dict[str, Trace],
        interventions: Sequence[Intervention],
        globs: tuple[str, ...],
        writer: TraceWriter | None,
    ) -> None:
        """Set up the next job; `traces` are the ones that the interventions name."""
        self._globs, self._known = globs, {}
        self.writer = writer or cast("TraceWriter", _NoWriter())
        self.truncated = False
        self.calls = 0
        self.patched = self.rows_changed = self.routed_rows = 0
        self.patched_sites = set()
        self._active = tuple(self._open(item, traces) for item in interventions)
        self.active = True

    def stop(self) -> None:
        """End the job; raises EngineError if an intervention patched nothing."""
        self.active = False
        for item in self._active:
            if not self.patched_sites & (item.sites or self.patched_sites):
                first = next(iter(item.sites)) if item.sites else "*"
                raise EngineError(
                    f"an intervention patched nothing ({first} of {len(item.sites or ())} sites)",
                    "capture the baseline with these sites and this sequence",
                )
        self._active = ()

    def begin_call(self, rows: Sequence[Row]) -> None:
        """Start a forward pass whose flat token batch is `rows`."""
        super().begin_call(rows)
        if self.active:
            self._call_keys = [SequenceKey(r.mode, r.source, r.probe) for r in rows]
            self._call_positions = np.array([r.position for r in rows], dtype=np.int64)

    def replacement(
        self, native: str, kind: str, tensor: torch.Tensor, row_index: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """What flows on instead of `tensor` [rows, ...]; None where nothing replaces it."""
        if self.active and self._operands is not None and kind == "output":
            return self._with_operands(native, tensor)
        if not (self.active and self._active):
            return None
        result: torch.Tensor | None = None
        for part in self.layout.parts.get(native) or (Part(native),):
            site = Site(part.fqn, public_kind(kind))
            item = self._intervention(site)
            if item is None:
                continue
            target = _copy(tensor, site.kind) if result is None else result
            if self._fill(item, site, part, target, row_index):
                result = target
                if kind == "input":
                    # One input serves all parts of a fused module.
                    break
        return result

    def _with_operands(self, native: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The output of a linear with other operands; None where nothing changes."""
        x = self._inputs.pop(native, None)
        assert self._operands is not None
        result: torch.Tensor | None = None
        for part in self.layout.parts.get(native) or (Part(native),):
            site = Site(part.fqn, "output")
            if x is None or site not in self._operand_sites:
                continue
            computed = self._operands(part.fqn, x.reshape(x.shape[0], -1), tensor.dtype)
            own = tensor[:, part.start : part.stop] if part.stop else tensor
            if computed is None:
                self.inexact.add(site)
                continue
            self._count(site)
            if torch.equal(computed, own):
                continue
            self.inexact.add(site)
            result = tensor.clone() if result is None else result
            (result[:, part.start : part.stop] if part.stop else result).copy_(computed)
        return result

    def route(
        self, native: str, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The expert ids and weights that flow on; None where nothing replaces them."""
        if not (self.active and self._active):
            return None
        site = Site(native, "topk_ids")
        item = self._intervention(site)
        if item is None:
            return None
        ids, weights = ids_TK.detach().clone(), weights_TK.detach().clone()
        changed = False
        for key, rows, positions in self._sequences(None):
            found = self._routing(item, key, native, positions)
            if found is None:
                continue
            known, baseline, local = found
            where = torch.from_numpy(rows[known]).to(ids.device)
            before = (ids[where], weights[where])
            after = _reroute(before, baseline, local if item.mode == "correction" else None)
            self.rows_changed += int((_sorted(before[0]) != _sorted(after[0])).any(-1).sum())
            self.routed_rows += len(where)
            ids[where], weights[where] = after
            changed = True
        if not changed:
            return None
        self._count(site)
        self._count(Site(native, "topk_weights"))
        return ids, weights

    def _routing(
        self, item: _Active, key: SequenceKey, native: str, positions: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], _Routing, _Routing | None] | None:
        sources = [item.baseline] + ([item.local] if item.local is not None else [])
        found = []
        for donor in sources:
            ids = donor.find(key, Site(native, "topk_ids"))
            weights = donor.find(key, Site(native, "topk_weights"))
            if ids is None or weights is None:
                return None
            found.append((ids, weights))
        known = np.isin(positions, found[0][0].positions)
        picked = [
            (ids.rows(positions[known]).long(), weights.rows(positions[known]))
            for ids, weights in found
        ]
        return known, picked[0], picked[1] if len(picked) > 1 else None

    def _open(self, item: Intervention, traces: dict[str, Trace]) -> _Active:
        assert item.mode in MODES
        assert (item.mode == "correction") == bool(item.local)
        for name in (item.baseline, item.local):
            if name and name not in self._donors:
                self._donors[name] = Donor(traces[name])
        return _Active(
            item.mode,
            frozenset(map(Site.parse, item.sites)) or None,
            self._donors[item.baseline],
            self._donors.get(item.local),
        )

    def _intervention(self, site: Site) -> _Active | None:
        return next((i for i in self._active if i.sites is None or site in i.sites), None)

    def _sequences(
        self, row_index: torch.Tensor | None
    ) -> list[tuple[SequenceKey, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """(sequence, rows of the tensor, positions) of every sequence in the call."""
        if row_index is None:
            own = np.arange(len(self._call_keys))
        else:
            own = row_index.cpu().numpy().astype(np.int64)
        keys = [self._call_keys[row] for row in own.tolist()]
        found = []
        for key in dict.fromkeys(keys):
            rows = np.array([i for i, k in enumerate(keys) if k == key], dtype=np.int64)
            found.append((key, rows, self._call_positions[own[rows]]))
        return found

    def _fill(
        self,
        item: _Active,
        site: Site,
        part: Part,
        tensor: torch.Tensor,
        row_index: torch.Tensor | None,
    ) -> bool:
        """Overwrite the part's slice of `tensor`; whether anything was replaced."""
        whole = tensor.view(tensor.shape[0], -1)
        if site.kind == "output" and part.stop:
            whole = whole[:, part.start : part.stop]
        filled = False
        for key, rows, positions in self._sequences(row_index):
            source = item.baseline.find(key, site)
            local = item.local.find(key, site) if item.local is not None else source
            if source is None or local is None:
                continue
            known = np.isin(positions, source.positions) & np.isin(positions, local.positions)
            if not known.any():
                continue
            where = torch.from_numpy(rows[known]).to(tensor.device)
            value = source.rows(positions[known]).to(tensor.device)
            width = value.shape[1]
            if width != whole.shape[1]:
                if site.kind != "logits":
                    raise EngineError(
                        f"{site} has {width} features in the baseline, {whole.shape[1]} here",
                        "the engines' layouts differ: report it",
                    )
                width = min(width, whole.shape[1])
                value = value[:, :width]
            if item.mode == "correction":
                own = local.rows(positions[known]).to(tensor.device)[:, :width]
                value = corrected(whole[where, :width], value, own)
            whole[where, :width] = value.to(tensor.dtype)
            filled = True
        if filled:
            self._count(site)
        return filled

    def _count(self, site: Site) -> None:
        self.patched += 1
        self.patched_sites.add(site)


_Routing = tuple[torch.Tensor, torch.Tensor]


def _copy(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """A contiguous copy to fill; logits in FP32, because the other engine's may be."""
    dtype = torch.float32 if kind == "logits" else tensor.dtype
    return tensor.detach().to(dtype, copy=True).contiguous()


def corrected(own: torch.Tensor, baseline: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`own` + (`baseline` - `local`) in float64, and exactly `baseline` where `own` is `local`.

    All [rows, features]; the result is float64 for the caller to round once.
    """
    moved = own.double() + (baseline.double() - local.double())
    return torch.where(own.double() == local.double(), baseline.double(), moved)


def _sorted(ids_TK: torch.Tensor) -> torch.Tensor:
    return ids_TK.long().sort(-1).values


def _reroute(own: _Routing, baseline: _Routing, local: _Routing | None) -> _Routing:
    """The baseline's routing, or with `local` only what the router itself decides differently.

    Where the router chose the baseline's set from the baseline's input, its own choice stays and
    only its weights are corrected, expert by expert.
    """
    ids, weights = own
    base_ids, base_weights = (t.to(ids.device) for t in baseline)
    if local is None:
        return base_ids.to(ids.dtype), base_weights.to(weights.dtype)
    local_ids, local_weights = (t.to(ids.device) for t in local)
    sorted_base, order_base = base_ids.sort(-1)
    sorted_local, order_local = local_ids.sort(-1)
    sorted_own, order_own = ids.long().sort(-1)
    decides_otherwise = (sorted_base != sorted_local).any(-1, keepdim=True)
    same_set = (sorted_own == sorted_base).all(-1, keepdim=True)
    fixed = torch.zeros_like(weights.double()).scatter_(
        -1,
        order_own,
        corrected(
            weights.gather(-1, order_own),
            base_weights.gather(-1, order_base),
            local_weights.gather(-1, order_local),
        ),
    )
    new_weights = torch.where(same_set, fixed, weights.double())
    new_weights = torch.where(decides_otherwise, base_weights.double(), new_weights)
    new_ids = torch.where(decides_otherwise, base_ids, ids.long())
    return new_ids.to(ids.dtype), new_weights.to(weights.dtype)
