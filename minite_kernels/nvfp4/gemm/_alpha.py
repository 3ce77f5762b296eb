"""The FP32 epilogue factors that recipes name: what the accumulator is multiplied by.

Invariant: one operator in an expression is one FP32 rounding, left to right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from minite_kernels.nvfp4.tensor import Nvfp4Tensor


def _factor(a: Nvfp4Tensor, b: Nvfp4Tensor) -> Tensor:
    """((6*6)*F_a)*F_b: exact in FP32 for E4M3 maxima 256 and 448."""
    value = 36.0 * a.operand.e4m3_max * b.operand.e4m3_max
    return torch.full((), value, dtype=torch.float32, device=a.device)


def _one(a: Nvfp4Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=a.device)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in FP32, where a per-token side is a column (a) or a row (b) of the [M, N] output."""
    return (a[:, None] if a.ndim else a) * (b[None, :] if b.ndim else b)


Alpha = Callable[[Nvfp4Tensor, Nvfp4Tensor], tuple[Tensor, ...]]

ALPHAS: Final[dict[str, Alpha]] = {
    "((A_a*A_b)*(1/((36*F_a)*F_b)))": lambda a, b: (
        _outer(a.amax, b.amax) * torch.div(_one(a), _factor(a, b)),
    ),
    "(A_a*A_b)/((36*F_a)*F_b)": lambda a, b: (torch.div(_outer(a.amax, b.amax), _factor(a, b)),),
    "(1/((36*F_a)*F_b)) then (A_a*A_b)": lambda a, b: (
        torch.div(_one(a), _factor(a, b)),
        _outer(a.amax, b.amax),
    ),
    "g_a*g_b": lambda a, b: (_outer(a.global_decode_scale, b.global_decode_scale),),
    "(1/S_a)*(1/S_b)": lambda a, b: (
        _outer(
            torch.div(_one(a), a.global_encode_scale), torch.div(_one(b), b.global_encode_scale)
        ),
    ),
    "1/(S_a*S_b)": lambda a, b: (
        torch.div(_one(a), _outer(a.global_encode_scale, b.global_encode_scale)),
    ),
    "bf16(g_a*g_b)": lambda a, b: (
        _outer(a.global_decode_scale, b.global_decode_scale).to(torch.bfloat16).to(torch.float32),
    ),
}
