"""The compare stage: two traces -> rows of metrics, and a row with a reason for each gap in them.

Knows canonical, metrics and stored traces; no engine. Invariant: every site that either side
captured gives exactly one row per sequence, compared or skipped.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
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
from minite_diag.canonical.scales import power_of_two_shift, unpack, unsigned_zero
from minite_diag.canonical.tokens import SiteTensor, read_site
from minite_diag.plan import Plan, read_plan
from minite_diag.site import Site
from minite_diag.trace.schema import COMPARISON, LOGPROBS, write_table
from minite_diag.trace.store import Trace

COMPARISON_FILE: Final = "comparison.parquet"
LOGPROBS_FILE: Final = "logprobs.parquet"

CODE_KINDS: Final = {
    "weight_codes": "weight_block_scale",
    "act_codes": "act_block_scale",
}
SCALE_KINDS: Final = {scale: codes for codes, scale in CODE_KINDS.items()}


class Unpaired(Exception):
    """Two tensors that can't be compared; the text is the reason of the skip."""


@dataclass(frozen=True)
class Side:
    """One trace and its sites."""

    trace: Trace
    sites: dict[SequenceKey, Sites]

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


def compare(run: Path) -> None:
    """Compare the learner with each sampler, and the samplers with each other.

    Writes comparison.parquet and logprobs.parquet; raises TraceError for a damaged run.
    """
    plan = read_plan(run)
    rows: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []
    usable = {
        spec.id: Side.of(Trace(run / "traces" / spec.id))
        for spec in plan.engines
        if _is_usable(run, spec.id)
    }
    for baseline_id, target_id in pairs_of(plan):
        if baseline_id in usable and target_id in usable:
            baseline, target = usable[baseline_id], usable[target_id]
            rows += compare_sites(baseline, target)
            logprobs += compare_logprobs(plan, baseline, target)
    write_table(run / COMPARISON_FILE, rows, COMPARISON)
    write_table(run / LOGPROBS_FILE, logprobs, LOGPROBS)


def pairs_of(plan: Plan) -> list[tuple[str, str]]:
    """(baseline, target) ids: learner with each sampler, then the samplers pairwise."""
    samplers = [spec.id for spec in plan.samplers]
    pairs = [(plan.learner.id, sampler) for sampler in samplers]
    pairs += [(a, b) for i, a in enumerate(samplers) for b in samplers[i + 1 :]]
    return pairs


def _is_usable(run: Path, engine_id: str) -> bool:
    folder = run / "traces" / engine_id
    return (folder / "tokens.parquet").exists() and (folder / "calls.parquet").exists()


def compare_sites(baseline: Side, target: Side) -> list[dict[str, Any]]:
    """One row per site and sequence of either side, in the baseline's execution order."""
    keys = list(dict.fromkeys([*baseline.sites, *target.sites]))
    return [row for key in keys for row in _compare_sequence(baseline, target, key)]


def _compare_sequence(baseline: Side, target: Side, key: SequenceKey) -> Iterator[dict[str, Any]]:
    mine, theirs = baseline.sites.get(key, {}), target.sites.get(key, {})
    order = execution_order(theirs) | execution_order(mine)
    if key != STATIC and not (mine and theirs):
        # A sequence that one side did not capture at all, such as another sampler's tokens.
        absent = (target if mine else baseline).trace
        reason = f"{absent.id} captured no tensors of this sequence"
        for site in sorted(order, key=lambda s: (order[s], s)):
            yield _row(baseline, target, key, site, order[site]) | _skip(reason)
        return
    for site in sorted(order, key=lambda s: (order[s], s)):
        row = _row(baseline, target, key, site, order[site])
        try:
            yield row | _compare_site(baseline, target, key, site)
        except Unpaired as unpaired:
            yield row | _skip(str(unpaired))


def _row(baseline: Side, target: Side, key: SequenceKey, site: Site, order: int) -> dict[str, Any]:
    return {
        "baseline": baseline.trace.id,
        "target": target.trace.id,
        "mode": key.mode,
        "source": key.source,
        "probe": key.probe,
        "order": order,
        "fqn": site.fqn,
        "kind": site.kind,
        "layer_index": site.layer_index,
        "expert_index": site.expert_index,
    }


def _skip(reason: str) -> dict[str, Any]:
    return {"status": "skipped", "reason": reason}


def _compare_site(baseline: Side, target: Side, key: SequenceKey, site: Site) -> dict[str, Any]:
    mine = _pieces(baseline, key, site)
    theirs = _pieces(target, key, site)
    if not mine[0].ref.file or not theirs[0].ref.file:
        return _compare_statistics(mine, theirs)
    x, y = read_site(baseline.trace, mine), read_site(target.trace, theirs)
    row: dict[str, Any] = {
        "status": "compared",
        "reason": "",
        "baseline_dtype": str(x.tensor.dtype).removeprefix("torch."),
        "target_dtype": str(y.tensor.dtype).removeprefix("torch."),
    }
    x, y, note = _same_rows(x, y)
    row["reason"] = note
    row |= _metrics_of(baseline, target, key, site, x, y)
    if x.positions is not None and row.get("first_row") is not None:
        row["first_row"] = int(x.positions[row["first_row"]])
    elif x.positions is None:
        row["first_row"] = None
    return row


def _pieces(side: Side, key: SequenceKey, site: Site) -> list[Piece]:
    pieces = side.sites.get(key, {}).get(site)
    if pieces:
        return pieces
    why = invisible_reason(side.trace, site)
    if why is None and site.expert_index is not None and key != STATIC:
        why = "no token of this sequence was routed to this expert there"
    raise Unpaired(f"{side.trace.id} has no such tensor" + (f": {why}" if why else ""))


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
    equal = a.digest == b.digest and a.dtype == b.dtype and a.shape == b.shape
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


def _metrics_of(
    baseline: Side, target: Side, key: SequenceKey, site: Site, x: SiteTensor, y: SiteTensor
) -> dict[str, Any]:
    if site.kind in CODE_KINDS:
        return _compare_codes(baseline, target, key, site, x, y)
    if site.kind in SCALE_KINDS:
        return _compare_block_scales(baseline, target, key, site, x, y)
    if site.kind == "topk_ids":
        return metrics.compare_expert_sets(x.tensor.long(), y.tensor.long())
    if site.kind == "topk_weights":
        return _compare_routing_weights(baseline, target, key, site, x, y)
    row = metrics.compare_values(x.tensor, y.tensor)
    if site.kind.endswith("_global_decode_scale"):
        ratio = (y.tensor.double() / x.tensor.double()).reshape(-1)
        row["scale_ratio"] = float(ratio.median())
    return row


def _compare_codes(
    baseline: Side, target: Side, key: SequenceKey, site: Site, x: SiteTensor, y: SiteTensor
) -> dict[str, Any]:
    a, b = unpack(unsigned_zero(x.tensor)), unpack(unsigned_zero(y.tensor))
    scales = Site(site.fqn, CODE_KINDS[site.kind])
    counted = torch.ones_like(a, dtype=torch.bool)
    left, right = baseline.read(key, scales), target.read(key, scales)
    if left is not None and right is not None and left.tensor.shape == right.tensor.shape:
        # A block whose scale is zero on both sides decodes to zero whatever its codes are.
        zero = (left.tensor.float() == 0) & (right.tensor.float() == 0)
        if zero.numel() * 16 == a.numel():
            counted = ~zero.repeat_interleave(16, -1)
    return metrics.compare_codes(a, b, counted)


def _compare_block_scales(
    baseline: Side, target: Side, key: SequenceKey, site: Site, x: SiteTensor, y: SiteTensor
) -> dict[str, Any]:
    codes = Site(site.fqn, SCALE_KINDS[site.kind])
    left, right = baseline.read(key, codes), target.read(key, codes)
    counted = None
    if left is not None and right is not None and left.tensor.shape == right.tensor.shape:
        # Writers disagree on the scale byte of a block of zeros (0x00, 0x38, 0x20, 0x08).
        zero = _zero_blocks(left.tensor) & _zero_blocks(right.tensor)
        if zero.shape == x.tensor.shape:
            counted = ~zero
    row = metrics.compare_codes(metrics.as_bits(x.tensor), metrics.as_bits(y.tensor), counted)
    shift = _scale_shift(baseline, target, key, site, x, y, counted)
    if shift is not None:
        row["reason"] = f"effective scales equal (global scale shifted by 2^{shift})"
    return row


def _zero_blocks(codes: torch.Tensor) -> torch.Tensor:
    plain = unsigned_zero(codes)
    return (plain.reshape(*plain.shape[:-1], -1, 8) == 0).all(-1)


def _scale_shift(
    baseline: Side,
    target: Side,
    key: SequenceKey,
    site: Site,
    x: SiteTensor,
    y: SiteTensor,
    counted: torch.Tensor | None,
) -> int | None:
    """K if the scales differ by an exact power of two between block and global scale only."""
    kind = site.kind.replace("block_scale", "global_decode_scale")
    left = baseline.read(key, Site(site.fqn, kind))
    right = target.read(key, Site(site.fqn, kind))
    if left is None or right is None or left.tensor.numel() != 1 or right.tensor.numel() != 1:
        return None
    a, b = float(left.tensor.double()), float(right.tensor.double())
    shift = power_of_two_shift(b / a) if a else None
    if not shift:
        return None
    same = x.tensor.double() * a == y.tensor.double() * b
    if counted is not None:
        same = same | ~counted
    return shift if bool(same.all()) else None


def _compare_routing_weights(
    baseline: Side, target: Side, key: SequenceKey, site: Site, x: SiteTensor, y: SiteTensor
) -> dict[str, Any]:
    """Weights are compared expert by expert, for tokens that chose the same set."""
    ids_x = baseline.read(key, Site(site.fqn, "topk_ids"))
    ids_y = target.read(key, Site(site.fqn, "topk_ids"))
    if ids_x is None or ids_y is None or ids_x.tensor.shape != ids_y.tensor.shape:
        return metrics.compare_values(x.tensor, y.tensor)
    a, order_a = ids_x.tensor.long().sort(-1)
    b, order_b = ids_y.tensor.long().sort(-1)
    same = (a == b).all(-1)
    if not bool(same.any()):
        raise Unpaired("no token chose the same experts on both sides")
    return metrics.compare_values(
        x.tensor.gather(-1, order_a)[same], y.tensor.gather(-1, order_b)[same]
    ) | {"agreement": float(same.double().mean()), "first_row": None}


def compare_logprobs(plan: Plan, baseline: Side, target: Side) -> list[dict[str, Any]]:
    """One row per token that both sides gave a log-probability for."""
    on = ["mode", "source", "probe", "position", "token_id"]
    pairs = baseline.trace.tokens.merge(
        target.trace.tokens, on=on, suffixes=("_baseline", "_target")
    ).dropna(subset=["logprob_baseline", "logprob_target"])
    category = {probe.id: probe.category for probe in plan.probes}
    kls = _full_kl(baseline, target)
    return [
        {
            "baseline": baseline.trace.id,
            "target": target.trace.id,
            "mode": row.mode,
            "source": row.source,
            "probe": row.probe,
            "category": category.get(row.probe, ""),
            "position": row.position,
            "token_id": row.token_id,
            "generated": row.generated_target,
            "target_phase": row.phase_target,
            "baseline_logprob": row.logprob_baseline,
            "target_logprob": row.logprob_target,
            # The logits of position i - 1 give the distribution of token i.
            "full_kl": kls.get((row.mode, row.source, row.probe, row.position - 1)),
            "topk_overlap": _overlap(row.top_ids_baseline, row.top_ids_target),
        }
        for row in _records(pairs)
    ]


def _records(frame: pd.DataFrame) -> Iterator[Any]:
    return iter(frame.itertuples(index=False))


def _overlap(a: Any, b: Any) -> float | None:
    k = min(len(a), len(b))
    if not k:
        return None
    return len(set(map(int, a[:k])) & set(map(int, b[:k]))) / k


def _full_kl(baseline: Side, target: Side) -> dict[tuple[str, str, str, int], float]:
    found: dict[tuple[str, str, str, int], float] = {}
    site = Site("lm_head", "logits")
    for key in baseline.sites:
        x, y = baseline.read(key, site), target.read(key, site)
        if x is None or y is None or x.positions is None or y.positions is None:
            continue
        common, i, j = np.intersect1d(x.positions, y.positions, return_indices=True)
        width = min(x.tensor.shape[1], y.tensor.shape[1])
        values = metrics.full_kl(
            x.tensor[torch.from_numpy(i), :width], y.tensor[torch.from_numpy(j), :width]
        )
        found |= {(*key, int(p)): v for p, v in zip(common, values, strict=True)}
    return found
