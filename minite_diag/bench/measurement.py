"""One measured number with what it was measured against, and how it is shown.

Knows Rich; measures nothing. Invariant: a number that was not measured is no row with a value: it
is a row whose `value` is None and whose `detail` says why.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Measurement:
    """`ratio` is value / peer's value, both from the same run; `peer` names the peer."""

    name: str
    value: float | None
    unit: str
    peer: str = ""
    ratio: float | None = None
    detail: str = ""


def to_json(rows: Sequence[Measurement]) -> str:
    """A JSON array, one object for each row."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)


def print_table(rows: Sequence[Measurement], title: str, console: Console) -> None:
    """A table for people."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "value", "against", "ratio", "detail"):
        table.add_column(column, overflow="fold")
    for row in rows:
        value = "not measured" if row.value is None else f"{row.value:.4g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        table.add_row(row.name, value, row.peer, ratio, row.detail)
    console.print(table)


def median_seconds(work: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median wall time of each function; they take turns, so that all see the same machine."""
    from statistics import median
    from time import perf_counter

    taken: list[list[float]] = [[] for _ in work]
    for _ in range(repeats):
        for function, times in zip(work, taken, strict=True):
            began = perf_counter()
            function()
            times.append(perf_counter() - began)
    return [median(times) for times in taken]
