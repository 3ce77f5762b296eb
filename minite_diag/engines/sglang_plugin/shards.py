"""What a rank of a tensor-parallel SGLang holds of each tensor.

Knows SGLang's module classes; how shards become the whole is in capture.shards. Invariant: a tensor
without a rule is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import nn

from minite_diag.capture.recorder import Recorder
from minite_diag.capture.shards import Rules, Shard, gather
from minite_diag.engines.base import Layout
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
