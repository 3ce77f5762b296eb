"""Reference RMSNorm: FP64 sum of squares in halving order, IEEE square root and division."""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.invariant.elementary import row_sum


def rms_norm(
    x_TK: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    unrounded_sum: bool,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(normed, sum) [T, K] in the dtype of x; the sum is x itself without a residual."""
    total = x_TK.to(torch.float32)
    if residual is not None:
        total = total + residual.to(torch.float32)
    stored = total.to(x_TK.dtype)
    value = total if unrounded_sum else stored.to(torch.float32)
    count = torch.full((), x_TK.shape[1], dtype=torch.float32, device=x_TK.device)
    mean = torch.div(row_sum(value.to(torch.float64).square()).to(torch.float32), count)
    # torch's FP32 sqrt on a CPU is not correctly rounded; FP64's, rounded to FP32, is.
    root = torch.sqrt((mean + eps).to(torch.float64)).to(torch.float32)
    inverse = torch.div(torch.ones_like(mean), root)
    out = value * inverse[:, None]
    if round_before_weight:
        out = out.to(x_TK.dtype).to(torch.float32)
    if weight is not None:
        out = out * weight.to(torch.float32)
    return out.to(x_TK.dtype), stored
