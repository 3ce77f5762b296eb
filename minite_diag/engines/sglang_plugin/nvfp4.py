"""NVFP4 linears and experts inside SGLang on CPU, through its plugin hooks.

SGLang's NVFP4 methods refuse to run without a GPU. Its loader and its fusion of scales stay its own:
the hooks call SGLang's functions and go on where those stop for want of a kernel. What quantizes
and multiplies is minite_kernels' model of the engine that a recipe names (`modelled`). Invariant:
the codes that the trace shows are those that this module multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from minite_diag.engines.sglang_plugin.plugin_hooks import around, replace
from minite_diag.errors import EngineUnavailable
from minite_kernels.nvfp4.format import E2M1_MAX, E4M3_MAX
from minite_kernels.nvfp4.gemm import PreparedOperand, gemm, prepare
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import Recipe, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

NATIVE_RECIPE: Final = "sglang"
"""What SGLang's default kernels compute on a Blackwell GPU."""

MODELLED_RECIPES: Final = (NATIVE_RECIPE, "flashinfer-fast", "flashinfer-exact", "vllm-cuda")
"""Recipes with a static activation scale and a block-scaled GEMM."""

ALIGNED_RECIPES: Final = ("pow2-row-scaled", "te-row-scaled")
"""Recipes that take each token's own amax; the checkpoint's static scale is not used."""

KNOWN_VERSIONS: Final = ("0.5.23",)

MODULE: Final = "sglang.srt.layers.quantization.modelopt_quant"
NO_KERNEL: Final = ("require SM100", "does not support NVFP4", "required padding")
"""What SGLang's own errors say where it needs a GPU's kernel, or that kernel's weight layout."""

COMBINE_IN_SLOT_ORDER = False
"""Set by the alignment `experts`: add the slots one by one in FP32."""

Tap = Callable[[str, int, torch.Tensor | None, Any], Any]
"""Called with (stage, expert, rows int64 [R] or None, value); returns what goes on: the same
object, or a replacement at the stages output, gate, up, activation and down."""


def no_tap(_stage: str, _expert: int, _rows: torch.Tensor | None, value: Any) -> Any:
    """What a layer is observed by unless somebody looks."""
    return value


@dataclass(frozen=True)
class Nvfp4Expert:
    """One expert's operands and their epilogue factors (None where the recipe computes them)."""

    gate: PreparedOperand
    up: PreparedOperand
    down: PreparedOperand
    alphas: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class Nvfp4Experts:
    """A layer's experts; `block_scale` keeps what the loader wrote before SGLang swizzled it."""

    experts: tuple[Nvfp4Expert, ...]
    input_encode: torch.Tensor
    down_encode: torch.Tensor
    block_scale: dict[str, torch.Tensor]


def register(recipe_name: str) -> Recipe:
    """Put the methods of a recipe in place, before the model is built; returns the recipe.

    Raises EngineUnavailable for another SGLang than the one whose methods these are.
    """
    import sglang

    if sglang.__version__ not in KNOWN_VERSIONS:
        raise EngineUnavailable(
            f"NVFP4 on CPU hooks into methods of SGLang {KNOWN_VERSIONS[0]}, "
            f"this is {sglang.__version__}",
            "minite-diag env create sglang",
        )
    recipe = get_recipe(recipe_name)
    linear, experts = f"{MODULE}.ModelOptFp4LinearMethod", f"{MODULE}.ModelOptNvFp4FusedMoEMethod"

    def prepare_linear(native: Any, method: Any, layer: Any) -> None:
        _without_gpu_layout(native, method, layer)
        layer.minite_recipe = recipe
        layer.minite_weight = stored_operand(
            layer.weight, layer.weight_scale, layer.weight_scale_2.max(), recipe
        )

    def prepare_experts(native: Any, method: Any, layer: Any) -> None:
        kept = {f: getattr(layer, f"{f}_weight_scale").data.clone() for f in ("w13", "w2")}
        _without_gpu_layout(native, method, layer)
        layer.minite_recipe = recipe
        layer.minite_experts = _prepared_experts(method, layer, kept, recipe)

    around(f"{linear}.process_weights_after_loading", prepare_linear)
    replace(f"{linear}.apply", apply_linear)
    around(f"{experts}.__init__", _construct_experts)
    around(f"{experts}.process_weights_after_loading", prepare_experts)
    replace(f"{experts}.create_moe_runner", _keep_runner_config)
    replace(f"{experts}.apply", apply_experts)
    return recipe


def _without_gpu_layout(native: Any, method: Any, layer: Any) -> None:
    """SGLang's fusion of scales, up to where it needs a GPU's weight layout."""
    try:
        native(method, layer)
    except (ValueError, AssertionError) as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise


def _construct_experts(native: Any, method: Any, config: Any) -> None:
    try:
        native(method, config)
    except ValueError as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise
        # What the constructor sets after the check that refuses this platform.
        method.enable_flashinfer_trtllm_moe = False
        method.use_flashinfer_trtllm_weight_layout = False
        method._cache_permute_indices = {}


def _keep_runner_config(method: Any, layer: Any, config: Any) -> None:
    from sglang.srt.layers.moe import get_moe_runner_backend

    method.moe_runner_config = config
    method.runner = None
    method._moe_runner_backend = get_moe_runner_backend()


def stored_operand(
    codes_NK: torch.Tensor, block_scale: torch.Tensor, decode_scale: torch.Tensor, recipe: Recipe
) -> PreparedOperand:
    """Codes uint8 [N, K/2] of a checkpoint as a GEMM operand, nothing requantized."""
    decode = decode_scale.detach().float().reshape(())
    return prepare(
        Nvfp4Tensor(
            codes=codes_NK.detach(),
            block_scale=block_scale.detach(),
            amax=decode * (E2M1_MAX * E4M3_MAX),
            global_encode_scale=decode.reciprocal(),
            global_decode_scale=decode,
            shape=(codes_NK.shape[0], codes_NK.shape[1] * 2),
            recipe=recipe,
            role="weight",
        )
    )


def is_per_token(recipe: Recipe) -> bool:
    """Whether each token has its own activation scale (the checkpoint's static one is unused)."""
    return recipe.activation.amax_scope == "token"


def quantize_activation(
    x_TK: torch.Tensor, recipe: Recipe, encode_scale: torch.Tensor
) -> Nvfp4Tensor:
    """Quantize activations [T, K] under the recipe, with the checkpoint's scale where it is used."""
    if is_per_token(recipe):
        return quantize(x_TK, recipe)
    return quantize(x_TK, recipe, global_encode_scale=encode_scale.detach().reshape(()))


def apply_linear(
    _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As ModelOptFp4LinearMethod.apply; alpha is the one that SGLang computed."""
    recipe = layer.minite_recipe
    x_TK = x.reshape(-1, x.shape[-1])
    quantized = quantize_activation(x_TK, recipe, layer.input_scale_inv)
    getattr(layer, "minite_tap", no_tap)("quantized", -1, None, quantized)
    alpha = None if is_per_token(recipe) else layer.alpha.detach().reshape(())
    out = gemm(quantized, layer.minite_weight, out_dtype=x.dtype, alpha=alpha, bias=bias)
    return out.reshape(*x.shape[:-1], -1)


def _prepared_experts(
    method: Any, layer: Any, block_scale: dict[str, torch.Tensor], recipe: Recipe
) -> Nvfp4Experts:
    w13_scale, w2_scale = layer.w13_weight_scale_2.detach(), layer.w2_weight_scale_2.detach()
    if w13_scale.dim() == 1:
        w13_scale = w13_scale[:, None].expand(-1, 2)
    size = layer.w13_weight.shape[1] // 2
    gate, up = slice(0, size), slice(size, 2 * size)
    if method.load_up_proj_weight_first:
        gate, up = up, gate

    def one(e: int) -> Nvfp4Expert:
        def half(rows: slice, scale: torch.Tensor) -> PreparedOperand:
            codes, blocks = layer.w13_weight.data[e, rows], block_scale["w13"][e, rows]
            return stored_operand(codes, blocks, scale, recipe)

        alphas = (layer.g1_alphas[e], layer.g1_alphas_up[e], layer.g2_alphas[e])
        return Nvfp4Expert(
            gate=half(gate, w13_scale[e, 0]),
            up=half(up, w13_scale[e, 1]),
            down=stored_operand(layer.w2_weight.data[e], block_scale["w2"][e], w2_scale[e], recipe),
            alphas=None if is_per_token(recipe) else tuple(a.detach() for a in alphas),  # type: ignore[arg-type]
        )

    count = int(layer.w13_weight.shape[0])
    return Nvfp4Experts(
        experts=tuple(one(e) for e in range(count)),
        input_encode=_one_scale(layer.w13_input_scale_quant, "w13"),
        down_encode=_one_scale(layer.w2_input_scale_quant, "w2"),
        block_scale=block_scale,
    )


def _one_scale(scale: torch.Tensor, fused: str) -> torch.Tensor:
    """The scale that all experts share, which SGLang's CUTLASS backend makes of theirs."""
    values = scale.detach().float().reshape(-1)
    if not torch.equal(values, values[:1].expand_as(values)):
        raise EngineUnavailable(
            f"SGLang kept one activation scale an expert for {fused}",
            "run with moe_runner_backend=flashinfer_cutlass",
        )
    return values[0]


def apply_experts(_: Any, layer: Any, dispatch_output: Any) -> Any:
    """As ModelOptNvFp4FusedMoEMethod.apply, one expert after the other."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x_TH, routing = dispatch_output.hidden_states, dispatch_output.topk_output
    out_TH = run_experts(
        x_TH,
        routing.topk_weights,
        routing.topk_ids,
        layer.minite_experts,
        layer.minite_recipe,
        getattr(layer, "minite_tap", no_tap),
    )
    return StandardCombineInput(hidden_states=out_TH)


def run_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    layer: Nvfp4Experts,
    recipe: Recipe,
    tap: Tap,
) -> torch.Tensor:
    """X [T, H], router weights and expert ids [T, k] -> [T, H] in x's dtype.

    As FlashInfer's CUTLASS backend: the hidden states are quantized once for all experts, each GEMM
    stores the activation dtype, the router weight is applied in FP32 and the slots are summed.
    """
    from sglang.srt.layers.activation import SiluAndMul

    dtype, activation = x_TH.dtype, SiluAndMul()
    slots_TKH = x_TH.new_zeros(*ids_TK.shape, x_TH.shape[-1], dtype=torch.float32)
    hidden = quantize_activation(x_TH, recipe, layer.input_encode)
    tap("input", -1, None, (x_TH, hidden))
    for e in ids_TK.unique().tolist():
        rows, slots = torch.where(ids_TK == e)
        expert, selected = layer.experts[e], hidden.rows(rows)
        alphas = expert.alphas or (None, None, None)
        gate_RI = tap(
            "gate", e, rows, gemm(selected, expert.gate, out_dtype=dtype, alpha=alphas[0])
        )
        up_RI = tap("up", e, rows, gemm(selected, expert.up, out_dtype=dtype, alpha=alphas[1]))
        act_RI = tap("activation", e, rows, activation(torch.cat((gate_RI, up_RI), -1)))
        quantized = quantize_activation(act_RI, recipe, layer.down_encode)
        tap("quantized", e, rows, quantized)
        down_RH = gemm(quantized, expert.down, out_dtype=dtype, alpha=alphas[2])
        down_RH = tap("down", e, rows, down_RH)
        slots_TKH[rows, slots] = down_RH.float() * weights_TK[rows, slots, None].float()
    return combine(slots_TKH).to(dtype)


def combine(slots_TKH: torch.Tensor) -> torch.Tensor:
    """Sum the weighted slots in FP32 [T, k, H] -> [T, H]."""
    if not COMBINE_IN_SLOT_ORDER:
        return slots_TKH.sum(dim=1)
    total_TH = slots_TKH[:, 0]
    for slot in range(1, slots_TKH.shape[1]):
        total_TH = total_TH + slots_TKH[:, slot]
    return total_TH
