"""Triton log-softmax: one row a program, three passes over it, sum in FP64."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.invariant._elementary_triton import exp, log
from minite_kernels.invariant.launch import unfused

_BLOCK = 4096


@triton.jit
def _log_softmax_kernel(x_ptr, out_ptr, V, stride_t, BLOCK: tl.constexpr):
    """One row: maximum, sum of exponentials, result."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(x_ptr + row * stride_t + start + v, mask=inside, other=float("-inf"))
        largest = tl.maximum(largest, x.to(tl.float32))
    top = tl.max(largest, 0)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(x_ptr + row * stride_t + start + v, mask=inside, other=float("-inf"))
        total += exp(x.to(tl.float32) - top).to(tl.float64)
    logarithm = log(tl.sum(total, 0).to(tl.float32))
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(x_ptr + row * stride_t + start + v, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * V + start + v, (x - top) - logarithm, mask=inside)


def log_softmax(logits_TV: Tensor) -> Tensor:
    """FP32 [T, V]."""
    tokens, vocabulary = logits_TV.shape
    x = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
    out = torch.empty(tokens, vocabulary, dtype=torch.float32, device=x.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        _log_softmax_kernel[(tokens,)](
            x, out, vocabulary, x.stride(0), BLOCK=block, num_warps=8, **unfused()
        )
    return out
