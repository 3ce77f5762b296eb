"""Engine names -> "module:Class", imported on first use; entry points fill the same table.

Knows no engine. Invariant: listing names imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from typing import Final

from minite_diag.engines.base import Engine
from minite_diag.errors import EngineUnavailable, UsageError

ENTRY_POINT_GROUP: Final = "minite_diag.engines"

BUILT_IN: Final = {
    "te": "minite_diag.engines.te:TeEngine",
    "hf": "minite_diag.engines.hf:HfEngine",
    "vllm": "minite_diag.engines.vllm:VllmEngine",
    "sglang": "minite_diag.engines.sglang:SglangEngine",
    "toy": "minite_diag.engines.toy:ToyEngine",
}

IMPORTED: Final = "external"
"""What a plan calls the engine of an imported trace."""


def engine_targets() -> dict[str, str]:
    """Every known engine name and its "module:Class"; built-in names can't be replaced."""
    third_party = {
        point.name: point.value
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
    return {**third_party, **BUILT_IN}


def check_engine_name(name: str) -> str:
    """Return `name`; raises UsageError with near matches if no engine has it."""
    if name == IMPORTED:
        raise UsageError(
            "an imported trace can't be run again", "give an engine for that side: compare"
        )
    names = engine_targets()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(sorted(names))}"
        raise UsageError(f"no engine is called {name!r}", hint)
    return name


def load_engine_class(name: str) -> type[Engine]:
    """Import the class of an engine; raises EngineUnavailable if its module can't be imported."""
    target = engine_targets()[check_engine_name(name)]
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise EngineUnavailable(
            f"engine {name!r} can't be imported from {target}: {error}",
            f"install it: pip install 'minite-diag[{name}]'",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise EngineUnavailable(
            f"engine {name!r}: {target} is not an Engine",
            "subclass minite_diag.engines.base.Engine",
        )
    return found
