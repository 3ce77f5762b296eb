"""The run as a terminal shows it, without colour and at a fixed width."""

from __future__ import annotations

import io
from typing import Any, Final

from rich.console import Console

from minite_diag.report.console import print_gate, print_summary

WIDTH: Final = 100


def to_text(summary: dict[str, Any]) -> str:
    """The gate's checks if there are some, else the whole summary."""
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, color_system=None, force_terminal=False)
    (print_gate if "gate" in summary else print_summary)(summary, console)
    return stream.getvalue()
