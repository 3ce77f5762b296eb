"""The static activation scales of an NVFP4 checkpoint, as the engines that load it use them.

Knows both layouts' direction and what engines fuse; no recipe. Invariant: every scale is a number
that the file holds, never a recomputed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from minite_diag.checkpoints import names
from minite_diag.checkpoints.model import Checkpoint
from minite_diag.checkpoints.stored import Direction, read_input_scale
from minite_diag.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class InputScale:
    """A static activation scale, FP32 [], and which way it multiplies."""

    value: Tensor
    direction: Direction

    @property
    def amax_order(self) -> float:
        """Grows with the amax that the scale stands for."""
        value = float(self.value)
        return value if self.direction == "decode" else -value


def read_input_scales(checkpoint: Checkpoint, linear_names: Iterable[str]) -> dict[str, InputScale]:
    """FQN -> the scale that quantizes the linear's input in an engine that loads `checkpoint`.

    The experts of a layer get the largest amax of all of them, which is what vLLM (0.23, 0.32) and
    SGLang's CUTLASS backend (0.5.23) make of their scales. Raises CheckpointError for a linear
    without input scale (a weight-only checkpoint), or a fused group (q/k/v, gate/up) with several.
    """
    found: dict[str, InputScale] = {}
    for fqn in linear_names:
        value, direction = read_input_scale(checkpoint, fqn)
        found[fqn] = InputScale(value, direction)
    _check_fused(checkpoint, found)
    return _with_shared_experts(found)


def _check_fused(checkpoint: Checkpoint, scales: dict[str, InputScale]) -> None:
    groups: dict[str, float] = {}
    for fqn, scale in scales.items():
        value = float(scale.value)
        if groups.setdefault(names.fused_group(fqn), value) != value:
            raise CheckpointError(
                f"{checkpoint.name}: {fqn} and its fused group have different input scales",
                "engines fuse them differently: export with one scale for q/k/v and gate/up",
            )


def _with_shared_experts(scales: dict[str, InputScale]) -> dict[str, InputScale]:
    largest: dict[tuple[str, str], InputScale] = {}
    keys = {
        fqn: (module, names.projection(names.fused_group(fqn)))
        for fqn in scales
        if (module := names.experts_module(fqn)) is not None
    }
    for fqn, key in keys.items():
        known = largest.get(key, scales[fqn])
        largest[key] = max(known, scales[fqn], key=lambda scale: scale.amax_order)
    return {fqn: largest[keys[fqn]] if fqn in keys else scale for fqn, scale in scales.items()}
