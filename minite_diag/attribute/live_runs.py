"""One engine's live session with a budget: every forward is counted under the step it served.

Knows sessions and budgets; no metric. Invariant: a job that doesn't fit the budget doesn't run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minite_diag.capture.live import ForwardBudget, Job, JobResult
from minite_diag.capture.runner import Report
from minite_diag.plan import EngineSpec


class Session(Protocol):
    """What serves jobs: a LiveSession, or an engine in this process."""

    @property
    def spec(self) -> EngineSpec:
        """The engine."""

    @property
    def report(self) -> Report:
        """Where progress goes."""

    def run(self, job: Job) -> JobResult:
        """Run one job."""


class BudgetSpent(Exception):
    """The next job would pass the budget; the text says by how much."""


@dataclass
class LiveRuns:
    """Runs jobs of one engine for one step after the other."""

    session: Session
    budget: ForwardBudget

    def run(self, step: str, job: Job) -> JobResult:
        """Run a job; raises BudgetSpent before it if it doesn't fit."""
        if not self.budget.allows(job.forwards):
            raise BudgetSpent(
                f"{job.forwards} more forwards pass the budget of {self.budget.limit} "
                f"({self.budget.total} are done)"
            )
        result = self.session.run(job)
        spec = self.session.spec
        self.budget.spend(spec.id, step, result.forwards)
        self.session.report(
            spec, {"event": "live", "job": job.name, "forwards": self.budget.total, "step": step}
        )
        return result
