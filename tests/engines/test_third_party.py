"""An engine of 60 lines, found by its entry point, holds the contract; so do the bundled ones."""

import json
import os
from pathlib import Path

import pytest
from command import ROOT, minite

from minite_diag.testing import EngineContract

HERE = Path(__file__).parent / "third_party"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The third party's distribution, in this process and in the workers'."""
    site = tmp_path_factory.mktemp("site")
    info = site / "someones_engine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-engine\nVersion: 1\n")
    points = "[minite_diag.engines]\nsomeones = someones_engine:SomeonesEngine\n"
    (info / "entry_points.txt").write_text(points)
    paths = os.pathsep.join(map(str, (ROOT, site, HERE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(site))
        yield paths


class TestSomeones(EngineContract):
    engine = "someones"


class TestHf(EngineContract):
    engine = "hf"


class TestToy(EngineContract):
    engine = "toy"

    def test_every_linear_is_seen_by_its_checkpoint_name_or_declared_invisible(self):
        """The toy reads no checkpoint."""


def test_it_takes_sixty_lines():
    assert len((HERE / "someones_engine.py").read_text().splitlines()) <= 60


def test_the_command_line_finds_it(installed, tmp_path):
    done = minite(
        *("compare", "--learner", "hf", "--sampler", "someones", "--model", "demo-moe"),
        *("--quantize", "none", "--dtype", "float32", "--num-probes", "1", "--modes", "score"),
        *("--out", str(tmp_path / "run"), "--json", "-q"),
        PYTHONPATH=installed,
    )
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    assert pair["sampler"]["label"] == "someones"
    assert pair["logprob"]["score"]["max_abs"] < 1e-4
