"""The child of a live session: one engine, loaded once, that serves jobs from its standard input.

    python -m minite_diag.capture.live_worker RUN ENGINE_ID OPTIONS_JSON

Imports only its own engine. One job per line; each result is written to `live/ENGINE_ID/` and named
on standard output. Bare jobs run before the engine is observed: a bare job after the first hooked
one is refused. Invariant: nothing in the captured traces is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minite_diag.alignments.base import apply_environment, check_device
from minite_diag.capture import ranks
from minite_diag.capture.interventions import IntervenedRecorder, Intervention, OperandOutput
from minite_diag.capture.live import LIVE_FOLDER, Job, JobResult, Scored, SequenceSpec, log_name
from minite_diag.capture.worker import (
    EXIT_ERROR,
    Progress,
    _error_record,
    _follow_parent,
    count_ranks,
    open_progress,
)
from minite_diag.engines.base import Engine, EngineInfo, ScoredTokens, TokenSequence
from minite_diag.engines.registry import load_engine_class
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import EngineSpec, Plan, read_plan
from minite_diag.trace.store import Trace, TraceWriter

MODULE = "minite_diag.capture.live_worker"


class LiveEngine:
    """One loaded engine and the jobs that it has done."""

    def __init__(self, run: Path, plan: Plan, spec: EngineSpec) -> None:
        self.run, self.plan, self.spec = run, plan, spec
        self.folder = run / LIVE_FOLDER / spec.id
        self.folder.mkdir(parents=True, exist_ok=True)
        apply_environment(spec.engine, spec.align)
        self.engine: Engine = load_engine_class(spec.engine)()
        self.info: EngineInfo = self.engine.load(spec, plan)
        check_device(spec.engine, spec.align, self.info.device)
        self.recorder: IntervenedRecorder | None = None
        self._traces: dict[str, Trace] = {}
        self._sides: dict[str, Any] = {}
        self._done = 0

    def do(self, job: Job) -> Path:
        """Run one job; returns the file of its result."""
        began = time.monotonic()
        self._done += 1
        if not job.hooked:
            if self.recorder is not None:
                raise UsageError(
                    f"job {job.name!r} wants the bare engine, which has hooks by now",
                    "put bare jobs before hooked ones",
                )
            result = JobResult(job.name, self._run(job), job.forwards, 0.0)
        else:
            result = self._do_hooked(job)
        result = dataclasses.replace(result, seconds=time.monotonic() - began)
        file = self.folder / f"{self._done:04d}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', job.name)}.json"
        if not ranks.is_follower():
            file.write_text(json.dumps(dataclasses.asdict(result)) + "\n", encoding="utf-8")
        return file

    def _do_hooked(self, job: Job) -> JobResult:
        if self.recorder is None:
            self.recorder = IntervenedRecorder(self.info.layout)
            self.engine.observe(self.recorder)
        recorder = self.recorder
        writer = self._writer(job) if job.record else None
        patches = [Intervention(**dataclasses.asdict(patch)) for patch in job.patch]
        recorder.start(self._sources(patches), patches, job.record, writer)
        recorder.use_operands(self._operands(job), job.operand_sites)
        done = False
        try:
            scored = self._run(job)
            recorder.stop()
            if recorder.truncated:
                raise EngineError(
                    f"job {job.name!r} records more than {self.plan.capture.max_disk} bytes",
                    "raise --max-disk, or capture fewer --sites or --tokens",
                )
            done = True
        finally:
            recorder.active = False
            if writer is not None:
                writer.close()
                if not done:
                    shutil.rmtree(writer.folder, ignore_errors=True)
        return JobResult(
            job.name,
            scored,
            job.forwards,
            0.0,
            patched=recorder.patched,
            patched_sites=len(recorder.patched_sites),
            rows_changed=recorder.rows_changed,
            routed_rows=recorder.routed_rows,
            trace=str(writer.folder) if writer is not None else "",
            inexact=tuple(sorted(map(str, recorder.inexact))),
        )

    def _operands(self, job: Job) -> OperandOutput | None:
        if job.operands is None:
            return None
        from minite_diag.attribute.operands import OperandModel, OperandSwap
        from minite_diag.compare import Side

        swap = OperandSwap(**{**job.operands, "swapped": tuple(job.operands["swapped"])})
        for name in (swap.baseline, swap.target):
            if name not in self._sides:
                self._sides[name] = Side.of(Trace(self.run / "traces" / name))
        return OperandModel(self.plan, self._sides, swap).output

    def _writer(self, job: Job) -> TraceWriter:
        folder = self.folder / f"{self._done:04d}-trace"
        writer = ranks.writer_of(folder, self.plan.capture.max_disk)
        writer.manifest(
            {
                "engine": dataclasses.asdict(self.spec),
                "status": "ok",
                "error": None,
                "layout": dataclasses.asdict(self.info.layout),
                "invisible": self.info.invisible,
            }
        )
        return writer

    def _sources(self, patches: list[Intervention]) -> dict[str, Trace]:
        for patch in patches:
            for name in filter(None, (patch.baseline, patch.local)):
                if name not in self._traces:
                    is_engine = name == patch.baseline
                    self._traces[name] = Trace(
                        self.run / "traces" / name if is_engine else Path(name)
                    )
        return self._traces

    def _run(self, job: Job) -> tuple[Scored, ...]:
        return tuple(_record(self._forward(job, number)) for number in range(len(job.sequences)))

    def _forward(self, job: Job, number: int) -> ScoredTokens:
        sequence = _sequence(job.sequences[number])
        if job.action == "score":
            return self.engine.score(sequence)
        if job.action == "chunked":
            return self.engine.score_chunked(sequence, job.size)
        if job.action == "sample":
            return self.engine.sample(sequence, job.tokens, job.seed)
        if job.action == "batch-sample":
            batch = [sequence, *self._others(job, number)]
            return self.engine.sample_batch(batch, job.tokens, job.seed)[0]
        return self.engine.score_batch([sequence, *self._others(job, number)])[0]

    def _others(self, job: Job, number: int) -> list[TokenSequence]:
        """Neighbours of one sequence, other ones for each."""
        others = [_sequence(s) for s in job.neighbours if s != job.sequences[number]]
        if len(others) < job.size - 1:
            raise UsageError(f"job {job.name!r} has {len(others)} neighbours", "give more")
        first = number % len(others)
        return [*others[first:], *others[:first]][: job.size - 1]


def _sequence(spec: SequenceSpec) -> TokenSequence:
    return TokenSequence(spec.mode, spec.source, spec.probe, spec.token_ids, spec.prompt_length)


def _record(scored: ScoredTokens) -> Scored:
    sequence = scored.sequence
    return Scored(
        sequence.mode,
        sequence.source,
        sequence.probe,
        sequence.token_ids,
        scored.logprobs,
        scored.cached_tokens,
    )


def _serve(live: LiveEngine, progress: Progress, lines: Iterable[str]) -> None:
    for line in lines:
        job = Job.from_json(line)
        try:
            file = live.do(job)
        except Exception as error:
            if ranks.lost_step(error):
                raise
            traceback.print_exc()
            progress("failed", job=job.name, **_error_record(error))
            continue
        progress("result", job=job.name, file=str(file))


def main(argv: list[str] | None = None) -> int:
    """Entry point of the live worker; returns its exit code."""
    arguments = argv or sys.argv[1:]
    run, engine_id, options = arguments[:3]
    is_rank = (launcher := ranks.launcher(arguments)) is not None
    name = log_name(engine_id, json.loads(options))
    progress = open_progress(Path(run), name, is_rank=is_rank)
    _follow_parent(launcher)
    began = time.monotonic()
    try:
        plan = read_plan(Path(run))
        spec = plan.engine(engine_id)
        spec = dataclasses.replace(spec, options=spec.options | json.loads(options))
        count = 1 if is_rank else count_ranks(spec)
        if count > 1:
            progress.hand_over()
            return ranks.launch(MODULE, arguments, count, name, progress)
        live = LiveEngine(Path(run), plan, spec)
        seconds = time.monotonic() - began
        progress("loaded", label=live.info.label, seconds=seconds)
        _serve(live, progress, ranks.lines_of_first(sys.stdin) if is_rank else sys.stdin)
        live.engine.close()
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001  a worker reports whatever ends it
        traceback.print_exc()
        if is_rank:
            ranks.report_failure(_error_record(error))
        else:
            progress("error", **_error_record(error))
        return EXIT_ERROR
    return 0


def _exit(code: int) -> Any:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Engines leave threads behind that would hold the process for seconds; all files are closed.
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
