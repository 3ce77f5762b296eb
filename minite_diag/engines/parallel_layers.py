"""How the parallel layers of vLLM split tensors over ranks; SGLang's are of the same descent.

Knows the attributes that both engines' layers have, and neither engine: its classes are handed in.
How shards become the whole is in capture.shards. Invariant: a tensor without a rule is the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from minite_diag.capture.shards import Rules, Shard
from minite_diag.errors import EngineUnavailable

WEIGHT_KINDS: Final = ("weight", "weight_codes", "weight_block_scale")
INPUT_KINDS: Final = ("input", "act_codes", "act_block_scale")


@dataclass(frozen=True)
class ParallelClasses:
    """An engine's classes, and the option with which it takes ranks."""

    column: Any
    row: Any
    embedding: Any
    attention: Any
    activation: Any
    ranks_option: str


def partition_sizes(module: Any) -> list[int]:
    """Output features of each fused part of a linear, of this rank."""
    if hasattr(module, "total_num_kv_heads"):
        query = int(module.num_heads) * int(module.head_size)
        key = int(module.num_kv_heads) * int(module.head_size)
        value = int(module.num_kv_heads) * int(getattr(module, "v_head_size", module.head_size))
        return [query, key, value]
    sizes = getattr(module, "output_partition_sizes", None)
    return [int(size) for size in sizes] if sizes is not None else [int(module.output_size)]


def linear_rules(
    model: nn.Module, linears: Iterable[tuple[str, Any]], classes: ParallelClasses
) -> Rules:
    """Of linears and the vocabulary; raises EngineUnavailable for replicated key heads."""
    rules: Rules = {}
    for name, module in linears:
        if isinstance(module, classes.column):
            if getattr(module, "num_kv_head_replicas", 1) > 1:
                raise EngineUnavailable(
                    f"{name}: more ranks than key heads, which are replicated",
                    f"use fewer ranks ({classes.ranks_option})",
                )
            sizes = tuple(partition_sizes(module))
            if not module.gather_output:
                rules[name, "output"] = Shard("concatenate", -1, sizes)
            for kind in (*WEIGHT_KINDS, "bias"):
                rules[name, kind] = Shard("concatenate", 0, sizes)
        elif isinstance(module, classes.row):
            rules |= {(name, kind): Shard("concatenate") for kind in INPUT_KINDS + WEIGHT_KINDS}
            if not module.reduce_results:
                rules[name, "output"] = Shard("add")
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, classes.embedding):
            rows = int(module.org_vocab_size)
            rules[name, "weight"] = Shard("concatenate", 0, rows=rows)
    return rules


def attention_rules(model: nn.Module, classes: ParallelClasses) -> Rules:
    """Of heads: RoPE, attention and the norms of q and k; and of the activation."""
    rules: Rules = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, classes.attention):
            for native in (f"{parent}.q_rope", f"{parent}.k_rope", name):
                rules[native, "output"] = Shard("concatenate")
        elif name.endswith((".q_norm", ".k_norm")):
            rules |= {(name, kind): Shard("concatenate") for kind in ("input", "output")}
        elif isinstance(module, classes.activation):
            rules[name, "output"] = Shard("concatenate")
    return rules


def expert_rules(name: str, num_experts: int, intermediate_size: int) -> Rules:
    """Of a mixture's experts, `intermediate_size` features of gate on this rank; not of their sum."""
    rules: Rules = {}
    halves = (intermediate_size, intermediate_size)
    for kind in WEIGHT_KINDS:
        rules[f"{name}.w13", kind] = Shard("concatenate", 1, halves)
        rules[f"{name}.w2", kind] = Shard("concatenate")
    for expert in range(num_experts):
        site = f"{name}.{expert}"
        for leaf in ("gate_proj", "up_proj"):
            rules[f"{site}.{leaf}", "output"] = Shard("concatenate")
        rules |= {(f"{site}.down_proj", kind): Shard("concatenate") for kind in INPUT_KINDS}
        rules[f"{site}.down_proj", "output"] = Shard("add")
    return rules
