"""The live half of attribution: engines run again, with interventions.

For each engine its legs; for each learner-sampler pair the local error of every op, causal shares
and the routing counterfactual. Imports no torch until it runs. Invariant: a step that failed or
didn't fit the budget is in `errors` or `skipped`, and the rest is still measured.

The object::

    schema    1
    legs      one row per engine and leg
    noise     engine -> the worst leg's mean_abs and max_abs
    local     one row per pair and site
    causal    one record per pair
    routing   one record per pair with a router
    forwards  total, budget, by engine, by step
    seconds, skipped, errors
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minite_diag.attribute.effects import noise_floor
from minite_diag.attribute.live_runs import BudgetSpent, LiveRuns, Session
from minite_diag.attribute.record import read_attribution
from minite_diag.capture import runner
from minite_diag.capture.live import ForwardBudget, LiveSession, SequenceSpec, sequences_of
from minite_diag.errors import MiniteDiagError
from minite_diag.plan import EngineSpec, Plan, read_plan

SCHEMA: Final = 1
LEG_SEQUENCES: Final = 2
CAUSAL_SEQUENCES: Final = 2
"""Of each mode: causal shares need some fifty runs."""

if TYPE_CHECKING:
    from minite_diag.attribute.causal import OperandExperiment

OpenSession = Callable[[Path, str, runner.Report], AbstractContextManager[Session]]


def attribute_live(
    run: Path,
    report: runner.Report,
    *,
    budget: int | None = None,
    engines: Sequence[str] | None = None,
    open_session: OpenSession = LiveSession,
    patches: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the engines of a captured and compared run again; returns the object above.

    `budget` bounds the forwards (one sequence through one model); `engines` limits the samplers;
    `open_session` starts an engine, by default in a process of its own; `patches` are site globs
    whose own share is measured too.
    """
    attribution = _Attribution(run, report, ForwardBudget(budget), open_session)
    attribution.patches = patches
    return attribution.all(engines)


class _Attribution:
    def __init__(
        self, run: Path, report: runner.Report, budget: ForwardBudget, open_session: OpenSession
    ) -> None:
        self.run, self.report, self.budget = run, report, budget
        self.patches: Sequence[str] = ()
        self.plan: Plan = read_plan(run)
        self.open_session = open_session
        self.found: dict[str, Any] = {
            "schema": SCHEMA,
            "legs": [],
            "noise": {},
            "local": [],
            "causal": [],
            "routing": [],
            "forwards": {},
            "seconds": 0.0,
            "skipped": [],
            "errors": [],
        }

    def all(self, engines: Sequence[str] | None) -> dict[str, Any]:
        """Learner first: its noise counts in every verdict."""
        began = time.monotonic()
        with runner._termination_as_interrupt():
            for spec in (self.plan.learner, *self.plan.samplers):
                if spec.role == "learner" or engines is None or spec.id in engines:
                    self._engine(spec)
        self.found["seconds"] = time.monotonic() - began
        self.found["forwards"] = {
            "total": self.budget.total,
            "budget": self.budget.limit,
            "by_engine": self.budget.by_engine,
            "by_step": self.budget.by_step,
        }
        return self.found

    def _engine(self, spec: EngineSpec) -> None:
        try:
            if self.open_session is LiveSession:
                # First: it costs two forwards, and causal shares may spend the budget.
                self._production(spec)
            with self.open_session(self.run, spec.id, self.report) as session:
                runs = LiveRuns(session, self.budget)
                self._legs(runs)
                if spec.role == "sampler":
                    self._pair(runs)
        except BudgetSpent as spent:
            self._skip("pair", spec.id, str(spent))
        except MiniteDiagError as error:
            self.found["errors"].append(
                {
                    "engine": spec.id,
                    "message": error.message,
                    "hint": error.hint,
                    "log": str(self.run / f"live-{spec.id}.log"),
                }
            )

    def _production(self, spec: EngineSpec) -> None:
        """The engine once more, as a service runs it: what a capture's settings change."""
        from minite_diag.attribute.legs import leg_row, measure_production, worst_legs
        from minite_diag.engines.registry import load_engine_class
        from minite_diag.trace.store import Trace

        options = load_engine_class(spec.engine).production_options
        if not options:
            return
        tokens = Trace(self.run / "traces" / spec.id).tokens
        keys = zip(tokens["mode"], tokens["source"], tokens["probe"], strict=True)
        score = [key for key in dict.fromkeys(keys) if key[0] == "score"][:LEG_SEQUENCES]
        if not score:
            return
        if not self.budget.allows(len(score)):
            reason = f"the budget of {self.budget.limit} forwards is spent"
            self.found["legs"].append(
                leg_row(spec.id, "production", "in production settings", reason)
            )
            self._skip("leg production", spec.id, reason)
            return
        try:
            with LiveSession(self.run, spec.id, self.report, options) as session:
                runs = LiveRuns(session, self.budget)
                row = measure_production(runs, tokens, self._sequences(score))
        except MiniteDiagError as error:
            row = leg_row(spec.id, "production", "in production settings", error.message)
        self.found["legs"].append(row)
        self.found["noise"] = worst_legs(self.found["legs"])
        if row["status"] == "skipped":
            self._skip("leg production", spec.id, row["reason"])

    def _skip(self, step: str, engine: str, reason: str) -> None:
        self.found["skipped"].append({"step": step, "engine": engine, "reason": reason})

    def _legs(self, runs: LiveRuns) -> None:
        from minite_diag.attribute.legs import measure_legs, worst_legs
        from minite_diag.trace.store import Trace

        engine = runs.session.spec.id
        tokens = Trace(self.run / "traces" / engine).tokens
        keys = list(
            dict.fromkeys(zip(tokens["mode"], tokens["source"], tokens["probe"], strict=True))
        )
        score = [key for key in keys if key[0] == "score"][:LEG_SEQUENCES]
        own = [key for key in keys if key[1] == engine][:LEG_SEQUENCES]
        if not score:
            self._skip("legs", engine, "the run has no teacher-forced probe of this engine")
            return
        rows = measure_legs(
            runs, tokens, self._sequences(score), self._sequences(own), self.plan.seed
        )
        self.found["legs"] += rows
        self.found["noise"] = worst_legs(self.found["legs"])
        for row in rows:
            if row["status"] == "skipped":
                self._skip(f"leg {row['leg']}", engine, row["reason"])

    def _sequences(self, keys: list[tuple[str, str, str]]) -> list[SequenceSpec]:
        return sequences_of(self.run, keys)

    def _pair(self, runs: LiveRuns) -> None:
        from minite_diag.attribute.causal import Experiment, measure_shares
        from minite_diag.attribute.counterfactual import replay_routing
        from minite_diag.attribute.gap import stored_logprobs
        from minite_diag.attribute.local_error import layer_outputs, measure_local, patched_sites
        from minite_diag.compare import Side
        from minite_diag.trace.store import Trace

        learner, target = self.plan.learner.id, runs.session.spec.id
        baseline = Side.of(Trace(self.run / "traces" / learner))
        sampler = Side.of(Trace(self.run / "traces" / target))
        keys = [
            key
            for key in baseline.sites
            if (key.mode == "score" or key.source == target) and patched_sites(baseline, [key])
        ]
        if not keys:
            self._skip("pair", target, f"{learner} captured no tensors of any sequence")
            return
        sequences = self._sequences([(key.mode, key.source, key.probe) for key in keys])
        local = measure_local(
            runs,
            baseline,
            sampler,
            sequences,
            self._stored_rows(target),
            self.plan.capture.sites,
        )
        try:
            self.found["local"] += local.rows
            experiment = Experiment(
                runs,
                learner,
                stored_logprobs(baseline.trace.tokens),
                local,
                _some_of_each_mode(sequences),
            )
            routing = replay_routing(experiment, patched_sites(baseline, keys), target)
            if routing is not None:
                self.found["routing"].append(routing)
            self.found["causal"].append(
                measure_shares(
                    experiment,
                    self.plan.model.num_layers,
                    target,
                    self._floor(learner, target),
                    layer_outputs(baseline, keys),
                    self._operands(learner, target),
                    self.patches,
                )
            )
        finally:
            local.delete()

    def _operands(self, learner: str, target: str) -> OperandExperiment | None:
        """What the stored half found both engines to compute in their quantized linears."""
        from minite_diag.attribute.causal import OperandExperiment
        from minite_diag.attribute.operands import PARTS, swap_recipes

        if not self.plan.quantized:
            return None
        pairs = (read_attribution(self.run) or {}).get("pairs", [])
        contracts = [
            pair["contracts"]
            for pair in pairs
            if (pair["baseline"], pair["target"]) == (learner, target)
        ]
        if not contracts:
            return OperandExperiment({}, (), (), "the stored run was not attributed before")
        recipes = swap_recipes(contracts[0])
        if isinstance(recipes, str):
            return OperandExperiment({}, (), (), recipes)
        swap = {"baseline": learner, "target": target, "recipes": recipes}
        sites = tuple(f"{fqn}:output" for fqn in self.plan.quantized)
        return OperandExperiment(swap, sites, PARTS)

    def _floor(self, *engines: str) -> float:
        """Of the legs that differ in nothing but the run: the gap was measured alone, in prefill."""
        own = [row for row in self.found["legs"] if row["engine"] in engines]
        return noise_floor(own) or 0.0

    def _stored_rows(self, target: str) -> list[dict[str, Any]]:
        from minite_diag.trace.schema import COMPARISON, read_table

        rows = read_table(self.run / "comparison.parquet", COMPARISON).to_pandas()
        pair = rows[(rows["baseline"] == self.plan.learner.id) & (rows["target"] == target)]
        return [dict(row) for row in pair.to_dict("records")]


def _some_of_each_mode(sequences: list[SequenceSpec]) -> list[SequenceSpec]:
    chosen: list[SequenceSpec] = []
    for mode in ("score", "sample"):
        chosen += [s for s in sequences if s.mode == mode][:CAUSAL_SEQUENCES]
    return chosen
