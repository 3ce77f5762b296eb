"""NVFP4 weights as a checkpoint file holds them: bytes, and which way its global scales point.

Knows the two layouts' tensor names; computes nothing. Invariant: every field is the file's own
bytes under a new view, never a converted value.

Legend: N output features, K contraction, B = K/16 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from minite_diag.checkpoints.model import Checkpoint
from minite_diag.errors import CheckpointError

Layout = Literal["modelopt", "compressed-tensors"]
Direction = Literal["decode", "encode"]


@dataclass(frozen=True)
class LayoutNames:
    """Suffixes of one layout's tensors, and the direction of its global scales."""

    codes: str
    block_scale: str
    global_scale: str
    input_global_scale: str
    direction: Direction
    scalar_shape: tuple[int, ...]


LAYOUTS: Final[dict[Layout, LayoutNames]] = {
    "modelopt": LayoutNames(
        ".weight", ".weight_scale", ".weight_scale_2", ".input_scale", "decode", ()
    ),
    "compressed-tensors": LayoutNames(
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        ".input_global_scale",
        "encode",
        (1,),
    ),
}


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """One quantized linear: `codes` uint8 [N, K/2], `block_scale` uint8 (E4M3 bytes) [N, B].

    `global_scale` and `input_global_scale` (None for weight-only) are FP32 []; `direction` says
    whether both multiply to decode (amax/2688) or to encode (2688/amax).
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor
    input_global_scale: Tensor | None
    direction: Direction


def layout_of(checkpoint: Checkpoint) -> Layout:
    """The layout of an NVFP4 checkpoint; raises CheckpointError for any other."""
    match checkpoint.format:
        case "nvfp4-modelopt":
            return "modelopt"
        case "nvfp4-compressed-tensors":
            return "compressed-tensors"
    raise CheckpointError(
        f"{checkpoint.name} ({checkpoint.format}) holds no NVFP4 codes",
        "export it first: minite-diag export",
    )


def read_quantized(checkpoint: Checkpoint, fqn: str) -> StoredWeight:
    """Read one quantized linear, bytes as they are in the file.

    Raises CheckpointError if the checkpoint or this linear is not NVFP4.
    """
    layout = LAYOUTS[layout_of(checkpoint)]
    if not checkpoint.is_linear_quantized(fqn):
        raise CheckpointError(
            f"{fqn} of {checkpoint.name} is not quantized", "read it with read_weight"
        )
    has_input = fqn + layout.input_global_scale in checkpoint.tensors
    return StoredWeight(
        codes=checkpoint.read(fqn + layout.codes),
        block_scale=checkpoint.read(fqn + layout.block_scale).view(torch.uint8),
        global_scale=checkpoint.read(fqn + layout.global_scale).reshape(()),
        input_global_scale=checkpoint.read(fqn + layout.input_global_scale).reshape(())
        if has_input
        else None,
        direction=layout.direction,
    )


def read_input_scale(checkpoint: Checkpoint, fqn: str) -> tuple[Tensor, Direction]:
    """The static activation scale of one quantized linear, FP32 [], and its direction.

    Raises CheckpointError if the linear is not NVFP4, or the checkpoint is weight-only.
    """
    layout = LAYOUTS[layout_of(checkpoint)]
    name = fqn + layout.input_global_scale
    if name not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.path} has no {name}: it holds no static activation scale for {fqn}",
            "export it with calibrated scales: minite-diag export",
        )
    return checkpoint.read(name).reshape(()), layout.direction
