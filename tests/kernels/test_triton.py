"""Runs the Triton checks in processes of their own: an interpreter mode and a numpy of their own.

``interpreted/`` runs every kernel in Triton's CPU interpreter against the reference; ``compiled/``
cross-compiles them for GPUs that are not here. Missing Triton is a failure, not a skip.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALL = "pip install --no-deps --target .triton -r tests/kernels/triton.txt"


def triton_folder() -> str:
    """Folder to put first on the path; empty if the environment itself has Triton."""
    folder = Path(os.environ.get("MINITE_TRITON", ROOT / ".triton"))
    if folder.is_dir():
        return str(folder)
    if importlib.util.find_spec("triton") is None:
        raise FileNotFoundError(f"no Triton in {folder}; run: {INSTALL}")
    return ""


@pytest.mark.parametrize(("folder", "at_least"), (("interpreted", 100), ("compiled", 15)))
def test_checks_pass(folder: str, at_least: int) -> None:
    paths = [triton_folder(), str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "OMP_NUM_THREADS": "1",  # tiny tensors: threads only wait for each other
    }
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=check_*.py", str(HERE / folder)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed.group(1)) >= at_least, run.stdout[-1000:]
    assert "skipped" not in run.stdout
