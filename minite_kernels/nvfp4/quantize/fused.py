"""Producers that engines fuse with the quantizer: where they round before it, and where not.

Fusion changes bits because an intermediate is no longer rounded to BF16. These functions compute
what the fused kernels of the named engines compute; each is a composition of this library's ops,
so their promises hold. Shapes: T tokens, [T, 2I] gate and up, [T, K] rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl
from minite_kernels.invariant.elementary import row_sum
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import Recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

__all__ = ["add_rms_norm_quantize", "silu_mul_quantize"]


def silu_mul_quantize(
    gate_up: Tensor,
    recipe: Recipe | str,
    *,
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> Nvfp4Tensor:
    """Quantize silu(gate) * up of [T, 2I] as vLLM's fused kernel does: one rounding before it.

    The unfused pair of ops rounds silu(gate) as well, which changes about 1 % of codes.
    """
    hidden = silu_mul(gate_up, rounding="once", impl=impl)
    return quantize(hidden, recipe, amax=amax, global_encode_scale=global_encode_scale, impl=impl)


def add_rms_norm_quantize(
    x_TK: Tensor,
    residual_TK: Tensor,
    weight: Tensor,
    eps: float,
    *,
    global_encode_scale: Tensor,
    recipe: Recipe | str = "flashinfer-rmsnorm",
    impl: Impl = "auto",
) -> tuple[Nvfp4Tensor, Tensor]:
    """(quantized norm, x + residual) as FlashInfer's CuTe-DSL add + RMSNorm + quantize does.

    It quantizes fp32(bf16(h * w)) / rms(h): the product with the weight is rounded to x's dtype,
    the normalized value is not, so the quantizer sees FP32. Source: add_rmsnorm_fp4quant.py.
    """
    total = (x_TK.to(torch.float32) + residual_TK.to(torch.float32)).to(x_TK.dtype)
    h = total.to(torch.float32)
    count = torch.full((), h.shape[1], dtype=torch.float32, device=h.device)
    mean = torch.div(row_sum(h.to(torch.float64).square()).to(torch.float32), count)
    root = torch.sqrt((mean + eps).to(torch.float64)).to(torch.float32)
    inverse = torch.div(torch.ones_like(root), root)
    weighted = (h * weight.to(torch.float32)).to(x_TK.dtype).to(torch.float32)
    value = weighted * inverse[:, None]
    q = quantize(value, recipe, global_encode_scale=global_encode_scale, impl=impl)
    return q, total
