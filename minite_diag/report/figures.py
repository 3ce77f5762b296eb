"""Figures of the HTML report: numbers in, inline SVG out, drawn by matplotlib.

Knows no run. Invariant: the same numbers give the same bytes, text stays text, every colour is a
CSS variable of the page (so that dark mode and print restyle it), names are never read as markup
or formulas, and no series is told apart by colour alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter

from minite_diag.report import words

INK, GRID, PAPER = "#010101", "#020202", "#030303"
SERIES: Final = tuple(f"#0a000{i}" for i in range(1, 7))
"""Stand-ins that become var(--s1) ... var(--s6)."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
HATCHES: Final = ("", "////", "....", "xxxx", "\\\\\\\\", "++")
WIDTH: Final = 6.6
"""Inches of a figure in half of the page's width: text comes out at about its own size."""
LABEL_ROOM: Final = 66
"""Characters of labels that fit side by side under an axis."""
HEAT_WIDTH: Final = 10.5
MAX_CELL_TEXT: Final = 1000
"""Cells up to which a heat map carries its numbers."""
RAMP: Final = (
    "#fff7ec", "#fee8c8", "#fdd49e", "#fdbb84", "#fc8d59", "#ef6548", "#d7301f", "#990000",
)  # fmt: skip
"""Light to dark in one hue (OrRd): ordered by lightness, so that any eye reads the order."""
_PLACE: Final = "place:"
"""How a link into the report is written until ids have their prefix."""
_SETTINGS: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "minite-diag",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.size": 10.0,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Line:
    """One series: y may hold None where nothing was measured."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True)
class HeatMap:
    """`values[row][column]` (None: not measured); `links` gives the place behind a cell."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]
    links: Mapping[tuple[int, int], str]
    titles: Mapping[tuple[int, int], str]


def line_chart(
    key: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    whole_x: bool = True,
    share: bool = False,
) -> str:
    """Lines with a marker and a dash of their own, as SVG; `log` falls back where all is zero."""
    with mpl.rc_context(_SETTINGS):
        figure, axes = _axes(WIDTH, 3.1)
        positive = [v for line in lines for v in line.y if v is not None and v > 0]
        log = log and bool(positive)
        floor = min(positive) / 3 if log else 0.0
        for i, line in enumerate(lines):
            # Zero has no place on a log axis: it is drawn on the floor, hollow.
            y = [math.nan if v is None else max(v, floor) if log else v for v in line.y]
            axes.plot(line.x, y, **_style(i), label=_short(line.name))
            if log:
                zeros = [(x, floor) for x, v in zip(line.x, line.y, strict=True) if v == 0]
                if zeros:
                    axes.plot(*zip(*zeros, strict=True), **_style(i) | _HOLLOW)
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            low, high = axes.get_ylim()
            if high / low < 30:
                axes.yaxis.set_minor_formatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else "")
        if share:
            axes.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        if whole_x:
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label + (" (log; hollow: 0)" if log else ""))
        _legend(axes)
        return _svg(figure, key)


def bar_chart(
    key: str,
    names: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None]]],
    *,
    label: str,
    share: bool = False,
    texts: Sequence[Sequence[str]] = (),
) -> str:
    """Horizontal bars, one group a name, hatched by series, with their numbers beside them."""
    with mpl.rc_context(_SETTINGS):
        figure, axes = _axes(WIDTH, 0.9 + 0.3 * len(names) * max(1, len(series)) ** 0.75)
        height = 0.8 / max(1, len(series))
        for i, (name, values) in enumerate(series):
            for j, value in enumerate(values):
                at = j + (i - (len(series) - 1) / 2) * height
                if value is None:
                    axes.annotate("not measured", (0, at), **_beside(1))
                    continue
                axes.barh(
                    at, value, height * 0.9, **_fill(i), label=_short(name) if j == 0 else None
                )
                shown = texts[i][j] if texts else words.number(value)
                axes.annotate(shown, (value, at), **_beside(value))
        axes.set_yticks(range(len(names)), [_short(name) for name in names])
        axes.invert_yaxis()
        axes.axvline(0.0, color=INK, linewidth=0.8)
        _percent(axes, share)
        axes.set_xlabel(label)
        axes.margins(x=0.2)
        if len(series) > 1:
            _legend(axes)
        return _svg(figure, key)


def waterfall(
    key: str, steps: Sequence[tuple[str, float, float, str]], *, label: str, share: bool = True
) -> str:
    """Bars from a start to an end, one under the other: (name, start, end, text); totals from 0."""
    with mpl.rc_context(_SETTINGS):
        figure, axes = _axes(WIDTH, 0.9 + 0.34 * len(steps))
        for i, (name, start, end, shown) in enumerate(steps):
            kind = 2 if name == "interaction" else 0 if start == 0 and i == len(steps) - 1 else 1
            axes.barh(i, end - start, 0.66, left=start, **_fill(kind))
            axes.annotate(shown, (max(start, end), i), **_beside(1))
            if i + 1 < len(steps):
                axes.plot([end, end], [i - 0.33, i + 1.33], color=INK, linewidth=0.6)
        axes.set_yticks(range(len(steps)), [_short(step[0]) for step in steps])
        axes.invert_yaxis()
        axes.axvline(0.0, color=INK, linewidth=0.8)
        _percent(axes, share)
        axes.set_xlabel(label)
        axes.margins(x=0.2)
        return _svg(figure, key)


def histogram(
    key: str,
    edges: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
) -> str:
    """Shares by bin, grouped bars hatched by series."""
    with mpl.rc_context(_SETTINGS):
        figure, axes = _axes(WIDTH, 2.9)
        width = 0.86 / max(1, len(series))
        for i, (name, values) in enumerate(series):
            at = np.arange(len(edges)) + (i - (len(series) - 1) / 2) * width
            axes.bar(at, values, width * 0.92, **_fill(i), label=_short(name))
        step = max(1, math.ceil(sum(len(edge) + 2 for edge in edges) / LABEL_ROOM))
        axes.set_xticks(range(0, len(edges), step), list(edges)[::step])
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _legend(axes)
        return _svg(figure, key)


def heat_map(key: str, data: HeatMap, *, log: bool, low_is_good: bool = True) -> str:
    """Cells from light (good) to dark (bad) with their numbers, hatched where nothing is known."""
    with mpl.rc_context(_SETTINGS):
        rows, cols = len(data.rows), len(data.columns)
        names = [_short(name) for name in data.columns]
        # Labels hang at 40 degrees under the cells, left of their column.
        below = 0.3 + 0.045 * max(map(len, names))
        width = max(HEAT_WIDTH, 1.5 + 0.52 * cols)
        height = 0.1 + 0.25 * rows + below
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes(
            (1.15 / width, below / height, 1 - 1.2 / width, 0.25 * rows / height)
        )
        known = [v for row in data.values for v in row if v is not None and math.isfinite(v)]
        scale = _scale(known, log, low_is_good)
        numbers = rows * cols <= MAX_CELL_TEXT
        for i, row in enumerate(data.values):
            for j, value in enumerate(row):
                _cell(axes, data, (i, j), None if value is None else scale(value), numbers)
        axes.set_xlim(0, cols)
        axes.set_ylim(rows, 0)
        axes.set_xticks(
            np.arange(cols) + 0.5, names, rotation=40, ha="right", rotation_mode="anchor"
        )
        step = max(1, math.ceil(rows / 40))
        axes.set_yticks(
            (np.arange(rows) + 0.5)[::step], [words.visible(n) for n in data.rows][::step]
        )
        axes.tick_params(length=0, labelsize=9)
        axes.set_ylabel("layer")
        for spine in axes.spines.values():
            spine.set_visible(False)
        return _titled(_svg(figure, key, tight=False), key, data.titles)


def _cell(
    axes: Axes, data: HeatMap, at: tuple[int, int], level: float | None, numbers: bool
) -> None:
    i, j = at
    box = Rectangle((j + 0.03, i + 0.04), 0.94, 0.92, linewidth=0.0, clip_on=False)
    box.set_gid(f"cell-{i}-{j}")
    if level is None:
        box.set(facecolor=PAPER, edgecolor=GRID, linewidth=0.4)
        axes.add_patch(box)
        return
    shade = min(len(RAMP) - 1, int(level * len(RAMP)))
    box.set_facecolor(RAMP[shade])
    if at in data.links:
        box.set_url(f"{_PLACE}{data.links[at]}")
    axes.add_patch(box)
    if numbers and data.texts[i][j]:
        ink = "#1a1a1a" if shade < 5 else "#ffffff"
        axes.text(
            j + 0.5, i + 0.52, data.texts[i][j], ha="center", va="center", fontsize=7.5, color=ink
        )


def _scale(known: Sequence[float], log: bool, low_is_good: bool) -> Any:
    """Value -> 0 (good) ... 1 (bad)."""
    if not low_is_good:
        return lambda value: 1.0 - value
    positive = [value for value in known if value > 0]
    if not positive:
        return lambda value: 0.0
    if not log:
        top = max(positive)
        return lambda value: value / top
    top = math.log10(max(positive))
    # A decade at least: what differs by a few per cent has almost the same shade.
    bottom = min(math.log10(min(positive)), top - 1.0)
    return lambda value: (
        0.0 if value <= 0 else 0.12 + 0.88 * (math.log10(value) - bottom) / (top - bottom)
    )


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.grid(True, color=GRID, linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
    return figure, axes


_HOLLOW: Final = {"linestyle": "none", "markerfacecolor": PAPER}


def _style(i: int) -> dict[str, Any]:
    i %= len(SERIES)
    return {"color": SERIES[i], "marker": MARKERS[i], "linestyle": DASHES[i]}


def _fill(i: int) -> dict[str, Any]:
    i %= len(SERIES)
    return {"facecolor": SERIES[i], "edgecolor": PAPER, "hatch": HATCHES[i], "linewidth": 0.4}


def _beside(value: float) -> dict[str, Any]:
    left = value < 0
    return {
        "xytext": (-4 if left else 4, 0),
        "textcoords": "offset points",
        "va": "center",
        "ha": "right" if left else "left",
        "fontsize": 8.5,
    }


def _percent(axes: Axes, share: bool) -> None:
    if share:
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")


def _legend(axes: Axes) -> None:
    """Above the axes, in as many columns as the longest name leaves room for."""
    names = axes.get_legend_handles_labels()[1]
    longest = max((len(name) for name in names), default=1)
    room = max(1, LABEL_ROOM // (longest + 8))
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(room, len(names) or 1), borderpad=0
    )


def _short(name: str) -> str:
    name = words.visible(name)
    return name if len(name) <= 32 else f"…{name[-31:]}"


def _svg(figure: Figure, key: str, *, tight: bool = True) -> str:
    """The figure as an <svg> element whose ids start with `key`."""
    if tight:
        figure.set_layout_engine("constrained")
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": key}):
        # No date, no creator: the bytes depend on the numbers only.
        FigureCanvasSVG(figure).print_svg(
            stream, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _inline(stream.getvalue(), key)


def _inline(document: str, key: str) -> str:
    """Strip what only a file of its own needs; put CSS variables for the stand-in colours."""
    svg = document[document.index("<svg") :]
    # Its style element would style the whole page, its metadata names addresses.
    svg = re.sub(r"\s*<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r' version="[^"]*"', "", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{key}-", svg)
    # For the pointer: a keyboard has the same links in the table of the numbers.
    link = rf'<a href="{_PLACE}([^"]*)" target="_blank">(.*?)</a>'
    svg = re.sub(link, r'<g data-go="\1">\2</g>', svg, flags=re.DOTALL)
    svg = re.sub(rf'<g id="(?!{key}-cell-)[^"]*"', "<g", svg)
    svg = re.sub(r"#0a000([1-6])", r"var(--s\1)", svg)
    for stand_in, name in ((INK, "ink"), (GRID, "grid"), (PAPER, "paper")):
        svg = svg.replace(stand_in, f"var(--{name})")
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    # Hundredths of a point are enough for what is drawn; text is data and stays as it is.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d{2})\d+", r"\1", tag[0]), svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def _titled(svg: str, key: str, titles: Mapping[tuple[int, int], str]) -> str:
    for (i, j), title in titles.items():
        gid = f'<g id="{key}-cell-{i}-{j}">'
        svg = svg.replace(gid, f"{gid}<title>{escape(words.visible(title))}</title>", 1)
    return svg
