"""GitHub Actions: annotations as workflow commands, and the step summary.

Knows the summary object. Invariant: whatever a name holds, it stays data of its own command: a new
line would start another one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from minite_diag.outputs.issues import Issue, issues_of
from minite_diag.report import words

_COMMANDS: Final = {"error": "error", "warning": "warning", "note": "notice"}
MAX_OF_A_KIND: Final = 10
"""GitHub shows ten annotations of each kind for a step."""


def to_github(summary: dict[str, Any]) -> str:
    """One workflow command a line, the verdict first."""
    verdict = summary["verdict"]
    command = {"fail": "error", "error": "error", "inconclusive": "error"}.get(verdict, "notice")
    lines = [_command(command, f"minite-diag: {verdict}", words.headline(summary))]
    counts = Counter({command: 1})
    left = 0
    for issue in issues_of(summary):
        kind = _COMMANDS[issue.level]
        counts[kind] += 1
        if counts[kind] > MAX_OF_A_KIND:
            left += 1
        else:
            lines.append(_annotation(issue, kind))
    if left:
        lines.append(f"{left} more annotations than GitHub shows are left out")
    return "\n".join(lines) + "\n"


def _annotation(issue: Issue, kind: str) -> str:
    waived = f" [waived: {issue.waived}]" if issue.waived else ""
    return _command(kind, f"{issue.rule}: {issue.title}", f"{issue.where}: {issue.text}{waived}")


def _command(name: str, title: str, message: str) -> str:
    return f"::{name} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
