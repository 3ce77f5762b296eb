"""Rotary position embedding from given cos and sin tables.

Promise: elementwise, no fused multiply-add, so invariant and the same bits in ``ref`` and
``triton``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select

__all__ = ["rope", "rope_tables"]


def rope_tables(
    positions_T: Tensor, inverse_frequencies: Tensor, *, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(cos, sin) FP32 [T, D/2] of integer positions, computed in FP64 and rounded once."""
    angle = positions_T.to(torch.float64)[:, None] * inverse_frequencies.to(torch.float64)
    cos, sin = torch.cos(angle) * scaling, torch.sin(angle) * scaling
    return cos.to(torch.float32), sin.to(torch.float32)


def rope(
    x_THD: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairs: Literal["half", "interleaved"] = "half",
    rounding: Literal["once", "each"] = "once",
    impl: Impl = "auto",
) -> Tensor:
    """Rotate x [T, H, D] by cos, sin [T, R/2], R <= D; columns from R on pass through.

    ``half`` pairs column i with i + R/2 (GPT-NeoX, Llama, Qwen), ``interleaved`` 2i with 2i + 1.
    ``once`` rounds x1*cos - x2*sin at the end; ``each`` rounds both products and the tables to x's
    dtype too, as Hugging Face does in BF16.
    """
    if cos.shape != sin.shape or cos.shape[0] != x_THD.shape[0]:
        raise ValueError(f"cos, sin must be [T, R/2], got {tuple(cos.shape)}, {tuple(sin.shape)}")
    module = select("rope", __name__, impl, x_THD.device)
    out: Tensor = module.rope(x_THD, cos, sin, pairs == "interleaved", rounding == "each")
    return out
