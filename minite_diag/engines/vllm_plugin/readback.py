"""What really got installed in a loaded vLLM: settings and evidence, read from its objects.

Knows vLLM's attribute names; decides nothing. Invariant: every statement comes from an object that
the model holds, never from what was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from minite_diag.engines.base import Evidence
from minite_diag.engines.vllm_plugin.hooks import fused_experts, is_nvfp4, kernel_object
from minite_diag.engines.vllm_plugin.layout import expert_layers, linear_modules
from minite_diag.engines.vllm_plugin.nvfp4_cpu import DequantizedWeights, emulation_module
from minite_diag.engines.vllm_plugin.nvfp4_modelled import ALIGNED_RECIPES

_EMULATION = "nvfp4_emulation_utils"

WEIGHT_ONLY: Final = (
    "W4A16: the checkpoint asks for W4A4, this kernel does not quantize activations; "
    "nvfp4_recipe=vllm-emulation computes W4A4"
)


def qualified_name(value: Any) -> str:
    """Dotted path of a class, function or method."""
    value = getattr(value, "__func__", value)
    return f"{value.__module__}.{value.__qualname__}"


def linear_kernel(module: Any) -> str:
    """What multiplies in a linear: its NVFP4 kernel class, or the unquantized GEMM it chose."""
    kernel = kernel_object(module)
    if kernel is not None:
        return qualified_name(type(kernel))
    chosen = getattr(module, "cpu_linear", None)
    if chosen is not None:
        code = getattr(chosen, "__code__", None)
        # vLLM wraps the GEMM that it dispatched to in a lambda; the last global name is the op.
        return "cpu_linear: " + (code.co_names[-1] if code is not None else chosen.__name__)
    return qualified_name(getattr(module.quant_method, "_gemm_impl", type(module.quant_method)))


def op_forwards(model: nn.Module) -> dict[str, str]:
    """Class of each CustomOp in the model -> the forward that its platform dispatch chose."""
    found: dict[str, str] = {}
    for module in model.modules():
        forward = getattr(module, "_forward_method", None)
        if forward is not None:
            found[type(module).__name__] = f"{qualified_name(type(module))}.{forward.__name__}"
    return found


def attention(model: nn.Module) -> str:
    """The attention implementations, as class names."""
    from vllm.model_executor.layers.attention import Attention

    kinds = {qualified_name(type(m.impl)) for m in model.modules() if isinstance(m, Attention)}
    return ", ".join(sorted(kinds))


def norm_providers() -> str:
    """Providers that vLLM's norm ops dispatch to, in order of priority."""
    try:
        from vllm import ir
    except ImportError:
        return ""
    return "; ".join(
        f"{name}: {', '.join(getattr(ir.ops, name).get_priority())}"
        for name in ("rms_norm", "fused_add_rms_norm")
        if hasattr(getattr(ir.ops, name, None), "get_priority")
    )


def read_settings(model: nn.Module, config: Any) -> dict[str, str]:
    """Everything that changes bits, as vLLM's objects state it."""
    linears = Counter(
        f"{type(module).__name__}: {type(module.quant_method).__name__} -> {linear_kernel(module)}"
        for _, module in linear_modules(model)
    )
    experts = Counter(
        f"{type(layer.weights.quant_method).__name__} -> "
        f"{qualified_name(type(fused_experts(layer)))}"
        for layer in expert_layers(model)
    )
    settings = {
        "quantization": str(config.model_config.quantization),
        "linears": "; ".join(f"{what} ({n})" for what, n in sorted(linears.items())),
        "experts": "; ".join(f"{what} ({n})" for what, n in sorted(experts.items())),
        "routers": ", ".join(
            sorted({qualified_name(type(layer.router)) for layer in expert_layers(model)})
        ),
        "ops": "; ".join(v for _, v in sorted(op_forwards(model).items())),
        "norm_providers": norm_providers(),
        "attention": attention(model),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
        "max_model_len": str(config.model_config.max_model_len),
        "block_size": str(config.cache_config.block_size),
        "prefix_caching": str(config.cache_config.enable_prefix_caching),
        "enforce_eager": str(config.model_config.enforce_eager),
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "threads": str(torch.get_num_threads()),
    }
    return {key: value for key, value in settings.items() if value}


def read_evidence(model: nn.Module) -> Iterator[Evidence]:
    """Who computes each op. vLLM's own kernels are native, its NVFP4 emulation is emulated."""
    ops = op_forwards(model)
    for kernel in sorted({linear_kernel(m) for _, m in linear_modules(model) if not is_nvfp4(m)}):
        yield Evidence("linear", "native", kernel)
    for _, module in sorted(
        {linear_kernel(m): m for _, m in linear_modules(model) if is_nvfp4(m)}.items()
    ):
        yield from _nvfp4_linear(module)
    for name, forward in sorted(ops.items()):
        if name.endswith("RMSNorm"):
            yield Evidence("norm", "native", forward, norm_providers())
    for name, forward in sorted(ops.items()):
        if "Rotary" in name:
            yield Evidence("rope", "native", forward)
    yield Evidence("attention", "native", attention(model))
    if "SiluAndMul" in ops:
        yield Evidence("activation", "native", ops["SiluAndMul"])
    yield from _experts(model)
    yield Evidence("lm_head", "native", linear_kernel(model.get_submodule("lm_head")))
    yield Evidence("logprobs", "native", "vllm.v1.sample.sampler.Sampler.compute_logprobs")


def _nvfp4_linear(module: Any) -> Iterator[Evidence]:
    kernel = kernel_object(module)
    name = qualified_name(type(kernel))
    recipe = getattr(kernel, "recipe", None)
    if recipe is not None:
        status = _status_of(recipe)
        note = f"recipe {recipe.name}: {recipe.engine}"
        yield Evidence("nvfp4_linear", status, name, note)
        yield Evidence("nvfp4_quantize", status, "minite_kernels.nvfp4.quantize", note)
    elif "Marlin" in name:
        yield Evidence("nvfp4_linear", "native", name, WEIGHT_ONLY)
    elif "Emulation" in name and next(module.parameters()).device.type != "cpu":
        yield Evidence("nvfp4_linear", "emulated", name)
        yield Evidence(
            "nvfp4_quantize",
            "emulated",
            f"vllm.model_executor.layers.quantization.utils.{_EMULATION}.ref_nvfp4_quant_dequant",
            "one Triton kernel quantizes and dequantizes: its codes are not visible",
        )
    elif "Emulation" in name:
        note = "" if _dequantizes_each_time() else "what dequantize_to_dtype returns is kept"
        yield Evidence("nvfp4_linear", "emulated", name, note)
        yield Evidence(
            "nvfp4_quantize",
            "emulated",
            f"vllm.model_executor.layers.quantization.utils.{_EMULATION}.ref_nvfp4_quant",
            "codes and block scales are what this function returned to the kernel",
        )
    else:
        yield Evidence("nvfp4_linear", "native", name)


def is_per_token(recipe: Any) -> bool:
    """Whether each token has its own activation scale (the checkpoint's static one is unused)."""
    return bool(recipe is not None and recipe.activation.amax_scope == "token")


def _status_of(recipe: Any) -> str:
    return "replaced" if recipe.name in ALIGNED_RECIPES else "modelled"


def _dequantizes_each_time() -> bool:
    return not isinstance(emulation_module().dequantize_to_dtype, DequantizedWeights)


def _experts(model: nn.Module) -> Iterator[Evidence]:
    layers = expert_layers(model)
    if not layers:
        return
    router = {qualified_name(type(layer.router)) for layer in layers}
    yield Evidence("router", "native", ", ".join(sorted(router)))
    for impl, experts in sorted(
        {
            qualified_name(type(fused_experts(layer))): fused_experts(layer) for layer in layers
        }.items()
    ):
        if impl.startswith("minite_diag."):
            yield _our_experts(impl, experts.arithmetic)
        else:
            note = WEIGHT_ONLY if "Marlin" in impl and layers[0].is_nvfp4 else ""
            yield Evidence("experts", "emulated" if "Emulation" in impl else "native", impl, note)


def _our_experts(impl: str, arithmetic: Any) -> Evidence:
    recipe = getattr(arithmetic, "recipe", None)
    if recipe is not None:
        scale = "each token its own" if is_per_token(recipe) else "one for all experts"
        note = f"recipe {recipe.name}: {recipe.engine}; activation scale: {scale}"
        return Evidence("experts", _status_of(recipe), impl, note)
    return Evidence(
        "experts",
        "replaced",
        impl,
        "vLLM emulates NVFP4 experts in Triton, which needs a GPU; this repeats its order "
        "with vLLM's quantizer, dequantizer and activation",
    )


def nvfp4_choices(*, is_cpu: bool) -> Iterator[Evidence]:
    """What would compute NVFP4 on this platform, before a model is loaded."""
    if is_cpu:
        yield Evidence(
            "nvfp4_linear",
            "emulated",
            "vllm EmulationNvFp4LinearKernel",
            "vLLM's own; its CPU table lacks the entry, which is added",
        )
        yield Evidence(
            "experts",
            "replaced",
            "minite_diag.engines.vllm_plugin.nvfp4_cpu",
            "vLLM emulates experts in a Triton kernel that needs a GPU",
        )
        return
    major = torch.cuda.get_device_capability()[0]
    if major >= 10:
        yield Evidence("nvfp4_linear", "native", "FP4 tensor cores", "the backend is read back")
    else:
        yield Evidence(
            "nvfp4_linear",
            "native",
            "Marlin W4A16",
            "activations are not quantized; nvfp4_recipe=vllm-emulation computes W4A4",
        )
