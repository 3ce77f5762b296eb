"""Every error that a user can meet, as one tree.

    MiniteDiagError
    ├── UsageError          the command or its configuration is wrong          (exit 2)
    ├── CheckpointError     a checkpoint or probe file can't be used           (exit 2)
    ├── EngineUnavailable   an engine, kernel or interpreter is not installed  (exit 3)
    ├── EngineError         an engine started and then failed                  (exit 3)
    └── TraceError          a run directory can't be read                      (exit 3)

To add one: subclass the nearest class, inherit its standard cousin too, give `exit_code`.
The message names the file, engine or site; the hint is the next step for the user.
"""

from __future__ import annotations


class MiniteDiagError(Exception):
    """Root of the tree: `message` says what happened and where, `hint` what to do next."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


class UsageError(MiniteDiagError, ValueError):
    """The command line, configuration or pattern can't mean anything."""

    exit_code = 2


class CheckpointError(MiniteDiagError, ValueError):
    """A checkpoint or probe file is missing, truncated, hostile or of an unknown kind."""

    exit_code = 2


class EngineUnavailable(MiniteDiagError, ImportError):
    """An engine (or the kernel that the plan insists on) is not installed here."""


class EngineError(MiniteDiagError, RuntimeError):
    """An engine started and then failed, hung, or ran out of memory."""


class TraceError(MiniteDiagError, OSError):
    """A run directory or one of its files is missing, incomplete or of another version."""


def root_cause(error: BaseException) -> str:
    """The first line of the innermost error that says something."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).strip()
        messages.append(f"{type(cause).__name__}: {text.splitlines()[0]}" if text else "")
        cause = cause.__cause__ or cause.__context__
    return next((m for m in reversed(messages) if m), type(error).__name__)
