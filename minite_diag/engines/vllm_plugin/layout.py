"""vLLM's module tree as data: which checkpoint modules a fused module holds, and where.

Knows torch and vLLM's class names; opens no file. Invariant: every fused module that a hook or a
static tensor names is in the Layout, and its parts cover its output rows without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from minite_diag.engines.base import Layout, Part
from minite_diag.engines.parallel_layers import partition_sizes
from minite_diag.errors import EngineError

QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class ExpertLayer:
    """One mixture of experts: `name` is its native module, `weights` holds, `router` chooses.

    `runner` is the module whose call is the whole layer, `holder` the name of the one that has the
    parameters: vLLM 0.32 keeps them in a child, 0.23 in the layer itself.
    """

    name: str
    runner: Any
    weights: Any
    router: Any
    holder: str

    @property
    def is_monolithic(self) -> bool:
        """Whether one kernel routes and multiplies, so that no choice of experts is visible."""
        methods = (self.runner, getattr(self.weights, "quant_method", None))
        return any(bool(getattr(method, "is_monolithic", False)) for method in methods)

    @property
    def is_nvfp4(self) -> bool:
        """Whether the experts hold E2M1 codes, also after a kernel repacked them."""
        return hasattr(self.weights.quant_method, "nvfp4_backend")

    @property
    def num_experts(self) -> int:
        """Experts in this process."""
        return int(self.weights.local_num_experts)

    @property
    def intermediate_size(self) -> int:
        """Output features of one expert's gate."""
        config = self.weights.moe_config
        padded = config.intermediate_size_per_partition
        return int(getattr(config, "intermediate_size_per_partition_unpadded", padded))


def linear_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every vLLM linear layer (router included, lm_head not)."""
    from vllm.model_executor.layers.linear import LinearBase

    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield name, module


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Every mixture of experts of the model."""
    found = []
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        weights = getattr(module, "routed_experts", None)
        if router is None:
            continue
        if weights is not None:
            found.append(ExpertLayer(name, module, weights, router, f"{name}.routed_experts"))
        elif hasattr(module, "runner") and hasattr(module, "quant_method"):
            found.append(ExpertLayer(name, module, module, router, name))
    return found


def build_layout(model: nn.Module) -> Layout:
    """Map each fused module to its checkpoint parts; raises EngineError for an unknown fusion."""
    to_checkpoint = checkpoint_names(model)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    parts: dict[str, tuple[Part, ...]] = {}
    for name, module in linear_modules(model):
        sizes = partition_sizes(module)
        leaf = name.rpartition(".")[2]
        base = to_checkpoint(name)
        if len(sizes) == 1:
            if base != name:
                parts[name] = (Part(base),)
            continue
        leaves = packed.get(leaf) or (list(QKV) if len(sizes) == 3 else [])
        if len(leaves) != len(sizes):
            raise EngineError(
                f"{name} fuses {len(sizes)} parts, vLLM's packed_modules_mapping names {leaves}",
                "this architecture's fused modules can't be mapped yet",
            )
        parent = base.removesuffix(leaf)
        parts[name] = tuple(_rows(parent, leaves, sizes))
    for layer in expert_layers(model):
        parts.update(_expert_parts(to_checkpoint(layer.name), layer))
    return Layout(parts)


def _rows(parent: str, leaves: list[str], sizes: list[int]) -> Iterator[Part]:
    start = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        yield Part(parent + leaf, start, start + size)
        start += size


def _expert_parts(fqn: str, layer: ExpertLayer) -> dict[str, tuple[Part, ...]]:
    size = layer.intermediate_size
    return {
        f"{layer.name}.w13": tuple(
            Part(f"{fqn}.{e}.{leaf}", start, start + size, e)
            for e in range(layer.num_experts)
            for leaf, start in (("gate_proj", 0), ("up_proj", size))
        ),
        f"{layer.name}.w2": tuple(
            Part(f"{fqn}.{e}.down_proj", expert=e) for e in range(layer.num_experts)
        ),
    }


def checkpoint_names(model: nn.Module) -> Any:
    """A function from native to checkpoint names: the inverse of the model's prefix mapping."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = {
        new: old
        for old, new in getattr(mapper, "orig_to_new_prefix", {}).items()
        if new and "." in new
    }

    def to_checkpoint(name: str) -> str:
        for new, old in prefixes.items():
            if name.startswith(new):
                return old + name[len(new) :]
        return name

    return to_checkpoint
