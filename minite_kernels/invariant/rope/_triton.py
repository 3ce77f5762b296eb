"""Triton rotary embedding: one token a program, all its heads."""

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
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    H,
    D,
    stride_t,
    stride_h,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_EACH: tl.constexpr,
    HP: tl.constexpr,
    PP: tl.constexpr,
):
    """Rotate columns 0..2*HALF of every head of one token."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)[:, None]
    pair = tl.arange(0, PP)
    inside = (h < H) & (pair < HALF)[None, :]
    first = pair
    second = pair + HALF
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    dtype = out_ptr.dtype.element_ty
    x_ptr += t * stride_t
    a = tl.load(x_ptr + h * stride_h + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + h * stride_h + second[None, :], mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + t * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + t * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if ROUND_EACH:
        cos = cos.to(dtype).to(tl.float32)
        sin = sin.to(dtype).to(tl.float32)
    ac = a * cos
    bs = b * sin
    bc = b * cos
    as_ = a * sin
    if ROUND_EACH:
        ac = ac.to(dtype).to(tl.float32)
        bs = bs.to(dtype).to(tl.float32)
        bc = bc.to(dtype).to(tl.float32)
        as_ = as_.to(dtype).to(tl.float32)
    out_ptr += t * H * D
    tl.store(out_ptr + h * D + first[None, :], (ac - bs).to(dtype), mask=inside)
    tl.store(out_ptr + h * D + second[None, :], (bc + as_).to(dtype), mask=inside)


def rope(x_THD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, round_each: bool) -> Tensor:
    """[T, H, D], rotated in FP32."""
    tokens, heads, dim = x_THD.shape
    x_THD = x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()
    half = cos.shape[1]
    rotated = 2 * half == dim
    out = (
        torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
        if rotated
        else (x_THD.clone(memory_format=torch.contiguous_format))
    )
    if out.numel():
        _rope_kernel[(tokens,)](
            x_THD,
            cos.contiguous(),
            sin.contiguous(),
            out,
            heads,
            dim,
            x_THD.stride(0),
            x_THD.stride(1),
            HALF=half,
            INTERLEAVED=interleaved,
            ROUND_EACH=round_each,
            HP=triton.next_power_of_2(heads),
            PP=triton.next_power_of_2(half),
            num_warps=4,
            **unfused(),
        )
    return out
