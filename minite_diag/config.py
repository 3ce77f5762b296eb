"""Settings from files: `minite.toml`, or `[tool.minite-diag]` in `pyproject.toml`.

Knows TOML, environment variables and option names; no torch. Invariant: an unknown key is an error
that names the file and the nearest key, and each value can be told apart by where it came from. The
order of precedence is command line, MINITE_DIAG_* environment, file, default.

    [tool.minite-diag.compare]
    sampler = ["vllm"]
    num-probes = 4

    [[tool.minite-diag.waivers]]
    metric = "mean_abs"
    reason = "per-tensor scale until the next upgrade"
    expires = 2027-03-01
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minite_diag.errors import UsageError

ENV_PREFIX: Final = "MINITE_DIAG"
OTHER_VARIABLES: Final = ("MINITE_DIAG_ALIGN", "MINITE_DIAG_CACHE", "MINITE_DIAG_ENVIRONMENTS")
"""Variables that are no option of a command."""
WAIVERS: Final = "waivers"


@dataclass(frozen=True)
class Settings:
    """What a settings file holds: options by command, and waivers; `file` None if there is none."""

    commands: Mapping[str, Any] = field(default_factory=dict)
    waivers: Any = ()
    file: Path | None = None


def find_settings(folder: Path) -> Settings:
    """Settings of the nearest file in `folder` or its parents."""
    for parent in [folder, *folder.parents]:
        own = parent / "minite.toml"
        if own.is_file():
            return _settings(_read(own), own)
        project = parent / "pyproject.toml"
        if project.is_file():
            table = _read(project).get("tool", {}).get("minite-diag")
            if table is not None:
                return _settings(table, project)
    return Settings()


def _settings(table: Any, file: Path) -> Settings:
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: minite-diag is no table", "write [tool.minite-diag.COMMAND]")
    commands = {key: value for key, value in table.items() if key != WAIVERS}
    return Settings(commands, table.get(WAIVERS, ()), file)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"can't read {file}: {error}", "correct the file") from error


def default_map(settings: Settings, commands: Mapping[str, set[str]]) -> dict[str, dict[str, Any]]:
    """Click's default_map; raises UsageError for a command or option that doesn't exist."""
    result: dict[str, dict[str, Any]] = {}
    for command, options in settings.commands.items():
        if not isinstance(options, Mapping) or command not in commands:
            _unknown(settings.file, command, [*commands, WAIVERS])
        result[command] = {}
        for key, value in options.items():
            name = key.replace("-", "_")
            if name not in commands[command]:
                _unknown(settings.file, f"{command}.{key}", sorted(commands[command]))
            result[command][name] = value
    return result


def _unknown(file: Path | None, key: str, known: list[str]) -> None:
    shown = [name.replace("_", "-") for name in known]
    near = difflib.get_close_matches(key.rpartition(".")[2], shown, n=1)
    raise UsageError(
        f"{file}: unknown setting {key!r}",
        f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(shown)}",
    )


def unknown_variables(
    environment: Iterable[str], commands: Mapping[str, set[str]]
) -> list[tuple[str, str]]:
    """MINITE_DIAG_* variables that name no option, each with the nearest that does ("" if none)."""
    known = {*OTHER_VARIABLES}
    for command, options in commands.items():
        prefix = f"{ENV_PREFIX} {command}".strip().upper().replace("-", "_").replace(" ", "_")
        known |= {f"{prefix}_{option}".upper() for option in options}
    found = []
    for name in sorted(environment):
        if name.startswith(f"{ENV_PREFIX}_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            found.append((name, near[0] if near else ""))
    return found
