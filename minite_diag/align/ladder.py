"""The ladder: the same plan with alignments added one by one, and what each of them closes.

Every rung is a whole run of its own under `RUN/align/`, captured and compared like the first.
Invariant: a rung that could not be measured is in the ladder with its error, and the share that a
rung closes is of the first run's gap.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from minite_diag.align.leave_one_out import leave_one_out
from minite_diag.align.price import bare_price
from minite_diag.align.rung import backward_of, changes_of, is_equal, recipe_of, sides_of
from minite_diag.alignments.base import (
    application,
    check_needs,
    known_alignments,
    resolve_alignments,
    without_superseded,
)
from minite_diag.capture.runner import Report, capture
from minite_diag.compare import compare
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import PLAN_FILE, Plan, read_plan
from minite_diag.prepare import (
    CompareRequest,
    alignable_parts,
    make_writable,
    prepare,
    read_request,
)
from minite_diag.summary import summarize

ALIGN_JSON: Final = "align.json"
ALIGN_SCHEMA: Final = 1

Say = Callable[[str], None]


def align(
    run: Path,
    names: Sequence[str],
    say: Say,
    report: Report,
    *,
    without: bool = False,
    price: bool = False,
) -> dict[str, Any]:
    """Climb the ladder; returns the object below and writes align.json.

    {"schema", "before", "after", "ladder", "left_out", "bare_price"}: `left_out` with `without`,
    one row for each alignment that was left out alone; `bare_price` with `price`.

    `names` are alignments, or none or `all`: those that do something in this run's engines, until
    every bit is equal; ops that are equal without us stay native. Rungs that were measured before
    are kept. Raises UsageError for unknown names and for what does nothing here, EngineError for a
    run in which an engine failed.
    """
    request = read_request(run)
    plan = read_plan(run)
    before = summarize(run)
    if before["verdict"] == "error":
        raise EngineError(
            f"{run} holds no measurement to climb from: an engine failed",
            f"minite-diag compare --resume {run}",
        )
    parts = alignable_parts(request)
    chosen = _chosen(names, plan, before, parts)
    ladder = [_rung("as it is", (), plan, before, before)]
    after = before
    for count, name in enumerate(chosen, start=1):
        folder = run / "align" / f"{count}-{name}"
        climbed = without_superseded(chosen[:count], parts)
        say(f"rung {count} of {len(chosen)}: + {name}")
        after = _measure(request, folder, climbed, say, report)
        plan_now = read_plan(folder_of(folder, climbed))
        ladder.append(_rung(f"+ {name}", climbed, plan_now, after, before))
        if _is_zero(after) and (not names or "all" in names):
            say("bitwise zero: the engines' own ops are kept from here on")
            break
    climbed = tuple(ladder[-1]["alignments"])

    def measure(others: tuple[str, ...], folder: str) -> dict[str, Any]:
        say(folder)
        return _measure(request, run / "align" / folder, others, say, report)

    left_out = leave_one_out(climbed, measure, report) if without else None
    result = {
        "schema": ALIGN_SCHEMA,
        "before": before,
        "after": after,
        "ladder": ladder,
        "left_out": left_out,
        "bare_price": bare_price(run, Path(ladder[-1]["run"]), report) if price else None,
    }
    (run / ALIGN_JSON).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _is_zero(summary: dict[str, Any]) -> bool:
    """Whether every log-probability and every compared tensor is bitwise equal, nothing missing."""
    return summary["verdict"] == "measured" and all(
        is_equal(pair) and pair["sites"]["bitwise_equal"] > 0 for pair in summary["pairs"]
    )


def _chosen(
    names: Sequence[str], plan: Plan, before: dict[str, Any], parts: frozenset[str]
) -> list[str]:
    """The rungs, in ladder order.

    Raises UsageError for a named alignment that does nothing here; without names, or with `all`,
    those are passed over.
    """
    resolved = resolve_alignments(names or ["all"])
    if not names or "all" in names:
        known = known_alignments()
        return [
            name
            for name in resolved
            if known[name].in_ladder
            and known[name].needs in ("", *parts)
            and not _useless(name, plan, before)
        ]
    check_needs(resolved, parts)
    for name in resolved:
        if reason := _useless(name, plan, before):
            raise UsageError(f"alignment {name!r} {reason}", "leave it out")
    return list(resolved)


def _useless(name: str, plan: Plan, before: dict[str, Any]) -> str:
    """Why the alignment does nothing in the run's engines, on their devices; empty: it does."""
    found = [how for spec in plan.engines if (how := application(name, spec.engine)) is not None]
    if not found:
        return f"does nothing in {', '.join(spec.engine for spec in plan.engines)}"
    devices = {e["id"]: "cpu" if e["device"] == "cpu" else "cuda" for e in before["engines"]}
    for spec in plan.engines:
        how = application(name, spec.engine)
        if how is not None and how.device in ("", devices[spec.id]):
            return ""
    return f"is for {found[0].device}, this run is on {', '.join(sorted(set(devices.values())))}"


def _measure(
    request: CompareRequest, folder: Path, names: tuple[str, ...], say: Say, report: Report
) -> dict[str, Any]:
    folder = folder_of(folder, names)
    if not (folder / PLAN_FILE).exists():
        make_writable(folder)
        prepare(dataclasses.replace(request, align=names), folder, say)
    results = capture(read_plan(folder), folder, report, resume=True)
    if not (folder / "comparison.parquet").exists() or any(r.status != "kept" for r in results):
        compare(folder)
    return summarize(folder)


def folder_of(folder: Path, names: Sequence[str]) -> Path:
    """Where the run with these alignments is: `folder`, or beside it if that holds another set."""
    if not (folder / PLAN_FILE).exists() or set(read_request(folder).align) == set(names):
        return folder
    digest = hashlib.sha256("+".join(names).encode()).hexdigest()[:8]
    return folder.with_name(f"{folder.name}-{digest}")


def _rung(
    title: str,
    names: tuple[str, ...],
    plan: Plan,
    summary: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:
    """One row of the ladder for the first learner-sampler pair."""
    newest = known_alignments()[names[-1]] if names else None
    pair = summary["pairs"][0] if summary["pairs"] else None
    return {
        "rung": title,
        "run": summary["run"],
        "alignments": list(names),
        "what": newest.title if newest else "both engines in their own settings",
        "sides": sides_of(newest, plan),
        "changes": changes_of(newest, plan),
        "kernels": bool(newest and newest.kernels),
        "learner_recipe": recipe_of(plan.learner),
        "backward": backward_of(plan),
        "export_recipe": plan.export_recipe,
        "verdict": summary["verdict"],
        "error": [e["error"] for e in summary["engines"] if e["error"]],
        "logprob": pair["logprob"] if pair else None,
        "sites": pair["sites"] if pair else None,
        "first_divergence": pair["first_divergence"] if pair else None,
        "closed": {mode: _closed(summary, before, mode) for mode in ("score", "sample")},
        "ops": [_ops(engine) for engine in summary["engines"]],
        "price": [
            _price(engine, old)
            for engine, old in zip(summary["engines"], before["engines"], strict=True)
        ],
    }


def _closed(summary: dict[str, Any], before: dict[str, Any], mode: str) -> float | None:
    """Share of the first run's mean absolute gap that is gone."""
    if not summary["pairs"] or not before["pairs"]:
        return None
    now = summary["pairs"][0]["logprob"].get(mode)
    old = before["pairs"][0]["logprob"].get(mode)
    if not now or not old or not old.get("mean_abs"):
        return None
    return 1.0 - float(now["mean_abs"]) / float(old["mean_abs"])


def _ops(engine: dict[str, Any]) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    for item in engine["evidence"]:
        groups.setdefault(item["status"], []).append(item["op"])
    return {"engine": engine["id"], **{k: list(dict.fromkeys(v)) for k, v in groups.items()}}


def _price(engine: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Forward time and peak memory against the unaligned self; both runs were hooked."""

    def ratio(now: Any, old: Any) -> float | None:
        return float(now) / float(old) if now and old else None

    now_s, old_s = engine["seconds"].get("forward"), before["seconds"].get("forward")
    return {
        "engine": engine["id"],
        "forward_seconds": now_s,
        "time_ratio": ratio(now_s, old_s),
        "peak_rss_ratio": ratio(engine["peak_rss_bytes"], before["peak_rss_bytes"]),
        "peak_gpu_ratio": ratio(engine["peak_gpu_bytes"], before["peak_gpu_bytes"]),
    }
