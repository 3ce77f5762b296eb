"""Local against inherited: each op of the target fed the baseline's recorded tensors.

One forward per sequence in the real engine: every output is replaced by the baseline's on its way
to the next op, so each op sees the baseline's inputs, and what the op itself computed is recorded.
Knows stored traces and comparison rows; no engine. Invariant: total is measured in the captured
runs, never derived from the other two.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from minite_diag.attribute.live_runs import LiveRuns
from minite_diag.attribute.operators import inputs_of, op_of
from minite_diag.canonical.names import SequenceKey
from minite_diag.capture.live import Job, Patch, SequenceSpec
from minite_diag.compare import Side, compare_sites
from minite_diag.site import Site
from minite_diag.trace.store import Trace

PATCHED_KINDS: Final = frozenset(
    {"input", "output", "logits", "router_logits", "topk_ids", "topk_weights"}
)
CODE_KINDS: Final = frozenset({"act_codes", "act_block_scale"})
_LAYER_OUTPUT: Final = re.compile(r".*layers\.\d+$")

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class LocalRun:
    """The trace of the target's ops on the baseline's inputs, and the rows measured from it."""

    folder: str
    rows: Rows

    def born(self) -> list[Site]:
        """Sites whose op computed other bits than the baseline's from the baseline's input."""
        return [
            Site(row["site"], row["kind"])
            for row in self.rows
            if is_born(row) and row["kind"] not in CODE_KINDS
        ]

    def delete(self) -> None:
        """Remove the tensors; the rows stay."""
        shutil.rmtree(self.folder, ignore_errors=True)


def op_class(site: Site) -> str | None:
    """The op that computes a site's tensor; a norm's input is the residual sum."""
    if site.kind in CODE_KINDS:
        return "quantize"
    if site.kind == "input":
        name = site.fqn.rpartition(".")[2]
        if name in ("q_norm", "k_norm"):
            return None
        if "norm" in name:
            return "residual"
    return op_of(site.fqn, site.kind)


def patched_sites(baseline: Side, keys: Iterable[SequenceKey]) -> tuple[str, ...]:
    """Every token-wise site of the baseline that an op reads.

    Not a layer's output: a fused add and norm takes its two addends, which are the outputs of
    ops; the sum alone would hide what it does with them.
    """
    found = {
        site
        for key in keys
        for site in baseline.sites.get(key, {})
        if site.kind in PATCHED_KINDS and not _LAYER_OUTPUT.match(site.fqn)
    }
    return tuple(map(str, sorted(found)))


def layer_outputs(baseline: Side, keys: Iterable[SequenceKey]) -> dict[int, Site]:
    """The captured outputs of whole layers by index."""
    return {
        site.layer_index: site
        for key in keys
        for site in baseline.sites.get(key, {})
        if site.kind == "output" and _LAYER_OUTPUT.match(site.fqn) and site.layer_index is not None
    }


def measure_local(
    runs: LiveRuns,
    baseline: Side,
    target: Side,
    sequences: list[SequenceSpec],
    stored: Rows,
    globs: tuple[str, ...] = ("*",),
) -> LocalRun:
    """Run the target on the baseline's tensors and compare op by op.

    `stored` are the pair's rows of the comparison of the captured runs, `globs` the sites that
    those runs kept.
    """
    keys = [SequenceKey(*sequence.key) for sequence in sequences]
    patch = Patch(baseline.trace.id, sites=patched_sites(baseline, keys))
    job = Job(f"local-{baseline.trace.id}", tuple(sequences), patch=(patch,), record=globs)
    result = runs.run("local", job)
    local = Side.of(Trace(Path(result.trace)))
    rows = local_rows(baseline, target, local, keys, stored)
    return LocalRun(result.trace, rows)


def local_rows(
    baseline: Side, target: Side, local: Side, keys: list[SequenceKey], stored: Rows
) -> Rows:
    """One row per site, in the baseline's execution order; means over the sequences."""
    wanted = set(keys)
    own = _by_site(compare_sites(baseline, local), wanted)
    total = _by_site(stored, wanted)
    inherited = _by_site(compare_sites(local, target), wanted)
    has_qk_norm = any(site.fqn.endswith(".q_norm") for site in own)
    rows = []
    for site, found in own.items():
        op = op_class(site)
        if op is None:
            continue
        elements = np.array([row["elements"] for row in found], dtype=np.float64)
        # Engines list the chosen experts in any order: what counts is the set.
        column = "agreement" if site.kind == "topk_ids" else "bitwise_fraction"
        equal = np.array([row[column] for row in found], dtype=np.float64)
        input_error = _input_error(site, total, has_qk_norm)
        born, upstream = _error(site, own), _error(site, inherited)
        bitwise = float((equal * elements).sum() / max(elements.sum(), 1.0))
        rows.append(
            {
                "baseline": baseline.trace.id,
                "target": target.trace.id,
                "site": site.fqn,
                "kind": site.kind,
                "op": op,
                "layer_index": site.layer_index,
                "expert_index": site.expert_index,
                "order": min(int(row["order"]) for row in found),
                "probes": len(found),
                "elements": int(elements.sum()),
                "error_local": born if born is not None else 1.0 - bitwise,
                "bitwise_local": bitwise,
                "error_total": _error(site, total),
                "error_inherited": upstream,
                "input_error": input_error,
                "amplification": (
                    upstream / input_error if input_error and upstream is not None else None
                ),
            }
        )
    return sorted(rows, key=lambda row: (row["order"], row["site"], row["kind"]))


BySite = dict[Site, Rows]


def _by_site(rows: Iterable[dict[str, Any]], keys: set[SequenceKey]) -> BySite:
    found: BySite = defaultdict(list)
    for row in rows:
        key = SequenceKey(row["mode"], row["source"], row["probe"])
        if key in keys and row["status"] == "compared" and row["elements"]:
            found[Site(row["fqn"], row["kind"])].append(row)
    return found


def _error(site: Site, rows: BySite) -> float | None:
    """Mean over sequences: relative L2, or the mismatch rate of codes, scales and expert sets."""
    values = [value for row in rows.get(site, ()) if (value := _one_error(site, row)) is not None]
    return float(np.mean(values)) if values else None


def _one_error(site: Site, row: dict[str, Any]) -> float | None:
    columns = {"topk_ids": "agreement"} | dict.fromkeys(CODE_KINDS, "mismatch_rate")
    value = row.get(columns.get(site.kind, "rel_l2"))
    if value is None or not np.isfinite(value):
        return None
    return 1.0 - float(value) if site.kind == "topk_ids" else float(value)


def _input_error(site: Site, total: BySite, has_qk_norm: bool) -> float | None:
    """Of all tensors that the op reads: root of the mean square of their relative L2 errors."""
    if site.kind in CODE_KINDS:
        reads = [(site.fqn, "input")]
    elif site.kind == "input":
        return None
    else:
        reads = inputs_of(site.fqn, site.kind, has_qk_norm)
    errors = [
        error
        for fqn, kind in reads
        if kind != "topk_ids" and (error := _error(Site(fqn, kind), total)) is not None
    ]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else None


def is_born(row: dict[str, Any]) -> bool:
    """Whether the op computed other numbers; bits alone are compared on the coarser dtype's grid."""
    return bool(row["bitwise_local"] < 1.0 or (row["error_local"] or 0.0) > 0.0)


def born_here(rows: Rows) -> Rows:
    """Ops that compute other numbers from the baseline's inputs: by op, the worst site first."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in rows:
        if is_born(row):
            groups[row["op"]].append(row)
    found = []
    for op, members in groups.items():
        worst = max(members, key=lambda row: row["error_local"] or 0.0)
        found.append(
            {
                "op": op,
                "sites": len(members),
                "error_local": worst["error_local"],
                "site": worst["site"],
                "kind": worst["kind"],
            }
        )
    return sorted(found, key=lambda row: -(row["error_local"] or 0.0))
