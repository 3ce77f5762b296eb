"""Pinned tile of attention: the same for prefill and decode, or their bits would differ."""

from __future__ import annotations

from typing import Final

QUERIES: Final = 64
KEYS: Final = 64
NUM_WARPS: Final = 4
NUM_STAGES: Final = 2
