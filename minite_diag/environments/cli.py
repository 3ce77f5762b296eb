"""`minite-diag env ...`: build the environment of an engine that can't share this one.

Imports no torch when it starts. The package's command line mounts `app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minite_diag.terminal import command, reporting_errors, say

app = typer.Typer(
    name="env",
    help="Environments of engines whose packages conflict with this one's.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """Environments of engines whose packages conflict with this one's."""


@command(app)
def create(
    engine: Annotated[str, typer.Argument(help="Engine, such as sglang.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Folder; default $MINITE_DIAG_ENVIRONMENTS/ENGINE, or one in the cache. "
            "`compare` looks there.",
        ),
    ] = None,
) -> None:
    """Build an engine's pinned environment, if it isn't there; prints its interpreter."""
    with reporting_errors():
        from minite_diag.environments import create as build

        typer.echo(build(engine, out, say))
