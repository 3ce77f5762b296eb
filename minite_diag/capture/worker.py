"""The child process: one engine, one trace. `python -m minite_diag.capture.worker RUN ENGINE_ID`.

Imports only its own engine. Invariant: the manifest on disk always tells the truth: `running`
until the end, then `ok`, `truncated` (disk budget) or `error` with the reason. Progress goes to
stdout as JSON lines, everything that libraries print goes to the log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from minite_diag import __version__
from minite_diag.alignments.base import apply_environment, bundled_ops, check_device
from minite_diag.alignments.ran import never_ran
from minite_diag.capture import ranks
from minite_diag.capture.environment import (
    bit_changing_environment,
    installed_versions,
    machine,
    peak_gpu_bytes,
    peak_rss_bytes,
)
from minite_diag.capture.recorder import Recorder
from minite_diag.capture.sequences import (
    sample_prompts,
    sampled_sequences,
    sampler_traces,
    score_sequences,
    token_rows,
)
from minite_diag.engines.base import Engine, EngineInfo, TokenSequence
from minite_diag.engines.registry import load_engine_class
from minite_diag.errors import MiniteDiagError
from minite_diag.plan import EngineSpec, Plan, read_plan

MODULE = "minite_diag.capture.worker"
EXIT_ERROR = 3
PARENT_POLL_S = 2.0


class Progress:
    """JSON lines for the parent: {"event": ..., ...}."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: str, **fields: Any) -> None:
        """Write one line; a parent that went away is not an error."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            print(json.dumps({"event": event, **fields}), file=self._stream, flush=True)

    def hand_over(self) -> None:
        """Let processes that are started from now on find the stream as their standard output."""
        os.dup2(self._stream.fileno(), 1)


class Capture:
    """Runs one engine over its sequences and writes the trace."""

    def __init__(self, run: Path, plan: Plan, spec: EngineSpec, progress: Progress) -> None:
        self.run = run
        self.plan = plan
        self.spec = spec
        self.progress = progress
        self.writer = ranks.writer_of(
            run / "traces" / spec.id, plan.capture.max_disk, plan.capture.stats_only
        )
        self.record: dict[str, Any] = {
            "engine": dataclasses.asdict(spec),
            "status": "running",
            "error": None,
            "tool_version": __version__,
            "versions": installed_versions(),
            "machine": machine(),
            "environment": bit_changing_environment(),
            "started": time.time(),
            "seconds": {},
        }

    def start(self) -> Engine:
        """Load the engine and hook it."""
        self.writer.manifest(self.record)
        began = time.monotonic()
        apply_environment(self.spec.engine, self.spec.align)
        engine = load_engine_class(self.spec.engine)()
        info = engine.load(self.spec, self.plan)
        check_device(self.spec.engine, self.spec.align, info.device)
        self.record["seconds"]["load"] = time.monotonic() - began
        self.record.update(_describe(info))
        self.recorder = Recorder(self.writer, self.plan.capture, info.layout)
        engine.observe(self.recorder)
        # Engines set variables while they start, so this is the value that ran.
        self.record["environment"] = bit_changing_environment()
        self.writer.flush()
        self.writer.manifest(self.record)
        self.progress("loaded", label=info.label, seconds=self.record["seconds"]["load"])
        return engine

    def work(self, engine: Engine) -> None:
        """Score and sample every sequence of the plan."""
        steps: list[tuple[str, TokenSequence]] = []
        if "score" in self.plan.modes:
            steps += [("score", s) for s in score_sequences(self.plan)]
        if "sample" in self.plan.modes:
            if self.spec.role == "sampler":
                steps += [("sample", s) for s in sample_prompts(self.plan, self.spec.id)]
            else:
                for trace in sampler_traces(self.plan, self.run):
                    steps += [("score", s) for s in sampled_sequences(self.plan, trace)]
        began = time.monotonic()
        for number, (action, sequence) in enumerate(steps, start=1):
            self._one(engine, action, sequence)
            self.progress(
                "sequence", mode=sequence.mode, probe=sequence.probe, done=number, of=len(steps)
            )
        self.record["seconds"]["forward"] = time.monotonic() - began

    def _one(self, engine: Engine, action: str, sequence: TokenSequence) -> None:
        self.recorder.active = sequence.mode == "score" or self.plan.capture.sample_tensors
        try:
            if action == "score":
                scored = engine.score(sequence)
            else:
                scored = engine.sample(sequence, self.plan.sample_tokens, self.plan.seed)
        finally:
            self.recorder.active = False
        self.writer.tokens(token_rows(scored))
        self.writer.flush()

    def finish(self, status: str, error: dict[str, str] | None = None) -> None:
        """Write the final manifest."""
        self.record.update(
            status=status,
            error=error,
            bytes=self.writer.bytes_written,
            peak_rss_bytes=peak_rss_bytes(),
            peak_gpu_bytes=peak_gpu_bytes(),
            finished=time.time(),
        )
        self.writer.manifest(self.record)

    def run_all(self) -> str:
        """Do everything; returns the final status."""
        engine = self.start()
        self.work(engine)
        self.writer.close()
        self.record["silent_hooks"] = self.recorder.silent
        if self.recorder.calls:
            self._correct_evidence(engine)
        self.record["calls"] = self.recorder.calls
        status = "truncated" if self.recorder.truncated else "ok"
        engine.close()
        self.finish(status)
        return status

    def _correct_evidence(self, engine: Engine) -> None:
        """A patch that nothing called replaced nothing: the op's evidence and a warning say so."""
        ours = bundled_ops(self.spec.engine, self.spec.align)
        idle = never_ran(op for op in engine.patched if op in ours)
        for item in self.record["evidence"]:
            if item["op"] in idle and item["status"] == "replaced":
                note = f"patched ({item['note']}), but the patch was never called"
                own = item["instead_of"] or "the engine's own"
                item.update(status="native", impl=own, note=note, instead_of="")
        self.record["silent_hooks"] += [f"alignment of {op}: never called" for op in idle]


def _describe(info: EngineInfo) -> dict[str, Any]:
    record = dataclasses.asdict(info)
    record["evidence"] = [dataclasses.asdict(e) for e in info.evidence]
    return record


def _error_record(error: BaseException) -> dict[str, str]:
    if isinstance(error, MiniteDiagError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {
        "kind": type(error).__name__,
        "message": str(error).strip() or type(error).__name__,
        "hint": "see the engine's log",
    }


def _follow_parent(parent: int | None = None) -> None:
    """End this process if the parent is gone: a killed parent can't tell its workers."""
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(EXIT_ERROR)

    threading.Thread(target=watch, daemon=True).start()


def open_progress(run: Path, job: str, *, is_rank: bool) -> Progress:
    """The parent's pipe; whatever libraries print goes to the log from now on."""
    if is_rank:
        ranks.begin(ranks.log_file(run, job, ranks.number()))
    # A rank above 0 has no pipe: its progress goes to its log too.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return Progress(pipe)


def count_ranks(spec: EngineSpec) -> int:
    """Processes that run the engine; raises UsageError for options that can't be."""
    try:
        engine = load_engine_class(spec.engine)
    except MiniteDiagError:
        return 1  # its start says what is wrong
    return engine.ranks(spec.options)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the worker process; returns its exit code."""
    arguments = argv or sys.argv[1:]
    run, engine_id = arguments[:2]
    is_rank = (launcher := ranks.launcher(arguments)) is not None
    progress = open_progress(Path(run), f"engine-{engine_id}", is_rank=is_rank)
    _follow_parent(launcher)
    capture: Capture | None = None
    try:
        plan = read_plan(Path(run))
        spec = plan.engine(engine_id)
        count = 1 if is_rank else count_ranks(spec)
        if count > 1:
            progress.hand_over()
            return ranks.launch(MODULE, arguments, count, f"engine-{engine_id}", progress)
        capture = Capture(Path(run), plan, spec, progress)
        status = capture.run_all()
    except KeyboardInterrupt:
        if capture is not None:
            capture.writer.close()
            capture.finish("error", {"kind": "Interrupted", "message": "interrupted", "hint": ""})
        return 130
    except BaseException as error:  # noqa: BLE001  a worker reports whatever ends it
        traceback.print_exc()
        record = _error_record(error)
        if capture is not None:
            with contextlib.suppress(OSError):
                capture.writer.close()
        if is_rank:
            # Which rank's error it is that ends the run is known to the launcher only.
            ranks.report_failure(record)
            return EXIT_ERROR
        if capture is not None:
            capture.finish("error", record)
        progress("error", **record)
        return EXIT_ERROR
    progress("done", status=status)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM leaves threads behind that would hold the process for seconds; all files are closed.
    os._exit(code)
