"""Settings from files: `minite.toml`, or `[tool.minite-diag]` in `pyproject.toml`.

Knows TOML and option names; no torch. Invariant: an unknown key is an error that names the file,
and `show` gives each value with where it came from. The order of precedence is command line,
MINITE_DIAG_* environment, file, default.

    [tool.minite-diag.compare]
    sampler = ["vllm"]
    num-probes = 4
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minite_diag.errors import UsageError

ENV_PREFIX: Final = "MINITE_DIAG"


def find_settings(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Settings of the nearest file in `folder` or its parents; ({}, None) if there is none."""
    for parent in [folder, *folder.parents]:
        own = parent / "minite.toml"
        if own.is_file():
            return _read(own), own
        project = parent / "pyproject.toml"
        if project.is_file():
            table = _read(project).get("tool", {}).get("minite-diag")
            if table is not None:
                return table, project
    return {}, None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"can't read {file}: {error}", "correct the file") from error


def default_map(
    settings: Mapping[str, Any], file: Path | None, commands: Mapping[str, set[str]]
) -> dict[str, dict[str, Any]]:
    """Click's default_map; raises UsageError for a command or option that doesn't exist."""
    result: dict[str, dict[str, Any]] = {}
    for command, options in settings.items():
        if not isinstance(options, Mapping) or command not in commands:
            _unknown(file, command, list(commands))
        result[command] = {}
        for key, value in options.items():
            name = key.replace("-", "_")
            if name not in commands[command]:
                _unknown(file, f"{command}.{key}", sorted(commands[command]))
            result[command][name] = value
    return result


def _unknown(file: Path | None, key: str, known: list[str]) -> None:
    shown = [name.replace("_", "-") for name in known]
    near = difflib.get_close_matches(key.rpartition(".")[2], shown, n=1)
    raise UsageError(
        f"{file}: unknown setting {key!r}",
        f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(shown)}",
    )
