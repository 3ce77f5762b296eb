"""Checkpoints: resolve, read, choose linears, calibrate, export to NVFP4.

Knows Hugging Face folders and the two NVFP4 layouts that samplers load; no engine, no run
directory. Importing it loads torch, but neither transformers nor a model.

    checkpoint = resolve("demo-moe", cache_dir)
    linears = quantized_names(checkpoint, "default")
    amax = calibrate(checkpoint, sequences, linears)
    nvfp4 = export(checkpoint, "te", "modelopt", out_dir, "default", amax)
"""

from __future__ import annotations

import os
from pathlib import Path

from minite_diag.checkpoints.calibrate import Calibration, calibrate
from minite_diag.checkpoints.demo import DEMO, DEMO_MOE, open_demo, open_demo_moe
from minite_diag.checkpoints.dequantize import dequantize_checkpoint
from minite_diag.checkpoints.export import export
from minite_diag.checkpoints.model import Checkpoint, open_checkpoint
from minite_diag.checkpoints.names import fused_group, is_expert, is_router
from minite_diag.checkpoints.patterns import quantized_names
from minite_diag.checkpoints.reader import TensorInfo, iter_tensors, list_tensors, read_tensor
from minite_diag.checkpoints.stored import StoredWeight, read_quantized

__all__ = [
    "Calibration",
    "Checkpoint",
    "StoredWeight",
    "TensorInfo",
    "calibrate",
    "dequantize_checkpoint",
    "export",
    "fused_group",
    "is_expert",
    "is_router",
    "iter_tensors",
    "list_tensors",
    "open_checkpoint",
    "quantized_names",
    "read_quantized",
    "read_tensor",
    "resolve",
]


def resolve(model: str | os.PathLike[str], cache_dir: Path) -> Checkpoint:
    """The checkpoint that `--model` names: `demo`, `demo-moe`, or a folder.

    `cache_dir` is where `demo` is made on first use. Raises CheckpointError, naming file and next
    step, for anything that can't be read.
    """
    if model == DEMO:
        return open_demo(cache_dir)
    if model == DEMO_MOE:
        return open_demo_moe()
    return open_checkpoint(Path(model))
