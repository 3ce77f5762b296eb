"""What checkpoint names mean: routers, experts, fused groups, and near misses.

Knows only strings in the Hugging Face form, unfused. Invariant: an FQN here never ends in
`.weight`, and two linears that a sampler stores as one module have the same `fused_group`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

LM_HEAD: Final = "lm_head"
EMBEDDING: Final = "model.embed_tokens"

_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
}
_ROUTER: Final = re.compile(r"\.(?:gate|router|shared_expert_gate)$")
_EXPERT: Final = re.compile(r"^(?P<module>.*\.experts)\.(?P<index>\d+)\.")
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def is_router(fqn: str) -> bool:
    """Whether the linear scores experts (`mlp.gate`, `router`), not `gate_proj`."""
    return _ROUTER.search(fqn) is not None


def is_expert(fqn: str) -> bool:
    """Whether the linear belongs to one routed expert."""
    return _EXPERT.match(fqn) is not None


def experts_module(fqn: str) -> str | None:
    """The module that holds the expert (`model.layers.0.mlp.experts`), or None."""
    match = _EXPERT.match(fqn)
    return match["module"] if match else None


def expert_index(fqn: str) -> int | None:
    """Index of the expert that the linear belongs to, or None."""
    match = _EXPERT.match(fqn)
    return int(match["index"]) if match else None


def layer_index(fqn: str) -> int | None:
    """Index of the decoder layer, or None outside of the layers."""
    match = _LAYER.search(fqn)
    return int(match[1]) if match else None


def projection(fqn: str) -> str:
    """The last part of the name (`q_proj`)."""
    return fqn.rpartition(".")[2]


def fused_group(fqn: str) -> str:
    """The name under which samplers fuse this linear with its siblings; else the name itself.

    `...self_attn.q_proj` gives `...self_attn.qkv_proj`; gate and up of an MLP, or of one expert,
    give `...gate_up_proj`.
    """
    parent, dot, last = fqn.rpartition(".")
    return f"{parent}{dot}{_FUSED.get(last, last)}"


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that puts layer 2 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in parts)


def near_misses(wanted: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """The most similar names, one for each family of names that differ only in numbers."""
    families: dict[str, str] = {}
    for name in names:
        families.setdefault(re.sub(r"\d+", "0", name), name)
    plain = re.sub(r"\d+", "0", wanted.strip("*!"))
    close = difflib.get_close_matches(plain, families, n=limit, cutoff=0.3)
    return [families[key] for key in close] or list(families.values())[:limit]
