"""Triton RMSNorm: one row a program, sum of squares in FP64."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.invariant.launch import unfused


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    K,
    eps,
    stride_x,
    stride_residual,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    UNROUNDED_SUM: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    KP: tl.constexpr,
):
    """Norm of one row, with the residual added first if there is one."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    inside = k < K
    dtype = x_ptr.dtype.element_ty
    total = tl.load(x_ptr + row * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    value = total
    if HAS_RESIDUAL:
        other = tl.load(residual_ptr + row * stride_residual + k, mask=inside, other=0.0)
        total = total + other.to(tl.float32)
        stored = total.to(dtype)
        tl.store(sum_ptr + row * K + k, stored, mask=inside)
        value = stored.to(tl.float32)
        if UNROUNDED_SUM:
            value = total
    wide = value.to(tl.float64)
    squares = tl.sum(wide * wide, 0).to(tl.float32)
    mean = tl.div_rn(squares, K.to(tl.float32))
    out = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if ROUND_BEFORE_WEIGHT:
        out = out.to(dtype).to(tl.float32)
    if HAS_WEIGHT:
        out = out * tl.load(weight_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + k, out.to(dtype), mask=inside)


def rms_norm(
    x_TK: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    unrounded_sum: bool,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(normed, sum) [T, K] in the dtype of x; the sum is x itself without a residual."""
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    total = x_TK if residual is None else torch.empty_like(out)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    if out.numel():
        _rms_norm_kernel[(x_TK.shape[0],)](
            x_TK,
            x_TK if residual is None else residual,
            x_TK if weight is None else weight,
            out,
            total,
            x_TK.shape[1],
            eps,
            x_TK.stride(0),
            0 if residual is None else residual.stride(0),
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            UNROUNDED_SUM=unrounded_sum,
            ROUND_BEFORE_WEIGHT=round_before_weight,
            KP=triton.next_power_of_2(x_TK.shape[1]),
            num_warps=4 if x_TK.shape[1] <= 4096 else 8,
            **unfused(),
        )
    return out, total
