"""From an NVFP4 checkpoint back to high precision, for engines that can't load codes.

Knows the two layouts and decodes with `minite_kernels`; streams like the exporter. Invariant: the
result holds what the codes stand for, evaluated in FP32 in the direction that the file stores and
rounded once to the output dtype; what quantization lost stays lost, and the notes say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from minite_diag.checkpoints.model import CONFIG_FILE, EXPORT_FILE, Checkpoint, open_checkpoint
from minite_diag.checkpoints.stored import LAYOUTS, StoredWeight, layout_of, read_quantized
from minite_diag.checkpoints.writer import (
    SHARD_BYTES,
    OutputTensor,
    ShardWriter,
    atomic_folder,
    copy_tokenizer,
)
from minite_kernels.nvfp4.format import BLOCK_SIZE, decode_e2m1
from minite_kernels.nvfp4.layout import unpack_codes

_DTYPES: Final = {"bf16": ("BF16", torch.bfloat16), "fp32": ("F32", torch.float32)}


def decode(stored: StoredWeight) -> Tensor:
    """The values [N, K] in FP32: code * (block scale * global decode scale), as samplers decode."""
    scale_NB = stored.block_scale.view(torch.float8_e4m3fn).float()
    if stored.direction == "decode":
        factor_NB = scale_NB * stored.global_scale
    else:
        factor_NB = torch.div(scale_NB, stored.global_scale)
    values = decode_e2m1(unpack_codes(stored.codes))
    blocks = values.view(*scale_NB.shape, BLOCK_SIZE)
    return (blocks * factor_NB[..., None]).flatten(1)


def dequantize_checkpoint(
    checkpoint: Checkpoint,
    out_dir: Path,
    dtype: Literal["bf16", "fp32"] = "bf16",
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Checkpoint:
    """Write an NVFP4 checkpoint's decoded weights as an ordinary one, and open it.

    Tensors that were not quantized keep their bytes, unless `dtype` is FP32. Raises
    CheckpointError if the checkpoint is not NVFP4 or `out_dir` exists.
    """
    suffix = LAYOUTS[layout_of(checkpoint)]
    stored_suffixes = {
        suffix.codes,
        suffix.block_scale,
        suffix.global_scale,
        suffix.input_global_scale,
    }
    quantized = checkpoint.quantized_linear_names()
    replaced = {fqn + part for fqn in quantized for part in stored_suffixes}
    kept = [name for name in checkpoint.tensors if name not in replaced]
    name, torch_dtype = _DTYPES[dtype]
    shapes = {fqn: checkpoint.shape(fqn) for fqn in quantized}
    outputs = {f"{fqn}.weight": OutputTensor(f"{fqn}.weight", name, shapes[fqn]) for fqn in shapes}
    for other in kept:
        outputs[other] = OutputTensor(other, name, checkpoint.tensors[other].shape)
    with atomic_folder(out_dir) as temporary:
        ordered = [outputs[key] for key in sorted(outputs)]
        with ShardWriter(temporary, ordered, shard_bytes) as writer:
            for fqn in quantized:
                value = decode(read_quantized(checkpoint, fqn))
                writer.write(f"{fqn}.weight", value.to(torch_dtype))
            for other in kept:
                writer.write(other, checkpoint.read(other).to(torch_dtype))
        _write_files(checkpoint, temporary, torch_dtype)
    return open_checkpoint(out_dir)


def _write_files(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    notes = [*checkpoint.notes, f"weights decoded from NVFP4 ({layout_of(checkpoint)} layout)"]
    source = {
        "name": checkpoint.name,
        "fingerprint": checkpoint.fingerprint,
        "format": checkpoint.format,
        "notes": notes,
    }
    for name, content in ((CONFIG_FILE, config), (EXPORT_FILE, {"schema": 1, "source": source})):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    copy_tokenizer(checkpoint.path, folder)
