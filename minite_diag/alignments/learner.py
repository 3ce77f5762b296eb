"""The alignments in a user's own training process: one call, and everything back as it was after it.

    with aligned(model, ["norm", "rope", "attention"]):
        train(model)

    align_from_environment(model)      # what MINITE_DIAG_ALIGN names, nothing if it is not set

Knows torch modules and what the replacements touch. Invariant: parameters are shared, never copied
or changed; leaving the context restores every module and function that a replacement put aside.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from minite_diag.alignments.base import (
    application,
    apply_replacements,
    names_in_environment,
    resolve_alignments,
)
from minite_diag.errors import UsageError

_OWN = frozenset({"_parameters", "_buffers"})


@contextlib.contextmanager
def aligned(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Apply alignments to a transformers model; gives op -> names of what was patched.

    Raises UsageError for a name that does nothing here, EngineError where nothing was patched.
    """
    before = _Before(model)
    try:
        yield align_model(model, names)
    finally:
        before.restore()


def align_model(model: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """As `aligned`, for the rest of the process."""
    chosen = resolve_alignments(names)
    useless = [name for name in chosen if not _has_ops(name)]
    if useless and "all" not in names:
        raise UsageError(
            f"alignment {useless[0]!r} replaces nothing in a transformers model",
            "settings are for the process that trains: see `minite-diag align --list`",
        )
    return apply_replacements("hf", [name for name in chosen if name not in useless], model)


def align_from_environment(model: nn.Module) -> dict[str, list[str]]:
    """Apply what MINITE_DIAG_ALIGN names to the learner; an empty dict, and no change, without it.

    Names that only the sampler knows are left to its plugin.
    """
    names = names_in_environment()
    chosen = [name for name in resolve_alignments(names) if _has_ops(name)] if names else []
    return apply_replacements("hf", chosen, model)


def _has_ops(name: str) -> bool:
    found = application(name, "hf")
    return found is not None and bool(found.replacements)


class _Before:
    """What replacements touch: modules, attributes of modules, the config, module functions."""

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = model.config
        self.attention = getattr(model.config, "_attn_implementation", None)
        self.modules = [
            (module, dict(module._modules), self._attributes(module)) for module in model.modules()
        ]
        engine = importlib.import_module("minite_diag.engines.hf")
        modeling = importlib.import_module(type(model).__module__)
        self.functions = [(owner, dict(vars(owner))) for owner in (engine, modeling)]

    @staticmethod
    def _attributes(module: nn.Module) -> dict[str, Any]:
        return {k: v for k, v in vars(module).items() if k not in _OWN and k != "_modules"}

    def restore(self) -> None:
        """Put all of it back."""
        for module, children, attributes in self.modules:
            module._modules.clear()
            module._modules.update(children)
            for name in set(self._attributes(module)) - set(attributes):
                delattr(module, name)
            vars(module).update(attributes)
        for owner, names in self.functions:
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        if self.attention is not None:
            self.config._attn_implementation = self.attention
