"""The stages of `compare` in order, with what a person sees meanwhile.

Knows the stages and Rich; computes nothing. Invariant: whatever a stage left on disk stays there
when a later one fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from minite_diag.capture.runner import CaptureResult, capture
from minite_diag.gate import GateRequest
from minite_diag.plan import EngineSpec, read_plan
from minite_diag.prepare import CompareRequest, make_run_folder, prepare
from minite_diag.report.console import print_gate, print_summary
from minite_diag.terminal import error_console, print_line


class CompareFlow:
    """plan -> capture -> compare -> summary, report, gate."""

    def __init__(self, console: Console, *, progress: bool) -> None:
        self.console = console
        self.progress = progress

    def say(self, text: str) -> None:
        """One progress line, if they are wanted."""
        if self.progress:
            print_line(self.console, text, "dim")

    def prepare(self, request: CompareRequest, out: Path | None) -> Path:
        """Make the run directory and the plan; returns the directory."""
        run = make_run_folder(out, request)
        plan = prepare(request, run, self.say)
        self.say(
            f"run {run}: {len(plan.probes)} probes, {len(plan.engines)} engines, "
            f"at most {plan.capture.expected_bytes / 1e9:.2f} GB expected"
        )
        return run

    def finish(
        self, run: Path, *, resume: bool, gate: GateRequest | None, attribute: bool
    ) -> dict[str, Any]:
        """Capture what is missing, compare, attribute, summarize; returns the summary object."""
        from minite_diag.compare import compare
        from minite_diag.gate.evidence import check_site_globs

        plan = read_plan(run)
        results = capture(plan, run, self._report, resume=resume)
        for result in results:
            self._say_result(result)
        self.say("comparing")
        compare(run)
        check_site_globs(run, plan)
        return self.conclude(run, gate=gate, attribute=attribute)

    def conclude(self, run: Path, *, gate: GateRequest | None, attribute: bool) -> dict[str, Any]:
        """What follows a comparison: causes, summary, gate, report; returns the summary object."""
        from minite_diag.gate import check_gate, with_gate
        from minite_diag.report.html import write_report
        from minite_diag.stored_summary import read_summary

        if attribute:
            self.say("searching for causes")
            self._attribute(run, live=False, budget=None, patches=[])
        summary = read_summary(run)
        if gate is not None:
            summary = with_gate(summary, check_gate(run, summary, gate))
        write_report(run, summary, None)
        print_summary(summary, self.console)
        if gate is not None:
            self.console.print()
            print_gate(summary, self.console)
        return summary

    def attribute(
        self, run: Path, *, live: bool, budget: int | None, patches: list[str]
    ) -> dict[str, Any]:
        """Attribute a stored run and render its report again; returns the attribution object."""
        from minite_diag.report.html import write_report
        from minite_diag.stored_summary import read_summary

        found = self._attribute(run, live=live, budget=budget, patches=patches)
        summary = read_summary(run)
        write_report(run, summary, None)
        print_summary(summary, self.console)
        return found

    def align(self, run: Path, names: list[str], *, without: bool, price: bool) -> dict[str, Any]:
        """Climb the alignment ladder of a stored run, report anew; returns the align object."""
        from minite_diag.align import align
        from minite_diag.report.console import print_ladder
        from minite_diag.report.html import write_report
        from minite_diag.stored_summary import read_summary

        result = align(run, names, self.say, self._report, without=without, price=price)
        write_report(run, read_summary(run), None)
        print_ladder(result, self.console)
        return result

    def _attribute(
        self, run: Path, *, live: bool, budget: int | None, patches: list[str]
    ) -> dict[str, Any]:
        from minite_diag.attribute.stage import attribute

        return attribute(run, self._report, live=live, budget=budget, patches=patches)

    def _report(self, spec: EngineSpec, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "loaded":
            self.say(f"{spec.id}: {event['label']} loaded in {event['seconds']:.0f} s")
        elif kind == "sequence":
            self.say(f"{spec.id}: {event['mode']} {event['probe']} ({event['done']}/{event['of']})")
        elif kind == "live":
            self.say(f"{spec.id}: {event['job']} ({event['forwards']} forwards)")
        elif kind == "kept":
            self.say(f"{spec.id}: kept from before")

    def _say_result(self, result: CaptureResult) -> None:
        if result.status != "error":
            return
        for name, text in (
            ("error:", f"{result.engine_id}: {result.message}"),
            ("next: ", result.hint),
            ("log:  ", result.log),
        ):
            print_line(error_console(), f"{name} {text}")
