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
from minite_diag.engines.sglang_plugin.nvfp4 import Weights, is_per_token


def write(model: nn.Module, recorder: Recorder) -> None:
    """Record every static tensor of the model."""
    for name, module in linear_modules(model):
        if is_nvfp4(module):
            held = module.minite_nvfp4
            _write_nvfp4(name, held, held.weights, recorder)
        elif recorder.wants(name, "weight"):
            recorder.static(name, "weight", module.weight.data)
    for layer in expert_layers(model):
        _write_experts(layer, recorder)
    _write_others(model, recorder)


def _write_nvfp4(name: str, held: Any, weights: Weights, recorder: Recorder) -> None:
    recorder.static(name, "weight_codes", weights.codes)
    recorder.static(name, "weight_block_scale", weights.block_scale)
    recorder.static(name, weights.global_kind, weights.global_scale)
    if not is_per_token(held.recipe):
        recorder.static(name, "act_global_encode_scale", weights.input_encode)


def _write_experts(layer: ExpertLayer, recorder: Recorder) -> None:
    experts = layer.experts
    for fused in ("w13", "w2"):
        native = f"{layer.name}.{fused}"
        if is_nvfp4(experts):
            held = experts.minite_nvfp4
            _write_nvfp4(native, held, getattr(held, fused), recorder)
        else:
            recorder.static(native, "weight", getattr(experts, f"{fused}_weight").data)


def _write_others(model: nn.Module, recorder: Recorder) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            # A shard of a padded vocabulary is cut where it is put together.
            rows = module.org_vocab_size if module.tp_size == 1 else len(module.weight)
            recorder.static(name, "weight", module.weight.data[:rows])
        elif "RMSNorm" in type(module).__name__ and isinstance(module.weight, torch.Tensor):
            recorder.static(name, "weight", module.weight.data)
