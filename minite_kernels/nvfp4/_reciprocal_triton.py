"""The instruction ``rcp.approx.ftz.f32`` itself, elementwise on CUDA tensors."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.nvfp4.quantize._triton_arithmetic import rcp

_BLOCK = 1024


@triton.jit
def _rcp_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1.0)
    tl.store(out_ptr + i, rcp(x, True, False), mask=i < n)


def rcp_approx_device(x: Tensor) -> Tensor:
    """Apply the instruction to every FP32 element of a CUDA tensor: same shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _rcp_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), BLOCK=_BLOCK)
    return out
