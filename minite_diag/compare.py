"""The compare stage: two traces -> rows of metrics, and a row with a reason for each gap in them.

Knows canonical, metrics and stored traces; no engine. Invariant: every site that either side
captured gives exactly one row per sequence, compared or skipped; neither a whole trace nor all
rows are ever in memory.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from minite_diag import metrics
from minite_diag.canonical.names import STATIC, SequenceKey
from minite_diag.compare_site import SequencePair, Side, Unpaired, invisible_reason
from minite_diag.plan import Plan, read_plan
from minite_diag.site import Site
from minite_diag.trace.schema import COMPARISON, LOGPROBS, SCALES, TableWriter
from minite_diag.trace.store import Trace

__all__ = ["Side", "compare", "compare_logprobs", "compare_sites", "invisible_reason"]

COMPARISON_FILE: Final = "comparison.parquet"
LOGPROBS_FILE: Final = "logprobs.parquet"
SCALES_FILE: Final = "scales.parquet"

RELEASE_BYTES: Final = 16 << 20
"""Bytes read from a trace before its pages are let go."""


def compare(run: Path, out: Path | None = None) -> None:
    """Compare the learner with each sampler, and the samplers with each other.

    Writes comparison.parquet, scales.parquet and logprobs.parquet to `out` (default: the run);
    raises TraceError for a damaged run.
    """
    out = run if out is None else out
    plan = read_plan(run)
    usable = {
        spec.id: Side.of(Trace(run / "traces" / spec.id))
        for spec in plan.engines
        if _is_usable(run, spec.id)
    }
    pairs = [(usable[a], usable[b]) for a, b in plan.pairs if a in usable and b in usable]
    with one_thread():
        with (
            TableWriter(out / COMPARISON_FILE, COMPARISON) as table,
            TableWriter(out / SCALES_FILE, SCALES) as scales,
        ):
            for baseline, target in pairs:
                counts = ScaleCounts()
                for row in compare_sites(baseline, target, counts):
                    table.append(row)
                for row in counts.rows():
                    scales.append({"baseline": baseline.trace.id, "target": target.trace.id} | row)
        with TableWriter(out / LOGPROBS_FILE, LOGPROBS) as table:
            for baseline, target in pairs:
                for row in compare_logprobs(plan, baseline, target):
                    table.append(row)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Most tensors are small: waking torch's threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_usable(run: Path, engine_id: str) -> bool:
    folder = run / "traces" / engine_id
    return (folder / "tokens.parquet").exists() and (folder / "calls.parquet").exists()


class ScaleCounts:
    """Blocks by E4M3 byte of both sides, summed by mode, kind and layer."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int | None], torch.Tensor] = defaultdict(
            lambda: torch.zeros(2, 256, dtype=torch.int64)
        )

    def add(self, mode: str, site: Site, counts: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add one site's blocks: [256] of each side."""
        self._sums[mode, site.kind, site.layer_index] += torch.stack(counts)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per mode, kind, layer and byte that occurs."""
        for (mode, kind, layer), both in self._sums.items():
            for code in both.sum(0).nonzero().reshape(-1).tolist():
                yield {
                    "mode": mode,
                    "kind": kind,
                    "layer_index": layer,
                    "code": code,
                    "baseline_blocks": int(both[0, code]),
                    "target_blocks": int(both[1, code]),
                }


def compare_sites(
    baseline: Side, target: Side, scales: ScaleCounts | None = None
) -> Iterator[dict[str, Any]]:
    """One row per site and sequence of either side, in the baseline's execution order.

    The block scales that were compared are counted in `scales`.
    """
    for key in dict.fromkeys([*baseline.sites, *target.sites]):
        yield from _compare_sequence(baseline, target, key, scales)
        baseline.trace.release()
        target.trace.release()


def _compare_sequence(
    baseline: Side, target: Side, key: SequenceKey, scales: ScaleCounts | None
) -> Iterator[dict[str, Any]]:
    pair = SequencePair(baseline, target, key)
    order = target.order(key) | baseline.order(key)
    sites = sorted(order, key=lambda s: (order[s], s))
    if key != STATIC and not (pair.sites[0] and pair.sites[1]):
        # A sequence that one side did not capture at all, such as another sampler's tokens.
        absent = (target if pair.sites[0] else baseline).trace
        skip = _skip(f"{absent.id} captured no tensors of this sequence")
        for site in sites:
            yield _row(baseline, target, key, site, order[site]) | skip
        return
    read = 0
    for site in sites:
        row = _row(baseline, target, key, site, order[site])
        try:
            found = pair.measure(site)
            row |= found.row
            if scales is not None and found.scale_counts is not None:
                scales.add(key.mode, site, found.scale_counts)
        except Unpaired as unpaired:
            row |= _skip(str(unpaired))
        yield row
        read += 8 * (row.get("elements") or 0)
        if read > RELEASE_BYTES:
            baseline.trace.release()
            target.trace.release()
            read = 0


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


def compare_logprobs(plan: Plan, baseline: Side, target: Side) -> Iterator[dict[str, Any]]:
    """One row per token that both sides gave a log-probability for."""
    on = ["mode", "source", "probe", "position", "token_id"]
    pairs = baseline.trace.tokens.merge(
        target.trace.tokens, on=on, suffixes=("_baseline", "_target")
    ).dropna(subset=["logprob_baseline", "logprob_target"])
    category = {probe.id: probe.category for probe in plan.probes}
    for key, tokens in pairs.groupby(["mode", "source", "probe"], sort=False):
        kls = _full_kl(baseline, target, SequenceKey(*key))
        for row in tokens.itertuples(index=False):
            yield {
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
                "full_kl": kls.get(row.position - 1),
                "topk_overlap": _overlap(row.top_ids_baseline, row.top_ids_target),
            }


def _overlap(a: Any, b: Any) -> float | None:
    k = min(len(a), len(b))
    if not k:
        return None
    return len(set(map(int, a[:k])) & set(map(int, b[:k]))) / k


def _full_kl(baseline: Side, target: Side, key: SequenceKey) -> dict[int, float]:
    """KL over the vocabulary by position, where both sides gave logits."""
    site = Site("lm_head", "logits")
    x, y = baseline.read(key, site), target.read(key, site)
    if x is None or y is None or x.positions is None or y.positions is None:
        return {}
    common, i, j = np.intersect1d(x.positions, y.positions, return_indices=True)
    width = min(x.tensor.shape[1], y.tensor.shape[1])
    found = {
        int(position): metrics.full_kl(x.tensor[a : a + 1, :width], y.tensor[b : b + 1, :width])[0]
        for position, a, b in zip(common.tolist(), i.tolist(), j.tolist(), strict=True)
    }
    baseline.trace.release()
    target.trace.release()
    return found
