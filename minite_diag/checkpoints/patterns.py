"""Which linears are quantized: the `--quantize` pattern.

Knows names only. Invariant: the result can be loaded by a sampler: linears that it fuses are in or
out together, so are the experts of one layer, and neither router nor lm_head is in.

A pattern is a comma list. Each term is a glob over FQNs (`*.mlp.*`) or a preset; `!` before a term
takes its names out again. Without a positive term the list starts from `default`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Final

from minite_diag.checkpoints import names
from minite_diag.checkpoints.model import BLOCK_SIZE, Checkpoint
from minite_diag.errors import UsageError

DEFAULT: Final = "default"
NONE: Final = "none"

_PRESETS: Final[dict[str, Callable[[str], bool]]] = {
    DEFAULT: lambda fqn: True,
    "experts": names.is_expert,
    "attention": lambda fqn: ".self_attn." in fqn,
    "mlp": lambda fqn: ".mlp." in fqn,
}
_COUNTED: Final = ("all-but-last", "all-but-first")


def quantized_names(checkpoint: Checkpoint, pattern: str) -> list[str]:
    """The linears that `pattern` selects, in natural order.

    Presets: `default` (all but lm_head and routers), `none`, `experts`, `attention`, `mlp`,
    `all-but-last:N` and `all-but-first:N` (layers). Raises UsageError when a term matches nothing,
    with the names nearest to it, or when a sampler could not load the selection.
    """
    linears = checkpoint.linear_names()
    terms = [term.strip() for term in pattern.split(",") if term.strip()]
    if not terms:
        raise UsageError("the quantize pattern is empty", "write none to quantize nothing")
    if terms == [NONE]:
        return []
    positive = [term for term in terms if not term.startswith("!")] or [DEFAULT]
    negative = [term.removeprefix("!") for term in terms if term.startswith("!")]
    selected = {fqn for term in positive for fqn in _match(checkpoint, linears, term)}
    for term in negative:
        removed = selected & set(_match(checkpoint, linears, term))
        if not removed:
            raise UsageError(f"!{term} takes nothing out of {pattern!r}", "drop that term")
        selected -= removed
    if not selected:
        raise UsageError(f"{pattern!r} leaves no linear", "write none to quantize nothing")
    result = [fqn for fqn in linears if fqn in selected]
    _check_loadable(checkpoint, linears, result)
    return result


def _match(checkpoint: Checkpoint, linears: list[str], term: str) -> list[str]:
    usual = [fqn for fqn in linears if fqn != names.LM_HEAD and not names.is_router(fqn)]
    preset, _, count = term.partition(":")
    if preset in _COUNTED:
        found = [fqn for fqn in usual if _in_kept_layers(checkpoint, fqn, preset, count)]
    elif term in _PRESETS:
        found = [fqn for fqn in usual if _PRESETS[term](fqn)]
    else:
        found = fnmatch.filter(linears, term)
    if not found:
        presets = ", ".join([*_PRESETS, NONE, *(f"{name}:N" for name in _COUNTED)])
        near = ", ".join(names.near_misses(term, linears))
        raise UsageError(
            f"{term!r} matches no linear of {checkpoint.name}",
            f"near: {near}; presets: {presets}",
        )
    return found


def _in_kept_layers(checkpoint: Checkpoint, fqn: str, preset: str, count: str) -> bool:
    if not count.isdigit() or not 0 < int(count) < checkpoint.num_layers:
        raise UsageError(
            f"{preset}:{count} needs a number of layers from 1 to {checkpoint.num_layers - 1}",
            f"for example {preset}:1",
        )
    layer = names.layer_index(fqn)
    if layer is None:
        return False
    if preset == "all-but-last":
        return layer < checkpoint.num_layers - int(count)
    return layer >= int(count)


def _check_loadable(checkpoint: Checkpoint, linears: Iterable[str], selected: list[str]) -> None:
    chosen = set(selected)
    for fqn in selected:
        if fqn == names.LM_HEAD or names.is_router(fqn):
            raise UsageError(
                f"the pattern selects {fqn}, which stays in high precision here",
                f"add !{fqn if fqn == names.LM_HEAD else '*.' + names.projection(fqn)}",
            )
        if checkpoint.shape(fqn)[1] % BLOCK_SIZE:
            raise UsageError(
                f"{fqn} has K={checkpoint.shape(fqn)[1]}, not a multiple of {BLOCK_SIZE}",
                f"add !{fqn}",
            )
    whole: dict[str, list[str]] = {}
    for fqn in linears:
        whole.setdefault(names.experts_module(fqn) or names.fused_group(fqn), []).append(fqn)
    for module, members in whole.items():
        left_out = [fqn for fqn in members if fqn not in chosen]
        if left_out and len(left_out) < len(members):
            raise UsageError(
                f"samplers hold {module} as one module, but the pattern leaves out {left_out[0]} "
                f"and {len(left_out) - 1} more of its {len(members)} parts",
                "select all of its parts or none",
            )
