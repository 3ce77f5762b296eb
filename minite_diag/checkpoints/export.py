"""Export: the NVFP4 checkpoint that a sampler loads, from a BF16/FP16/FP32 master.

This is the refit step of reinforcement learning: the learner's weights become the sampler's.
Knows both on-disk layouts and streams; the arithmetic is `minite_kernels.nvfp4.quantize` under the
given recipe. Invariants: one fused group is in memory at a time; linears that a sampler fuses
share one global scale; equal inputs give equal bytes; the folder appears complete or not at all.

Every output's place is known before any weight is read (NVFP4 sizes depend on shapes alone), so
shards are written by seeking, in safetensors' own order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import minite_diag
from minite_diag.checkpoints import names
from minite_diag.checkpoints.calibrate import Calibration
from minite_diag.checkpoints.model import (
    BLOCK_SIZE,
    CONFIG_FILE,
    EXPORT_FILE,
    MODELOPT_CONFIG_FILE,
    Checkpoint,
    open_checkpoint,
)
from minite_diag.checkpoints.patterns import quantized_names
from minite_diag.checkpoints.stored import LAYOUTS, Layout
from minite_diag.checkpoints.writer import (
    SHARD_BYTES,
    OutputTensor,
    ShardWriter,
    atomic_folder,
    copy_tokenizer,
)
from minite_diag.errors import CheckpointError, UsageError
from minite_kernels.nvfp4.quantize import amax_of, global_scale
from minite_kernels.nvfp4.quantize import quantize as quantize_matrix
from minite_kernels.nvfp4.recipe import Recipe, get_recipe

Activations = Literal["static", "none"]


def export(
    checkpoint: Checkpoint,
    recipe: str | Recipe,
    layout: Layout,
    out_dir: Path,
    quantize: str = "default",
    calibration: Mapping[str, float] | None = None,
    *,
    activations: Activations = "static",
    shard_bytes: int = SHARD_BYTES,
) -> Checkpoint:
    """Write `checkpoint` as NVFP4 under `recipe` in `layout`, and open the result.

    Weights are quantized with the recipe's weight arithmetic (16x16 tiles are replicated to 1x16
    rows, the only layout that samplers load); `activations="static"` also writes each linear's
    input scale from `calibration` (input amax by FQN), which is then required; `"none"` writes a
    weight-only checkpoint. Raises CheckpointError if `out_dir` exists, the source is quantized
    already, a weight is not finite, or a calibration value is missing; UsageError for the pattern.
    """
    recipe = _recipe(recipe)
    if layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}", f"one of: {', '.join(LAYOUTS)}")
    if checkpoint.is_quantized:
        raise CheckpointError(
            f"{checkpoint.name} is {checkpoint.format} already", "export its BF16 master instead"
        )
    selected = quantized_names(checkpoint, quantize)
    if not selected:
        raise UsageError("the pattern 'none' leaves nothing to export", "use the model as it is")
    job = _Export(checkpoint, recipe, layout, selected, activations, calibration)
    with atomic_folder(out_dir) as temporary:
        job.write_weights(temporary, shard_bytes)
        job.write_files(temporary, job.record(quantize))
    return open_checkpoint(out_dir)


def _recipe(recipe: str | Recipe) -> Recipe:
    try:
        return get_recipe(recipe)
    except ValueError as error:
        raise UsageError(str(error), "pick one of them with --recipe") from error


class _Export:
    """One export: what goes where, and the streaming of one fused group after another."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        layout: Layout,
        selected: Sequence[str],
        activations: Activations,
        calibration: Mapping[str, float] | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.recipe = recipe
        self.layout: Layout = layout
        self.selected = list(selected)
        self.activations = activations
        self.groups: dict[str, list[str]] = {}
        for fqn in selected:
            self.groups.setdefault(names.fused_group(fqn), []).append(fqn)
        self.fallbacks = dict(calibration.fallbacks) if isinstance(calibration, Calibration) else {}
        self.input_amax = self._input_amax(calibration)

    def _input_amax(self, calibration: Mapping[str, float] | None) -> dict[str, float]:
        if self.activations == "none":
            return {}
        if calibration is None:
            raise CheckpointError(
                "static activation scales need a calibration",
                'calibrate on the probes first, or export with activations="none"',
            )
        missing = [fqn for fqn in self.selected if fqn not in calibration]
        if missing:
            raise CheckpointError(
                f"the calibration lacks {missing[0]} and {len(missing) - 1} more",
                "calibrate with the same --quantize pattern",
            )
        shared = {
            group: max(calibration[fqn] for fqn in members)
            for group, members in self.groups.items()
        }
        return {fqn: shared[names.fused_group(fqn)] for fqn in self.selected}

    def write_weights(self, folder: Path, shard_bytes: int) -> None:
        """Write all shards, holding one fused group (or one untouched tensor) at a time."""
        with ShardWriter(folder, self._outputs(), shard_bytes) as writer:
            for members in self.groups.values():
                for name, value in self._quantize_group(members):
                    writer.write(name, value)
            replaced = {f"{fqn}.weight" for fqn in self.selected}
            for name in self.checkpoint.tensors:
                if name not in replaced:
                    writer.write(name, self.checkpoint.read(name))

    def _outputs(self) -> Iterable[OutputTensor]:
        suffix = LAYOUTS[self.layout]
        replaced = {f"{fqn}.weight": fqn for fqn in self.selected}
        for name, info in self.checkpoint.tensors.items():
            fqn = replaced.get(name)
            if fqn is None:
                yield OutputTensor(name, info.dtype, info.shape)
                continue
            n, k = info.shape
            yield OutputTensor(fqn + suffix.codes, "U8", (n, k // 2))
            yield OutputTensor(fqn + suffix.block_scale, "F8_E4M3", (n, k // BLOCK_SIZE))
            yield OutputTensor(fqn + suffix.global_scale, "F32", suffix.scalar_shape)
            if self.activations == "static":
                yield OutputTensor(fqn + suffix.input_global_scale, "F32", suffix.scalar_shape)

    def _quantize_group(self, members: Sequence[str]) -> Iterable[tuple[str, Tensor]]:
        suffix = LAYOUTS[self.layout]
        weights = {fqn: self.checkpoint.read_weight(fqn) for fqn in members}
        for fqn, w_NK in weights.items():
            # Not left to the amax: several recipes ignore NaN there, as their engines do.
            if not w_NK.isfinite().all():
                raise CheckpointError(
                    f"{fqn} of {self.checkpoint.name} holds NaN or infinity",
                    "the master checkpoint is broken: nothing was written",
                )
        amax = torch.stack(
            [amax_of(w_NK, self.recipe, role="weight") for w_NK in weights.values()]
        ).max()
        for fqn, w_NK in weights.items():
            q = quantize_matrix(w_NK, self.recipe, role="weight", amax=amax)
            weight_scale = self._directed(q.global_encode_scale, q.global_decode_scale, fqn)
            yield fqn + suffix.codes, q.codes
            yield fqn + suffix.block_scale, q.block_scale
            yield fqn + suffix.global_scale, weight_scale
            if self.activations == "static":
                yield fqn + suffix.input_global_scale, self._input_scale(fqn)

    def _input_scale(self, fqn: str) -> Tensor:
        amax = torch.tensor(self.input_amax[fqn], dtype=torch.float32)
        # Only the dtype of this row matters: some recipes round statistics to it.
        row = torch.zeros(1, BLOCK_SIZE, dtype=torch.bfloat16)
        scale = global_scale(row, self.recipe, role="activation", amax=amax)
        return self._directed(scale.encode, scale.decode, fqn)

    def _directed(self, encode: Tensor, decode: Tensor, fqn: str) -> Tensor:
        suffix = LAYOUTS[self.layout]
        value = decode if suffix.direction == "decode" else encode
        if not (value.isfinite() and value > 0):
            raise CheckpointError(
                f"recipe {self.recipe.name} gives {fqn} the global scale {value.item()}",
                "leave the linear out with --quantize, or pick another recipe",
            )
        return value.reshape(suffix.scalar_shape)

    def record(self, pattern: str) -> dict[str, Any]:
        """What was done, for `minite_export.json`."""
        return {
            "schema": 1,
            "minite_diag": minite_diag.__version__,
            "source": {
                "name": self.checkpoint.name,
                "fingerprint": self.checkpoint.fingerprint,
                "format": self.checkpoint.format,
                "notes": list(self.checkpoint.notes),
            },
            "recipe": self.recipe.name,
            "layout": self.layout,
            "quantize": pattern,
            "quantized": self.selected,
            "activations": self.activations,
            "input_amax": self.input_amax,
            "input_amax_fallbacks": self.fallbacks,
        }

    def write_files(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Write config, quantization config and export record; copy tokenizer files."""
        selected = set(self.selected)
        kept = [fqn for fqn in self.checkpoint.linear_names() if fqn not in selected]
        config = dict(self.checkpoint.config)
        files: dict[str, Mapping[str, Any]] = {EXPORT_FILE: record}
        if self.layout == "modelopt":
            config["quantization_config"] = modelopt_config(kept, self.activations)
            files[MODELOPT_CONFIG_FILE] = modelopt_legacy_config(kept)
        else:
            config["quantization_config"] = compressed_tensors_config(kept, self.activations)
        files[CONFIG_FILE] = config
        for name, content in files.items():
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
        copy_tokenizer(self.checkpoint.path, folder)


def _with_fused_names(kept: Sequence[str]) -> list[str]:
    """The kept linears, fused names too: vLLM unfuses a name before it looks, SGLang does not."""
    fused = {names.fused_group(fqn) for fqn in kept if not names.is_expert(fqn)}
    plain = {fqn for fqn in kept if not names.is_expert(fqn)}
    return sorted(plain | fused, key=names.natural_key)


def _kept_expert_modules(kept: Sequence[str]) -> list[str]:
    modules = {module for fqn in kept if (module := names.experts_module(fqn))}
    return sorted(modules, key=names.natural_key)


def _modelopt_excluded(kept: Sequence[str]) -> list[str]:
    return _with_fused_names(kept) + [f"{module}*" for module in _kept_expert_modules(kept)]


def modelopt_config(kept: Sequence[str], activations: Activations) -> dict[str, Any]:
    """`quantization_config` of config.json in ModelOpt's layout; `kept` stay in high precision."""
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    group = {
        "input_activations": arguments if activations == "static" else None,
        "weights": arguments,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": BLOCK_SIZE,
        "config_groups": {"group_0": group},
        "ignore": _modelopt_excluded(kept),
        "producer": {"name": "minite-diag", "version": minite_diag.__version__},
    }


def modelopt_legacy_config(kept: Sequence[str]) -> dict[str, Any]:
    """`hf_quant_config.json`, which older loaders read."""
    return {
        "producer": {"name": "minite-diag", "version": minite_diag.__version__},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": _modelopt_excluded(kept),
        },
    }


def compressed_tensors_config(kept: Sequence[str], activations: Activations) -> dict[str, Any]:
    """`quantization_config` in compressed-tensors' layout; `kept` stay in high precision."""
    arguments = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK_SIZE,
        "strategy": "tensor_group",
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": arguments,
        "input_activations": {**arguments, "dynamic": "local"} if activations == "static" else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    experts = [f"re:{module.replace('.', '[.]')}[.].*" for module in _kept_expert_modules(kept)]
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [fqn for fqn in kept if not names.is_expert(fqn)] + experts,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": "0.17.0",
    }
