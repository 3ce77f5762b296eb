"""What a rank of a tensor-parallel vLLM holds of each tensor, and what sums the ranks' parts.

Knows vLLM's module classes; how shards become the whole is in capture.shards. Invariant: a tensor
without a rule is the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torch import nn

from minite_diag.capture.shards import Rules, Shard
from minite_diag.engines.base import Evidence
from minite_diag.engines.vllm_plugin.layout import expert_layers, linear_modules, partition_sizes
from minite_diag.engines.vllm_plugin.readback import qualified_name
from minite_diag.errors import EngineUnavailable

WEIGHT_KINDS: Final = ("weight", "weight_codes", "weight_block_scale")
INPUT_KINDS: Final = ("input", "act_codes", "act_block_scale")


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
    rules: Rules = {}
    _linear_rules(model, rules)
    _attention_rules(model, rules)
    _expert_rules(model, rules)
    return rules


def _linear_rules(model: nn.Module, rules: Rules) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in linear_modules(model):
        if isinstance(module, ColumnParallelLinear):
            if getattr(module, "num_kv_head_replicas", 1) > 1:
                raise EngineUnavailable(
                    f"{name}: more ranks than key heads, which are replicated",
                    "use fewer ranks (tensor_parallel_size)",
                )
            sizes = tuple(partition_sizes(module))
            if not module.gather_output:
                rules[name, "output"] = Shard("concatenate", -1, sizes)
            for kind in (*WEIGHT_KINDS, "bias"):
                rules[name, kind] = Shard("concatenate", 0, sizes)
        elif isinstance(module, RowParallelLinear):
            rules |= {(name, kind): Shard("concatenate") for kind in INPUT_KINDS + WEIGHT_KINDS}
            if not module.reduce_results:
                rules[name, "output"] = Shard("add")
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            rows = int(module.org_vocab_size)
            rules[name, "weight"] = Shard("concatenate", 0, rows=rows)


def _attention_rules(model: nn.Module, rules: Rules) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention

    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, Attention):
            for native in (f"{parent}.q_rope", f"{parent}.k_rope", name):
                rules[native, "output"] = Shard("concatenate")
        elif name.endswith((".q_norm", ".k_norm")):
            rules |= {(name, kind): Shard("concatenate") for kind in ("input", "output")}
        elif isinstance(module, SiluAndMul):
            rules[name, "output"] = Shard("concatenate")


def _expert_rules(model: nn.Module, rules: Rules) -> None:
    for layer in expert_layers(model):
        half = layer.intermediate_size
        for kind in WEIGHT_KINDS:
            rules[f"{layer.name}.w13", kind] = Shard("concatenate", 1, (half, half))
            rules[f"{layer.name}.w2", kind] = Shard("concatenate")
        for expert in range(layer.num_experts):
            site = f"{layer.name}.{expert}"
            for leaf in ("gate_proj", "up_proj"):
                rules[f"{site}.{leaf}", "output"] = Shard("concatenate")
            rules |= {(f"{site}.down_proj", kind): Shard("concatenate") for kind in INPUT_KINDS}
            rules[f"{site}.down_proj", "output"] = Shard("add")
        # vLLM 0.32 sums over the ranks in the layer, 0.23 in the block around it.
        rules[layer.name, "output"] = Shard("add", unless_equal=True)
