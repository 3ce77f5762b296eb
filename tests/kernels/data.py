"""Matrices that quantizer tests share: ordinary distributions, amax sweeps and special blocks."""

from __future__ import annotations

import torch
from torch import Tensor

DISTRIBUTIONS = (
    *("normal", "heavy_t2", "outlier_channels", "row_binades", "silu_mul", "ties"),
    *("zero_blocks", "zero_tensor", "negative_zeros", "underflow", "subnormals", "huge"),
)
NOT_FINITE = ("nan_element", "nan_block", "inf_element", "inf_and_nan")


def matrix(kind: str, m: int = 64, k: int = 256, seed: int = 0) -> Tensor:
    """FP32 [m, k] of one of ``DISTRIBUTIONS`` or ``NOT_FINITE``, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    match kind:
        case "normal":
            return x
        case "heavy_t2":
            chi2 = torch.randn(m, k, 2, generator=generator).square().sum(-1)
            return x / (chi2 / 2).sqrt()
        case "outlier_channels":
            x[:, ::37] *= 60.0
            return x
        case "row_binades":
            return x * torch.exp2(torch.linspace(-20, 4, m))[:, None]
        case "silu_mul":
            return torch.nn.functional.silu(3 * x) * x.flip(1)
        case "ties":
            grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0])
            x = grid[torch.randint(0, 10, (m, k), generator=generator)]
            x[:, ::16] = 6.0
            x[0, 0] = 2688.0
            return x
        case "zero_blocks":
            x.view(m, -1, 16)[torch.rand(m, k // 16, generator=generator) < 0.3] = 0.0
            return x
        case "zero_tensor":
            return torch.zeros(m, k)
        case "negative_zeros":
            x[torch.rand(m, k, generator=generator) < 0.3] = -0.0
            x[1, :16] = -0.0
            return x
        case "underflow":
            x[1::2] *= 1e-7
            x[0, 0] = 50.0
            return x
        case "subnormals":
            return x * 1e-39
        case "huge":
            return x * 1e36
        case "nan_element":
            x[2, 17] = torch.nan
            return x
        case "nan_block":
            x[2, 16:32] = torch.nan
            return x
        case "inf_element":
            x[3, 40], x[3, 41] = torch.inf, -torch.inf
            return x
        case "inf_and_nan":
            x[3, 40], x[3, 41] = torch.inf, torch.nan
            return x
    raise ValueError(kind)


def amax_sweep(dtype: torch.dtype, count: int = 128, k: int = 128) -> list[Tensor]:
    """``count`` matrices [16, k] whose amax takes evenly spread mantissas: 1 <= amax < 2."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for index in range(count):
        x = torch.randn(16, k, generator=generator)
        x *= torch.exp2(torch.randint(-6, 1, (16, k // 16), generator=generator)).repeat_interleave(
            16, 1
        )
        amax = 1.0 + index / count
        x = (x.clamp(-3, 3) / 3 * amax).to(dtype)
        x[3, 5] = amax
        out.append(x)
    return out
