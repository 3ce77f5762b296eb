"""SGLang's NVFP4 methods on CPU, through its plugin hooks: ModelOpt and compressed-tensors.

The methods refuse to run without a GPU. Their loaders and their fusion of scales stay SGLang's own:
the hooks call its functions, go on where those stop for want of a kernel or of a kernel's weight
layout, and multiply by `nvfp4`. Invariant: what a hook needs of the weights is kept before SGLang
swizzles it, and every scale is one that SGLang computed.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from minite_diag.engines.sglang_plugin import nvfp4
from minite_diag.engines.sglang_plugin.nvfp4 import (
    Nvfp4Expert,
    Nvfp4Experts,
    Nvfp4Linear,
    Weights,
)
from minite_diag.engines.sglang_plugin.plugin_hooks import around, check_sglang, replace
from minite_kernels.nvfp4.gemm import stored_operand
from minite_kernels.nvfp4.recipe import Recipe, get_recipe

QUANTIZATION: Final = "sglang.srt.layers.quantization"
MODELOPT: Final = f"{QUANTIZATION}.modelopt_quant"
COMPRESSED: Final = f"{QUANTIZATION}.compressed_tensors"
SCHEMES: Final = f"{COMPRESSED}.schemes.compressed_tensors_w4a4_nvfp4"

NO_KERNEL: Final = ("require SM100", "does not support NVFP4", "required padding")
"""What SGLang's own errors say where it needs a GPU's kernel, or that kernel's weight layout."""

DECODE: Final = "weight_global_decode_scale"
ENCODE: Final = "weight_global_encode_scale"


def register(linear_recipe: str | None, expert_recipe: str | None) -> None:
    """Put the methods of dense linears and of experts in place, before the model is built.

    None leaves SGLang's own. Raises EngineUnavailable for another SGLang than the one whose methods
    these are, and on a GPU.
    """
    check_sglang("NVFP4 by minite_kernels")
    _allow_compressed_tensors()
    if linear_recipe is not None:
        recipe = get_recipe(linear_recipe)
        _register_modelopt_linear(recipe)
        _register_compressed_linear(recipe)
    if expert_recipe is not None:
        recipe = get_recipe(expert_recipe)
        _register_modelopt_experts(recipe)
        _register_compressed_experts(recipe)


def _register_modelopt_linear(recipe: Recipe) -> None:
    linear = f"{MODELOPT}.ModelOptFp4LinearMethod"

    def load_linear(native: Any, method: Any, layer: Any) -> None:
        _without_gpu_layout(native, method, layer)
        scale = layer.weight_scale_2.detach().max()
        weights = Weights(
            layer.weight.data,
            layer.weight_scale.data,
            DECODE,
            scale,
            layer.input_scale_inv.detach(),
        )
        layer.minite_nvfp4 = _linear(recipe, weights, layer.alpha)

    around(f"{linear}.process_weights_after_loading", load_linear)
    replace(f"{linear}.apply", apply_linear)


def _register_modelopt_experts(recipe: Recipe) -> None:
    experts = f"{MODELOPT}.ModelOptNvFp4FusedMoEMethod"

    def load_experts(native: Any, method: Any, layer: Any) -> None:
        blocks = [layer.w13_weight_scale.data.clone(), layer.w2_weight_scale.data.clone()]
        _without_gpu_layout(native, method, layer)
        scale = layer.w13_weight_scale_2.detach().float()
        scale = scale[:, None].expand(-1, 2) if scale.dim() == 1 else scale
        up_first = method.load_up_proj_weight_first
        w13 = Weights(
            layer.w13_weight.data,
            blocks[0],
            DECODE,
            # Rows may be up, then gate; SGLang's scales are always gate, then up.
            scale.flip(-1) if up_first else scale,
            _for_each(layer.w13_input_scale_quant, len(scale)),
        )
        w2_scale = layer.w2_weight_scale_2.detach().float()
        w2_encode = _for_each(layer.w2_input_scale_quant, len(scale))
        w2 = Weights(layer.w2_weight.data, blocks[1], DECODE, w2_scale, w2_encode)
        alphas = (layer.g1_alphas, layer.g1_alphas_up, layer.g2_alphas)
        layer.minite_nvfp4 = _experts(recipe, w13, w2, alphas, up_first)

    around(f"{experts}.__init__", _construct_modelopt_experts)
    around(f"{experts}.process_weights_after_loading", load_experts)
    replace(f"{experts}.create_moe_runner", _keep_runner_config)
    replace(f"{experts}.apply", apply_experts)


@functools.cache
def _allow_compressed_tensors() -> None:
    """Once a process: linears and experts may be registered one after the other."""

    def supported(native: Any, config: Any, capability: int, error: bool = True) -> bool:
        return capability >= 100 or bool(native(config, capability, error))

    around(
        f"{COMPRESSED}.compressed_tensors.CompressedTensorsConfig._check_scheme_supported",
        supported,
    )


def _register_compressed_linear(recipe: Recipe) -> None:
    linear = f"{SCHEMES}.CompressedTensorsW4A4Fp4"

    def load_linear(native: Any, scheme: Any, layer: Any) -> None:
        blocks = layer.weight_scale.data.clone()
        native(scheme, layer)
        scale, encode = layer.weight_global_scale.detach(), layer.input_global_scale.detach()
        weights = Weights(layer.weight_packed.data, blocks, ENCODE, scale, encode)
        layer.minite_nvfp4 = _linear(recipe, weights, layer.alpha)

    around(f"{linear}.process_weights_after_loading", load_linear)
    replace(f"{linear}.apply_weights", apply_linear)


def _register_compressed_experts(recipe: Recipe) -> None:
    experts = f"{SCHEMES}_moe.CompressedTensorsW4A4Nvfp4MoE"

    def load_experts(native: Any, scheme: Any, layer: Any) -> None:
        blocks = [layer.w13_weight_scale.data.clone(), layer.w2_weight_scale.data.clone()]
        native(scheme, layer)
        # SGLang takes the gate's global scale for both halves.
        gate = layer.w13_weight_global_scale.detach().float()[:, :1].expand(-1, 2)
        w13_encode = _for_each(layer.w13_input_scale_quant, len(gate))
        w13 = Weights(layer.w13_weight.data, blocks[0], ENCODE, gate, w13_encode)
        w2_scale = layer.w2_weight_global_scale.detach().float()
        w2_encode = _for_each(layer.w2_input_scale_quant, len(gate))
        w2 = Weights(layer.w2_weight.data, blocks[1], ENCODE, w2_scale, w2_encode)
        alphas = (layer.g1_alphas, layer.g1_alphas, layer.g2_alphas)
        layer.minite_nvfp4 = _experts(recipe, w13, w2, alphas, scheme.load_up_proj_weight_first)

    around(f"{experts}.__init__", _construct_compressed_experts)
    around(f"{experts}.process_weights_after_loading", load_experts)
    replace(f"{experts}.create_moe_runner", _keep_runner_config)
    replace(f"{experts}.apply_weights", apply_experts)


def _without_gpu_layout(native: Any, method: Any, layer: Any) -> None:
    """SGLang's fusion of scales, up to where it needs a GPU's weight layout."""
    try:
        native(method, layer)
    except (ValueError, AssertionError) as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise


def _construct_modelopt_experts(native: Any, method: Any, config: Any) -> None:
    try:
        native(method, config)
    except ValueError as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise
        # What the constructor sets after the check that refuses this platform.
        method.enable_flashinfer_trtllm_moe = False
        method.use_flashinfer_trtllm_weight_layout = False
        method._cache_permute_indices = {}


def _construct_compressed_experts(native: Any, scheme: Any) -> None:
    # SGLang's own switch for a subclass that brings a path for another platform.
    scheme.requires_blackwell = False
    native(scheme)


def _keep_runner_config(method: Any, layer: Any, config: Any) -> None:
    from sglang.srt.layers.moe import get_moe_runner_backend

    method.moe_runner_config = config
    method.runner = None
    method._moe_runner_backend = get_moe_runner_backend()


def _for_each(scale: torch.Tensor, experts: int) -> torch.Tensor:
    """One scale an expert [E]; some of SGLang's backends keep one for all."""
    return scale.detach().float().reshape(-1).expand(experts)


def _decode(weights: Weights) -> torch.Tensor:
    scale = weights.global_scale.float()
    return scale if weights.global_kind == DECODE else scale.reciprocal()


def _linear(recipe: Recipe, weights: Weights, alpha: torch.Tensor) -> Nvfp4Linear:
    operand = stored_operand(weights.codes, weights.block_scale, _decode(weights), recipe)
    return Nvfp4Linear(recipe, weights, operand, alpha.detach().float().reshape(()))


def _experts(
    recipe: Recipe,
    w13: Weights,
    w2: Weights,
    alphas: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    up_first: bool,
) -> Nvfp4Experts:
    """`alphas` [E] of gate, up and down."""
    size = w13.codes.shape[1] // 2
    gate, up = (1, 0) if up_first else (0, 1)
    w13_decode, w2_decode = _decode(w13), _decode(w2)

    def half(e: int, number: int) -> nvfp4.PreparedOperand:
        rows = slice(number * size, (number + 1) * size)
        codes, blocks = w13.codes[e, rows], w13.block_scale[e, rows]
        return stored_operand(codes, blocks, w13_decode[e, number], recipe)

    experts = []
    for e in range(len(w13.codes)):
        down = stored_operand(w2.codes[e], w2.block_scale[e], w2_decode[e], recipe)
        own = (alphas[0][e].detach(), alphas[1][e].detach(), alphas[2][e].detach())
        experts.append(Nvfp4Expert(half(e, gate), half(e, up), down, own))
    return Nvfp4Experts(recipe, w13, w2, tuple(experts))


def apply_linear(
    _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the methods' `apply`: quantize, multiply, SGLang's alpha."""
    tap = getattr(layer, "minite_tap", nvfp4.no_tap)
    return nvfp4.run_linear(layer.minite_nvfp4, x, bias, tap)


def apply_experts(_: Any, layer: Any, dispatch_output: Any) -> Any:
    """As the methods' `apply`, one expert after the other."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    routing = dispatch_output.topk_output
    out_TH = nvfp4.run_experts(
        dispatch_output.hidden_states,
        routing.topk_weights,
        routing.topk_ids,
        layer.minite_nvfp4,
        getattr(layer, "minite_tap", nvfp4.no_tap),
    )
    return StandardCombineInput(hidden_states=out_TH)
