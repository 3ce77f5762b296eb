"""Which replacements ran in this process: a patch that nothing calls has replaced nothing.

Every replacement calls `note` with its op where it computes. Knows torch only to keep out of graphs
that are compiled. Invariant: an op is named here only after our code for it ran.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ran: set[str] = set()


def note(op: str) -> None:
    """Our code for `op` runs now."""
    if not torch.compiler.is_compiling():
        _ran.add(op)


def never_ran(patched: Iterable[str]) -> list[str]:
    """Those of the patched ops of which nothing ran so far."""
    return [op for op in patched if op not in _ran]
