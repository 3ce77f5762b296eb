"""The change between two runs as one self-contained HTML file.

Knows the change object only; computes nothing. Invariant: the same look, policy and escaping as the
report of a run.
"""

from __future__ import annotations

from typing import Any, Final

from minite_diag.report.html import render_page
from minite_diag.report.tables import Cell, Row, Table, columns, count, number, text

Json = dict[str, Any]

SIGNS: Final = {"worse": "▲", "better": "▼", "no change seen": "="}
TONES: Final = {"worse": "differs", "better": "equal"}


def to_change_html(change: Json) -> str:
    """The page of a change; it ends with a newline."""
    pairs = [_pair(pair, f"p{i}") for i, pair in enumerate(change["pairs"], start=1)]
    page = render_page(
        "change.html.j2",
        title="minite-diag: change between two runs",
        change=change,
        pairs=pairs,
        verdict=verdict_text(change),
        environment=_environment(change),
    )
    return f"{page}\n"


def verdict_text(change: Json) -> str:
    """What got worse and what got better, in a sentence."""
    if not change["pairs"]:
        return "The runs have no pair of engines in common"
    told = []
    for verdict in ("worse", "better"):
        found = [
            f"{row['mode']} {row['metric']}"
            for pair in change["pairs"]
            for row in pair["metrics"]
            if row["verdict"] == verdict
        ]
        if found:
            told.append(f"{verdict}: {', '.join(dict.fromkeys(found))}")
    return "; ".join(told).capitalize() or "No change of the gap was seen"


def _pair(pair: Json, key: str) -> Json:
    causes = pair["causes"] or {}
    return {
        **pair,
        "key": key,
        "metric_table": _metrics(pair, key),
        "site_table": _sites(pair, key),
        "cause_list": [
            (state, cause) for state in ("new", "gone", "kept") for cause in causes.get(state, [])
        ],
        "splits": [first or "none: bitwise equal" for first in pair["first_divergence"]],
    }


def _metrics(pair: Json, key: str) -> Table:
    rows = [
        Row(
            [
                Cell(
                    f"{SIGNS.get(row['verdict'], '?')} {row['verdict']}",
                    tone=TONES.get(row["verdict"], ""),
                ),
                text(row["mode"]),
                text(row["metric"], code=True),
                number(row["before"]),
                number(row["after"]),
                number(row["change"]),
                number(row["low"]),
                number(row["high"]),
                count(row["tokens"][0]),
                count(row["tokens"][1]),
                text("yes" if row["paired"] else "no"),
            ]
        )
        for row in pair["metrics"]
    ]
    heading = columns(
        *("Verdict", "Mode", "Metric", "#Before", "#After", "#Change", "#From", "#To"),
        *("#Tokens before", "#Tokens after", "Same tokens"),
    )
    return Table(f"{key}-metrics", "The gap before and after, 95 % interval", heading, rows)


def _sites(pair: Json, key: str) -> Table | None:
    if not pair["sites"]:
        return None
    rows = [
        Row(
            [
                text(row["site"], code=True),
                text(row["metric"], code=True),
                number(row["before"]),
                number(row["after"]),
                number(row["after"] - row["before"]),
            ]
        )
        for row in pair["sites"]
    ]
    heading = columns("Site", "Metric", "#Before", "#After", "#Change")
    return Table(f"{key}-sites", "Sites that changed most", heading, rows)


def _environment(change: Json) -> Table | None:
    if not change["environment"]:
        return None
    rows = [
        Row([text(r["engine"]), text(r["key"]), text(r["before"]), text(r["after"])])
        for r in change["environment"]
    ]
    return Table(
        "environment",
        "What the engines say differently",
        columns("Engine", "What", "Before", "After"),
        rows,
        filters=len(rows) > 12,
    )
