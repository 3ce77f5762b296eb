"""The summary on a terminal.

Knows the summary object and Rich; no torch. Invariant: everything goes to the console it is given
(stderr when stdout carries JSON).
"""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minite_diag.report import words

MAX_CAUSES = 6
INDENT = "  "
NARROW = 60
"""Columns below which tables become lists and names stand above their text."""
STYLES = {"measured": "bold", "pass": "bold green", "fail": "bold red"}


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Verdict, gap, first divergence, worst sites, what ran, files, next command."""
    style = STYLES.get(summary["verdict"], "bold yellow")
    console.print(f"[{style}]{_plain(words.headline(summary))}[/]", highlight=False)
    model = summary["model"]
    notes = f" ({'; '.join(model['notes'])})" if model["notes"] else ""
    _line(console, "model", f"{model['name']}, {model['architecture']}, {model['format']}{notes}")
    _line(
        console,
        "quantized",
        f"{summary['quantize']['linears']} linears ({summary['quantize']['pattern']})"
        + (f", exported by recipe {summary['export_recipe']}" if summary["export_recipe"] else ""),
    )
    for engine in summary["engines"]:
        _line(console, engine["role"], f"{words.name_of(engine)}  {words.evidence(engine)}")
        if engine["silent_hooks"]:
            _line(console, "", f"{len(engine['silent_hooks'])} hooks never fired", "yellow")
        error = engine["error"]
        if error:
            _line(console, "", f"{error['message']} -> {error['hint']}", "red")
    for pair in summary["pairs"]:
        _print_pair(pair, console)
    for name, path in summary["files"].items():
        _line(console, name, path)
    _line(console, "next", summary["next"], "bold")


def _print_pair(pair: dict[str, Any], console: Console) -> None:
    learner, sampler = pair["learner"], pair["sampler"]
    console.print()
    console.print(
        f"[bold]{_plain(learner['label'] or learner['id'])} vs "
        f"{_plain(sampler['label'] or sampler['id'])}[/]",
        highlight=False,
    )
    _line(console, "gap", words.gap(pair))
    sample = pair["logprob"].get("sample")
    if sample:
        _line(
            console,
            "",
            f"KL(sampler || learner): k1 {words.number(sample['k1_kl'])}, "
            f"k3 {words.number(sample['k3_kl'])}; "
            f"mult_prob_error {words.number(sample['mult_prob_error'])}",
        )
    _line(console, "first split", words.divergence(pair))
    sites = pair["sites"]
    _line(
        console,
        "tensors",
        f"{sites['compared']} compared, {sites['bitwise_equal']} bitwise equal, "
        f"{sites['skipped']} skipped",
    )
    if pair["routing"]:
        lowest = pair["routing"]["lowest"]
        _line(
            console,
            "routing",
            f"{pair['routing']['agreement']:.1%} of tokens choose the same experts "
            f"(lowest {lowest['agreement']:.1%} at {lowest['site']})",
        )
    for cause in (pair["causes"] or [])[:MAX_CAUSES]:
        text = cause["text"] + words.worth(cause)
        _line(console, cause["code"], text, "bold" if cause["code"] < "MD2" else "")
    hidden = len(pair["causes"] or []) - MAX_CAUSES
    if hidden > 0:
        _line(console, "", f"{hidden} more causes in the report")
    if pair["causes"]:
        _line(console, "", f"minite-diag explain {pair['causes'][0]['code']}")
    for name, text in words.live_lines(pair["live"]) if pair["live"] else []:
        _line(console, name, text)
    if pair["worst"]:
        _print_worst(pair["worst"], console)


def _plain(text: str) -> str:
    """Text that is neither markup nor a terminal's escape sequence."""
    return escape(words.visible(text))


def _print_worst(worst: list[dict[str, Any]], console: Console) -> None:
    if console.width < NARROW:
        for site in worst:
            _line(
                console,
                f"{site['site']}:{site['kind']}",
                f"rel L2 {words.number(site['rel_l2'])} "
                f"(its input {words.number(site['input_rel_l2'])})",
            )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worst sites", overflow="fold")
    for heading in ("rel L2", "of its input", "bits equal"):
        table.add_column(heading, justify="right")
    for site in worst:
        table.add_row(
            _plain(f"{site['site']}:{site['kind']}"),
            words.number(site["rel_l2"]),
            words.number(site["input_rel_l2"]),
            "-" if site["bitwise_fraction"] is None else f"{site['bitwise_fraction']:.1%}",
        )
    console.print(table)


def _line(console: Console, name: str, text: str, style: str = "") -> None:
    """Name and text; on a narrow terminal the text goes under its name, wrapped at spaces."""
    text = words.visible(text)
    if console.width < NARROW:
        if name:
            console.print(f"[dim]{_plain(name)}[/]", highlight=False, soft_wrap=True)
        # Long words are left whole: a path that is broken over two lines can't be copied.
        width = console.width - len(INDENT)
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
            console.print(INDENT + line, style=style, highlight=False, markup=False, soft_wrap=True)
        return
    marked = f"[{style}]{_plain(text)}[/]" if style else _plain(text)
    console.print(f"[dim]{name:>11}[/]  {marked}", highlight=False, soft_wrap=True)


def print_gate(summary: dict[str, Any], console: Console) -> None:
    """The gate's verdict, each check behind it, and the notes."""
    gate = summary["gate"]
    style = STYLES.get(gate["verdict"], "bold yellow")
    console.print(
        f"[{style}]{_plain(gate['verdict'])}[/] (profile {_plain(gate['profile'])})",
        highlight=False,
    )
    shown = {words.check(check) for check in gate["checks"]}
    for reason in gate["reasons"]:
        if reason not in shown:
            _line(console, "", reason)
    for check in gate["checks"]:
        _line(console, "waived" if check["waived"] else check["verdict"], words.check(check))
        if check["waived"]:
            _line(console, "", f"{check['waived']['reason']}, until {check['waived']['expires']}")
    for note in gate["notes"]:
        _line(console, "note", note)


def print_ladder(result: dict[str, Any], console: Console) -> None:
    """One row per rung: gap, share closed, tensors equal, price; then what each rung changes.

    The gap is the mean absolute log-probability difference, `equal` counts tensors; time and memory
    are learner/sampler ratios to the first run, both hooked.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rung", no_wrap=True)
    for heading in ("sample", "score", "closed", "equal", "time", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rung in result["ladder"]:
        table.add_row(_plain(rung["rung"]), *words.rung_cells(rung))
    console.print(table)
    _print_changes(result["ladder"], console)
    for rung in result["ladder"]:
        for error in rung["error"]:
            _line(console, rung["rung"], f"{error['message']} -> {error['hint']}", "red")
    _line(console, "last", words.last_native(result["ladder"]))
    for ops in result["ladder"][-1]["ops"]:
        kept = {k: v for k, v in ops.items() if k != "engine"}
        text = "; ".join(f"{status}: {', '.join(names)}" for status, names in kept.items())
        _line(console, ops["engine"], text)
    for row in result["bare_price"] or []:
        _line(console, "price", f"{row['engine']}: {words.bare_price(row)}")
    for row in result["left_out"] or []:
        _line(console, "without", f"{row['left_out']}: {words.left_out(row)}")


def _print_changes(ladder: list[dict[str, Any]], console: Console) -> None:
    """Ops are counted here, learner/sampler; the report names them."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("rung", "side", "ours", "native"):
        table.add_column(heading, no_wrap=True)
    table.add_column("changed", overflow="fold")
    for rung in ladder:
        sides, changed, _, _ = words.rung_changes(rung)
        ours, native = words.op_counts(rung, "replaced"), words.op_counts(rung, "native")
        side = "both" if sides == words.BOTH else sides
        what = changed.replace(f"{words.BOTH}: ", "")
        table.add_row(*map(_plain, (rung["rung"], side, ours, native, what)))
    console.print(table)
    backward = [rung for rung in ladder if rung.get("backward")]
    for said in dict.fromkeys(rung["backward"] for rung in backward):
        rungs = ", ".join(rung["rung"] for rung in backward if rung["backward"] == said)
        _line(console, "backward", f"{said}: {rungs}")


def print_doctor(found: dict[str, Any], console: Console) -> None:
    """One block an engine: what it would be, what computes NVFP4, problems with their fixes."""
    for engine in found["engines"]:
        style = {"ok": "green", "problem": "yellow", "missing": "red"}[engine["status"]]
        what = " ".join(filter(None, (engine["label"], engine["version"])))
        where = f" ({engine['device']})" if engine["device"] else ""
        console.print(
            f"[bold]{escape(engine['engine'])}[/] [{style}]{engine['status']}[/] "
            f"{escape(what + where)}",
            highlight=False,
            soft_wrap=True,
        )
        if engine["python"]:
            _line(console, "python", engine["python"])
        for kernel in engine["kernels"]:
            note = f" ({kernel['note']})" if kernel["note"] else ""
            _line(console, kernel["op"], f"{kernel['status']}: {kernel['impl']}{note}")
        for problem in engine["problems"]:
            _line(console, "problem", problem["text"], style)
            _line(console, "next", problem["fix"], "bold")
    for row in found["environment"]:
        text = f"{row['name']}={row['value']} (in {', '.join(row['engines'])})"
        _line(console, row["side"], text)
