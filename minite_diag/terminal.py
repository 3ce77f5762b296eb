"""What every command shares with the terminal: colour, quiet, progress, errors.

Knows Typer and Rich; no stage, no torch. Invariant: data goes to stdout, everything for people to
stderr; an error of ours is one message with its next step and its exit code, never a traceback.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from minite_diag.errors import MiniteDiagError
from minite_diag.report.words import visible

COLORS: Final = ("auto", "always", "never")
_VARIABLES: Final = {"NO_COLOR": "never", "FORCE_COLOR": "always"}
_quiet = ContextVar("quiet", default=False)
_no_progress = ContextVar("no_progress", default=False)


def _set_color(value: str | None) -> str | None:
    """Rich, and the processes of the engines, read colour from the environment."""
    if value is None:
        return None
    if value not in COLORS:
        near = difflib.get_close_matches(value, COLORS, n=1)
        raise typer.BadParameter(f"did you mean {near[0]!r}?" if near else f"one of {COLORS}")
    for variable in _VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update({name: "1" for name, when in _VARIABLES.items() if when == value})
    return value


def _switch(variable: ContextVar[bool]) -> Callable[[bool], bool]:
    def callback(value: bool) -> bool:
        # A command and the group above it have the same option: either place turns it on.
        variable.set(variable.get() or value)
        return value

    return callback


Color = Annotated[
    str | None,
    typer.Option(
        callback=_set_color,
        is_eager=True,
        envvar="MINITE_DIAG_COLOR",
        show_envvar=False,
        metavar="auto|always|never",
        autocompletion=lambda: list(COLORS),
        help="Colour on a terminal (auto; NO_COLOR is obeyed), always or never.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_switch(_quiet),
        is_eager=True,
        envvar="MINITE_DIAG_QUIET",
        show_envvar=False,
        help="Print errors and data only.",
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--no-progress",
        callback=_switch(_no_progress),
        is_eager=True,
        envvar="MINITE_DIAG_NO_PROGRESS",
        show_envvar=False,
        help="No progress lines.",
    ),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print each setting and its origin, and stop.")
]
TERMINAL_OPTIONS: Final = {
    "color": (Color, None),
    "quiet": (Quiet, False),
    "no_progress": (NoProgress, False),
    "show_config": (ShowConfig, False),
}
MIN_HELP: Final = 52
_CONTEXT: Final = "terminal_context"


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Register a command that also takes --color, --quiet, --no-progress and --show-config."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            # Typer gives a command one context: the function's own, if it asks for it.
            context = options[own] if own else options.pop(_CONTEXT)
            if options["show_config"]:
                show_config(context)
            return function(*args, **{k: v for k, v in options.items() if k not in hidden})

        hidden = TERMINAL_OPTIONS.keys()
        plain = inspect.signature(function, eval_str=True).parameters.values()
        own = next((p.name for p in plain if p.annotation is typer.Context), None)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            *plain,
            *(
                inspect.Parameter(key, keyword, default=value, annotation=kind)
                for key, (kind, value) in TERMINAL_OPTIONS.items()
            ),
        ]
        if own is None:
            parameters.append(inspect.Parameter(_CONTEXT, keyword, annotation=typer.Context))
        for parameter in parameters:
            _without_variable(parameter.annotation)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name)(run)
        return function

    return register


def _without_variable(annotation: Any) -> None:
    """Help that names a variable at every option can't be read; --show-config names them."""
    for item in getattr(annotation, "__metadata__", ()):
        item.show_envvar = False


def help_width() -> dict[str, int]:
    """Click's help is never narrower than 50 columns unless it is told so."""
    columns = shutil.get_terminal_size().columns
    return {"terminal_width": columns - 1} if columns < MIN_HELP else {}


def show_config(context: typer.Context) -> None:
    """Print each option of a command with its value and where that came from, and exit."""
    for parameter in context.command.params:
        name = parameter.name
        if name and name not in ("show_config", "help"):
            shown = name.replace("_", "-")
            typer.echo(f"{shown} = {context.params.get(name)!r}  ({_origin(context, parameter)})")
    raise typer.Exit


def _origin(context: typer.Context, parameter: Any) -> str:
    source = context.get_parameter_source(parameter.name)
    kind = source.name if source else "DEFAULT"
    if kind == "ENVIRONMENT":
        automatic = f"{context.auto_envvar_prefix}_{parameter.name.upper()}"
        return str(parameter.envvar or automatic)
    if kind == "DEFAULT_MAP":
        settings = context.find_root().obj
        return str(settings.file)
    return {"COMMANDLINE": "command line"}.get(kind, "default")


def reset() -> None:
    """Forget the options of an earlier command line in this process."""
    _quiet.set(False)
    _no_progress.set(False)


def console() -> Console:
    """Where people read: stderr, and nothing with --quiet."""
    return Console(stderr=True, quiet=_quiet.get())


def error_console() -> Console:
    """Where errors go: stderr, also with --quiet."""
    return Console(stderr=True)


def shows_progress() -> bool:
    """Whether progress lines are wanted."""
    return not (_quiet.get() or _no_progress.get())


def print_line(out: Console, text: str, style: str = "") -> None:
    """One line that is never wrapped: a path or command broken over two lines can't be copied."""
    shown = "\n".join(map(visible, text.split("\n")))
    out.print(shown, style=style, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """One progress line."""
    if shows_progress():
        print_line(console(), text, "dim")


@contextmanager
def reporting_errors(as_json: bool = False) -> Iterator[None]:
    """Print a MiniteDiagError (on stdout too with `as_json`) and exit with its code."""
    try:
        yield
    except MiniteDiagError as error:
        print_error(error)
        if as_json:
            record = {"message": error.message, "hint": error.hint}
            typer.echo(json.dumps({"schema": 1, "verdict": "error", "error": record}))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print_line(error_console(), "interrupted: what was captured is kept", "yellow")
        raise typer.Exit(130) from None


def print_error(error: MiniteDiagError) -> None:
    """`error:` and `next:` on stderr."""
    out = error_console()
    print_line(out, f"error: {error.message}", "red")
    if error.hint:
        print_line(out, f"next:  {error.hint}")
