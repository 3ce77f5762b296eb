"""Reference W4A4 GEMM in torch: exact partial sums in FP64, CPU and GPU.

A decoded operand q*s is a multiple of 2^-10 of magnitude at most 6*448 < 2^12, so a product is an
integer multiple of 2^-20 below 2^23 and the sum of 1024 of them is an integer below 2^53: FP64
holds every partial sum of a 1024-column slice exactly, in any order and any blocking a BLAS picks.
Slices are then added in ascending k. Invariant, by that argument: a row's accumulator does not
depend on the other rows, on M, or on the thread count; and whenever the whole sum fits FP32's 24
bits it equals what any FP32 accumulation gives.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

from minite_kernels.nvfp4.format import BLOCK_SIZE, e2m1_grid
from minite_kernels.nvfp4.gemm._epilogue import Epilogue, apply
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

#: Columns whose products FP64 sums exactly: 1024 * (6*448)^2 * 2^20 < 2^53.
EXACT_COLUMNS: Final = 1024


def gemm(a: Nvfp4Tensor, b: PreparedOperand, epilogue: Epilogue) -> Tensor:
    """[M, N] from a [M, K] and b [N, K]: exact accumulator, then the epilogue."""
    return apply(epilogue, accumulate(decode(a), b.layout("decoded_fp64", decode)))


def decode(q: Nvfp4Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """q*s without any global scale: [M, K], exact in FP64, FP32, BF16 and FP16."""
    m, k = q.shape
    value = _values_of_byte(dtype, q.device)[q.codes.to(torch.int32)].flatten(1)
    value = torch.nn.functional.pad(value, (0, -k % BLOCK_SIZE)).view(
        m, -(-k // BLOCK_SIZE), BLOCK_SIZE
    )
    return value.mul_(q.block_scale.to(torch.float32).to(dtype)[..., None]).flatten(1)[:, :k]


@functools.cache
def _values_of_byte(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the two values of each packed byte, low nibble first; made once a device."""
    byte = torch.arange(256, device=device)
    return e2m1_grid(dtype, device)[torch.stack((byte & 15, byte >> 4), 1)]


def accumulate(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """FP32 [M, N] of decoded FP64 operands: exact slices, added in order, rounded once."""
    total = torch.mm(a_MK[:, :EXACT_COLUMNS], b_NK[:, :EXACT_COLUMNS].t())
    for start in range(EXACT_COLUMNS, a_MK.shape[1], EXACT_COLUMNS):
        columns = slice(start, start + EXACT_COLUMNS)
        total += torch.mm(a_MK[:, columns], b_NK[:, columns].t())
    return total.to(torch.float32)
