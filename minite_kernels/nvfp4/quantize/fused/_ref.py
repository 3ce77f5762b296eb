"""Reference of the fused producers: the op, then the quantizer, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.invariant.elementary import row_sum
from minite_kernels.invariant.rms_norm import _ref as rms_norm
from minite_kernels.invariant.silu_mul import _ref as silu_mul
from minite_kernels.nvfp4.quantize import _ref as quantizer
from minite_kernels.nvfp4.quantize._ref import GlobalScale
from minite_kernels.nvfp4.quantize.fused import NormForm
from minite_kernels.nvfp4.recipe import OperandRecipe


def silu_mul_quantize(
    operand: OperandRecipe, gate_up: Tensor, scale: GlobalScale | None, round_silu: bool
) -> tuple[Tensor, Tensor, GlobalScale]:
    """Codes, block scales and global scales of silu(gate) * up [T, I]."""
    return _quantize(operand, silu_mul.silu_mul(gate_up, round_silu), scale)


def rms_norm_quantize(
    operand: OperandRecipe,
    x_TK: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: GlobalScale | None,
    form: NormForm,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor, GlobalScale, Tensor]:
    """Codes, block scales, global scales of the norm [T, K], and the sum in x's dtype."""
    if form == "weight_first":
        value, total = _weight_first(x_TK, residual, weight, eps)
    else:
        value, total = rms_norm.rms_norm(
            x_TK, weight, eps, residual, form == "float32", round_before_weight
        )
    return *_quantize(operand, value, scale), total


def _weight_first(
    x_TK: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(fp32(dtype(h * w)) / rms(h), h in x's dtype) of h = x + residual as it is stored."""
    total = x_TK
    if residual is not None:
        total = (x_TK.to(torch.float32) + residual.to(torch.float32)).to(x_TK.dtype)
    h = total.to(torch.float32)
    count = torch.full((), h.shape[1], dtype=torch.float32, device=h.device)
    mean = torch.div(row_sum(h.to(torch.float64).square()).to(torch.float32), count)
    root = torch.sqrt((mean + eps).to(torch.float64)).to(torch.float32)
    inverse = torch.div(torch.ones_like(root), root)
    weighted = h if weight is None else (h * weight.to(torch.float32)).to(x_TK.dtype)
    return weighted.to(torch.float32) * inverse[:, None], total


def _quantize(
    operand: OperandRecipe, value: Tensor, scale: GlobalScale | None
) -> tuple[Tensor, Tensor, GlobalScale]:
    scale = quantizer.scale_of(operand, value) if scale is None else scale
    return *quantizer.quantize_rows(operand, value, scale, None), scale
