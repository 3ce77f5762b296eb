"""The weights as a loaded SGLang holds them, written to the recorder.

Knows SGLang's parameter names; no hook. Codes, block scales and high-precision weights are what the
loader wrote; global scales are the fused ones that the kernels multiply by. Invariant: one layer in
memory at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minite_diag.capture.recorder import Recorder
from minite_diag.engines.sglang_plugin.hooks import is_nvfp4
from minite_diag.engines.sglang_plugin.layout import ExpertLayer, expert_layers, linear_modules
from minite_diag.engines.sglang_plugin.nvfp4 import Nvfp4Experts, is_per_token


def write(model: nn.Module, recorder: Recorder) -> None:
    """Record every static tensor of the model."""
    for name, module in linear_modules(model):
        if is_nvfp4(module):
            _write_nvfp4(name, module, recorder)
        elif recorder.wants(name, "weight"):
            recorder.static(name, "weight", module.weight.data)
    for layer in expert_layers(model):
        _write_experts(layer, recorder)
    _write_others(model, recorder)


def _write_nvfp4(name: str, module: Any, recorder: Recorder) -> None:
    recorder.static(name, "weight_codes", module.weight.data)
    recorder.static(name, "weight_block_scale", module.weight_scale.data)
    recorder.static(name, "weight_global_decode_scale", module.weight_scale_2.data.max())
    if not is_per_token(module.minite_recipe):
        recorder.static(name, "act_global_encode_scale", module.input_scale_inv.data)


def _write_experts(layer: ExpertLayer, recorder: Recorder) -> None:
    experts = layer.experts
    if not is_nvfp4(experts):
        for fused in ("w13", "w2"):
            recorder.static(f"{layer.name}.{fused}", "weight", getattr(experts, f"{fused}_weight"))
        return
    held: Nvfp4Experts = experts.minite_experts
    for fused, encode in (("w13", held.input_encode), ("w2", held.down_encode)):
        native = f"{layer.name}.{fused}"
        recorder.static(native, "weight_codes", getattr(experts, f"{fused}_weight").data)
        recorder.static(native, "weight_block_scale", held.block_scale[fused])
        # [E, 2] for w13: gate and up keep a scale each.
        scale = getattr(experts, f"{fused}_weight_scale_2").data.float()
        if fused == "w13" and scale.dim() == 2 and layer.up_first:
            scale = scale.flip(-1)
        recorder.static(native, "weight_global_decode_scale", scale)
        if not is_per_token(experts.minite_recipe):
            recorder.static(native, "act_global_encode_scale", encode.expand(layer.num_experts))


def _write_others(model: nn.Module, recorder: Recorder) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            recorder.static(name, "weight", module.weight.data[: module.org_vocab_size])
        elif "RMSNorm" in type(module).__name__ and isinstance(module.weight, torch.Tensor):
            recorder.static(name, "weight", module.weight.data)
