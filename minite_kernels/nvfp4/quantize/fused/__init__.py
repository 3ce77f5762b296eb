"""Producers that engines fuse with the quantizer: where they round before it, and where not.

Fusion changes bits where an intermediate is no longer rounded. These functions compute what the
fused kernels of the named engines compute: ``ref`` composes this library's ops, ``triton`` is one
kernel that never stores the intermediate (a recipe that takes the amax of a tensor from the data
needs a second one, which reads the input again). Promise: both give the bytes of the composition,
so the promises of ``silu_mul``, ``rms_norm`` and ``quantize`` hold. Shapes: T tokens, [T, 2I] gate
and up, [T, K] rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select
from minite_kernels.invariant.silu_mul import Rounding
from minite_kernels.nvfp4.quantize import given_scale
from minite_kernels.nvfp4.quantize._ref import GlobalScale
from minite_kernels.nvfp4.recipe import OperandRecipe, Recipe, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

__all__ = [
    "MAX_COLUMNS",
    "NormForm",
    "add_rms_norm_quantize",
    "rms_norm_quantize",
    "silu_mul_quantize",
]

#: Widest row whose statistics one program of the Triton kernel takes.
MAX_COLUMNS = 16384
#: What the quantizer sees of h = x + residual. ``weight_first``: fp32(dtype(h * w)) / rms(h), as
#: FlashInfer's CuTe-DSL kernel; ``rounded`` and ``float32``: ``invariant.rms_norm.add_rms_norm``.
NormForm = Literal["weight_first", "rounded", "float32"]


def silu_mul_quantize(
    gate_up: Tensor,
    recipe: Recipe | str,
    *,
    rounding: Rounding = "once",
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> Nvfp4Tensor:
    """Quantize silu(gate) * up of [T, 2I]: the bytes of ``quantize(silu_mul(gate_up, rounding))``.

    vLLM's fused kernel rounds once, silu(gate) stays in FP32; the unfused pair of ops rounds it as
    well (``"twice"``), which changes about 1 % of codes. Scales as in ``quantize``.
    """
    recipe = get_recipe(recipe)
    operand = recipe.activation
    if gate_up.ndim != 2 or gate_up.shape[1] % 4:
        raise ValueError(f"silu_mul_quantize takes [T, 2I], I even, got {tuple(gate_up.shape)}")
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    scale = given_scale(gate_up, recipe, "activation", amax, global_encode_scale, None)
    module = select("silu_mul_quantize", __name__, impl, gate_up.device, _limits(operand, width))
    codes, block_scale, scale = module.silu_mul_quantize(
        operand, gate_up, scale, rounding == "twice"
    )
    return _tensor(codes, block_scale, scale, (tokens, width), recipe)


def rms_norm_quantize(
    x_TK: Tensor,
    weight: Tensor | None,
    eps: float,
    recipe: Recipe | str,
    *,
    weight_rounding: Rounding = "twice",
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> Nvfp4Tensor:
    """Quantize the norm of x: the bytes of ``quantize(rms_norm(x, weight, eps))``.

    With a static scale (serving) or one amax a token, which is the same read. Scales as in
    ``quantize``.
    """
    recipe = get_recipe(recipe)
    operand = recipe.activation
    scale = given_scale(x_TK, recipe, "activation", amax, global_encode_scale, None)
    limits = _limits(operand, x_TK.shape[1])
    module = select("rms_norm_quantize", __name__, impl, x_TK.device, limits)
    codes, block_scale, scale, _ = module.rms_norm_quantize(
        operand, x_TK, None, weight, eps, scale, "rounded", weight_rounding == "twice"
    )
    return _tensor(codes, block_scale, scale, (x_TK.shape[0], x_TK.shape[1]), recipe)


def add_rms_norm_quantize(
    x_TK: Tensor,
    residual_TK: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    recipe: Recipe | str = "flashinfer-rmsnorm",
    form: NormForm = "weight_first",
    weight_rounding: Rounding = "twice",
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Nvfp4Tensor, Tensor]:
    """(quantized norm, x + residual); by default as FlashInfer's CuTe-DSL add + RMSNorm + quantize.

    ``form`` says what is quantized; ``weight_first`` quantizes FP32 and takes no
    ``weight_rounding``. Source of that form: FlashInfer's add_rmsnorm_fp4quant.py. Scales as in
    ``quantize``.
    """
    recipe = get_recipe(recipe)
    operand = recipe.activation
    dtype = quantized_dtype(x_TK.dtype, form)
    scale = given_scale(x_TK, recipe, "activation", amax, global_encode_scale, None, dtype)
    limits = _limits(operand, x_TK.shape[1])
    module = select("add_rms_norm_quantize", __name__, impl, x_TK.device, limits)
    codes, block_scale, scale, total = module.rms_norm_quantize(
        operand, x_TK, residual_TK, weight, eps, scale, form, weight_rounding == "twice"
    )
    return _tensor(codes, block_scale, scale, (x_TK.shape[0], x_TK.shape[1]), recipe), total


def quantized_dtype(dtype: torch.dtype, form: NormForm) -> torch.dtype:
    """Dtype of what the quantizer sees, on which some recipes' statistics depend."""
    return torch.float32 if form == "weight_first" else dtype


def _limits(operand: OperandRecipe, columns: int) -> dict[str, str | None]:
    """Say what the Triton kernel does not do: one program holds a row, and rows are not tiled."""
    if operand.tile[0] > 1:
        return {"triton": "activations in 16x16 tiles are quantized by no fused kernel"}
    if operand.rounding == "stochastic":
        return {"triton": "activations are rounded stochastically by no fused kernel"}
    if columns > MAX_COLUMNS:
        return {"triton": f"a row is held by one program, up to {MAX_COLUMNS} columns"}
    return {}


def _tensor(
    codes: Tensor, block_scale: Tensor, scale: GlobalScale, shape: tuple[int, int], recipe: Recipe
) -> Nvfp4Tensor:
    return Nvfp4Tensor(
        codes=codes,
        block_scale=block_scale,
        amax=scale.amax,
        global_encode_scale=scale.encode,
        global_decode_scale=scale.decode,
        shape=shape,
        recipe=recipe,
        role="activation",
    )
