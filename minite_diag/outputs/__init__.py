"""One run, written for machines and people: text, JSON, JUnit XML, SARIF, GitHub, Markdown, HTML.

Knows the summary object only; no torch, no pandas (HTML reads the run's tables too). Invariant: every format says the same verdict,
names that come from a model, probe or engine are inert in it, and equal runs give equal bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from minite_diag.errors import UsageError

FORMATS: Final = {
    "text": "minite_diag.outputs.text:to_text",
    "json": "minite_diag.outputs.json_object:to_json",
    "junit": "minite_diag.outputs.junit:to_junit",
    "sarif": "minite_diag.outputs.sarif:to_sarif",
    "github": "minite_diag.outputs.github:to_github",
    "markdown": "minite_diag.outputs.markdown:to_markdown",
    "html": "minite_diag.report.html:to_html",
}
SUFFIXES: Final = {
    ".txt": "text",
    ".json": "json",
    ".xml": "junit",
    ".sarif": "sarif",
    ".md": "markdown",
    ".html": "html",
}
STDOUT: Final = "-"


def render(summary: dict[str, Any], name: str) -> str:
    """The run in one format; it ends with a newline."""
    module, _, function = FORMATS[name].partition(":")
    to_format: Callable[[dict[str, Any]], str] = getattr(importlib.import_module(module), function)
    return to_format(summary)


def plan_outputs(
    formats: Sequence[str], files: Sequence[str], known: Iterable[str] | None = None
) -> list[tuple[str, str]]:
    """Pairs of format and file (`-` is stdout); raises UsageError where they don't fit.

    As many formats as files are paired in order; files alone give their format by their suffix;
    one format alone goes to stdout.
    """
    names = list(known or FORMATS)
    if not formats:
        formats = [_format_of(file) for file in files]
    for name in formats:
        if name not in names:
            from minite_diag.gate.limits import suggestion

            raise UsageError(f"no output format is called {name!r} here", suggestion(name, names))
    if len(formats) == 1 and not files:
        return [(formats[0], STDOUT)]
    if len(formats) != len(files):
        raise UsageError(
            f"{len(formats)} formats and {len(files)} files",
            "give one -o for each --format (- is stdout), or -o alone: its suffix is the format",
        )
    pairs = list(zip(formats, files, strict=True))
    if sum(file == STDOUT for _, file in pairs) > 1:
        raise UsageError("two formats go to stdout", "give the other ones a file with -o")
    return pairs


def _format_of(file: str) -> str:
    found = SUFFIXES.get(Path(file).suffix.lower())
    if found is None:
        raise UsageError(
            f"{file}: its suffix names no format",
            f"one of {', '.join(SUFFIXES)}; or give --format too",
        )
    return found


def write_output(text: str, file: str) -> None:
    """Write a file whole or not at all; raises UsageError where it can't be written."""
    path = Path(file)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}", "give a writable file") from error
