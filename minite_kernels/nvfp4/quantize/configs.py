"""Pinned launch choices of the quantizer kernels. No choice changes a bit: no sum is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """Rows and columns of x that one program quantizes."""

    rows: int
    columns: int
    num_warps: int


TILE: Final = QuantizeConfig(rows=8, columns=256, num_warps=4)
#: x whose rows are contiguous in memory, as the transposes of backward are.
TRANSPOSED: Final = QuantizeConfig(rows=64, columns=64, num_warps=4)
TILE_16X16: Final = QuantizeConfig(rows=16, columns=128, num_warps=4)
#: Whole rows: the token's amax and its codes from one read.
TOKEN_ELEMENTS: Final = 4096
TOKEN_NUM_WARPS: Final = 4
#: Widest row that one program holds; wider rows take two passes.
TOKEN_MAX_COLUMNS: Final = 16384
AMAX_ELEMENTS: Final = 8192
