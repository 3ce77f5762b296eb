"""The arithmetic of SGLang's NVFP4 linears and experts, on CPU and on scales that SGLang fused.

Knows torch and minite_kernels; SGLang's activation is its own. What quantizes and multiplies is
minite_kernels' model of the engine that a recipe names (`modelled`). Invariant: the codes that the
trace shows are those that this module multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from minite_diag.alignments.ran import note
from minite_kernels.nvfp4.gemm import PreparedOperand, gemm
from minite_kernels.nvfp4.grouped_gemm import combine_slots
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import Recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

NATIVE_RECIPES: Final = {"nvfp4-modelopt": "sglang", "nvfp4-compressed-tensors": "sglang-ct"}
"""Checkpoint format -> what SGLang's default kernels compute on a Blackwell GPU."""

MODELLED_RECIPES: Final = (
    *NATIVE_RECIPES.values(),
    "flashinfer-fast",
    "flashinfer-exact",
    "vllm-cuda",
)
"""Recipes with a static activation scale and a block-scaled GEMM."""

ALIGNED_RECIPES: Final = ("pow2-row-scaled", "te-row-scaled")
"""Recipes that take each token's own amax; the checkpoint's static scale is not used."""

COMBINE_IN_SLOT_ORDER = False
"""Set by the alignment `experts`: add the slots one by one in FP32."""

Tap = Callable[[str, int, torch.Tensor | None, Any], Any]
"""Called with (stage, expert, rows int64 [R] or None, value); returns what goes on: the same
object, or a replacement at the stages gate, up, activation and down."""


def no_tap(_stage: str, _expert: int, _rows: torch.Tensor | None, value: Any) -> Any:
    """What a layer is observed by unless somebody looks."""
    return value


@dataclass(frozen=True)
class Weights:
    """What SGLang's loader wrote for one fused weight, before any kernel's layout.

    `codes` uint8 [N, K/2] or [E, N, K/2], `block_scale` E4M3 alike; `global_kind` says which way
    `global_scale` goes, [] or [E] or, where gate and up have their own, [E, 2] in the rows' order;
    `input_encode` [] or [E] is the activations' scale after SGLang's fusion.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_kind: str
    global_scale: torch.Tensor
    input_encode: torch.Tensor


@dataclass(frozen=True)
class Nvfp4Linear:
    """A linear's operand and the epilogue factor that SGLang computed."""

    recipe: Recipe
    weights: Weights
    operand: PreparedOperand
    alpha: torch.Tensor


@dataclass(frozen=True)
class Nvfp4Expert:
    """One expert's operands and their epilogue factors."""

    gate: PreparedOperand
    up: PreparedOperand
    down: PreparedOperand
    alphas: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Nvfp4Experts:
    """A layer's experts; `w13` and `w2` are their weights."""

    recipe: Recipe
    w13: Weights
    w2: Weights
    experts: tuple[Nvfp4Expert, ...]

    @property
    def one_input_scale(self) -> bool:
        """Whether all experts quantize the hidden states alike."""
        encode = self.w13.input_encode
        return is_per_token(self.recipe) or bool((encode == encode[0]).all())


def is_per_token(recipe: Recipe) -> bool:
    """Whether each token has its own activation scale (the checkpoint's static one is unused)."""
    return recipe.activation.amax_scope == "token"


def quantize_activation(
    x_TK: torch.Tensor, recipe: Recipe, encode_scale: torch.Tensor
) -> Nvfp4Tensor:
    """Quantize activations [T, K] under the recipe, with the checkpoint's scale where it is used."""
    if is_per_token(recipe):
        return quantize(x_TK, recipe)
    return quantize(x_TK, recipe, global_encode_scale=encode_scale.reshape(()))


def multiply(
    x: Nvfp4Tensor,
    operand: PreparedOperand,
    alpha: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The GEMM with SGLang's alpha; a scale for each token needs the recipe's own epilogue."""
    factor = None if is_per_token(x.recipe) else alpha
    return gemm(x, operand, out_dtype=dtype, alpha=factor, bias=bias)


def run_linear(
    linear: Nvfp4Linear, x: torch.Tensor, bias: torch.Tensor | None, tap: Tap
) -> torch.Tensor:
    """X [..., K] -> [..., N] in x's dtype."""
    x_TK = x.reshape(-1, x.shape[-1])
    quantized = quantize_activation(x_TK, linear.recipe, linear.weights.input_encode)
    tap("quantized", -1, None, quantized)
    out = multiply(quantized, linear.operand, linear.alpha, x.dtype, bias)
    return out.reshape(*x.shape[:-1], -1)


def run_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    layer: Nvfp4Experts,
    tap: Tap,
) -> torch.Tensor:
    """X [T, H], router weights and expert ids [T, k] -> [T, H] in x's dtype.

    As FlashInfer's CUTLASS backend: the hidden states are quantized once where all experts share a
    scale, each GEMM stores the activation dtype, the router weight is applied in FP32, and the
    slots are summed.
    """
    from sglang.srt.layers.activation import SiluAndMul

    dtype, activation, recipe = x_TH.dtype, SiluAndMul(), layer.recipe
    slots_TKH = x_TH.new_zeros(*ids_TK.shape, x_TH.shape[-1], dtype=torch.float32)
    shared = None
    if layer.one_input_scale:
        shared = quantize_activation(x_TH, recipe, layer.w13.input_encode[0])
    for e in ids_TK.unique().tolist():
        rows, slots = torch.where(ids_TK == e)
        expert, alphas = layer.experts[e], layer.experts[e].alphas
        if shared is None:
            selected = quantize_activation(x_TH[rows], recipe, layer.w13.input_encode[e])
        else:
            selected = shared.rows(rows)
        tap("input", e, rows, (x_TH, selected))
        gate_RI = tap("gate", e, rows, multiply(selected, expert.gate, alphas[0], dtype))
        up_RI = tap("up", e, rows, multiply(selected, expert.up, alphas[1], dtype))
        act_RI = tap("activation", e, rows, activation(torch.cat((gate_RI, up_RI), -1)))
        quantized = quantize_activation(act_RI, recipe, layer.w2.input_encode[e])
        tap("quantized", e, rows, quantized)
        down_RH = tap("down", e, rows, multiply(quantized, expert.down, alphas[2], dtype))
        slots_TKH[rows, slots] = down_RH.float() * weights_TK[rows, slots, None].float()
    return combine(slots_TKH).to(dtype)


def combine(slots_TKH: torch.Tensor) -> torch.Tensor:
    """Sum the weighted slots in FP32 [T, k, H] -> [T, H]."""
    if not COMBINE_IN_SLOT_ORDER:
        return slots_TKH.sum(dim=1)
    note("experts")
    return combine_slots(slots_TKH)
