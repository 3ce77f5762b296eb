"""Tables of the HTML report as data: columns, cells with what they sort by, and what was left out.

Knows no template and no run. Invariant: a table that shows fewer rows than were found says how many
and where the rest is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minite_diag.report import words

NOTHING: Final = "-"
LONG_WORD: Final = 24


@dataclass(frozen=True)
class Column:
    """`numeric` columns are aligned right and sort by number."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    """`text` as shown, `value` as sorted; `href` a place in the report, `tone` a CSS class."""

    text: str
    value: float | None = None
    href: str = ""
    tone: str = ""
    code: bool = False

    @property
    def long(self) -> bool:
        """Whether a word of it may have to be broken."""
        return any(len(word) > LONG_WORD for word in self.text.split())


@dataclass(frozen=True)
class Row:
    """`anchor` is the row's id, or empty."""

    cells: Sequence[Cell]
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """`key` is unique in the report; `left_out` is a sentence, empty where every row is shown."""

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    left_out: str = ""
    filters: bool = field(default=False)


def columns(*names: str) -> list[Column]:
    """Columns by name; a leading `#` makes one numeric."""
    return [Column(name.removeprefix("#"), name.startswith("#")) for name in names]


def text(value: Any, *, href: str = "", tone: str = "", code: bool = False) -> Cell:
    """Words on one line; nothing is a dash."""
    shown = NOTHING if value is None or value == "" else words.visible(str(value))
    return Cell(shown, href=href, tone=tone, code=code)


def number(value: Any, *, href: str = "", tone: str = "") -> Cell:
    """A measured number, four significant digits."""
    known = finite(value)
    return Cell(words.number(known), known, href, tone)


def count(value: Any, *, tone: str = "") -> Cell:
    """A whole number."""
    known = finite(value)
    return Cell(NOTHING if known is None else f"{int(known)}", known, tone=tone)


def share(value: Any, *, marked: bool = False) -> Cell:
    """A share in per cent; `marked` tells by tone and sign whether it is all of it.

    What rounds to 100 % without being it is shown as less.
    """
    known = finite(value)
    if known is None:
        return Cell(NOTHING)
    shown = f"{known:.2%}"
    if shown == "100.00%" and known < 1.0:
        shown = "<100%"
    if not marked:
        return Cell(shown, known)
    equal = known == 1.0
    return Cell(f"{shown} {'=' if equal else '≠'}", known, tone="equal" if equal else "differs")


def finite(value: Any) -> float | None:
    """A float, or None for nothing, NaN and infinities."""
    if value is None:
        return None
    known = float(value)
    return known if math.isfinite(known) else None


def capped(
    rows: Iterable[Row], limit: int, where: str, order: str = "the first"
) -> tuple[list[Row], str]:
    """At most `limit` rows, and the sentence about the others (empty if there are none)."""
    every = list(rows)
    if len(every) <= limit:
        return every, ""
    return every[:limit], f"{order} {limit} of {len(every)} rows; the rest is in {where}"
