"""MoE router: linear, softmax over all experts, top-k with a stated tie rule.

Promise: a token's experts and weights depend on that token alone. Ties go to the lower expert
index. ``ref`` and ``triton`` use their own ``matmul``: equal logits give equal results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select
from minite_kernels.invariant.matmul import PreparedWeight, matmul

__all__ = ["route_logits", "router"]


def router(
    x_TK: Tensor,
    w_EK: Tensor | PreparedWeight,
    top_k: int,
    *,
    renormalize: bool = True,
    logits_dtype: torch.dtype = torch.float32,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights FP32 [T, S], ids int64 [T, S], logits [T, E] ``logits_dtype``) from x [T, K]."""
    logits = matmul(x_TK, w_EK, out_dtype=logits_dtype, impl=impl)
    weights, ids = route_logits(logits, top_k, renormalize=renormalize, impl=impl)
    return weights, ids, logits


def route_logits(
    logits_TE: Tensor, top_k: int, *, renormalize: bool = True, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """(weights FP32 [T, S], ids int64 [T, S]) by descending probability, lower index first on ties.

    ``renormalize`` divides by the sum over the chosen, in slot order. Raises ValueError on top_k.
    """
    if not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(f"top_k must be in 1..{logits_TE.shape[1]}, got {top_k}")
    module = select("router", __name__, impl, logits_TE.device)
    result: tuple[Tensor, Tensor] = module.route_logits(logits_TE, top_k, renormalize)
    return result
