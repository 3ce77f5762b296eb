"""Pinned tiles of the GEMM kernels, chosen by the number of rows.

Every kernel sums k in ascending steps of one tensor-core instruction (k16) into one FP32
accumulator, so the tiles below give the same bits wherever the exact sum fits 24 bits, and were
compared on an H200 with data where it does not (tests/kernels/gpu). Nothing is autotuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """Tile of the kernel that reads packed weights: rows of a, rows of b; K comes in slices."""

    rows: int
    columns: int
    #: Weights are the first operand of the product, rows of a the second.
    swap: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodedConfig:
    """Tile of the persistent kernel on decoded operands."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int
    #: Store the tile in two halves: half the shared memory on the way out.
    split_store: bool = False


#: Rows up to which packed weights are read, once for each 16 (or 64) rows.
PACKED_MAX_ROWS: Final = 128
PACKED_TINY: Final = PackedConfig(rows=8, columns=32, swap=True, num_warps=2, num_stages=5)
PACKED_SMALL: Final = PackedConfig(rows=16, columns=64, swap=False, num_warps=4, num_stages=4)
#: Where wider tiles would leave half of the GPU without work.
PACKED_NARROW: Final = PackedConfig(rows=16, columns=32, swap=False, num_warps=4, num_stages=4)
NARROW_COLUMNS: Final = 4096
#: Of one expert's few rows: half the activations to load, and mma.sync, which waits for nobody.
GROUPED_TINY: Final = PackedConfig(rows=8, columns=64, swap=True, num_warps=4, num_stages=3)
GROUPED_SHORT: Final = PackedConfig(rows=8, columns=128, swap=True, num_warps=4, num_stages=3)
#: K below which a program's few slices are too little work for its start and end.
SHORT_K: Final = 1024
GROUPED_SMALL: Final = PackedConfig(rows=16, columns=64, swap=True, num_warps=4, num_stages=3)
PACKED_MEDIUM: Final = PackedConfig(rows=64, columns=64, swap=True, num_warps=4, num_stages=4)
DECODED: Final = DecodedConfig(rows=128, columns=256, k=64, num_warps=8, num_stages=4)
#: FP32 output: the tile above would not fit shared memory on its way out.
DECODED_FLOAT32: Final = DecodedConfig(rows=128, columns=128, k=64, num_warps=8, num_stages=4)
GROUPED_DECODED: Final = DecodedConfig(
    rows=128, columns=256, k=64, num_warps=8, num_stages=3, split_store=True
)
#: Average rows an expert from which grouped GEMMs decode their weights first.
GROUPED_DECODE_ROWS: Final = 64
#: Columns of a packed weight's slice: the largest that divides K.
SLICES: Final = (256, 128, 64)
#: Tiles of neighbouring rows that run together, for reuse in L2.
GROUP_ROWS: Final = 8


def packed_config(rows: int, columns: int) -> PackedConfig:
    """Tile of a dense GEMM with this number of rows and of columns."""
    if rows > 16:
        return PACKED_MEDIUM
    if columns <= NARROW_COLUMNS:
        return PACKED_NARROW
    return PACKED_TINY if rows <= 8 else PACKED_SMALL


def grouped_packed_config(rows_per_expert: float, k: int) -> PackedConfig:
    """Tile of a grouped GEMM with this average number of rows an expert."""
    if rows_per_expert > 16:
        return PACKED_MEDIUM
    if rows_per_expert > 4:
        return GROUPED_SMALL
    return GROUPED_SHORT if k < SHORT_K else GROUPED_TINY


def decoded_config(wide_output: bool) -> DecodedConfig:
    """Tile for a 2-byte or, ``wide_output``, a 4-byte output dtype."""
    return DECODED_FLOAT32 if wide_output else DECODED


def grouped_decoded_config(wide_output: bool) -> DecodedConfig:
    """Tile of grouped GEMMs on decoded operands, as ``decoded_config``."""
    return DECODED_FLOAT32 if wide_output else GROUPED_DECODED


def slice_columns(k: int) -> int | None:
    """Columns of a packed slice for this K, None if no slice divides it."""
    return next((columns for columns in SLICES if k % columns == 0), None)
