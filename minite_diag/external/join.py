"""The shards of one tensor -> the tensor, by how its module is parallel.

Knows torch and sizes; no file. Invariant: every rank that has to hold a shard holds one, shards of
what is replicated are equal byte for byte, and nothing is added up unless the manifest says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from minite_diag.errors import UsageError
from minite_diag.external.modules import Module
from minite_diag.metrics import is_bitwise_equal
from minite_diag.site import STATIC_KINDS

FEATURES_FIRST: Final = frozenset({"weight", "weight_codes", "weight_block_scale", "bias"})
"""Kinds whose dim 0 are output features; dim 1, where there is one, are input features."""
OUTPUTS: Final = frozenset({"output", "logits", "router_logits"})
INPUTS: Final = frozenset({"input", "act_codes", "act_block_scale"})


@dataclass(frozen=True)
class Rank:
    """One process of the foreign run.

    `tensor`, `expert_tensor`, `data`: its index among the ranks that share a layer, an expert, or
    nothing but the weights; `experts`: the model's experts that it holds (start, stop);
    `layer_offset`: what is added to its own layer numbers.
    """

    name: str
    files: tuple[str, ...] = ()
    tensor: int = 0
    expert_tensor: int = 0
    data: int = 0
    experts: tuple[int, int] | None = None
    layer_offset: int = 0


@dataclass(frozen=True)
class Shard:
    """One rank's tensor; `where` says file and name, for errors."""

    rank: Rank
    tensor: torch.Tensor
    where: str


class RanksDiffer(Exception):
    """Ranks hold different bytes of what should be one, and no rank has the whole."""


def spread_of(module: Module, kind: str) -> str:
    """How tensor ranks hold a kind: same, features, rows, sum."""
    rule = module.rule
    if kind.endswith("_scale") and "global" in kind:
        return "one"
    if rule.parallel == "replicated":
        return "rows" if rule.sequence_parallel and kind not in STATIC_KINDS else "same"
    if rule.parallel == "column":
        if kind in FEATURES_FIRST | OUTPUTS:
            return "features"
        return "rows" if rule.sequence_parallel and kind in INPUTS else "same"
    if rule.parallel == "row":
        return _row_parallel(module, kind)
    if rule.parallel == "heads":
        return "same" if kind in STATIC_KINDS else "features"
    if kind in STATIC_KINDS:  # vocab
        return "features"
    return "rows" if rule.sequence_parallel else "sum" if rule.partial else "same"


def _row_parallel(module: Module, kind: str) -> str:
    if kind == "bias":
        return "same"
    if kind in FEATURES_FIRST | INPUTS:
        return "features"
    if module.rule.partial:
        return "sum"
    return "rows" if module.rule.sequence_parallel else "same"


def join(module: Module, kind: str, shards: Sequence[Shard], tensor_ranks: int) -> torch.Tensor:
    """One data rank's shards -> its tensor; raises UsageError naming what is missing or differs.

    Raises RanksDiffer for a global scale, or a sum, that each rank has for itself.
    """
    by_rank = _by_tensor_rank(module, kind, shards)
    how = spread_of(module, kind)
    missing = sorted(set(range(tensor_ranks)) - by_rank.keys())
    if missing and how != "same" and how != "one":
        raise UsageError(
            f"{module.native}:{kind} lacks the shard of tensor rank {missing[0]}: there is only "
            f"{', '.join(shard.where for shard in shards)}",
            "add that rank's file, or correct the ranks in manifest.json",
        )
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    if len(ordered) == 1:
        return ordered[0].tensor
    if how in ("same", "one"):
        apart = "quantized its own part" if how == "one" else None
        if module.rule.may_be_partial and kind == "output":
            apart = "has its own sum, and they are added later"
        return _same(module, kind, ordered, apart)
    if how == "sum":
        total = torch.stack([_like(shard, ordered[0]).float() for shard in ordered]).sum(0)
        return total.to(ordered[0].tensor.dtype)
    dim = 0 if how == "rows" else _feature_dim(module, kind, ordered[0].tensor)
    return concatenate(ordered, dim, f"{module.native}:{kind}")


def _by_tensor_rank(module: Module, kind: str, shards: Sequence[Shard]) -> dict[int, Shard]:
    found: dict[int, Shard] = {}
    for shard in shards:
        rank = shard.rank.expert_tensor if module.is_expert else shard.rank.tensor
        if rank in found:
            _same(module, kind, [found[rank], shard])
        else:
            found[rank] = shard
    return found


def _same(
    module: Module, kind: str, shards: Sequence[Shard], apart: str | None = None
) -> torch.Tensor:
    """The tensor that all shards are; `apart`: what each rank did where they may differ."""
    first, *rest = shards
    for other in rest:
        if not is_bitwise_equal(first.tensor, other.tensor):
            if apart is not None:
                raise RanksDiffer(f"{first.rank.name} and {other.rank.name} differ: each {apart}")
            raise UsageError(
                f"{module.native}:{kind} differs between {first.where} and {other.where}",
                "it should be the same on both: correct `parallel`, or the dump",
            )
    return first.tensor


def _feature_dim(module: Module, kind: str, tensor: torch.Tensor) -> int:
    if module.rule.parallel == "row" and kind in FEATURES_FIRST:
        return 1
    return 0 if kind in FEATURES_FIRST else tensor.dim() - 1


def _like(shard: Shard, first: Shard) -> torch.Tensor:
    if shard.tensor.shape != first.tensor.shape:
        raise UsageError(
            f"{shard.where} has shape {tuple(shard.tensor.shape)}, {first.where} "
            f"{tuple(first.tensor.shape)}: they can't be added",
            "correct the dump",
        )
    return shard.tensor


def concatenate(shards: Sequence[Shard], dim: int, what: str) -> torch.Tensor:
    """Along `dim`; raises UsageError naming the shard that doesn't fit."""
    first = shards[0]
    for shard in shards:
        fits = shard.tensor.dim() == first.tensor.dim() > dim and all(
            a == b
            for i, (a, b) in enumerate(zip(shard.tensor.shape, first.tensor.shape, strict=True))
            if i != dim
        )
        if not fits or shard.tensor.dtype != first.tensor.dtype:
            raise UsageError(
                f"{what}: {shard.where} is {_shape(shard)}, {first.where} is {_shape(first)}: they "
                f"can't be joined along dim {dim}",
                "correct `parallel` of that module, or the shard",
            )
    return torch.cat([shard.tensor for shard in shards], dim)


def _shape(shard: Shard) -> str:
    dtype = str(shard.tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(shard.tensor.shape)}"
