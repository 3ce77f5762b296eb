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


TILE: Final = QuantizeConfig(rows=8, columns=256, num_warps=2)
#: Decoded FP16 values, twice the bytes of x's codes.
VALUES: Final = QuantizeConfig(rows=8, columns=256, num_warps=4)
#: x whose rows are contiguous in memory, as the transposes of backward are.
TRANSPOSED: Final = QuantizeConfig(rows=128, columns=32, num_warps=4)
TILE_16X16: Final = QuantizeConfig(rows=16, columns=128, num_warps=4)
#: Whole rows: the token's amax and its codes from one read.
TOKEN_ELEMENTS: Final = 2048
#: Widest row that one program holds in registers; wider rows are read again from the cache.
TOKEN_MAX_COLUMNS: Final = 16384
AMAX_ELEMENTS: Final = 8192
#: Tokens by columns of a program that quantizes along tokens: one block of 16 each.
ALONG_TOKENS_COLUMNS: Final = 256
ALONG_TOKENS_NUM_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """Rows of a program that quantizes whole rows, in pieces of ``columns`` (0: as many as fit)."""

    rows: int
    columns: int
    pieces: int
    num_warps: int


def token_config(k: int) -> TokenConfig:
    """Tile of whole rows of k columns, with the least padding that powers of two allow."""
    padded = max(16, 1 << (k - 1).bit_length())
    if k % 3 == 0 and (k // 3) & (k // 3 - 1) == 0 and 16 <= k // 3 <= 4096:
        columns, pieces = k // 3, 3
    elif padded <= TOKEN_MAX_COLUMNS and padded * 7 <= k * 8:
        columns, pieces = padded, 1
    else:
        sizes = [size for size in (2048, 1024, 512, 256) if size <= padded] or [padded]
        columns, pieces = min(sizes, key=lambda size: (-(-k // size) * size, -size)), 0
    # A thread holds whole blocks of a piece: their scales are worked out once.
    rows = max(1, min(16, (TOKEN_ELEMENTS if pieces < 3 else TOKEN_ELEMENTS // 2) // columns))
    return TokenConfig(rows, columns, pieces, 2 if columns * max(1, pieces) <= 4096 else 8)


def tile_config(rows_contiguous: bool, tile_2d: bool, values: bool) -> QuantizeConfig:
    """Tile for x in row-major order or transposed, with 16x16 blocks, or into decoded values."""
    if not rows_contiguous:
        return TRANSPOSED
    if tile_2d:
        return TILE_16X16
    return VALUES if values else TILE
