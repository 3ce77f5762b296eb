"""The part of a fused native tensor that belongs to one checkpoint module.

Knows torch and layouts. Invariant: parts of a fused output, weight, code or block-scale tensor
are slices along the output features, or the same slice of every period of them (query, key and
value of each query group in turn); inputs and activation scales are shared by all parts.
"""

from __future__ import annotations

from typing import Final

import torch

from minite_diag.engines.base import Part
from minite_diag.errors import TraceError

SPLIT_FIRST: Final = frozenset({"weight", "weight_codes", "weight_block_scale", "bias"})
"""Kinds whose dim 0 (after the expert dim) are output features."""
SPLIT_LAST: Final = frozenset({"output"})
"""Kinds whose last dim are output features."""


def take_part(
    tensor: torch.Tensor, kind: str, part: Part, siblings: tuple[Part, ...]
) -> torch.Tensor:
    """Slice `tensor` to `part`; `siblings` are all parts of its native module.

    Raises TraceError where the layout says more rows than the tensor has.
    """
    if part.expert is not None and kind not in ("input", "output"):
        if tensor.dim() == 0:
            return tensor
        if part.expert >= tensor.shape[0]:
            raise TraceError(
                f"{part.fqn}: expert {part.expert} of a tensor of shape {tuple(tensor.shape)}",
                "the engine's layout is wrong: report it",
            )
        tensor = tensor[part.expert]
    if kind.endswith("_decode_scale"):
        return _part_of_scale(tensor, part, siblings)
    if part.stop == 0:
        return tensor
    if kind in SPLIT_FIRST:
        return _narrow(tensor, 0, part)
    if kind in SPLIT_LAST:
        return _narrow(tensor, tensor.dim() - 1, part)
    return tensor


def is_shared(kind: str, part: Part) -> bool:
    """Whether all parts of a native module have the same tensor of this kind: its inputs."""
    if part.expert is not None and kind not in ("input", "output"):
        return False
    if kind.endswith("_decode_scale"):
        return False
    return part.stop == 0 or kind not in SPLIT_FIRST | SPLIT_LAST


def _narrow(tensor: torch.Tensor, dim: int, part: Part) -> torch.Tensor:
    period = part.period or tensor.shape[dim]
    if part.stop > period or tensor.shape[dim] % max(period, 1):
        every = f" of every {part.period}" if part.period else ""
        raise TraceError(
            f"{part.fqn}: rows {part.start}:{part.stop}{every} of a tensor of shape "
            f"{tuple(tensor.shape)}",
            "the engine's layout is wrong: report it",
        )
    if not part.period:
        return tensor.narrow(dim, part.start, part.stop - part.start)
    periods = tensor.unflatten(dim, (tensor.shape[dim] // period, period))
    return periods.narrow(dim + 1, part.start, part.stop - part.start).flatten(dim, dim + 1)


def _part_of_scale(tensor: torch.Tensor, part: Part, siblings: tuple[Part, ...]) -> torch.Tensor:
    """A fused module holds one scale, or one for each of its parts."""
    same = [p for p in siblings if p.expert == part.expert]
    if tensor.dim() == 1 and tensor.shape[0] == len(same) > 1:
        return tensor[same.index(part)]
    return tensor
