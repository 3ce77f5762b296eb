"""The change between two runs as text, JSON, Markdown or HTML.

Knows the change object; computes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from minite_diag.outputs.json_object import to_json
from minite_diag.outputs.markdown import plain, table
from minite_diag.outputs.text import WIDTH
from minite_diag.report import words

MAX_ENVIRONMENT: Final = 40


def render_change(change: dict[str, Any], name: str) -> str:
    """The change in one of FORMATS; it ends with a newline."""
    return _RENDERERS[name](change)


def _to_text(change: dict[str, Any]) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, force_terminal=False)
    for line in _lines(change):
        console.print(escape(words.visible(line)), highlight=False, soft_wrap=True)
    return stream.getvalue()


def _lines(change: dict[str, Any]) -> Iterator[str]:
    yield f"from {change['before']['run']} to {change['after']['run']}"
    yield from (f"note  {note}" for note in change["notes"])
    for pair in change["pairs"]:
        yield ""
        yield f"{pair['learner']} vs {pair['sampler']}"
        yield from (f"  {_metric(row)}" for row in pair["metrics"])
        yield f"  first split: {_first(pair)}"
        for state, cause in _causes(pair):
            yield f"  {state:5} {cause['code']} {cause['where']}: {cause['text']}"
        if pair["causes"] is None:
            yield "  causes not compared: minite-diag attribute RUN was not run on both"
        if pair["sites"]:
            yield "  sites that changed most"
        yield from (f"    {_site(row)}" for row in pair["sites"])
    if change["environment"]:
        yield ""
        yield "what the engines say differently"
    for row in change["environment"][:MAX_ENVIRONMENT]:
        yield f"  {row['engine']} {row['key']}: {_value(row['before'])} -> {_value(row['after'])}"
    hidden = len(change["environment"]) - MAX_ENVIRONMENT
    if hidden > 0:
        yield f"  {hidden} more in --format json"


def _causes(pair: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = pair["causes"] or {}
    return [(state, cause) for state in ("new", "gone", "kept") for cause in found.get(state, [])]


def _metric(row: dict[str, Any]) -> str:
    return (
        f"{row['verdict']:14} {row['mode']} {row['metric']}: {words.number(row['before'])} -> "
        f"{words.number(row['after'])}, change {_signed(row['change'])}{_interval(row)} "
        f"({'the same tokens' if row['paired'] else 'other tokens'})"
    )


def _interval(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return ""
    return f" [{_signed(row['low'])}, {_signed(row['high'])}]"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.3g}"


def _first(pair: dict[str, Any]) -> str:
    old, new = (first or "none: bitwise equal" for first in pair["first_divergence"])
    return f"{new} (as before)" if old == new else f"{old} -> {new}"


def _site(row: dict[str, Any]) -> str:
    return (
        f"{row['site']} {row['metric']} {words.number(row['before'])} -> "
        f"{words.number(row['after'])}"
    )


def _value(value: Any) -> str:
    return "-" if value is None else str(value)


def _to_markdown(change: dict[str, Any]) -> str:
    before, after = change["before"]["run"], change["after"]["run"]
    lines = ["## minite-diag: change", "", plain(f"From {before} to {after}"), ""]
    lines += [f"- {plain(note)}" for note in change["notes"]]
    for pair in change["pairs"]:
        lines += ["", f"### {plain(pair['learner'])} vs {plain(pair['sampler'])}", ""]
        rows = [
            (
                plain(row["verdict"]),
                plain(f"{row['mode']} {row['metric']}"),
                words.number(row["before"]),
                words.number(row["after"]),
                plain(f"{_signed(row['change'])}{_interval(row)}"),
            )
            for row in pair["metrics"]
        ]
        lines += table(("verdict", "metric", "before", "after", "change, 95 % interval"), rows)
        lines += [f"First split: {plain(_first(pair))}", ""]
        for state, cause in _causes(pair):
            lines.append(f"- {state}: **{cause['code']}** {plain(cause['text'])}")
        sites = [
            (
                plain(row["site"]),
                plain(row["metric"]),
                words.number(row["before"]),
                words.number(row["after"]),
            )
            for row in pair["sites"]
        ]
        lines += ["", *table(("site", "metric", "before", "after"), sites)]
    differing = [
        (plain(r["engine"]), plain(r["key"]), plain(_value(r["before"])), plain(_value(r["after"])))
        for r in change["environment"][:MAX_ENVIRONMENT]
    ]
    if differing:
        heading = ("engine", "what", "before", "after")
        lines += ["### Environment", "", *table(heading, differing)]
    return "\n".join(lines) + "\n"


def _to_html(change: dict[str, Any]) -> str:
    # matplotlib and pandas are loaded for HTML only.
    from minite_diag.report.html_change import to_change_html

    return to_change_html(change)


_RENDERERS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "text": _to_text,
    "json": to_json,
    "markdown": _to_markdown,
    "html": _to_html,
}
FORMATS: Final = tuple(_RENDERERS)
