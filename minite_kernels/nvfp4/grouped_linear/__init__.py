"""The three GEMMs of linear layers over experts: forward, data gradient, weight gradient.

Rows are routed and sorted by expert; a dense layer is one expert. Each GEMM quantizes both operands
along its own contraction, as Transformer Engine does:

    forward  Y  = X  W^T    X along K (activation), W along K (weight)
    dgrad    dX = dY W      dY along N (gradient),  W^T along N (weight; a 16x16 tile transposes)
    wgrad    dW = dY^T X    dY^T and X^T along the expert's rows, after the RHT if the recipe has it

Shapes: R rows, E experts, w [E, N, K]; ``offsets`` int64 [E + 1]. Invariant: an expert's results
depend on its own rows and weight alone; rows beyond ``offsets[-1]`` are padding and give zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, beyond_device, select
from minite_kernels.nvfp4.gemm import DEQUANTIZED, HOPPER
from minite_kernels.nvfp4.recipe import Recipe

__all__ = [
    "ALIGNMENT",
    "Options",
    "data_gradient",
    "forward",
    "prepare_weight",
    "weight_gradient",
]

#: Rows of an expert's range start at multiples of this where ``triton`` runs (``route(align=)``).
ALIGNMENT = 64


@dataclass(frozen=True)
class Options:
    """What the three GEMMs share; ``generator`` seeds stochastic rounding."""

    recipe: Recipe
    impl: Impl = "auto"
    generator: torch.Generator | None = None


def forward(
    x_RK: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    options: Options,
    *,
    input_amax: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    prepared: Any = None,
    aligned: bool = False,
) -> Tensor:
    """Y [R, N], by default in the dtype of x; ``input_amax`` FP32 [E] for static recipes.

    ``prepared`` is what ``prepare_weight`` made of w with the same options and alignment.

    ``aligned`` promises that every offset is a multiple of ``ALIGNMENT`` (nothing is checked: that
    would wait for the device); without it only ``ref`` runs.
    """
    module = _select(options, x_RK, w_ENK, aligned)
    out: Tensor = module.forward(
        x_RK, w_ENK, offsets, options, input_amax, out_dtype or x_RK.dtype, prepared
    )
    return out


def prepare_weight(x_RK: Tensor, w_ENK: Tensor, options: Options, *, aligned: bool = False) -> Any:
    """Quantize w once for ``forward`` and, where its tile is 16x16, ``data_gradient``.

    ``x_RK`` is the layer's input, which decides the implementation; the result is opaque.
    """
    module = _select(options, x_RK, w_ENK, aligned)
    return module.prepare_weight(w_ENK, options)


def data_gradient(
    dy_RN: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    options: Options,
    *,
    prepared: Any = None,
    aligned: bool = False,
) -> Tensor:
    """Compute dX [R, K] in the dtype of dy."""
    module = _select(options, dy_RN, w_ENK, aligned)
    out: Tensor = module.data_gradient(dy_RN, w_ENK, offsets, options, prepared)
    return out


def weight_gradient(
    dy_RN: Tensor,
    x_RK: Tensor,
    offsets: Tensor,
    options: Options,
    *,
    out_dtype: torch.dtype = torch.float32,
    aligned: bool = False,
) -> Tensor:
    """Compute dW [E, N, K]; an expert without rows gets zeros."""
    module = _select(options, dy_RN, x_RK, aligned)
    out: Tensor = module.weight_gradient(dy_RN, x_RK, offsets, options, out_dtype)
    return out


def _select(options: Options, a: Tensor, b: Tensor, aligned: bool) -> ModuleType:
    """Module that runs one GEMM of these operands."""
    obstacle: str | None = "rows of experts are not aligned"
    if aligned:
        obstacle = beyond_device(a.device, HOPPER) or _beyond_triton(a, b)
    if options.recipe.gemm.operands == "dequantized":
        obstacle = DEQUANTIZED
    return select("grouped_linear", __name__, options.impl, a.device, {"triton": obstacle})


def _beyond_triton(a: Tensor, b: Tensor) -> str | None:
    """Say what of these tensors the Triton path does not take, None if it takes them.

    Rows and widths are those of its TMA tiles, whose blocks of 16 must not straddle experts; BF16
    is what training multiplies.
    """
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return "it takes bfloat16"
    if a.shape[-1] % 64 or b.shape[-1] % 64 or b.shape[-2] % 16 or a.shape[0] % ALIGNMENT:
        return "widths must be multiples of 64 and rows of the alignment"
    return None
