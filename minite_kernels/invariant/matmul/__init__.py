"""Batch-invariant matrix product with a weight: x [T, K] times w [N, K] transposed.

For BF16, FP16 and FP32 operands (an LM head in FP32 included). Promise: the bits of out[t] depend
on x[t] and w alone, for every T and thread count, on one device and implementation. ``ref`` and
``triton`` sum differently and agree to FP32 accuracy, not in bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select
from minite_kernels.invariant.matmul.operand import PreparedWeight

__all__ = ["PreparedWeight", "lm_head", "matmul"]


def matmul(
    x_TK: Tensor,
    w_NK: Tensor | PreparedWeight,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Compute x [.., K] @ w [N, K]^T (+ bias [N] in FP32) with FP32 accumulation: [.., N] ``out_dtype``.

    ``out_dtype`` defaults to that of x. ``PreparedWeight(w)`` keeps what ``ref`` derives from w.
    Raises ValueError if K differs.
    """
    weight = w_NK if isinstance(w_NK, PreparedWeight) else PreparedWeight(w_NK)
    if x_TK.shape[-1] != weight.w.shape[1]:
        raise ValueError(f"K differs: x has {x_TK.shape[-1]}, w has {weight.w.shape[1]}")
    module = select("matmul", __name__, impl, x_TK.device)
    flat = x_TK.reshape(-1, x_TK.shape[-1])
    out: Tensor = module.matmul(flat, weight, bias, out_dtype or x_TK.dtype)
    return out.reshape(*x_TK.shape[:-1], -1)


def lm_head(x_TK: Tensor, w_VK: Tensor | PreparedWeight, *, impl: Impl = "auto") -> Tensor:
    """Logits in FP32, never rounded to x's dtype: [.., V]."""
    return matmul(x_TK, w_VK, out_dtype=torch.float32, impl=impl)
