"""The command line: parse, call one stage, print, exit code.

Imports no torch when it starts; each command imports its stage. Data goes to stdout (`--json`),
everything for people to stderr. Exit codes: 0 pass or measured, 1 gate failed, 2 usage, 3 could
not measure or inconclusive, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from minite_diag import __version__
from minite_diag.bench.cli import app as bench_app
from minite_diag.environments.cli import app as env_app
from minite_diag.errors import MiniteDiagError, UsageError
from minite_diag.terminal import (
    Color,
    NoProgress,
    Quiet,
    command,
    console,
    error_console,
    help_width,
    print_error,
    print_line,
    reporting_errors,
    reset,
    say,
    shows_progress,
)

EXIT_CODES = {"measured": 0, "pass": 0, "fail": 1, "inconclusive": 3, "error": 3}

app = typer.Typer(
    name="minite-diag",
    help="Find, explain and close the execution gap between an RL learner and its sampler.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Each option can be set by a variable, such as MINITE_DIAG_COMPARE_SEED, or in minite.toml; "
    "COMMAND --show-config says where each value comes from.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "MINITE_DIAG",
        **help_width(),
    },
)

app.add_typer(bench_app, name="bench")
app.add_typer(env_app, name="env")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"minite-diag {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            show_envvar=False,
            help="Print the version.",
        ),
    ] = False,
    color: Color = None,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> None:
    """Settings come from the command line, MINITE_DIAG_* variables, then a settings file."""
    from minite_diag.config import default_map, find_settings, unknown_variables

    settings = find_settings(Path.cwd())
    commands = _option_names(context.command)
    context.default_map = default_map(settings, commands)
    context.obj = settings
    for name, near in unknown_variables(os.environ, commands):
        hint = f"; did you mean {near}?" if near else ""
        print_line(console(), f"warning: {name} is no setting{hint}", "yellow")


def _option_names(group: Any, prefix: str = "") -> dict[str, set[str]]:
    """Names of the options of each command; "" stands for the group itself."""
    names = {prefix: {parameter.name for parameter in group.params if parameter.name}}
    for name, inner in getattr(group, "commands", {}).items():
        names |= _option_names(inner, f"{prefix} {name}".strip())
    return names


def _profile_names() -> list[str]:
    from minite_diag.gate.limits import PROFILES

    return list(PROFILES)


def _format_names() -> list[str]:
    from minite_diag.outputs import FORMATS

    return list(FORMATS)


def _alignment_names() -> list[str]:
    from minite_diag.alignments.base import known_alignments

    return ["all", *known_alignments()]


def _cause_codes() -> list[str]:
    from minite_diag.attribute.causes import CAUSES

    return list(CAUSES)


def _engine_names() -> list[str]:
    from minite_diag.engines.registry import engine_targets

    return sorted(engine_targets())


AsJson = Annotated[bool, typer.Option("--json", help="Print the result on stdout.")]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help="text, json, junit, sarif, github or markdown; repeat with -o.",
        autocompletion=_format_names,
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option("-o", "--out", help="File of a --format (its suffix is enough), - is stdout."),
]


@command(app)
def compare(
    context: typer.Context,
    learner: Annotated[
        str,
        typer.Option(
            help="Engine that trains: NAME[:key=value,...].", autocompletion=_engine_names
        ),
    ] = "te",
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine that generates; repeat for several.", autocompletion=_engine_names
        ),
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
        list[str] | None,
        typer.Option(help="Alignment to apply, or `all`; repeat.", autocompletion=_alignment_names),
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(help="Judge the run by this profile.", autocompletion=_profile_names),
    ] = None,
    no_attribute: Annotated[
        bool, typer.Option("--no-attribute", help="Leave out the search for causes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Run one model in a learner and in samplers, and say where their bits part."""
    with reporting_errors(as_json):
        from minite_diag.compare_command import CompareFlow
        from minite_diag.plan import CaptureSpec
        from minite_diag.prepare import CompareRequest, EngineRequest

        request_gate = _gate_request(context, gate)
        flow = CompareFlow(console(), progress=shows_progress())
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
            run,
            resume=resume is not None,
            gate=request_gate,
            attribute=not no_attribute,
        )
        _emit(summary, as_json)


@command(app)
def attribute(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    live: Annotated[
        bool,
        typer.Option("--live", help="Run the engines again: legs, local errors, causal shares."),
    ] = False,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Bound of forward passes with --live.")
    ] = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(help="With --live: glob of sites whose own share is measured; repeat."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Say where the gap of a stored run is born and why, with cause codes."""
    with reporting_errors(as_json):
        from minite_diag.compare_command import CompareFlow

        if patch and not live:
            raise UsageError("--patch runs the engines again", "add --live")
        found = CompareFlow(console(), progress=shows_progress()).attribute(
            run, live=live, budget=budget, patches=patch or []
        )
        if as_json:
            typer.echo(json.dumps(found, indent=1))


@command(app)
def align(
    run: Annotated[Path | None, typer.Argument(help="Run directory of a compare.")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--align",
            help="Alignment, or `all` (default); repeat.",
            autocompletion=_alignment_names,
        ),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List alignments, and stop.")] = False,
    leave_one_out: Annotated[
        bool,
        typer.Option("--leave-one-out", help="Then leave each out: is the gap attributed to it?"),
    ] = False,
    price: Annotated[
        bool, typer.Option("--price", help="Then time both engines without hooks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Run the same plan again with alignments added one by one: how far the gap closes."""
    with reporting_errors(as_json):
        from minite_diag.alignments.base import known_alignments, resolve_alignments

        if list_all:
            for found in known_alignments().values():
                kind = "kernels" if found.kernels else "settings"
                typer.echo(f"{found.name:18} {kind:9} {', '.join(found.engines):22} {found.title}")
                for engine, how in found.engines.items():
                    device = f", {how.device}" if how.device else ""
                    typer.echo(f"{'':18} {'':9} {engine}: versions {how.versions}{device}")
            raise typer.Exit
        if run is None:
            raise UsageError("no run directory", "minite-diag align RUN, or align --list")
        resolve_alignments(name or [])
        from minite_diag.compare_command import CompareFlow

        result = CompareFlow(console(), progress=shows_progress()).align(
            run, name or [], without=leave_one_out, price=price
        )
        if as_json:
            typer.echo(json.dumps(result, indent=1))
        raise typer.Exit(EXIT_CODES[result["after"]["verdict"]])


@command(app)
def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="Cause code, such as MD102.", autocompletion=_cause_codes),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory: what it measured, and its engines' fixes.")
    ] = None,
) -> None:
    """What a cause is, how to confirm it, how to fix it; without a code, list all."""
    with reporting_errors():
        from minite_diag.attribute.causes import CAUSES, page

        if code is None:
            for cause in CAUSES.values():
                typer.echo(f"{cause.code}  {cause.title}")
        elif run is None:
            typer.echo(page(code).rstrip())
        else:
            from minite_diag.attribute.explain import explain_in_run

            typer.echo(explain_in_run(run, code))


@command(app)
def gate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    profile: Annotated[
        str,
        typer.Option(
            help="bitwise, bf16-dense, bf16-moe, fp8 or nvfp4.", autocompletion=_profile_names
        ),
    ] = "nvfp4",
    limit: Annotated[
        list[str] | None,
        typer.Option(help="METRIC=VALUE[..WARN][@SITE-GLOB] beside or instead; repeat."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="JSON file of what was reached before: no worse than that.")
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write what is better into the file.")
    ] = False,
    format: Formats = None,
    out: Outputs = None,
    as_json: AsJson = False,
) -> None:
    """Judge a stored run by thresholds: exit 0 pass, 1 fail, 3 inconclusive or error."""
    with reporting_errors(as_json):
        from minite_diag.gate import GateRequest, check_gate, parse_limit, with_gate
        from minite_diag.report.console import print_gate
        from minite_diag.stored_summary import read_summary

        if update_baseline and baseline is None:
            raise UsageError("--update-baseline without a file", "add --baseline FILE")
        targets = _targets(format, out, as_json)
        request = GateRequest(
            profile,
            tuple(parse_limit(text) for text in limit or ()),
            baseline,
            update_baseline,
            _waivers(context),
        )
        summary = read_summary(run)
        summary = with_gate(summary, check_gate(run, summary, request))
        if not any(file == "-" for _, file in targets):
            print_gate(summary, console())
        _write(summary, targets)
        raise typer.Exit(EXIT_CODES[summary["verdict"]])


@command(app)
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    other: Annotated[
        Path | None, typer.Argument(help="A later run: report what changed from RUN to it.")
    ] = None,
    format: Formats = None,
    out: Outputs = None,
    as_json: AsJson = False,
) -> None:
    """Render a stored run (default RUN/report.html), or the change between two runs."""
    with reporting_errors(as_json):
        if other is not None:
            from minite_diag.change import compare_runs
            from minite_diag.outputs.change import FORMATS, render_change

            change = compare_runs(run, other)
            for name, file in _targets(format, out, as_json, FORMATS) or [("text", "-")]:
                _put(render_change(change, name), file)
            return
        from minite_diag.stored_summary import read_summary

        summary = read_summary(run)
        if format or as_json or any(not file.endswith(".html") for file in out or ()):
            _write(summary, _targets(format, out, as_json))
            raise typer.Exit(EXIT_CODES[summary["verdict"]])
        from minite_diag.report.html import write_report

        for file in out or [str(run / "report.html")]:
            typer.echo(write_report(run, summary, Path(file)))


@command(app)
def repro(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    site: Annotated[
        str | None, typer.Option(help="FQN:KIND; default: where the bits first part.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder; default RUN/repro-SITE.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out probe names and token positions.")
    ] = False,
) -> None:
    """Write the operands of one site and a script that shows its mismatch with torch alone."""
    with reporting_errors():
        from minite_diag.repro import write_bundle

        bundle = write_bundle(run, site, out, redact=redact)
        say(f"{bundle.mismatches} of {bundle.elements} elements of {bundle.site} differ")
        typer.echo(bundle.folder)


@command(app)
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
    with reporting_errors():
        from minite_diag.prepare import export_checkpoint

        written = export_checkpoint(model, out, recipe, layout, quantize, probes, say)
        typer.echo(written)


@command(app, name="import")
def import_(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="JSONL with both sides: token_ids, learner_, sampler_logprobs a line."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="New run directory.")] = None,
    learner: Annotated[
        Path | None, typer.Option(help="Folder of tensors that the learner dumped.")
    ] = None,
    sampler: Annotated[
        list[Path] | None, typer.Option(help="Folder of tensors that a sampler dumped; repeat.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run whose other engines are kept; it isn't changed.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder: head counts of fused modules.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="logprobs-jsonl, sharded, te-dumps or sglang-dumper; default: looked up."
        ),
    ] = None,
    gate: Annotated[str | None, typer.Option(help="Judge it by this profile.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Make a run of traces from outside: logged log-probabilities, or folders of dumped tensors."""
    with reporting_errors(as_json):
        from minite_diag.compare_command import CompareFlow
        from minite_diag.external.run import ImportRequest, import_traces

        if out is None:
            raise UsageError("no folder for the run", "add --out RUN")
        request = ImportRequest(file, learner, tuple(sampler or ()), run, model, format)
        asked = _gate_request(context, gate)
        import_traces(request, out, say)
        flow = CompareFlow(console(), progress=shows_progress())
        _emit(flow.conclude(out, gate=asked, attribute=True), as_json)


@command(app)
def doctor(
    engines: Annotated[
        list[str] | None, typer.Argument(help="Engines to look at; all without a name.")
    ] = None,
    python: Annotated[
        list[str] | None, typer.Option(help="Interpreter of an engine, as vllm=PATH; repeat.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Which engines run here, with which kernels; what changes bits; what to correct and how."""
    with reporting_errors(as_json):
        from minite_diag.doctor import examine
        from minite_diag.report.console import print_doctor

        found = examine(engines or [], _pythons(python or []), say)
        print_doctor(found, error_console() if as_json else console())
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        raise typer.Exit(EXIT_CODES[found["verdict"]])


@command(app)
def recipes() -> None:
    """List the arithmetics that quantizers and GEMMs of known engines compute."""
    with reporting_errors():
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


def _emit(summary: dict[str, Any], as_json: bool) -> NoReturn:
    if as_json:
        _write(summary, [("json", "-")])
    raise typer.Exit(EXIT_CODES[summary["verdict"]])


def _targets(
    formats: list[str] | None,
    out: list[str] | None,
    as_json: bool,
    known: Iterable[str] | None = None,
) -> list[tuple[str, str]]:
    """(format, file) of what was asked for; `--json` is `--format json` on stdout."""
    from minite_diag.outputs import plan_outputs

    targets = plan_outputs(formats or [], out or [], known)
    return [*targets, ("json", "-")] if as_json and ("json", "-") not in targets else targets


def _write(summary: dict[str, Any], targets: list[tuple[str, str]]) -> None:
    from minite_diag.outputs import render

    for name, file in targets:
        _put(render(summary, name), file)


def _put(text: str, file: str) -> None:
    if file == "-":
        typer.echo(text, nl=False)
    else:
        from minite_diag.outputs import write_output

        write_output(text, file)
        say(f"wrote {file}")


def _gate_request(context: typer.Context, profile: str | None) -> Any:
    """What `--gate PROFILE` asks; checked before anything runs."""
    if profile is None:
        return None
    from minite_diag.gate import GateRequest, get_profile

    return GateRequest(get_profile(profile).name, waivers=_waivers(context))


def _waivers(context: typer.Context) -> tuple[Any, ...]:
    from minite_diag.gate.waivers import read_waivers

    settings = context.find_root().obj
    return tuple(read_waivers(settings.waivers, settings.file))


def main() -> None:
    """Console entry point."""
    reset()
    try:
        app(prog_name="minite-diag")
    except MiniteDiagError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
