"""What a rank of a tensor-parallel SGLang holds of each tensor.

Knows SGLang's module classes; how its layers split tensors is in parallel_layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from minite_diag.capture.recorder import Recorder
from minite_diag.capture.shards import Rules, Shard, gather
from minite_diag.engines.base import Layout
from minite_diag.engines.parallel_layers import (
    ParallelClasses,
    attention_rules,
    expert_rules,
    linear_rules,
)
from minite_diag.engines.sglang_plugin.layout import expert_layers, linear_modules
from minite_diag.errors import EngineError
from minite_diag.plan import CaptureSpec
from minite_diag.trace.store import TraceWriter


def shard_rules(model: nn.Module) -> Rules:
    """(native name, kind) -> how it is sharded; raises EngineUnavailable for replicated heads."""
    classes = _classes()
    rules = linear_rules(model, linear_modules(model), classes) | attention_rules(model, classes)
    for layer in expert_layers(model):
        half = int(layer.experts.w13_weight.shape[1]) // 2
        rules |= expert_rules(layer.name, layer.num_experts, half)
        if not layer.experts.reduce_results:
            rules[layer.name, "output"] = Shard("add")
    return rules


def _classes() -> ParallelClasses:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return ParallelClasses(
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        RadixAttention,
        SiluAndMul,
        "tp_size",
    )


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
