"""`minite-diag bench ...`: a table for people on stderr, rows on stdout with `--json`.

Imports no torch when it starts. The package's command line mounts `app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from minite_diag.errors import MiniteDiagError

if TYPE_CHECKING:
    from minite_diag.bench.measurement import Measurement

app = typer.Typer(
    name="bench",
    help="Measure what the tool costs on this machine, as ratios of one run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
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
    with _errors():
        from minite_diag.bench.capture import bench_capture

        rows = [
            row
            for name in model or ["demo-moe", "demo"]
            for row in bench_capture(name, engine, tokens, repeats, _say)
        ]
    _show(rows, "bench capture", as_json)


@app.command()
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
    with _errors():
        from minite_diag.bench.compare import bench_compare

        rows = bench_compare(run, peer, repeats, peer_bytes, _say)
    _show(rows, "bench compare", as_json)


@app.command()
def kernels(
    name: Annotated[
        list[str] | None,
        typer.Option(help="quantizer, dense, moe or update; repeat. Default: all of them."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows on stdout.")] = False,
) -> None:
    """Every kernel on this machine's device against named peers, in one run."""
    with _errors():
        from minite_diag.bench.kernels import bench_kernels

        rows = bench_kernels(device, name, _say)
    _show(rows, "bench kernels", as_json)


def _say(text: str) -> None:
    console = Console(stderr=True)
    console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def _show(rows: list[Measurement], title: str, as_json: bool) -> None:
    from minite_diag.bench.measurement import print_table, to_json

    print_table(rows, title, Console(stderr=True))
    if as_json:
        typer.echo(to_json(rows))


class _errors:  # noqa: N801
    """Prints a MiniteDiagError as one message with its next step, and exits with its code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MiniteDiagError):
            console = Console(stderr=True)
            console.print(f"error: {error.message}", style="red", markup=False, soft_wrap=True)
            if error.hint:
                console.print(f"next:  {error.hint}", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(error.exit_code) from None
