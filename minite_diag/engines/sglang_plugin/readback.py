"""What really got installed in a loaded SGLang: settings and evidence, read from its objects.

Knows SGLang's attribute names; decides nothing. Invariant: every statement comes from an object that
the scheduler or the model holds, never from what was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minite_diag.engines.base import Evidence
from minite_diag.engines.sglang_plugin.hooks import is_nvfp4
from minite_diag.engines.sglang_plugin.layout import expert_layers, linear_modules
from minite_diag.engines.sglang_plugin.nvfp4 import ALIGNED_RECIPES, is_per_token


def qualified_name(value: Any) -> str:
    """Dotted path of a class, function or method."""
    value = getattr(value, "__func__", value)
    return f"{value.__module__}.{value.__qualname__}"


def op_forwards(model: nn.Module) -> dict[str, str]:
    """Class of each of SGLang's operators in the model -> the forward that its dispatch chose."""
    from sglang.kernels.fused_op import BaseFusedOp

    found: dict[str, str] = {}
    for module in model.modules():
        if isinstance(module, BaseFusedOp):
            chosen = module._forward_method or module._resolve_forward_method()
            found[type(module).__name__] = qualified_name(chosen)
    return found


def method_name(module: Any) -> str:
    """The quantization method that multiplies in a layer."""
    return qualified_name(type(module.quant_method))


def read_settings(scheduler: Any) -> dict[str, str]:
    """Everything that changes bits, as SGLang's objects state it."""
    runner = scheduler.tp_worker.model_runner
    model, arguments = runner.model, scheduler.server_args
    linears = Counter(f"{type(m).__name__}: {method_name(m)}" for _, m in linear_modules(model))
    experts = Counter(method_name(layer.experts) for layer in expert_layers(model))
    processor = model.logits_processor
    settings = {
        "quantization": str(runner.model_config.quantization),
        "linears": "; ".join(f"{what} ({n})" for what, n in sorted(linears.items())),
        "experts": "; ".join(f"{what} ({n})" for what, n in sorted(experts.items())),
        "moe_runner_backend": _moe_backend() if experts else "",
        "ops": "; ".join(v for _, v in sorted(op_forwards(model).items())),
        "attention": qualified_name(type(runner.attn_backend)),
        "sampling_backend": str(arguments.sampling_backend),
        "fast_input_logprobs": str(processor.input_logprob_processor.enable_fast_input_logprobs),
        "page_size": str(scheduler.page_size),
        "chunked_prefill_size": str(scheduler.chunked_prefill_size),
        "radix_cache": str(not scheduler.disable_radix_cache),
        "overlap_schedule": str(scheduler.enable_overlap),
        "tensor_parallel": str(arguments.tp_size),
        "context_length": str(runner.model_config.context_len),
        "max_total_tokens": str(runner.max_total_num_tokens),
        "threads": str(torch.get_num_threads()),
    }
    return {key: value for key, value in settings.items() if value}


def _moe_backend() -> str:
    from sglang.srt.layers.moe import get_moe_runner_backend

    return str(get_moe_runner_backend().value)


def read_evidence(scheduler: Any) -> Iterator[Evidence]:
    """Who computes each op. SGLang's own functions are native, minite_kernels' models modelled."""
    runner = scheduler.tp_worker.model_runner
    model = runner.model
    ops = op_forwards(model)
    linears = [module for _, module in linear_modules(model)]
    for name in sorted({method_name(m) for m in linears if not is_nvfp4(m)}):
        yield Evidence("linear", "native", name)
    recipes = [module.minite_nvfp4.recipe for module in linears if is_nvfp4(module)]
    for recipe in {recipe.name: recipe for recipe in recipes}.values():
        yield from _nvfp4_linear(recipe)
    for op, words in (("norm", "RMSNorm"), ("rope", "Rotary"), ("activation", "SiluAndMul")):
        for name, forward in sorted(ops.items()):
            if words in name:
                yield Evidence(op, "native", forward)
    yield Evidence("attention", "native", qualified_name(type(runner.attn_backend)))
    yield from _experts(model, ops)
    head = type(model.logits_processor)._compute_lm_head
    yield Evidence("lm_head", "native", qualified_name(head))
    yield from _logprobs(model)


def _logprobs(model: nn.Module) -> Iterator[Evidence]:
    from sglang.srt.layers import sampler

    processor: Any = model.logits_processor
    fast = processor.input_logprob_processor.enable_fast_input_logprobs
    decode = "log_softmax" if sampler.SGLANG_RETURN_ORIGINAL_LOGPROB else "log(softmax)"
    prompt = "logit - max - logsumexp" if fast else "log_softmax"
    yield Evidence(
        "logprobs",
        "native",
        qualified_name(sampler.Sampler),
        f"prompt tokens: {prompt}; generated tokens: {decode}",
    )


def _status_of(recipe: Any) -> str:
    return "replaced" if recipe.name in ALIGNED_RECIPES else "modelled"


def _nvfp4_linear(recipe: Any) -> Iterator[Evidence]:
    note = f"recipe {recipe.name}: {recipe.engine}; loader and scale fusion are SGLang's"
    status = _status_of(recipe)
    yield Evidence(
        "nvfp4_linear", status, "minite_diag.engines.sglang_plugin.nvfp4.run_linear", note
    )
    yield Evidence("nvfp4_quantize", status, "minite_kernels.nvfp4.quantize", note)


def _experts(model: nn.Module, ops: dict[str, str]) -> Iterator[Evidence]:
    layers = expert_layers(model)
    if not layers:
        return
    yield Evidence("router", "native", ops.get("TopK", ""))
    if not is_nvfp4(layers[0].experts):
        method = layers[0].experts.quant_method
        yield Evidence(
            "experts", "native", ops.get(type(method).__name__, qualified_name(type(method)))
        )
        return
    held = layers[0].experts.minite_nvfp4
    recipe = held.recipe
    scale = "one for all experts" if held.one_input_scale else "one an expert"
    scale = "each token its own" if is_per_token(recipe) else scale
    yield Evidence(
        "experts",
        _status_of(recipe),
        "minite_diag.engines.sglang_plugin.nvfp4.run_experts",
        f"recipe {recipe.name}: {recipe.engine}; activation scale: {scale}",
    )
