"""Environments of engines whose packages conflict with this one's: where they are, how they are built.

Knows paths and pip; imports no engine and no torch. Invariant: an environment is a plain virtual
environment with pinned packages, and the same files of this package that run here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from minite_diag.environments import sglang
from minite_diag.errors import EngineUnavailable, UsageError

FOLDER_VARIABLE: Final = "MINITE_DIAG_ENVIRONMENTS"

BUILDERS: Final[dict[str, Callable[[Path, Callable[[str], None]], Path]]] = {
    "sglang": sglang.create
}
"""Engine -> the function that builds its environment into a folder and returns its interpreter."""


def environment_folder(engine: str) -> Path:
    """Where an engine's environment is looked for: $MINITE_DIAG_ENVIRONMENTS or the cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named) / engine
    cache = os.environ.get("MINITE_DIAG_CACHE")
    if cache:
        return Path(cache) / "environments" / engine
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path.home() / ".cache"
    return home / "minite-diag" / "environments" / engine


def interpreter(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def engine_python(engine: str) -> str:
    """The interpreter that runs an engine: its own environment's, or this one if it has the engine.

    Raises EngineUnavailable with the command that builds the environment.
    """
    if engine not in BUILDERS:
        return sys.executable
    own = interpreter(environment_folder(engine))
    if own.exists():
        return str(own)
    if _installed_here(engine):
        return sys.executable
    raise EngineUnavailable(
        f"engine {engine!r} has no environment in {environment_folder(engine)}",
        f"minite-diag env create {engine}; or name an interpreter: --python {engine}=PATH",
    )


def create(engine: str, folder: Path | None, say: Callable[[str], None]) -> Path:
    """Build an engine's environment, by default where it is looked for; returns its interpreter.

    Raises UsageError for an engine that needs none, EngineUnavailable if a step fails.
    """
    if engine not in BUILDERS:
        raise UsageError(
            f"engine {engine!r} runs in this interpreter and needs no environment of its own",
            f"one of: {', '.join(BUILDERS)}",
        )
    return BUILDERS[engine](folder or environment_folder(engine), say)


def _installed_here(engine: str) -> bool:
    try:
        importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec(engine) is not None
