"""What a rank holds of a tensor, and how the first rank records the whole.

Knows torch.distributed and the Recorder; no engine. Every rank runs the same hooks in the same
order, so that a sharded tensor is gathered where it is seen. Invariant: what the model computes on
is never the gathered tensor; a sum of partial outputs is recorded as all-reduce of two ranks gives
it, in the tensor's dtype and in the order of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from minite_diag.capture.interventions import IntervenedRecorder
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import Layout, Part
from minite_diag.errors import EngineError, EngineUnavailable


@dataclass(frozen=True)
class Shard:
    """How shards make the whole: concatenated along `dim`, part by part, or added up."""

    how: Literal["concatenate", "add"]
    dim: int = -1
    sizes: tuple[int, ...] = ()
    """Sizes of the fused parts in one shard; empty for a tensor that is one part."""
    rows: int = 0
    """Rows that count; 0 for all of them. vLLM and SGLang pad their vocabulary."""
    unless_equal: bool = False
    """Whether ranks that hold the same bytes hold the sum already."""
    width: int = 0
    """Features of the whole, where they are known: a tensor that has them all is no shard."""

    def join(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from one shard a rank."""
        if self.unless_equal and all(_same_bytes(shards[0], shard) for shard in shards):
            return shards[0]
        if self.how == "add":
            total = shards[0]
            for shard in shards[1:]:
                total = total + shard
            return total
        sizes = self.sizes or (shards[0].shape[self.dim],)
        pieces = [torch.split(_as_bytes(shard), list(sizes), self.dim) for shard in shards]
        ordered = [rank[part] for part in range(len(sizes)) for rank in pieces]
        whole = torch.cat(ordered, self.dim).view(shards[0].dtype)
        if self.width and whole.shape[-1] != self.width:
            raise EngineError(
                f"shards of {shards[0].shape[-1]} features are no parts of {self.width}",
                "run it on one device",
            )
        return whole[: self.rows] if self.rows else whole


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Float8 can't be concatenated; its bytes can."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


Rules = dict[tuple[str, str], Shard]
"""(native name, kind) -> how it is sharded; what is not in it is the same on every rank."""


def whole_layout(layout: Layout, rules: Rules, ranks: int) -> Layout:
    """The layout of the gathered tensors: rows of column-sharded modules are those of all ranks."""
    parts = dict(layout.parts)
    for name, found in layout.parts.items():
        rule = rules.get((name, "weight"))
        if rule is not None and rule.sizes:
            parts[name] = tuple(
                Part(p.fqn, p.start * ranks, p.stop * ranks, p.expert) for p in found
            )
    return Layout(parts, layout.block_scale_layout)


def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensor of every rank, on the group's first rank; nothing on the others."""
    first, rank = dist.get_process_group_ranks(group)[0], dist.get_rank()
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    pieces = None
    if rank == first:
        pieces = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.gather(flat, pieces, dst=first, group=group)
    return [piece.view(tensor.dtype).view(tensor.shape) for piece in pieces or ()]


def gather_into(recorder: Recorder, rules: Rules, group: Any, *, engine: str, option: str) -> None:
    """Make a rank's recorder see the whole of what the ranks hold; on the first rank it writes it.

    Raises EngineUnavailable for one that also replaces tensors.
    """
    if isinstance(recorder, IntervenedRecorder):
        raise EngineUnavailable(
            f"{engine} takes interventions with one rank only",
            f"run it without the option {option}",
        )
    static, record = recorder.static, recorder.tensor

    def whole(native: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        rule = rules.get((native, kind))
        if rule is None or not recorder.wants(native, kind):
            return tensor
        if rule.how == "concatenate" and rule.width == tensor.shape[-1]:
            return tensor
        shards = gather(tensor, group)
        return rule.join(shards) if shards else tensor

    def write_static(native: str, kind: str, tensor: torch.Tensor) -> None:
        static(native, kind, whole(native, kind, tensor))

    def write(native: str, kind: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if recorder.active:
            record(native, kind, whole(native, kind, tensor), *args, **kwargs)

    recorder.static = write_static  # type: ignore[method-assign]
    recorder.tensor = write  # type: ignore[method-assign,assignment]
