"""The parent: starts one worker per engine, watches it, keeps what it wrote.

Knows no engine and no torch. Invariant: a worker that fails, hangs or is killed leaves a trace
whose status says so; the other engines still run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from minite_diag.errors import EngineUnavailable
from minite_diag.plan import EngineSpec, Plan

Report = Callable[[EngineSpec, dict[str, Any]], None]

GRACE_S = 10.0


@dataclass(frozen=True)
class CaptureResult:
    """How one engine's capture ended: `status` as in the manifest, or `kept` if it was there."""

    engine_id: str
    status: str
    message: str = ""
    hint: str = ""
    log: str = ""


def capture(plan: Plan, run: Path, report: Report, *, resume: bool = False) -> list[CaptureResult]:
    """Capture every engine, samplers first (the learner scores what they generated)."""
    order = [*plan.samplers, plan.learner]
    # A terminated parent must not leave an engine behind that holds the device.
    with _termination_as_interrupt():
        return _capture_all(plan, run, order, report, resume=resume)


def _capture_all(
    plan: Plan, run: Path, order: list[EngineSpec], report: Report, *, resume: bool
) -> list[CaptureResult]:
    results = []
    for spec in order:
        if resume and _manifest_status(run, spec) in ("ok", "truncated"):
            results.append(CaptureResult(spec.id, "kept"))
            report(spec, {"event": "kept"})
            continue
        results.append(capture_one(plan, run, spec, report))
    return results


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def capture_one(plan: Plan, run: Path, spec: EngineSpec, report: Report) -> CaptureResult:
    """Run one worker to its end, its timeout, or Ctrl-C (which is passed on, then raised)."""
    _clear(run / "traces" / spec.id)
    log_file = run / f"engine-{spec.id}.log"
    with log_file.open("wb") as log:
        try:
            process = subprocess.Popen(
                [spec.python, "-m", "minite_diag.capture.worker", str(run), spec.id],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=worker_environment(),
            )
        except OSError as error:
            raise EngineUnavailable(
                f"{spec.id}: can't start {spec.python}: {error.strerror}",
                f"set the interpreter: --python {spec.engine}=PATH",
            ) from error
        last: dict[str, Any] = {}
        timed_out = threading.Event()

        def expire() -> None:
            timed_out.set()
            _kill(process)

        timer = threading.Timer(plan.timeout_s, expire)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = _parse(line)
                if event is not None:
                    last = event
                    report(spec, event)
            code = process.wait()
        except KeyboardInterrupt:
            _interrupt(process)
            _mark(run, spec, "error", "interrupted", "compare --resume RUN goes on")
            raise
        finally:
            timer.cancel()
    return _result(run, spec, code, last, timed_out.is_set(), plan.timeout_s, log_file)


def worker_environment() -> dict[str, str]:
    """The variables of every engine's process: this one's, without network and thread pools."""
    environment = dict(os.environ)
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _result(
    run: Path,
    spec: EngineSpec,
    code: int,
    last: dict[str, Any],
    timed_out: bool,
    timeout_s: float,
    log_file: Path,
) -> CaptureResult:
    status = _manifest_status(run, spec)
    if code == 0 and status in ("ok", "truncated"):
        return CaptureResult(spec.id, status, log=str(log_file))
    if timed_out:
        message, hint = f"no end after {timeout_s:.0f} s", "raise --timeout or use fewer probes"
    elif last.get("event") == "error":
        message, hint = str(last.get("message")), str(last.get("hint"))
    elif code == -signal.SIGKILL:
        message = "killed by the system: very likely out of memory"
        hint = "use a smaller model, fewer or shorter probes, or a machine with more memory"
    else:
        message, hint = f"the worker died (exit {code})", f"read {log_file}"
    _mark(run, spec, "error", message, hint)
    return CaptureResult(spec.id, "error", message, hint, str(log_file))


def _manifest_file(run: Path, spec: EngineSpec) -> Path:
    return run / "traces" / spec.id / "manifest.json"


def _manifest_status(run: Path, spec: EngineSpec) -> str | None:
    try:
        return str(json.loads(_manifest_file(run, spec).read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError):
        return None


def _mark(run: Path, spec: EngineSpec, status: str, message: str, hint: str) -> None:
    """Write how it ended into the manifest of a worker that couldn't."""
    file = _manifest_file(run, spec)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {"schema": 1, "engine": spec.__dict__}
    if record.get("status") == "error" and record.get("error"):
        return
    record.update(status=status, error={"kind": "Worker", "message": message, "hint": hint})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _clear(folder: Path) -> None:
    """Remove an earlier, unfinished trace so that its files can't mix with the new ones."""
    if not folder.exists():
        return
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGINT)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return
        time.sleep(0.1)
    _kill(process)
