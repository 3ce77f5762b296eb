"""Where one tensor is observed: a checkpoint name and a kind.

Knows names only: no torch, no engine. Invariant: `Site.parse(str(site)) == site`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from minite_diag.errors import UsageError

KINDS: Final = (
    "input",
    "output",
    "residual",
    "weight",
    "weight_codes",
    "weight_block_scale",
    "weight_global_decode_scale",
    "bias",
    "act_codes",
    "act_block_scale",
    "act_global_decode_scale",
    "router_logits",
    "topk_ids",
    "topk_weights",
    "logits",
)
"""Tensor kinds, in the order in which one module produces them."""

STATIC_KINDS: Final = frozenset(
    {"weight", "weight_codes", "weight_block_scale", "weight_global_decode_scale", "bias"}
)
"""Kinds that don't depend on tokens: captured once per engine."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_EXPERT = re.compile(r"\.experts\.(\d+)(?:\.|$)")


@dataclass(frozen=True, order=True)
class Site:
    """One observed tensor: `fqn` is the checkpoint (Hugging Face) module name, unfused."""

    fqn: str
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown site kind {self.kind!r}", f"one of: {', '.join(KINDS)}")

    def __str__(self) -> str:
        return f"{self.fqn}:{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Read `fqn:kind`; raises UsageError when the kind is missing or unknown."""
        fqn, _, kind = text.rpartition(":")
        if not fqn:
            raise UsageError(f"site {text!r} has no kind", "write it as FQN:KIND")
        return cls(fqn, kind)

    @property
    def layer_index(self) -> int | None:
        """Index of the decoder layer, or None outside of the layers."""
        match = _LAYER.search(self.fqn)
        return int(match.group(1)) if match else None

    @property
    def expert_index(self) -> int | None:
        """Index of the expert, or None outside of the experts."""
        match = _EXPERT.search(self.fqn)
        return int(match.group(1)) if match else None


def matches(fqn: str, kind: str, patterns: Sequence[str]) -> bool:
    """Whether any glob selects the site; a pattern is `FQN_GLOB` or `FQN_GLOB:KIND_GLOB`."""
    for pattern in patterns:
        fqn_glob, _, kind_glob = pattern.partition(":")
        if fnmatch.fnmatchcase(fqn, fqn_glob) and fnmatch.fnmatchcase(kind, kind_glob or "*"):
            return True
    return False
