"""All alignments but one: the gap that returns, and whether attribution names what was left out.

Settings are left out as well as ops; one that a later alignment overrides brings nothing back.

Knows the ladder's measurement and the stored half of attribution. Invariant: the verdict rests on
causes that were found without knowing which alignment is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minite_diag.align.rung import is_equal
from minite_diag.alignments.base import known_alignments
from minite_diag.attribute.causes import OPS
from minite_diag.capture.runner import Report

CONSEQUENCE = "MD601"
"""Other experts follow from any difference before a router."""

Measure = Callable[[tuple[str, ...], str], dict[str, Any]]
"""(alignments, folder name) -> the summary of that run."""


def leave_one_out(climbed: Sequence[str], measure: Measure, report: Report) -> list[dict[str, Any]]:
    """One row for each alignment of `climbed`."""
    from minite_diag.attribute.stage import attribute
    from minite_diag.summary import summarize

    rows = []
    for name in climbed:
        rest = tuple(other for other in climbed if other != name)
        measured = measure(rest, f"without-{name}")
        if measured["verdict"] != "error":
            folder = Path(measured["run"])
            attribute(folder, report)
            measured = summarize(folder)
        rows.append(_row(name, measured))
    return rows


def _row(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    pair = summary["pairs"][0] if summary["pairs"] else None
    causes = list(pair["causes"] or []) if pair else []
    codes = list(dict.fromkeys(cause["code"] for cause in causes))
    return {
        "left_out": name,
        "run": summary["run"],
        "verdict": summary["verdict"],
        "logprob": pair["logprob"] if pair else None,
        "sites": pair["sites"] if pair else None,
        "first_divergence": pair["first_divergence"] if pair else None,
        "causes": [{"code": c["code"], "where": c["where"], "text": c["text"]} for c in causes],
        "attributed": None if is_equal(pair) else _is_named(name, codes, pair),
    }


def _is_named(name: str, codes: list[str], pair: dict[str, Any] | None) -> bool:
    """Whether the causes are what was left out and nothing else, in the part that it covers."""
    named = [code for code in codes if code != CONSEQUENCE]
    expected = expected_causes(name)
    if expected is not None:
        return bool(named) and set(named) <= expected
    first = (pair or {}).get("first_divergence")
    part = known_alignments()[name].needs
    in_part = first is None or {
        "experts": ".experts" in first["site"],
        "linears": ".experts" not in first["site"],
    }.get(part, True)
    # The kernel that comes back for the experts sums them too.
    also = {"MD206"} if part == "experts" else set()
    return bool(named) and in_part and all(c.startswith("MD1") or c in also for c in named)


def expected_causes(name: str) -> frozenset[str] | None:
    """The causes that leaving an alignment out has to bring back; None: any rule of NVFP4."""
    ops = {op for how in known_alignments()[name].engines.values() for op, _ in how.replacements}
    codes = {OPS[op] for op in ops if op in OPS} | ({"MD210"} if "logprobs" in ops else set())
    return frozenset(codes) or None
