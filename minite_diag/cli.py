"""The command line: parse, call one stage, print, exit code.

Imports no torch when it starts; each command imports its stage. Data goes to stdout (`--json`),
everything for people to stderr. Exit codes: 0 pass or measured, 1 gate failed, 2 usage, 3 could
not measure or inconclusive, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from minite_diag import __version__
from minite_diag.bench.cli import app as bench_app
from minite_diag.errors import MiniteDiagError, UsageError

EXIT_CODES = {"measured": 0, "pass": 0, "fail": 1, "inconclusive": 3, "error": 3}

app = typer.Typer(
    name="minite-diag",
    help="Find, explain and close the execution gap between an RL learner and its sampler.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "MINITE_DIAG"},
)

app.add_typer(bench_app, name="bench")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"minite-diag {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Settings come from the command line, MINITE_DIAG_* variables, then a settings file."""
    from minite_diag.config import default_map, find_settings

    settings, file = find_settings(Path.cwd())
    commands = {
        name: {parameter.name for parameter in command.params if parameter.name}
        for name, command in context.command.commands.items()  # type: ignore[attr-defined]
    }
    context.default_map = default_map(settings, file, commands)


@app.command()
def compare(
    context: typer.Context,
    learner: Annotated[str, typer.Option(help="Engine that trains: NAME[:key=value,...].")] = "te",
    sampler: Annotated[
        list[str] | None, typer.Option(help="Engine that generates; repeat for several.")
    ] = None,
    model: Annotated[str, typer.Option(help="Checkpoint folder, or `demo` / `demo-moe`.")] = "demo",
    probes: Annotated[Path | None, typer.Option(help="JSONL of texts or token ids.")] = None,
    num_probes: Annotated[int | None, typer.Option(min=1, help="Use the first N only.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    quantize: Annotated[
        str, typer.Option(help="Which linears are NVFP4: preset or globs; `none` for no one.")
    ] = "default",
    export_recipe: Annotated[
        str, typer.Option(help="Arithmetic that makes the sampler's NVFP4 weights.")
    ] = "modelopt",
    layout: Annotated[str, typer.Option(help="modelopt or compressed-tensors.")] = "modelopt",
    modes: Annotated[str, typer.Option(help="score, sample, or both.")] = "score,sample",
    sample_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that the sampler decodes.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    sites: Annotated[
        list[str] | None, typer.Option(help="Glob of sites to keep, FQN or FQN:KIND; repeat.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Keep tensors of the first N.")] = None,
    stats_only: Annotated[
        bool, typer.Option("--stats-only", help="Keep digests and statistics, no tensors.")
    ] = False,
    capture_sample: Annotated[
        bool, typer.Option("--capture-sample", help="Keep tensors of sampled sequences too.")
    ] = False,
    max_disk: Annotated[
        str | None, typer.Option(help="Stop keeping tensors of an engine at this size, as 2GB.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for each engine.")] = 1800.0,
    python: Annotated[
        list[str] | None, typer.Option(help="Interpreter of an engine, as vllm=PATH; repeat.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run that was cut.")] = None,
    align: Annotated[
        list[str] | None, typer.Option(help="Alignment to apply, or `all`; repeat.")
    ] = None,
    gate: Annotated[str | None, typer.Option(help="Judge the run by this profile.")] = None,
    no_attribute: Annotated[
        bool, typer.Option("--no-attribute", help="Leave out the search for causes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print each setting and its origin, and stop.")
    ] = False,
) -> None:
    """Run one model in a learner and in samplers, and say where their bits part."""
    if show_config:
        _show_config(context)
    with _errors(as_json):
        from minite_diag.compare_command import CompareFlow
        from minite_diag.plan import CaptureSpec
        from minite_diag.prepare import CompareRequest, EngineRequest

        flow = CompareFlow(_stderr(), quiet=quiet)
        if resume is None:
            request = CompareRequest(
                learner=EngineRequest.parse(learner),
                samplers=tuple(EngineRequest.parse(name) for name in sampler or ["vllm"]),
                model=model,
                probes=probes,
                num_probes=num_probes,
                dtype=dtype,
                quantize=quantize,
                export_recipe=export_recipe,
                layout=layout,
                modes=tuple(part.strip() for part in modes.split(",") if part.strip()),
                sample_tokens=sample_tokens,
                seed=seed,
                timeout_s=timeout,
                capture=CaptureSpec(
                    sites=tuple(sites or ["*"]),
                    tokens=tokens,
                    stats_only=stats_only,
                    sample_tensors=capture_sample,
                    max_disk=parse_size(max_disk),
                ),
                pythons=_pythons(python or []),
                align=tuple(align or ()),
            )
            run = flow.prepare(request, out)
        else:
            run = resume
        summary = flow.finish(
            run, resume=resume is not None, profile=gate, attribute=not no_attribute
        )
        _emit(summary, as_json)


@app.command()
def attribute(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    live: Annotated[
        bool,
        typer.Option("--live", help="Run the engines again: legs, local errors, causal shares."),
    ] = False,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Bound of forward passes with --live.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Say where the gap of a stored run is born and why, with cause codes."""
    with _errors(as_json):
        from minite_diag.compare_command import CompareFlow

        found = CompareFlow(_stderr(), quiet=quiet).attribute(run, live=live, budget=budget)
        if as_json:
            typer.echo(json.dumps(found, indent=1))


@app.command()
def align(
    run: Annotated[Path | None, typer.Argument(help="Run directory of a compare.")] = None,
    name: Annotated[
        list[str] | None, typer.Option("--align", help="Alignment, or `all` (default); repeat.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List alignments, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run the same plan again with alignments added one by one: how far the gap closes."""
    with _errors(as_json):
        from minite_diag.alignments.base import known_alignments

        if list_all:
            for found in known_alignments().values():
                kind = "kernels" if found.kernels else "settings"
                typer.echo(f"{found.name:14} {kind:9} {', '.join(found.engines):14} {found.title}")
                for engine, how in found.engines.items():
                    typer.echo(f"{'':14} {'':9} {engine}: versions {how.versions}")
            raise typer.Exit
        if run is None:
            raise UsageError("no run directory", "minite-diag align RUN, or align --list")
        from minite_diag.compare_command import CompareFlow

        result = CompareFlow(_stderr(), quiet=quiet).align(run, name or [])
        if as_json:
            typer.echo(json.dumps(result, indent=1))
        raise typer.Exit(EXIT_CODES[result["after"]["verdict"]])


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="Cause code, such as MD102.")] = None,
) -> None:
    """What a cause is, how to confirm it, how to fix it; without a code, list all."""
    with _errors(False):
        from minite_diag.attribute.causes import CAUSES, page

        if code is None:
            for cause in CAUSES.values():
                typer.echo(f"{cause.code}  {cause.title}")
        else:
            typer.echo(page(code).rstrip())


@app.command()
def gate(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    profile: Annotated[
        str, typer.Option(help="bitwise, bf16-dense, bf16-moe, fp8, nvfp4.")
    ] = "nvfp4",
    mean_abs: Annotated[float | None, typer.Option(min=0.0, help="Other threshold.")] = None,
    k3_kl: Annotated[float | None, typer.Option(min=0.0, help="Other threshold.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Judge a stored run by thresholds: exit 0 pass, 1 fail, 3 inconclusive or error."""
    with _errors(as_json):
        from minite_diag.gate import check_gate, with_gate
        from minite_diag.report.console import print_gate
        from minite_diag.summary import summarize

        summary = summarize(run)
        overrides = {k: v for k, v in (("mean_abs", mean_abs), ("k3_kl", k3_kl)) if v is not None}
        summary = with_gate(summary, check_gate(run, summary, profile, overrides))
        print_gate(summary, _stderr())
        _emit(summary, as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File; default RUN/report.html.")
    ] = None,
) -> None:
    """Render the HTML report of a stored run."""
    with _errors(False):
        from minite_diag.report.html import write_report
        from minite_diag.summary import summarize

        typer.echo(write_report(run, summarize(run), out))


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Master checkpoint folder, `demo` or `demo-moe`.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the new checkpoint.")],
    recipe: Annotated[str, typer.Option(help="Arithmetic of the weights.")] = "modelopt",
    layout: Annotated[str, typer.Option(help="modelopt or compressed-tensors.")] = "modelopt",
    quantize: Annotated[str, typer.Option(help="Which linears: preset or globs.")] = "default",
    probes: Annotated[
        Path | None, typer.Option(help="JSONL that calibrates static activation scales.")
    ] = None,
) -> None:
    """Write the NVFP4 checkpoint that a sampler loads: the refit step of RL."""
    with _errors(False):
        from minite_diag.prepare import export_checkpoint

        written = export_checkpoint(model, out, recipe, layout, quantize, probes, _say(_stderr()))
        typer.echo(written)


@app.command()
def recipes() -> None:
    """List the arithmetics that quantizers and GEMMs of known engines compute."""
    with _errors(False):
        from minite_kernels.nvfp4.recipe import RECIPES

        for name, recipe in RECIPES.items():
            typer.echo(f"{name:24} {recipe.engine}")


def parse_size(text: str | None) -> int | None:
    """Bytes of `500MB`, `2GB`, `1TiB` or a plain number; raises UsageError otherwise."""
    if text is None:
        return None
    import re

    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise UsageError(f"size {text!r} is not understood", "write it as 500MB or 2GB")
    unit = match.group(2).upper()
    factor = 1024 ** " KMGT".index(unit or " ") if match.group(3) else units[unit]
    return int(float(match.group(1)) * factor)


def _pythons(items: list[str]) -> dict[str, str]:
    result = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not equals:
            raise UsageError(f"--python {item!r}", "write it as ENGINE=PATH, such as vllm=PATH")
        result[name] = path
    return result


def _stderr() -> Console:
    return Console(stderr=True)


def _print(console: Console, text: str, style: str = "") -> None:
    # Not wrapped: a path or command that is broken over two lines can't be copied.
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: _print(console, text, "dim")


def _emit(summary: dict[str, Any], as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    raise typer.Exit(EXIT_CODES[summary["verdict"]])


def _show_config(context: typer.Context) -> NoReturn:
    for parameter in context.command.params:
        if parameter.name and parameter.name not in ("show_config", "help"):
            source = context.get_parameter_source(parameter.name)
            origin = source.name.lower() if source else "default"
            typer.echo(f"{parameter.name} = {context.params[parameter.name]!r}  ({origin})")
    raise typer.Exit


class _errors:
    """Prints a MiniteDiagError as one message with its next step, and exits with its code."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MiniteDiagError):
            console = _stderr()
            _print(console, f"error: {error.message}", "red")
            if error.hint:
                _print(console, f"next:  {error.hint}")
            if self.as_json:
                record = {"message": error.message, "hint": error.hint}
                typer.echo(json.dumps({"schema": 1, "verdict": "error", "error": record}))
            raise typer.Exit(error.exit_code) from None
        if isinstance(error, KeyboardInterrupt):
            _stderr().print("interrupted: what was captured is kept", style="yellow")
            raise typer.Exit(130) from None


def main() -> None:
    """Console entry point."""
    try:
        app(prog_name="minite-diag")
    except MiniteDiagError as error:
        print(f"error: {error.message}\nnext:  {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
