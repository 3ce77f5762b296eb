"""Triton SiLU-mul: elementwise, with the library's exp."""

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

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, width, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """One piece of one row: gate and up are ``width`` apart."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + exp(-gate))
    if ROUND:
        silu = silu.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + i, (silu * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, round_silu: bool) -> Tensor:
    """[.., 2I] -> [.., I]."""
    width = gate_up.shape[-1] // 2
    x = gate_up.reshape(-1, 2 * width).contiguous()
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        grid = (x.shape[0], triton.cdiv(width, block))
        _silu_mul_kernel[grid](
            x, out, width, ROUND=round_silu, BLOCK=block, num_warps=4, **unfused()
        )
    return out.reshape(*gate_up.shape[:-1], width)


@triton.jit
def _silu_mul_backward_kernel(dy_ptr, x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """One piece of one row: gradients of gate and up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(x_ptr + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + i, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + exp(-gate))
    d_gate = (dy * up) * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    d_up = dy * (gate * sigmoid)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * 2 * width + i, d_gate.to(dtype), mask=inside)
    tl.store(out_ptr + row * 2 * width + width + i, d_up.to(dtype), mask=inside)


def silu_mul_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient [.., 2I] of silu(gate) * up in FP32, rounded once."""
    width = gate_up.shape[-1] // 2
    x = gate_up.reshape(-1, 2 * width).contiguous()
    out = torch.empty_like(x)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        grid = (x.shape[0], triton.cdiv(width, block))
        _silu_mul_backward_kernel[grid](
            dy.contiguous(), x, out, width, BLOCK=block, num_warps=4, **unfused()
        )
    return out.reshape(gate_up.shape)
