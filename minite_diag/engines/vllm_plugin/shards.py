"""What a rank of a tensor-parallel vLLM holds of each tensor, and what sums the ranks' parts.

Knows vLLM's module classes and communicators; how its layers split tensors is in parallel_layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from minite_diag.capture.shards import Rules, Shard
from minite_diag.engines.base import Evidence
from minite_diag.engines.parallel_layers import (
    ParallelClasses,
    attention_rules,
    expert_rules,
    linear_rules,
)
from minite_diag.engines.vllm_plugin.layout import expert_layers, linear_modules
from minite_diag.engines.vllm_plugin.readback import qualified_name


def tensor_group() -> Any:
    """The tensor-parallel group of this process."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def name_shared_memory() -> None:
    """Give the ranks' shared memory on CPU a name of this start alone.

    vLLM names it after the port of its own rendezvous, which ranks of torchrun don't have: every
    start would take the same name, and fail where another is running or was killed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    private: Any = _CPUSHMDistributed
    name_of = private.make_group_name
    private.make_group_name = staticmethod(
        lambda group: f"minite{os.environ['MASTER_PORT']}{name_of(group).replace('/', '')}"
    )


def unlink_shared_memory() -> None:
    """Remove the names: the ranks have mapped the memory, which ends with the last of them."""
    module = getattr(tensor_group().device_communicator, "dist_module", None)
    name = getattr(module, "group_name", None)
    if name is not None:
        file = f"/dev/shm/{name}_{tensor_group().rank_in_group}"  # noqa: S108  vLLM's name
        Path(file).unlink(missing_ok=True)


def evidence() -> Iterator[Evidence]:
    """Who sums over the ranks; nothing for one rank."""
    group = tensor_group()
    if group.world_size > 1:
        communicator = group.device_communicator
        backends = [type(communicator).__name__] + [
            name
            for name in ("ca_comm", "qr_comm", "symm_mem_comm", "pynccl_comm")
            if not getattr(getattr(communicator, name, None), "disabled", True)
        ]
        note = f"{group.world_size} tensor-parallel ranks: {', '.join(backends)}"
        yield Evidence("collectives", "native", qualified_name(type(communicator)), note)


def shard_rules(model: nn.Module) -> Rules:
    """(native name, kind) -> how it is sharded; raises EngineUnavailable for replicated heads."""
    classes = _classes()
    rules = linear_rules(model, linear_modules(model), classes) | attention_rules(model, classes)
    for layer in expert_layers(model):
        rules |= expert_rules(layer.name, layer.num_experts, layer.intermediate_size)
        # vLLM 0.32 sums over the ranks in the layer, 0.23 in the block around it.
        rules[layer.name, "output"] = Shard("add", unless_equal=True)
    return rules


def _classes() -> ParallelClasses:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return ParallelClasses(
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        Attention,
        SiluAndMul,
        "tensor_parallel_size",
    )
