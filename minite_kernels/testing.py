"""What tests and callers need to make claims about bits: comparison by bytes, and exactness counted.

Imports no test framework. Invariant: a comparison is of bytes, so -0.0 differs from 0.0 and a NaN
equals only its own bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm._ref import decode
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

__all__ = ["assert_same_bits", "different_elements", "exact_in_any_blocking"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def different_elements(a: Tensor, b: Tensor) -> Tensor:
    """Bool tensor: where the bytes of two tensors of one shape and dtype differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"cannot compare {a.dtype}{tuple(a.shape)} with {b.dtype}{tuple(b.shape)}")
    integer = _INTEGERS[a.element_size()]
    return a.contiguous().view(integer) != b.contiguous().view(integer)


def assert_same_bits(a: Tensor, b: Tensor, what: str = "tensors") -> None:
    """Raise AssertionError with the count and the first place if any byte differs."""
    different = different_elements(a, b)
    if bool(different.any()):
        where = different.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{len(where)} of {a.numel()} elements of {what} differ; at {first}: {a[first]}, {b[first]}"
        )


def exact_in_any_blocking(a: Nvfp4Tensor, b: Nvfp4Tensor) -> Tensor:
    """Bool [M, N]: outputs that FP32 sums exactly in any blocking of ascending k.

    With u_i the largest power of two that divides every decoded element of row i, the sum over any
    contiguous range of k is a multiple of u_i*u_j; where all of them are below 2^24 units none
    rounds, so every tile, every split of K and every accumulator gives the exact sum. The largest
    such sum is the range of the prefix sums. Memory is M*K*8 bytes for each row of b.
    """
    left, right = decode(a), decode(b)
    units = _unit(left) * _unit(right).t()
    out = torch.empty(units.shape, dtype=torch.bool, device=left.device)
    for column, row in enumerate(right):
        prefix = torch.cumsum(left * row, 1)
        span = prefix.amax(1).clamp(min=0.0) - prefix.amin(1).clamp(max=0.0)
        out[:, column] = span < 2.0**24 * units[:, column]
    return out


def _unit(x_RK: Tensor) -> Tensor:
    """FP64 [R, 1]: largest power of two dividing every element of a row; inf for a zero row."""
    integer = (x_RK * 2.0**10).to(torch.int64)  # decoded elements are multiples of 2^-10
    low_bit = torch.where(integer == 0, torch.iinfo(torch.int64).max, integer & -integer)
    unit = low_bit.amin(1, keepdim=True).to(torch.float64) * 2.0**-10
    return torch.where((integer == 0).all(1, keepdim=True), torch.inf, unit)
