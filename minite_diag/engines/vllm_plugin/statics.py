"""The weights as a loaded vLLM holds them, written to the recorder.

Knows vLLM's parameter names; no hook. Codes, block scales and high-precision weights are what the
loader wrote (from the snapshot where post-load processing repacked them); global scales are the
fused ones that the kernels multiply by. Invariant: one layer in memory at a time.
"""

from __future__ import annotations

import torch
from torch import nn

from minite_diag.capture.recorder import Recorder
from minite_diag.engines.vllm_plugin import readback
from minite_diag.engines.vllm_plugin.hooks import (
    fused_experts,
    is_nvfp4,
    is_weight_only,
    kernel_object,
)
from minite_diag.engines.vllm_plugin.layout import ExpertLayer, expert_layers, linear_modules
from minite_diag.engines.vllm_plugin.snapshot import WeightSnapshot
from minite_diag.errors import EngineError


def write(model: nn.Module, snapshot: WeightSnapshot, recorder: Recorder) -> None:
    """Record every static tensor of the model."""
    for name, module in linear_modules(model):
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            recorder.static(name, "bias", module.bias.data)  # type: ignore[arg-type, union-attr]
        if is_nvfp4(module):
            _write_nvfp4(name, module, snapshot, recorder)
        elif recorder.wants(name, "weight"):
            recorder.static(name, "weight", snapshot.loaded(name, module, "weight"))
    for layer in expert_layers(model):
        _write_experts(layer, snapshot, recorder)
    _write_others(model, snapshot, recorder)


def _write_nvfp4(
    name: str, module: nn.Module, snapshot: WeightSnapshot, recorder: Recorder
) -> None:
    codes = snapshot.loaded(name, module, "weight_packed", "weight")
    recorder.static(name, "weight_codes", codes)
    recorder.static(name, "weight_block_scale", snapshot.loaded(name, module, "weight_scale"))
    recorder.static(
        name, "weight_global_decode_scale", _weight_decode_scale(name, module, snapshot)
    )
    recipe = getattr(kernel_object(module), "recipe", None)
    if not readback.is_per_token(recipe) and not is_weight_only(module):
        recorder.static(name, "act_global_encode_scale", module.input_global_scale_inv.data)  # type: ignore[arg-type]


def _weight_decode_scale(name: str, module: nn.Module, snapshot: WeightSnapshot) -> torch.Tensor:
    """FP32 []: the fused scale, as vLLM computed it; Marlin overwrites it with one of its own."""
    if not is_weight_only(module):
        return module.weight_global_scale.data  # type: ignore[return-value, union-attr]
    loaded = snapshot.spilled(name, "weight_scale_2")
    if loaded is not None:
        return loaded.max().float()
    return 1.0 / snapshot.loaded(name, module, "weight_global_scale").max().float()


def _write_experts(layer: ExpertLayer, snapshot: WeightSnapshot, recorder: Recorder) -> None:
    # The parameters may live in a child module whose name the checkpoint doesn't know.
    for fused in ("w13", "w2"):
        native = f"{layer.name}.{fused}"
        weight = snapshot.loaded(
            layer.holder, layer.weights, f"{fused}_weight_packed", f"{fused}_weight"
        )
        if weight.dtype != torch.uint8:
            recorder.static(native, "weight", weight)
            continue
        recorder.static(native, "weight_codes", weight)
        block_scale = snapshot.loaded(layer.holder, layer.weights, f"{fused}_weight_scale")
        recorder.static(native, "weight_block_scale", block_scale)
        _write_expert_scales(layer, fused, native, snapshot, recorder)


def _write_expert_scales(
    layer: ExpertLayer, fused: str, native: str, snapshot: WeightSnapshot, recorder: Recorder
) -> None:
    """The global scales that the experts' kernel uses, one per expert [E].

    vLLM collapses the activation scales of all experts into one; it is repeated here.
    """
    scales = fused_experts(layer).quant_config
    encode = scales.a1_gscale if fused == "w13" else scales.a2_gscale
    if encode is None:
        decode = _stored_expert_scale(layer, fused, snapshot)
        recorder.static(native, "weight_global_decode_scale", decode)
        return
    decode = scales.g1_alphas if fused == "w13" else scales.g2_alphas
    recorder.static(native, "weight_global_decode_scale", decode.float())
    arithmetic = getattr(fused_experts(layer), "arithmetic", None)
    if not readback.is_per_token(getattr(arithmetic, "recipe", None)):
        recorder.static(
            native, "act_global_encode_scale", encode.float().reshape(-1).expand(len(decode))
        )


def _stored_expert_scale(layer: ExpertLayer, fused: str, snapshot: WeightSnapshot) -> torch.Tensor:
    """FP32 [E] as loaded, where the kernel (Marlin) made scales of its own; gate and up share."""
    if hasattr(layer.weights, f"{fused}_weight_global_scale"):
        # compressed-tensors: the reciprocal, which its own method leaves alone.
        stored = getattr(layer.weights, f"{fused}_weight_global_scale").data.float().reciprocal()
    else:
        found = snapshot.spilled(layer.holder, f"{fused}_weight_scale_2")
        if found is None:
            raise EngineError(f"{layer.name}: no weight scale of {fused} as loaded", "report this")
        stored = found.float()
    return stored.reshape(len(stored), -1)[:, 0].contiguous()


def _write_others(model: nn.Module, snapshot: WeightSnapshot, recorder: Recorder) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            weight = snapshot.loaded(name, module, "weight")
            recorder.static(name, "weight", weight[: module.org_vocab_size])
        elif "RMSNorm" in type(module).__name__ and isinstance(module.weight, torch.Tensor):
            recorder.static(name, "weight", module.weight.data)
