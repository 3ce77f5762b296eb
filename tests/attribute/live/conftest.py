"""Toy runs captured and served in this process; real engines through their own processes."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minite_diag.attribute.live import attribute_live
from minite_diag.capture.live import Job, JobResult
from minite_diag.capture.live_worker import LiveEngine
from minite_diag.capture.worker import Capture, Progress
from minite_diag.compare import compare
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, read_plan, write_plan
from minite_diag.probe import Probe

ROOT = Path(__file__).parents[3]
PROBES = {"p0": tuple(range(3, 45)), "p1": tuple(range(90, 60, -1))}


def toy_plan(*faults: str | None) -> Plan:
    """A learner and one sampler per fault."""
    roles = ["learner", *["sampler"] * (len(faults) - 1)]
    engines = tuple(
        EngineSpec(
            id=f"{role}-{i}",
            role=role,
            engine="toy",
            python=sys.executable,
            checkpoint="",
            checkpoint_format="bf16",
            options={"fault": fault} if fault else {},
        )
        for i, (role, fault) in enumerate(zip(roles, faults, strict=True))
    )
    return Plan(
        model=ModelRef("toy", "", "bf16", "Toy", "0", 128, 2),
        engines=engines,
        probes=tuple(Probe.make(name, ids, len(ids) - 10) for name, ids in PROBES.items()),
        dtype="bfloat16",
        quantize="none",
        quantized=(),
        export_recipe="none",
        sample_tokens=6,
        capture=CaptureSpec(sample_tensors=True, top_k=4),
    )


def capture_here(run: Path, plan: Plan) -> None:
    """Capture and compare without worker processes."""
    run.mkdir(parents=True, exist_ok=True)
    write_plan(plan, run)
    for spec in (*plan.samplers, plan.learner):
        assert Capture(run, plan, spec, Progress(io.StringIO())).run_all() == "ok"
    compare(run)


class HereSession:
    """A live engine in this process."""

    def __init__(self, run: Path, engine_id: str, report) -> None:
        plan = read_plan(run)
        self.spec = plan.engine(engine_id)
        self.report = report
        self.live = LiveEngine(run, plan, self.spec)

    def run(self, job: Job) -> JobResult:
        return JobResult.from_json(self.live.do(job).read_text())


@contextlib.contextmanager
def open_here(run: Path, engine_id: str, report):
    yield HereSession(run, engine_id, report)


def ignore(spec, event) -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The toy's tensors are so small that waking a second thread takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # Engines in their own processes too: capture and live runs get the same number.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def here():
    """How to plan, capture and serve toys in this process."""
    return SimpleNamespace(plan=toy_plan, capture=capture_here, open_session=open_here)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """`toy(fault, learner=None)`: (run, live attribution) of a toy against a faulty one, once."""
    done = {}

    def run(fault, learner=None, budget=None):
        key = (fault, learner, budget)
        if key not in done:
            folder = tmp_path_factory.mktemp("toy")
            capture_here(folder, toy_plan(learner, fault))
            found = attribute_live(folder, ignore, budget=budget, open_session=open_here)
            assert found["errors"] == []
            done[key] = folder, found
        return done[key]

    return run


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """`real(name, *arguments)`: the run directory of a finished compare, once."""
    done = {}

    def run(name, *arguments):
        if name not in done:
            folder = tmp_path_factory.mktemp(name) / "run"
            finished = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "minite_diag.cli",
                    "compare",
                    *arguments,
                    "--out",
                    str(folder),
                    "--json",
                    "-q",
                ],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                timeout=600,
                check=False,
            )
            assert finished.returncode == 0, finished.stderr
            done[name] = folder
        return done[name]

    return run
