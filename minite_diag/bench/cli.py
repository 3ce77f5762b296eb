"""`minite-diag bench ...`: a table for people on stderr, rows on stdout with `--json`.

Imports no torch when it starts. The package's command line mounts `app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minite_diag.terminal import command, console, reporting_errors, say

if TYPE_CHECKING:
    from minite_diag.bench.measurement import Measurement

app = typer.Typer(
    name="bench",
    help="Measure what the tool costs on this machine, as ratios of one run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@command(app)
def capture(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint folder, `demo` or `demo-moe`; repeat. Default: both demos."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine that runs in this process.")] = "hf",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of one forward.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Forwards of each kind.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows on stdout.")] = False,
) -> None:
    """Hooked against bare forward: time with full tensors and statistics only, extra memory."""
    with reporting_errors():
        from minite_diag.bench.capture import bench_capture

        rows = [
            row
            for name in model or ["demo-moe", "demo"]
            for row in bench_capture(name, engine, tokens, repeats, say)
        ]
    _show(rows, "bench capture", as_json)


@command(app)
def compare(
    run: Annotated[Path, typer.Argument(help="Run directory with captured tensors.")],
    peer: Annotated[
        Path | None,
        typer.Option(help="Folder into which sglang was installed, for its comparator."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is run.")] = 3,
    peer_bytes: Annotated[
        int, typer.Option(min=1, help="At most so many bytes of tensors for the peer.")
    ] = 256 << 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows on stdout.")] = False,
) -> None:
    """The compare stage against a plain read of its files and against SGLang's comparator."""
    with reporting_errors():
        from minite_diag.bench.compare import bench_compare

        rows = bench_compare(run, peer, repeats, peer_bytes, say)
    _show(rows, "bench compare", as_json)


@command(app)
def kernels(
    name: Annotated[
        list[str] | None,
        typer.Option(help="quantizer, dense, moe, bounds or update; repeat. Default: all of them."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows on stdout.")] = False,
) -> None:
    """Every kernel on this machine's device against named peers, in one run."""
    with reporting_errors():
        from minite_diag.bench.kernels import bench_kernels

        rows = bench_kernels(device, name, say)
    _show(rows, "bench kernels", as_json)


def _show(rows: list[Measurement], title: str, as_json: bool) -> None:
    from minite_diag.bench.measurement import print_table, to_json

    print_table(rows, title, console())
    if as_json:
        typer.echo(to_json(rows))
