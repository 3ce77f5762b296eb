"""Triton router: one token a program, its experts' logits in registers."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.invariant._elementary_triton import exp
from minite_kernels.invariant.launch import unfused


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    E,
    stride_t,
    SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EP: tl.constexpr,
):
    """Softmax, then the largest probability SLOTS times, lower index first on ties."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    x = tl.load(logits_ptr + t * stride_t + e, mask=e < E, other=float("-inf")).to(tl.float32)
    numerator = exp(x - tl.max(x, 0))
    total = tl.sum(numerator.to(tl.float64), 0).to(tl.float32)
    probability = tl.where(e < E, tl.div_rn(numerator, total), -1.0)
    chosen = 0.0
    left = probability
    for slot in tl.static_range(SLOTS):
        best = tl.max(left, 0)
        index = tl.min(tl.where(left == best, e, EP), 0)
        tl.store(ids_ptr + t * SLOTS + slot, index.to(tl.int64))
        tl.store(weights_ptr + t * SLOTS + slot, best)
        chosen = best if slot == 0 else chosen + best
        left = tl.where(e == index, -2.0, left)
    if RENORMALIZE:
        left = probability
        for slot in tl.static_range(SLOTS):
            best = tl.max(left, 0)
            index = tl.min(tl.where(left == best, e, EP), 0)
            tl.store(weights_ptr + t * SLOTS + slot, tl.div_rn(best, chosen))
            left = tl.where(e == index, -2.0, left)


def route_logits(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(weights [T, S], ids [T, S])."""
    tokens, experts = logits_TE.shape
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits_TE,
            weights,
            ids,
            experts,
            logits_TE.stride(0),
            SLOTS=top_k,
            RENORMALIZE=renormalize,
            EP=triton.next_power_of_2(experts),
            num_warps=1,
            **unfused(),
        )
    return weights, ids
