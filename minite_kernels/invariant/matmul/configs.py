"""Pinned tiles. K is summed ascending in every one of them; none is autotuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Rows of x, rows of w and columns that one program multiplies at a time."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int


#: 16-bit operands on tensor cores: one tile for every number of rows.
HALF: Final = MatmulConfig(rows=64, columns=128, k=64, num_warps=4, num_stages=4)
#: FP32 operands on FP32 units (no TF32).
FLOAT32: Final = MatmulConfig(rows=32, columns=64, k=32, num_warps=4, num_stages=2)
GROUP_ROWS: Final = 8


def config(dtype: torch.dtype) -> MatmulConfig:
    """Tile of a product of operands of this dtype."""
    return FLOAT32 if dtype == torch.float32 else HALF
