"""Markdown: the step summary of a CI job, or a comment on a change.

Knows the summary object. Invariant: names from models and probes can't make markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from minite_diag.attribute.causes import page
from minite_diag.outputs.issues import fix_lines
from minite_diag.report import words

MAX_CAUSES: Final = 10
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]|~#!@$])")


def to_markdown(summary: dict[str, Any]) -> str:
    """Verdict, what ran, gap, checks, causes with their fixes."""
    lines = [f"## minite-diag: {summary['verdict']}", "", plain(words.headline(summary)), ""]
    lines += _what_ran(summary)
    gate = summary.get("gate")
    if gate:
        lines += _checks(gate)
    for pair in summary["pairs"]:
        lines += _pair(pair, summary["run"])
    if gate and gate["notes"]:
        lines += ["### Notes", "", *(f"- {plain(note)}" for note in gate["notes"]), ""]
    return "\n".join([*lines, f"Next: `{_code(summary['next'])}`"]) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _MARKUP.sub(r"\\\1", tag_free(text))


def tag_free(text: str) -> str:
    """Text that HTML shows as it is, on one line: Markdown's escapes mean nothing in a tag."""
    return html.escape(" ".join(text.split()), quote=False)


def _code(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table and an empty one; cells must be Markdown already."""
    return [
        f"| {' | '.join(heading)} |",
        f"|{'---|' * len(heading)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _what_ran(summary: dict[str, Any]) -> list[str]:
    model = summary["model"]
    rows = [
        (engine["role"], plain(words.name_of(engine)), plain(words.evidence(engine)))
        for engine in summary["engines"]
    ]
    title = f"Model {model['name']}, {model['architecture']}, {summary['dtype']}"
    quantized = f"{summary['quantize']['linears']} linears quantized"
    return [plain(f"{title}; {quantized}"), "", *table(("role", "engine", "what ran"), rows)]


def interval(check: dict[str, Any]) -> str:
    """`0.0123 [0.01, 0.015]`, as plain text."""
    estimate = words.number(check["estimate"])
    if check["low"] is None:
        return estimate
    high = words.number(check["high"])
    return f"{estimate} [{words.number(check['low'])}, {high}]"


def _checks(gate: dict[str, Any]) -> list[str]:
    rows = []
    for check in gate["checks"]:
        verdict = f"{check['verdict']} (waived)" if check["waived"] else check["verdict"]
        place = check["worst"] or f"{check['sampler']} {check['mode']}"
        rows.append(
            (
                verdict,
                f"{plain(check['metric'])} {'(baseline)' if check['rule'] == 'baseline' else ''}",
                plain(place),
                plain(interval(check)),
                words.number(check["limit"]),
                plain(check["reason"]) or "-",
            )
        )
    heading = ("verdict", "metric", "where", "value, 95 % interval", "limit", "why")
    return [f"### Gate, profile {plain(gate['profile'])}", "", *table(heading, rows)]


def _pair(pair: dict[str, Any], run: str) -> list[str]:
    names = [pair[role]["label"] or pair[role]["id"] for role in ("learner", "sampler")]
    lines = [f"### {plain(f'{names[0]} vs {names[1]}')}", "", f"- gap: {plain(words.gap(pair))}"]
    lines += [f"- first split: {plain(words.divergence(pair))}", ""]
    for cause in (pair["causes"] or [])[:MAX_CAUSES]:
        title = f"<b>{cause['code']}</b> {tag_free(cause['text'] + words.worth(cause))}"
        lines += ["<details>", f"<summary>{title}</summary>", ""]
        fixes = fix_lines(cause, run)
        if fixes:
            lines += [
                "For the engines of this run:",
                "",
                *(f"- `{_code(fix)}`" for fix in fixes),
                "",
            ]
        lines += [_page(cause["code"]), "", "</details>", ""]
    return lines


def _page(code: str) -> str:
    """The page of a cause one level down, without its title."""
    body = page(code).partition("\n")[2].strip()
    return re.sub(r"^## ", "#### ", body, flags=re.MULTILINE)
