"""exp, log and row sums whose bits are fixed by FP32 and FP64 operations alone, on any device.

A library's vectorized exp and the scalar one that finishes a loop's tail may differ in the last
bit, so an element's result can depend on how many others there are. Here exp and log are fixed
sequences of IEEE FP32 additions and multiplications (range reduction and the polynomials of
Cephes, about one ulp), the same in torch and in ``_elementary_triton``. Invariant: nothing is fused.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LOG2_E: Final = 1.44269504088896341
LN2_HIGH: Final = 0.693359375
LN2_LOW: Final = -2.12194440e-4
ROUND: Final = 1.5 * 2.0**23  # adding and subtracting it rounds to an integer, ties to even
EXP_LOW: Final = -104.0  # below: 0
EXP_HIGH: Final = 88.72283  # above: inf
EXP_POLYNOMIAL: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
SQRT_HALF: Final = 0.707106781186547524
LOG_POLYNOMIAL: Final = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def exp(x: Tensor) -> Tensor:
    """e^x in FP32, elementwise; 0 below -104, inf above 88.72283, NaN kept."""
    clamped = x.clamp(EXP_LOW, EXP_HIGH)
    n = (clamped * LOG2_E + ROUND) - ROUND
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    y = torch.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        y = y * r + coefficient
    y = (y * (r * r) + r) + 1.0
    whole = torch.where(n.isnan(), 0, n).to(torch.int32)
    half = whole >> 1
    y = (y * _power_of_two(half)) * _power_of_two(whole - half)
    y = torch.where(x < EXP_LOW, 0.0, y)
    return torch.where(x > EXP_HIGH, torch.inf, y)


def _power_of_two(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)


def log(x: Tensor) -> Tensor:
    """ln(x) in FP32 of positive normal x, elementwise."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).to(torch.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = m < SQRT_HALF
    exponent = torch.where(small, exponent - 1.0, exponent)
    m = torch.where(small, (m + m) - 1.0, m - 1.0)
    z = m * m
    y = torch.full_like(m, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        y = y * m + coefficient
    y = (y * m) * z
    y = (y + exponent * LN2_LOW) - z * 0.5
    return (m + y) + exponent * LN2_HIGH


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim in FP64, by halving: one order for every number of rows.

    x is padded with zeros to a power of two; padding it further changes no bit, because the upper
    half that is added first is then zero.
    """
    length = x.shape[-1]
    padded = 1 << max(0, length - 1).bit_length()
    total = torch.nn.functional.pad(x.to(torch.float64), (0, padded - length))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def softmax_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 exp(x - max) over the last dim and its FP32 sum (rounded from FP64), [.., 1]."""
    numerator = exp(x - x.amax(-1, keepdim=True))
    return numerator, row_sum(numerator).to(torch.float32)[..., None]
