"""The NVFP4 number formats: E2M1 codes, E4M3 block scales, blocks of 16.

Facts of the format and its two casts. Must not know about recipes: whatever engines do differently
(the sign of zero, NaN, ties) is an argument here. Invariant: every value that ``decode_e2m1``
returns is on ``E2M1_GRID``, and ``encode_e2m1`` of a grid value is that value's code.
"""

from __future__ import annotations

import functools
from typing import Final, Literal

import torch
from torch import Tensor

BLOCK_SIZE: Final = 16
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
E4M3_SMALLEST_NORMAL: Final = 2.0**-6
E4M3_SMALLEST_SUBNORMAL: Final = 2.0**-9
FLOAT32_MAX: Final = 3.4028234663852886e38
FLOAT32_SMALLEST_NORMAL: Final = 2.0**-126

#: Value of each code; bit 3 is the sign.
E2M1_GRID: Final = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
#: Midpoints between neighbouring magnitudes; code ``i`` and ``i + 1`` meet at ``E2M1_TIES[i]``.
E2M1_TIES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

NegativeZero = Literal["keep", "positive"]
Ties = Literal["even", "toward_zero"]


def encode_e2m1(
    y: Tensor,
    *,
    negative_zero: NegativeZero = "keep",
    nan_code: int = 7,
    ties: Ties = "even",
) -> Tensor:
    """Round FP32 values to E2M1 codes, saturating at +-6: any shape -> uint8, one code a byte.

    ``negative_zero="keep"`` takes the sign bit as it is (``cvt.rn.satfinite.e2m1x2``: -0.0 -> 0x8);
    ``"positive"`` takes the sign of ``y < 0``, so -0.0 -> 0x0 while -0.1 -> 0x8 still. NaN becomes
    ``nan_code``. ``ties="even"`` rounds to the even code; ``"toward_zero"`` to the smaller one.
    """
    if y.dtype != torch.float32:
        raise TypeError(f"encode_e2m1 takes float32, got {y.dtype}; widen exactly first")
    magnitude = y.abs().clamp_(max=E2M1_MAX)
    if ties == "even":
        code = _round_to_even_code(magnitude)
    else:
        code = torch.zeros_like(y, dtype=torch.int32)
        for tie in E2M1_TIES:
            code += magnitude > tie
    if negative_zero == "keep":
        code += (y.view(torch.int32) >> 28) & 8
    else:
        code += (y < 0).to(torch.int32) << 3
    return code.masked_fill_(y.isnan(), nan_code).to(torch.uint8)


def _round_to_even_code(magnitude: Tensor) -> Tensor:
    """Codes 0..7 of FP32 magnitudes in [0, 6], as int32 (NaN gives junk, masked by the caller).

    Adding 1.5 * 2^22 binades puts the sum where one ulp is the E2M1 step of that binade, so the
    FP32 adder does the rounding; the low mantissa bits are then the step count, 0..4. [0, 2)
    shares one step because E2M1's subnormals do.
    """
    binade = magnitude.clamp(min=1.0).view(torch.int32) & 0x7F800000
    sum_ = binade.view(torch.float32).mul(1.5 * 2.0**22).add_(magnitude)
    return (sum_.view(torch.int32) & 7).add_(binade >> 22).sub_(254)


def encode_e2m1_stochastic(y: Tensor, random_bits: Tensor) -> Tensor:
    """Round FP32 values to E2M1 stochastically with 8 random bits (uint8, shape of ``y``) each.

    Models ``cvt.rs.satfinite.e2m1x4``: t = |y| + bits/256 * step(|y|), floored to t's own step,
    saturated, with y's sign bit. A value on the grid keeps its code for every draw. Flooring to
    |y|'s step is the same: a t in the next binade lies below that binade's second point.
    """
    magnitude = y.abs()
    step = _step(magnitude)
    dithered = magnitude + random_bits.to(torch.float32) * (step / 256.0)
    floored = ((dithered / step).floor_() * step).clamp_(max=E2M1_MAX)
    return encode_e2m1(torch.copysign(floored, y))


def _step(magnitude: Tensor) -> Tensor:
    """Distance from a magnitude's grid point to the next one up: 0.5 below 2, 1 below 4, else 2."""
    step = torch.full_like(magnitude, 0.5)
    step.masked_fill_(magnitude >= 2.0, 1.0)
    return step.masked_fill_(magnitude >= 4.0, 2.0)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of each unpacked code (integers 0..15): same shape, ``dtype``; exact in any float."""
    return e2m1_grid(dtype, codes.device)[codes.to(torch.int32)]


@functools.cache
def e2m1_grid(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``E2M1_GRID`` as a tensor [16], made once a device."""
    return torch.tensor(E2M1_GRID, dtype=dtype, device=device)


def to_e4m3(values: Tensor) -> Tensor:
    """Cast FP32 to E4M3: round to nearest even, saturate at +-448 (also inf), NaN -> 0x7F."""
    bytes_ = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(bytes_ == 0xFF, 0x7F, bytes_).view(torch.float8_e4m3fn)
