"""One site of two traces -> one row of metrics, or the reason why there is none.

Knows canonical, metrics and stored traces; no engine, no plan. Invariant: what is compared are the
bytes that the engines held; the only liberties are declared (rows in token order, E2M1 zeros
without a sign, blocks of zeros masked, narrower dtype for bits) and noted where they matter.
"""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from minite_diag import metrics
from minite_diag.canonical.names import (
    STATIC,
    Piece,
    SequenceKey,
    Sites,
    execution_order,
    index_trace,
)
from minite_diag.canonical.scales import power_of_two_shift, unsigned_zero, zero_blocks
from minite_diag.canonical.shards import is_shared
from minite_diag.canonical.tokens import SiteTensor, read_site
from minite_diag.site import Site
from minite_diag.trace.store import Trace

CODE_KINDS: Final = {
    "weight_codes": "weight_block_scale",
    "act_codes": "act_block_scale",
}
SCALE_KINDS: Final = {scale: codes for codes, scale in CODE_KINDS.items()}

REMEMBERED: Final = 16
"""Results kept for sites that turn out to be the same bytes: the inputs of q, k and v."""


class Unpaired(Exception):
    """Two tensors that can't be compared; the text is the reason of the skip."""


@dataclass(frozen=True)
class Side:
    """One trace and its sites."""

    trace: Trace
    sites: Mapping[SequenceKey, Mapping[Site, list[Piece]]]

    @classmethod
    def of(cls, trace: Trace) -> Side:
        """Index a trace."""
        return cls(trace, index_trace(trace))

    def read(self, key: SequenceKey, site: Site) -> SiteTensor | None:
        """The site's tensor, or None where it was not captured (or only its statistics)."""
        pieces = self.sites.get(key, {}).get(site)
        if not pieces or not pieces[0].ref.file:
            return None
        return read_site(self.trace, pieces)

    def order(self, key: SequenceKey) -> dict[Site, int]:
        """Order of first execution of each site of a sequence."""
        found = self.sites.get(key)
        return execution_order(found) if isinstance(found, Sites) else {}


@dataclass(frozen=True)
class SiteResult:
    """Columns of the `comparison` table that depend on the tensors.

    `scale_counts`: blocks by E4M3 byte, [256] for each side, of block scales; blocks of zeros are
    not counted.
    """

    row: dict[str, Any]
    scale_counts: tuple[torch.Tensor, torch.Tensor] | None = None


class SequencePair:
    """The sites of one sequence in two traces."""

    def __init__(self, baseline: Side, target: Side, key: SequenceKey) -> None:
        self.key = key
        self.traces = baseline.trace, target.trace
        self.sites: tuple[Mapping[Site, list[Piece]], Mapping[Site, list[Piece]]] = (
            baseline.sites.get(key, {}),
            target.sites.get(key, {}),
        )
        self._results: OrderedDict[Any, SiteResult] = OrderedDict()

    def compare(self, site: Site) -> dict[str, Any]:
        """The row of a site; raises Unpaired."""
        return self.measure(site).row

    def measure(self, site: Site) -> SiteResult:
        """The row of a site, and the counts of its block scales; raises Unpaired."""
        pieces = self._pieces(0, site), self._pieces(1, site)
        if not pieces[0][0].ref.file or not pieces[1][0].ref.file:
            return SiteResult(_compare_statistics(*pieces))
        identity = self._identity(site, *pieces)
        if identity not in self._results:
            self._results[identity] = self._compare(site, *pieces)
            if len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        return self._results[identity]

    def read(self, site: Site) -> tuple[SiteTensor, SiteTensor]:
        """Both sides' tensors of a site; raises Unpaired."""
        pieces = self._pieces(0, site), self._pieces(1, site)
        if not pieces[0][0].ref.file or not pieces[1][0].ref.file:
            raise Unpaired("only statistics were kept")
        return read_site(self.traces[0], pieces[0]), read_site(self.traces[1], pieces[1])

    def _pieces(self, side: int, site: Site) -> list[Piece]:
        pieces = self.sites[side].get(site)
        if pieces:
            return pieces
        trace = self.traces[side]
        why = invisible_reason(trace, site)
        if why is None and site.expert_index is not None and self.key != STATIC:
            why = "no token of this sequence was routed to this expert there"
        raise Unpaired(f"{trace.id} has no such tensor" + (f": {why}" if why else ""))

    def _identity(self, site: Site, mine: list[Piece], theirs: list[Piece]) -> Any:
        """Equal for sites whose comparison reads the same bytes."""
        kinds = [site.kind]
        if site.kind in CODE_KINDS:
            kinds.append(CODE_KINDS[site.kind])
        elif site.kind in SCALE_KINDS:
            kinds += [SCALE_KINDS[site.kind], _global_kind(site.kind)]
        elif site.kind == "topk_weights":
            kinds.append("topk_ids")
        others = [
            pieces
            for kind in kinds[1:]
            for sites in self.sites
            for pieces in [sites.get(Site(site.fqn, kind), [])]
        ]
        return site.kind, *(tuple(map(_bytes_of, p)) for p in (mine, theirs, *others))

    def _read(self, side: int, site: Site, kind: str) -> torch.Tensor | None:
        """Another kind of the same module."""
        pieces = self.sites[side].get(Site(site.fqn, kind))
        if not pieces or not pieces[0].ref.file:
            return None
        return read_site(self.traces[side], pieces).tensor

    def _read_both(
        self, site: Site, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Another kind of the same module on both sides, where both have it in one shape."""
        x, y = self._read(0, site, kind), self._read(1, site, kind)
        if x is None or y is None or x.shape != y.shape:
            return None, None
        return x, y

    def _compare(self, site: Site, mine: list[Piece], theirs: list[Piece]) -> SiteResult:
        x, y = read_site(self.traces[0], mine), read_site(self.traces[1], theirs)
        row: dict[str, Any] = {
            "status": "compared",
            "reason": "",
            "baseline_dtype": str(x.tensor.dtype).removeprefix("torch."),
            "target_dtype": str(y.tensor.dtype).removeprefix("torch."),
        }
        x, y, row["reason"] = _same_rows(x, y)
        row |= self._metrics_of(site, x.tensor, y.tensor)
        if x.positions is None:
            row["first_row"] = None
        elif row.get("first_row") is not None:
            row["first_row"] = int(x.positions[row["first_row"]])
        return SiteResult(row, row.pop("scale_counts", None))

    def _metrics_of(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        if site.kind in CODE_KINDS:
            return self._compare_codes(site, x, y)
        if site.kind in SCALE_KINDS:
            return self._compare_block_scales(site, x, y)
        if site.kind == "topk_ids":
            return metrics.compare_expert_sets(x.long(), y.long())
        if site.kind == "topk_weights":
            return self._compare_routing_weights(site, x, y)
        row = metrics.compare_values(x, y)
        if site.kind.endswith("_global_decode_scale"):
            row["scale_ratio"] = float((y.double() / x.double()).reshape(-1).median())
        return row

    def _compare_codes(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        left, right = self._read_both(site, CODE_KINDS[site.kind])
        zero = None
        if left is not None and right is not None and left.numel() * 8 == x.numel():
            # A block whose scale is zero on both sides decodes to zero whatever its codes are.
            zero = (left.float() == 0) & (right.float() == 0)
        return metrics.compare_packed_codes(unsigned_zero(x), unsigned_zero(y), zero)

    def _compare_block_scales(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        left, right = self._read_both(site, SCALE_KINDS[site.kind])
        counted = None
        if left is not None and right is not None:
            # Writers disagree on the scale byte of a block of zeros (0x00, 0x38, 0x20, 0x08).
            a, b = zero_blocks(unsigned_zero(left)), zero_blocks(unsigned_zero(right))
            if a is not None and b is not None and a.shape == x.shape:
                counted = ~(a & b)
        row = metrics.compare_codes(metrics.as_bits(x), metrics.as_bits(y), counted)
        shift = self._scale_shift(site, x, y, counted)
        if shift is not None:
            row["reason"] = f"effective scales equal (global scale shifted by 2^{shift})"
        if x.dtype == y.dtype == torch.float8_e4m3fn:
            row["scale_counts"] = _counts(x, counted), _counts(y, counted)
        return row

    def _scale_shift(
        self, site: Site, x: torch.Tensor, y: torch.Tensor, counted: torch.Tensor | None
    ) -> int | None:
        """K if the scales differ by an exact power of two between block and global scale only."""
        left = self._read(0, site, _global_kind(site.kind))
        right = self._read(1, site, _global_kind(site.kind))
        if left is None or right is None or left.numel() != 1 or right.numel() != 1:
            return None
        a, b = float(left.double()), float(right.double())
        shift = power_of_two_shift(b / a) if a else None
        if not shift:
            return None
        same = x.double() * a == y.double() * b
        if counted is not None:
            same |= ~counted
        return shift if bool(same.all()) else None

    def _compare_routing_weights(
        self, site: Site, x: torch.Tensor, y: torch.Tensor
    ) -> dict[str, Any]:
        """Weights are compared expert by expert, for tokens that chose the same set."""
        ids_x, ids_y = self._read_both(site, "topk_ids")
        if ids_x is None or ids_y is None:
            return metrics.compare_values(x, y)
        a, order_a = ids_x.long().sort(-1)
        b, order_b = ids_y.long().sort(-1)
        same = (a == b).all(-1)
        if not bool(same.any()):
            raise Unpaired("no token chose the same experts on both sides")
        return metrics.compare_values(x.gather(-1, order_a)[same], y.gather(-1, order_b)[same]) | {
            "agreement": float(same.double().mean()),
            "first_row": None,
        }


def _counts(scales: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    bits = metrics.as_bits(scales)
    chosen = bits.reshape(-1) if counted is None else bits[counted]
    return torch.bincount(chosen, minlength=256)


def paired_tensors(pair: SequencePair, site: Site) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors that `pair.compare(site)` compares, in one shape; raises Unpaired."""
    x, y, _ = _same_rows(*pair.read(site))
    return x.tensor, y.tensor


def _global_kind(block_scale_kind: str) -> str:
    return block_scale_kind.replace("block_scale", "global_decode_scale")


def _bytes_of(piece: Piece) -> tuple[Any, ...]:
    """What decides the bytes of a piece: where it lies, which rows and which part of it."""
    ref = piece.ref
    part = None if is_shared(ref.kind, piece.part) else piece.part
    return ref.file, ref.offset, ref.row_offset, ref.call, ref.kind, ref.dtype, ref.shape, part


def invisible_reason(trace: Trace, site: Site) -> str | None:
    """Why the engine says that it can't show this site."""
    for pattern, reason in (trace.manifest.get("invisible") or {}).items():
        fqn_glob, _, kind_glob = pattern.partition(":")
        if fnmatch.fnmatchcase(site.fqn, fqn_glob) and fnmatch.fnmatchcase(
            site.kind, kind_glob or "*"
        ):
            return str(reason)
    return None


def _compare_statistics(mine: list[Piece], theirs: list[Piece]) -> dict[str, Any]:
    if len(mine) != 1 or len(theirs) != 1:
        raise Unpaired("only statistics were kept and the calls are split differently")
    a, b = mine[0].ref, theirs[0].ref
    if mine[0].part != theirs[0].part and (mine[0].part.stop or theirs[0].part.stop):
        raise Unpaired("only statistics were kept and one side's module is fused")
    if not a.digest or not b.digest:
        raise Unpaired("one side kept statistics only")
    if a.shape != b.shape:
        raise Unpaired(
            f"only statistics were kept, of shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype:
        raise Unpaired(f"only statistics were kept, of {a.dtype} and {b.dtype}")
    if a.digest.rpartition("/")[0] != b.digest.rpartition("/")[0]:
        raise Unpaired("only statistics were kept, and other tokens came here")
    equal = a.digest == b.digest
    row: dict[str, Any] = {
        "status": "compared",
        "reason": "statistics only",
        "baseline_dtype": a.dtype,
        "target_dtype": b.dtype,
        "elements": int(np.prod(a.shape)),
        "bitwise_fraction": 1.0 if equal else None,
    }
    if a.l2 and b.l2 is not None:
        row["scale_ratio"] = b.l2 / a.l2
    return row


def _same_rows(x: SiteTensor, y: SiteTensor) -> tuple[SiteTensor, SiteTensor, str]:
    """Keep the token positions that both sides have; raises Unpaired if shapes can't match."""
    note = ""
    if x.positions is not None and y.positions is not None:
        if not np.array_equal(x.positions, y.positions):
            common, i, j = np.intersect1d(x.positions, y.positions, return_indices=True)
            if not len(common):
                raise Unpaired("the sides saw no common token here")
            note = (
                f"{len(common)} common tokens of {len(x.positions)} (baseline) "
                f"and {len(y.positions)} (target)"
            )
            x = SiteTensor(x.tensor[torch.from_numpy(i)], common)
            y = SiteTensor(y.tensor[torch.from_numpy(j)], common)
    elif (x.positions is None) != (y.positions is None):
        return _broadcast_per_call(x, y)
    if x.tensor.shape != y.tensor.shape:
        if x.tensor.numel() == y.tensor.numel():
            return x, SiteTensor(y.tensor.reshape(x.tensor.shape), y.positions), note
        raise Unpaired(f"shapes differ: {tuple(x.tensor.shape)} and {tuple(y.tensor.shape)}")
    return x, y, note


def _broadcast_per_call(x: SiteTensor, y: SiteTensor) -> tuple[SiteTensor, SiteTensor, str]:
    """One side has one value per call, the other one per token."""
    whole, rows = (x, y) if x.positions is None else (y, x)
    if whole.tensor.numel() != 1:
        raise Unpaired("one side has a value per token, the other several per call")
    spread = SiteTensor(whole.tensor.reshape(1).expand(rows.tensor.shape), rows.positions)
    note = "one side has one value per call, the other one per token"
    return (spread, rows, note) if whole is x else (rows, spread, note)
