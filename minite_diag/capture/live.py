"""Engines that run again after the capture: jobs for a live worker, and the process that serves.

Knows no engine and no torch. A session starts one worker, which loads one engine once; each job is
one line to it, and its result one file in the run directory, so that what a figure was computed
from stays on disk. Invariant: a job that patched nothing, or an engine that died, is an error that
names the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from minite_diag.capture import runner
from minite_diag.errors import EngineError, EngineUnavailable, UsageError
from minite_diag.plan import EngineSpec, read_plan

ACTIONS: Final = ("score", "batch", "chunked", "sample", "batch-sample")
LIVE_FOLDER: Final = "live"


@dataclass(frozen=True)
class SequenceSpec:
    """A TokenSequence as plain data."""

    mode: str
    source: str
    probe: str
    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def key(self) -> tuple[str, str, str]:
        """(mode, source, probe)."""
        return self.mode, self.source, self.probe


@dataclass(frozen=True)
class Patch:
    """An intervention as plain data: see capture.interventions.Intervention."""

    baseline: str
    mode: str = "value"
    sites: tuple[str, ...] = ()
    local: str = ""


@dataclass(frozen=True)
class Job:
    """One or more forwards of one engine.

    `action` score: each sequence alone. batch: each sequence with `size` - 1 of `neighbours`, only
    its own result is kept. chunked: each in chunks of `size` tokens. sample: its prompt continued
    by `tokens` tokens with `seed`. batch-sample: both. `hooked` jobs can `patch` and `record` (site globs; the trace is
    the result's `trace`); bare ones run the engine without any hook, so they come first.
    """

    name: str
    sequences: tuple[SequenceSpec, ...]
    action: str = "score"
    hooked: bool = True
    patch: tuple[Patch, ...] = ()
    record: tuple[str, ...] = ()
    size: int = 0
    tokens: int = 0
    seed: int = 0
    neighbours: tuple[SequenceSpec, ...] = ()
    operands: dict[str, Any] | None = None
    """An attribute.operands.OperandSwap as plain data, applied at `operand_sites`."""
    operand_sites: tuple[str, ...] = ()

    @property
    def forwards(self) -> int:
        """Sequences that go through the model; decoding one counts once for its prefill."""
        batched = self.action in ("batch", "batch-sample")
        return len(self.sequences) * (self.size if batched else 1)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        for name in ("sequences", "neighbours"):
            data[name] = tuple(
                SequenceSpec(**{**s, "token_ids": tuple(s["token_ids"])}) for s in data[name]
            )
        data["patch"] = tuple(Patch(**{**p, "sites": tuple(p["sites"])}) for p in data["patch"])
        tuples = {name: tuple(data[name]) for name in ("record", "operand_sites")}
        return cls(**{**data, **tuples})


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of one sequence; None where the engine gives none."""

    mode: str
    source: str
    probe: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    cached_tokens: int = 0
    """Tokens of the prompt that the engine took from its prefix cache."""

    @property
    def key(self) -> tuple[str, str, str]:
        """(mode, source, probe)."""
        return self.mode, self.source, self.probe


@dataclass(frozen=True)
class JobResult:
    """What one job gave.

    `patched` counts replaced tensors; `patched_sites` the sites they belong to. `rows_changed` of
    `routed_rows` token rows got another set of experts than the engine chose. `inexact` are the
    operand sites whose output was replaced by other bits.
    """

    name: str
    scored: tuple[Scored, ...]
    forwards: int
    seconds: float
    patched: int = 0
    patched_sites: int = 0
    rows_changed: int = 0
    routed_rows: int = 0
    trace: str = ""
    inexact: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> JobResult:
        """Read a result file."""
        data = json.loads(text)
        scored = tuple(
            Scored(**{**s, "token_ids": tuple(s["token_ids"]), "logprobs": tuple(s["logprobs"])})
            for s in data.pop("scored")
        )
        data["inexact"] = tuple(data["inexact"])
        return cls(scored=scored, **data)


@dataclass
class ForwardBudget:
    """Counts forwards over all sessions; `limit` None is no bound."""

    limit: int | None = None
    total: int = 0
    by_engine: dict[str, int] = field(default_factory=dict)
    by_step: dict[str, int] = field(default_factory=dict)

    def allows(self, forwards: int) -> bool:
        """Whether so many more fit."""
        return self.limit is None or self.total + forwards <= self.limit

    def spend(self, engine_id: str, step: str, forwards: int) -> None:
        """Count forwards that ran."""
        self.total += forwards
        self.by_engine[engine_id] = self.by_engine.get(engine_id, 0) + forwards
        self.by_step[step] = self.by_step.get(step, 0) + forwards


def log_name(engine_id: str, options: Iterable[str]) -> str:
    """The name of a session's log, without its suffix."""
    return "-".join(("live", engine_id, *options))


class LiveSession:
    """One worker with one loaded engine; a context manager. `options` go over the plan's.

    `run` raises EngineUnavailable or EngineError with the worker's own message; after an error of
    a single job the session goes on, after the worker's death every job fails.
    """

    def __init__(
        self,
        run: Path,
        engine_id: str,
        report: runner.Report,
        options: dict[str, str] | None = None,
    ) -> None:
        self.folder = run
        self.options = options or {}
        self.plan = read_plan(run)
        known = [spec.id for spec in self.plan.engines]
        if engine_id not in known:
            raise UsageError(f"the run has no engine {engine_id!r}", f"one of: {', '.join(known)}")
        self.spec: EngineSpec = self.plan.engine(engine_id)
        self.report = report
        self.log_file = run / f"{log_name(engine_id, self.options)}.log"
        self.loaded: dict[str, Any] = {}
        self._expired = threading.Event()

    def __enter__(self) -> LiveSession:
        self._log = self.log_file.open("wb")
        try:
            self._process = subprocess.Popen(
                [
                    self.spec.python,
                    "-m",
                    "minite_diag.capture.live_worker",
                    str(self.folder),
                    self.spec.id,
                    json.dumps(self.options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                env=runner.worker_environment(),
            )
        except OSError as error:
            self._log.close()
            raise EngineUnavailable(
                f"{self.spec.id}: can't start {self.spec.python}: {error.strerror}",
                f"set the interpreter: --python {self.spec.engine}=PATH",
            ) from error
        try:
            self.loaded = self._next("loading", ("loaded",))
        except BaseException:
            self._end(kill=True)
            raise
        self.report(self.spec, self.loaded)
        return self

    def run(self, job: Job) -> JobResult:
        """Send one job and wait for its result."""
        assert job.action in ACTIONS
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(job.to_json().encode() + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._death(job.name) from error
        event = self._next(job.name, ("result", "failed"))
        if event["event"] == "failed":
            unavailable = event.get("kind") == "EngineUnavailable"
            raise (EngineUnavailable if unavailable else EngineError)(
                f"{self.spec.id}, {job.name}: {event['message']}", str(event.get("hint", ""))
            )
        return JobResult.from_json(Path(event["file"]).read_text(encoding="utf-8"))

    def _next(self, what: str, wanted: tuple[str, ...]) -> dict[str, Any]:
        """The next event of one of these kinds; the worker's end or silence is an error."""

        def expire() -> None:
            self._expired.set()
            runner._kill(self._process)

        timer = threading.Timer(self.plan.timeout_s, expire)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                event = runner._parse(line)
                if event is not None and event["event"] == "error":
                    raise EngineError(
                        f"{self.spec.id}, {what}: {event.get('message')}",
                        str(event.get("hint") or f"read {self.log_file}"),
                    )
                if event is not None and event["event"] in wanted:
                    return event
        finally:
            timer.cancel()
        raise self._death(what)

    def _death(self, what: str) -> EngineError:
        if self._expired.is_set():
            return EngineError(
                f"{self.spec.id}, {what}: no answer after {self.plan.timeout_s:.0f} s",
                "raise --timeout or use fewer probes",
            )
        code = self._process.wait()
        return EngineError(
            f"{self.spec.id}, {what}: the worker died (exit {code})", f"read {self.log_file}"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(kill=kind is not None and not issubclass(kind, Exception))

    def _end(self, *, kill: bool) -> None:
        if kill:
            runner._interrupt(self._process)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(runner.GRACE_S)
        except subprocess.TimeoutExpired:
            runner._kill(self._process)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def run_live(
    run: Path, engine_id: str, jobs: Iterable[Job], report: runner.Report
) -> list[JobResult]:
    """Load one engine and run jobs in order; raises at the first that fails."""
    with runner._termination_as_interrupt(), LiveSession(run, engine_id, report) as session:
        return [session.run(job) for job in jobs]


Runner = Callable[[Job], JobResult]


def sequences_of(run: Path, keys: Sequence[tuple[str, str, str]]) -> list[SequenceSpec]:
    """Sequences by (mode, source, probe): probes from the plan, samples from their sampler."""
    from minite_diag.capture.sequences import sampled_sequences, sampler_traces, score_sequences

    plan = read_plan(run)
    known = score_sequences(plan)
    if any(mode == "sample" for mode, _, _ in keys):
        known += [s for trace in sampler_traces(plan, run) for s in sampled_sequences(plan, trace)]
    by_key = {(s.mode, s.source, s.probe): s for s in known}
    return [
        SequenceSpec(s.mode, s.source, s.probe, tuple(s.token_ids), s.prompt_length)
        for s in (by_key[key] for key in keys)
    ]
