"""Real engines, real runs through the command line, one planted fault on the sampler's side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import planted_faults
import pytest

from minite_diag.checkpoints import open_demo_moe

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """A distribution on the path that brings the faults, as a third party's package would."""
    site = tmp_path_factory.mktemp("site")
    info = site / "planted_faults-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-faults\nVersion: 1\n")
    points = "\n".join(
        f"fault-{name} = planted_faults:fault_{name.replace('-', '_')}"
        for name in planted_faults.FAULTS
    )
    (info / "entry_points.txt").write_text(f"[minite_diag.alignments]\n{points}\n")
    path = os.pathsep.join(map(str, (ROOT, site, HERE)))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def demo_moe():
    """The folder of the shipped model."""
    return open_demo_moe().path


@pytest.fixture(scope="session")
def minite(environment):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "minite_diag.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=900,
        )

    return run


@pytest.fixture(scope="session")
def compare(minite, tmp_path_factory):
    """`compare(name, learner, samplers, *arguments)`: (run, its pairs by sampler), once per name.

    One run holds several samplers, each with its own fault: the learner is loaded once.
    """
    done = {}

    def run(name, learner, samplers, *arguments):
        if name not in done:
            folder = tmp_path_factory.mktemp(name) / "run"
            asked = [x for sampler in samplers for x in ("--sampler", sampler)]
            found = minite(
                *("compare", "--learner", learner, *asked, "--out", folder, "--json", "-q"),
                *arguments,
            )
            assert found.returncode in (0, 3), found.stderr
            summary = json.loads(found.stdout)
            assert "error" not in {engine["status"] for engine in summary["engines"]}, found.stderr
            learner_id = summary["engines"][0]["id"]
            pairs = [p for p in summary["pairs"] if p["learner"]["id"] == learner_id]
            done[name] = folder, pairs
        return done[name]

    return run
