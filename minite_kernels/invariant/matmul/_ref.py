"""Reference product with sums that are exact, hence order-free, in slices of 256 columns.

In each slice a row is written as integers of at most 2^22 times a power of two of its own: BF16's
8 bits are kept exactly down to 2^-14 of the slice's largest element, and what lies below is rounded
at 2^-23 of it, about an FP32 accumulator's own resolution. A product of such integers is at most
2^44 and a sum of 256 at most 2^52, so FP64 holds every partial sum exactly in any order a BLAS
picks. Slices are scaled back (powers of two: exact) and added in FP64 in ascending k.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minite_kernels.invariant.matmul.operand import PreparedWeight

SLICE: Final = 256
WINDOW_BITS: Final = 22


def matmul(
    x_TK: Tensor, weight: PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[T, N]: accumulate exactly by slices, round to FP32 once, add the bias, cast."""
    out = product(slices(x_TK), weight.layout("slices", slices)).to(torch.float32)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


Slices = list[tuple[Tensor, Tensor]]


def slices(x_RK: Tensor) -> Slices:
    """Per slice of columns: integers in FP64 [R, <=256] and the row's power of two [R, 1]."""
    return [_window(x_RK[:, start : start + SLICE]) for start in range(0, x_RK.shape[1], SLICE)]


def _window(part: Tensor) -> tuple[Tensor, Tensor]:
    part = part.to(torch.float64)
    exponent = torch.frexp(part.abs().amax(1, keepdim=True)).exponent  # |part| < 2^exponent
    unit = torch.ldexp(torch.ones_like(part[:, :1]), exponent - WINDOW_BITS)
    return (part / unit).round_(), unit


def product(x: Slices, w: Slices) -> Tensor:
    """FP64 [T, N]: each slice's exact integer product, scaled, added in order."""
    total: Tensor | None = None
    for (x_part, x_unit), (w_part, w_unit) in zip(x, w, strict=True):
        part = torch.mm(x_part, w_part.t()) * (x_unit * w_unit.t())
        total = part if total is None else total.add_(part)
    assert total is not None, "K must not be 0"
    return total
