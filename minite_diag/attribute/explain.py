"""A cause's page together with what this run measured of it, and the fixes for its engines.

Reads a run's summary and its ladder; no torch. Invariant: a gain is a figure that this run holds,
or the command that would measure it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minite_diag.attribute.causes import get_cause, page
from minite_diag.attribute.fixes import fixes_for
from minite_diag.report.words import name_of, number

ALIGN_JSON = "align.json"


def explain_in_run(run: Path, code: str) -> str:
    """The page of `code` as Markdown, then a section on `run`; raises TraceError for no run."""
    from minite_diag.summary import summarize

    code = get_cause(code).code
    summary = summarize(run)
    ladder = _ladder(run)
    lines = [page(code).rstrip(), "", f"## In {run}", ""]
    for pair in summary["pairs"]:
        lines += _pair(pair, code, run, ladder)
    return "\n".join(lines).rstrip()


def _pair(pair: dict[str, Any], code: str, run: Path, ladder: dict[str, float]) -> list[str]:
    sides = [pair["learner"], pair["sampler"]]
    lines = [f"**{name_of(sides[0])} against {name_of(sides[1])}**", ""]
    found = [cause for cause in pair["causes"] or [] if cause["code"] == code]
    if not found:
        said = "not found" if pair["causes"] is not None else "causes were not searched"
        return [*lines, f"- {said}", ""]
    for cause in found:
        lines.append(f"- {cause['text']} ({cause['strength']}, {cause['basis']} arithmetic)")
        lines += [f"  - {text}" for text in effect_lines(cause)]
    if not any(cause.get("effect") for cause in found):
        lines.append(f"  - worth: not measured; `minite-diag attribute {run} --live`")
    lines += ["", "Fixes:", ""]
    fixes = fixes_for(code, sides)
    lines += [fix_line(fix, str(run), ladder) for fix in fixes]
    if not fixes:
        lines.append("- none for these engines and versions; see Fix above")
    return [*lines, ""]


def effect_lines(cause: dict[str, Any]) -> list[str]:
    """What the cause is worth, one line per op class in which it acts."""
    lines = []
    for effect in cause.get("effect") or []:
        share = f" ({effect['closed']:.1%} of the gap)" if effect["closed"] is not None else ""
        lines.append(f"{effect['op']}: {number(effect['nats'])} nats{share}")
    if cause.get("below_noise"):
        lines.append("noise: not above what the engines differ from themselves")
    return lines


def fix_line(fix: dict[str, Any], run: str, ladder: dict[str, float]) -> str:
    """One bullet: where, what to type, and the gain where the ladder measured it."""
    where = "" if fix["engine"] == "any" else f"{fix['engine']}, "
    versions = f" {fix['versions']}" if fix["versions"] else ""
    text = f"- {where}{fix['kind']}{versions}: `{fix['line'].replace('RUN', run)}`"
    if fix["note"]:
        text += f" ({fix['note']})"
    if fix["alignment"] in ladder:
        text += f"; measured here: closes {ladder[fix['alignment']]:.1%} of the score gap"
    elif fix["alignment"]:
        text += "; gain not measured yet"
    return text


def _ladder(run: Path) -> dict[str, float]:
    """Alignment -> share of the gap that its rung closed beyond the rung before."""
    try:
        found = json.loads((run / ALIGN_JSON).read_text(encoding="utf-8"))
    except OSError:
        return {}
    gains: dict[str, float] = {}
    before = 0.0
    for rung in found["ladder"][1:]:
        now = rung["closed"]["score"]
        if now is not None:
            gains[rung["alignments"][-1]] = now - before
            before = now
    return gains
