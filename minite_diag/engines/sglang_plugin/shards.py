"""What a rank of a tensor-parallel SGLang holds of a tensor, and how rank 0 records the whole.

Knows SGLang's module classes, torch.distributed and the Recorder. Every rank runs the same hooks in
the same order, so that a sharded tensor is gathered where it is seen. Invariant: what the model
computes on is never the gathered tensor; a sum of partial outputs is recorded as all-reduce of two
ranks gives it, in the tensor's dtype and in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from minite_diag.capture.interventions import IntervenedRecorder
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import Layout, Part
from minite_diag.engines.sglang_plugin.layout import (
    expert_layers,
    linear_modules,
    partition_sizes,
)
from minite_diag.errors import EngineError, EngineUnavailable
from minite_diag.plan import CaptureSpec
from minite_diag.trace.store import TraceWriter

WEIGHT_KINDS: Final = ("weight", "weight_codes", "weight_block_scale")
INPUT_KINDS: Final = ("input", "act_codes", "act_block_scale")


@dataclass(frozen=True)
class Shard:
    """How shards make the whole: concatenated along `dim`, part by part, or added up."""

    how: Literal["concatenate", "add"]
    dim: int = -1
    sizes: tuple[int, ...] = ()
    """Sizes of the fused parts in one shard; empty for a tensor that is one part."""
    rows: int = 0
    """Rows that count; 0 for all of them. SGLang pads its vocabulary."""

    def join(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from one shard a rank."""
        if self.how == "add":
            total = shards[0]
            for shard in shards[1:]:
                total = total + shard
            return total
        sizes = self.sizes or (shards[0].shape[self.dim],)
        pieces = [torch.split(_as_bytes(shard), list(sizes), self.dim) for shard in shards]
        ordered = [rank[part] for part in range(len(sizes)) for rank in pieces]
        whole = torch.cat(ordered, self.dim).view(shards[0].dtype)
        return whole[: self.rows] if self.rows else whole


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Float8 can't be concatenated; its bytes can."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


Rules = dict[tuple[str, str], Shard]


def shard_rules(model: nn.Module) -> Rules:
    """(native name, kind) -> how it is sharded; raises EngineUnavailable for replicated heads."""
    rules: Rules = {}
    _linear_rules(model, rules)
    _attention_rules(model, rules)
    _expert_rules(model, rules)
    return rules


def _linear_rules(model: nn.Module, rules: Rules) -> None:
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in linear_modules(model):
        if isinstance(module, ColumnParallelLinear):
            if getattr(module, "num_kv_head_replicas", 1) > 1:
                raise EngineUnavailable(
                    f"{name}: more ranks than key heads, which are replicated",
                    "use fewer ranks (tp_size)",
                )
            sizes = tuple(partition_sizes(module))
            rules[name, "output"] = Shard("concatenate", -1, sizes)
            rules |= {(name, kind): Shard("concatenate", 0, sizes) for kind in WEIGHT_KINDS}
        elif isinstance(module, RowParallelLinear):
            rules |= {(name, kind): Shard("concatenate") for kind in INPUT_KINDS + WEIGHT_KINDS}
            if not module.reduce_results:
                rules[name, "output"] = Shard("add")
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            rules[name, "weight"] = Shard("concatenate", 0, rows=int(module.org_vocab_size))


def _attention_rules(model: nn.Module, rules: Rules) -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, RadixAttention):
            for native in (f"{parent}.q_rope", f"{parent}.k_rope", name):
                rules[native, "output"] = Shard("concatenate")
        elif name.endswith((".q_norm", ".k_norm")):
            rules |= {(name, kind): Shard("concatenate") for kind in ("input", "output")}
        elif isinstance(module, SiluAndMul):
            rules[name, "output"] = Shard("concatenate")


def _expert_rules(model: nn.Module, rules: Rules) -> None:
    for layer in expert_layers(model):
        half = int(layer.experts.w13_weight.shape[1]) // 2
        for kind in WEIGHT_KINDS:
            rules[f"{layer.name}.w13", kind] = Shard("concatenate", 1, (half, half))
            rules[f"{layer.name}.w2", kind] = Shard("concatenate")
        for expert in range(layer.num_experts):
            site = f"{layer.name}.{expert}"
            for leaf in ("gate_proj", "up_proj"):
                rules[f"{site}.{leaf}", "output"] = Shard("concatenate")
            rules |= {(f"{site}.down_proj", kind): Shard("concatenate") for kind in INPUT_KINDS}
            rules[f"{site}.down_proj", "output"] = Shard("add")
        if not layer.experts.reduce_results:
            rules[layer.name, "output"] = Shard("add")


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


class ShardRecorder(Recorder):
    """What the hooks of rank 1 and up write to: it hands shards to rank 0 and keeps nothing."""

    def __init__(self, layout: Layout, sites: tuple[str, ...], rules: Rules, group: Any) -> None:
        super().__init__(cast("TraceWriter", None), CaptureSpec(sites=sites), layout)
        self.rules, self.group = rules, group

    def begin_call(self, rows: Any) -> None:
        """Nothing: rank 0 knows whose rows they are."""

    def promise(self, native: str, kind: str) -> None:
        """Nothing: rank 0 promises."""

    def static(self, native: str, kind: str, tensor: torch.Tensor) -> None:
        """Hand a weight's shard over."""
        if (native, kind) in self.rules and self.wants(native, kind):
            gather(tensor, self.group)

    def tensor(
        self,
        native: str,
        kind: str,
        tensor: torch.Tensor,
        row_index: torch.Tensor | None = None,
        *,
        per_call: bool = False,
    ) -> None:
        """Hand a shard over, where this rank holds only a shard."""
        if self.active and (native, kind) in self.rules and self.wants(native, kind):
            gather(tensor, self.group)


def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensor of every rank, on the group's first rank; nothing on the others."""
    first, rank = dist.get_process_group_ranks(group)[0], dist.get_rank()
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    pieces = None
    if rank == first:
        pieces = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.gather(flat, pieces, dst=first, group=group)
    return [piece.view(tensor.dtype).view(tensor.shape) for piece in pieces or ()]


def gather_into(recorder: Recorder, rules: Rules, group: Any) -> None:
    """Make rank 0's recorder write the whole of what the ranks hold.

    Raises EngineUnavailable for one that also replaces tensors.
    """
    if isinstance(recorder, IntervenedRecorder):
        raise EngineUnavailable(
            "sglang takes interventions with one rank only", "run it without the option tp_size"
        )
    static, record = recorder.static, recorder.tensor

    def whole(native: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        rule = rules.get((native, kind))
        if rule is None or not recorder.wants(native, kind):
            return tensor
        return rule.join(gather(tensor, group))

    def write_static(native: str, kind: str, tensor: torch.Tensor) -> None:
        static(native, kind, whole(native, kind, tensor))

    def write(native: str, kind: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if recorder.active:
            record(native, kind, whole(native, kind, tensor), *args, **kwargs)

    recorder.static = write_static  # type: ignore[method-assign]
    recorder.tensor = write  # type: ignore[method-assign,assignment]


class Errors:
    """Runs a function that SGLang calls for us, whose errors it only logs."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.raised: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call, and keep what is raised."""
        try:
            self.function(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise

    def check(self) -> None:
        """Raise what was kept."""
        if self.raised is not None:
            raise EngineError(
                f"sglang: {type(self.raised).__name__}: {self.raised}", "see the engine's log"
            ) from self.raised
