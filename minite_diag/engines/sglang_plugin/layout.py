"""SGLang's module tree as data: which checkpoint modules a fused module holds, and where.

Knows torch and SGLang's class names; opens no file. Invariant: every fused module that a hook or a
static tensor names is in the Layout, and its parts cover its output rows without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from minite_diag.engines.base import Layout, Part
from minite_diag.engines.parallel_layers import partition_sizes
from minite_diag.errors import EngineError

FUSED_LEAVES: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused linears whose parts the model's class doesn't name itself."""


@dataclass(frozen=True)
class ExpertLayer:
    """One mixture of experts: `experts` is SGLang's FusedMoE, `topk` chooses for it."""

    name: str
    experts: Any
    topk: Any

    @property
    def num_experts(self) -> int:
        """Experts in this process."""
        return int(self.experts.num_local_experts)

    @property
    def up_first(self) -> bool:
        """Whether the rows of w13 are up, then gate: some GPU kernels want that order."""
        return bool(getattr(self.experts.quant_method, "load_up_proj_weight_first", False))

    @property
    def halves(self) -> tuple[str, str]:
        """The parts of w13 in the order of its rows."""
        return ("up_proj", "gate_proj") if self.up_first else ("gate_proj", "up_proj")


def linear_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every SGLang linear layer (router included, lm_head not)."""
    from sglang.srt.layers.linear import LinearBase

    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield name, module


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Every mixture of experts of the model."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    found = []
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            parent = model.get_submodule(name.rpartition(".")[0])
            found.append(ExpertLayer(name, module, getattr(parent, "topk", None)))
    return found


def build_layout(model: nn.Module) -> Layout:
    """Map each fused module to its checkpoint parts; raises EngineError for an unknown fusion."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    parts: dict[str, tuple[Part, ...]] = {}
    for name, module in linear_modules(model):
        sizes = partition_sizes(module)
        if len(sizes) == 1:
            continue
        leaf = name.rpartition(".")[2]
        leaves = tuple(packed.get(leaf) or FUSED_LEAVES.get(leaf, ()))
        if len(leaves) != len(sizes):
            raise EngineError(
                f"{name} fuses {len(sizes)} parts, SGLang's packed_modules_mapping names {leaves}",
                "this architecture's fused modules can't be mapped yet",
            )
        parts[name] = tuple(_rows(name.removesuffix(leaf), leaves, sizes))
    for layer in expert_layers(model):
        parts.update(_expert_parts(layer))
    return Layout(parts)


def _rows(parent: str, leaves: tuple[str, ...], sizes: list[int]) -> Iterator[Part]:
    start = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        yield Part(parent + leaf, start, start + size)
        start += size


def _expert_parts(layer: ExpertLayer) -> dict[str, tuple[Part, ...]]:
    size = int(layer.experts.w13_weight.shape[1]) // 2
    return {
        f"{layer.name}.w13": tuple(
            Part(f"{layer.name}.{e}.{leaf}", start, start + size, e)
            for e in range(layer.num_experts)
            for leaf, start in zip(layer.halves, (0, size), strict=True)
        ),
        f"{layer.name}.w2": tuple(
            Part(f"{layer.name}.{e}.down_proj", expert=e) for e in range(layer.num_experts)
        ),
    }
