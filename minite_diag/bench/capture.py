"""What hooks cost: forwards with everything written to disk against bare ones, and the memory.

Knows engines through their protocol, the recorder and the trace writer. Invariant: bare, hooked
and statistics-only forwards of the same tokens take turns in one process; a hooked one counts as
done when its sequence is flushed, so that it would survive the process.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from minite_diag.bench.measurement import Measurement
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import Engine, EngineInfo, TokenSequence
from minite_diag.engines.registry import load_engine_class
from minite_diag.errors import UsageError
from minite_diag.plan import CaptureSpec, Plan
from minite_diag.prepare import CompareRequest, EngineRequest, prepare
from minite_diag.trace.store import TraceWriter

TOKENS: Final = 256
REPEATS: Final = 7


@dataclass
class _Loaded:
    """One engine, and the folder that its trace goes to."""

    engine: Engine
    info: EngineInfo
    plan: Plan
    folder: Path
    recorder: Recorder | None = None

    def observe(self, spec: CaptureSpec) -> None:
        """Hook the engine; the weights go to a trace of their own."""
        writer = TraceWriter(self.folder / "weights", stats_only=spec.stats_only)
        self.recorder = Recorder(writer, spec, self.info.layout)
        self.engine.observe(self.recorder)
        writer.close()

    def score(self, sequence: TokenSequence) -> None:
        """One forward; a hooked engine writes a fresh trace and flushes it."""
        if self.recorder is None:
            self.engine.score(sequence)
            return
        trace = self.folder / "trace"
        self.recorder.writer = writer = TraceWriter(trace, stats_only=self.recorder.spec.stats_only)
        self.recorder.active = True
        try:
            self.engine.score(sequence)
        finally:
            self.recorder.active = False
        writer.flush()

    def clear(self) -> None:
        """Remove the trace of the last forward: not a part of what is timed."""
        if self.recorder is not None:
            self.recorder.writer.close()
        shutil.rmtree(self.folder / "trace", ignore_errors=True)


def bench_capture(
    model: str = "demo-moe",
    engine: str = "hf",
    tokens: int = TOKENS,
    repeats: int = REPEATS,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Measure one engine on one model: time ratios, bytes written, extra memory."""
    if tokens < 2 or repeats < 1:
        raise UsageError("bench capture needs 2 or more tokens and 1 or more repeats", "")
    with tempfile.TemporaryDirectory(prefix="minite-bench-") as name:
        folder = Path(name)
        plan = _plan(model, engine, folder / "run", say)
        sequence = _sequence(plan, tokens)
        say(f"{engine} on {plan.model.name}: memory")
        first = _load(plan, folder / "full")
        memory = _measure_memory(first, sequence)
        say(f"{engine} on {plan.model.name}: {repeats} repeats of {tokens} tokens")
        bare, light = _load(plan, folder / "bare"), _load(plan, folder / "stats")
        light.observe(CaptureSpec(stats_only=True))
        costs = _time([bare, first, light], sequence, repeats)
        written = first.recorder.writer.bytes_written if first.recorder else 0
        for loaded in (first, bare, light):
            loaded.engine.close()
    what = f"{engine} on {plan.model.name}, {tokens} tokens, median of {repeats}"
    return _rows(costs, written, what) + memory


def _plan(model: str, engine: str, run: Path, say: Callable[[str], None]) -> Plan:
    run.mkdir(parents=True)
    request = EngineRequest.parse(engine)
    quantize = "none" if request.name == "hf" else "default"
    return prepare(
        CompareRequest(learner=request, samplers=(request,), model=model, quantize=quantize),
        run,
        say,
    )


def _sequence(plan: Plan, tokens: int) -> TokenSequence:
    """The probes' own tokens, one probe after the other, as often as it takes."""
    ids = [token for probe in plan.probes for token in probe.token_ids]
    repeated = (ids * (tokens // len(ids) + 1))[:tokens]
    return TokenSequence("score", "", plan.probes[0].id, tuple(repeated), len(repeated))


def _load(plan: Plan, folder: Path) -> _Loaded:
    engine = load_engine_class(plan.learner.engine)()
    info = engine.load(plan.learner, plan)
    return _Loaded(engine, info, plan, folder)


@dataclass(frozen=True)
class _Cost:
    """Median wall and processor time of one forward, in seconds."""

    wall: float
    processor: float


def _time(loaded: list[_Loaded], sequence: TokenSequence, repeats: int) -> list[_Cost]:
    for item in loaded:
        item.score(sequence)
        item.clear()
    taken: list[list[_Cost]] = [[] for _ in loaded]
    for _ in range(repeats):
        for item, costs in zip(loaded, taken, strict=True):
            began, used = time.perf_counter(), time.process_time()
            item.score(sequence)
            costs.append(_Cost(time.perf_counter() - began, time.process_time() - used))
            item.clear()
        gc.collect()
    return [
        _Cost(median(cost.wall for cost in costs), median(cost.processor for cost in costs))
        for costs in taken
    ]


def _rows(costs: list[_Cost], written: int, what: str) -> list[Measurement]:
    bare, full, light = costs
    rows = [Measurement("bare forward", bare.wall, "s", detail=what)]
    for name, cost in (("full tensors", full), ("statistics only", light)):
        ratio = cost.wall / bare.wall
        rows.append(Measurement(f"hooked, {name}", cost.wall, "s", "bare forward", ratio, what))
    # What it costs where other work fills the machine, the writing thread included.
    for name, cost in (("full tensors", full), ("statistics only", light)):
        ratio = cost.processor / bare.processor
        rows.append(
            Measurement(
                f"hooked, {name}, processor time",
                cost.processor,
                "s",
                f"bare forward ({bare.processor:.4g} s)",
                ratio,
                what,
            )
        )
    return [*rows, Measurement("written per forward", written / 1e6, "MB", detail=what)]


def _measure_memory(loaded: _Loaded, sequence: TokenSequence) -> list[Measurement]:
    """Peak memory of a hooked forward beyond that of a bare one, in largest tensors."""
    for _ in range(2):
        loaded.score(sequence)
    bare = _peak_growth(lambda: loaded.score(sequence))
    loaded.observe(CaptureSpec())
    assert loaded.recorder is not None
    hooked = _peak_growth(lambda: loaded.score(sequence))
    loaded.recorder.writer.close()
    largest = _largest_tensor(loaded)
    loaded.clear()
    peer = f"largest tensor of a site ({largest / 1e6:.2f} MB)"
    if bare is None or hooked is None:
        reason = "this system doesn't let a process reset its peak memory"
        return [Measurement("peak extra memory", None, "MB", peer, None, reason)]
    extra = max(0, hooked - bare)
    return [
        Measurement(
            "peak extra memory",
            extra / 1e6,
            "MB",
            peer,
            extra / largest,
            f"resident, hooked forward {hooked / 1e6:.1f} MB, bare forward {bare / 1e6:.1f} MB",
        )
    ]


def _largest_tensor(loaded: _Loaded) -> int:
    from minite_diag.trace.index import TensorIndex

    return int(TensorIndex(loaded.folder / "trace" / "tensors").nbytes.max())


def _peak_growth(work: Callable[[], None]) -> int | None:
    """Bytes by which the resident set peaks above where it was (Linux)."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
