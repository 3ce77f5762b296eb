"""Running the command line as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def minite(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minite_diag.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=1200,
    )


def planted(fault: str, run: Path) -> dict[str, Any]:
    """The compared pair of a clean toy and one with a planted fault."""
    done = minite(
        "compare",
        "--learner",
        "toy",
        "--sampler",
        f"toy:fault={fault}",
        "--model",
        "demo-moe",
        "--num-probes",
        "2",
        "--out",
        str(run),
        "--json",
        "-q",
        "--modes",
        "score",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["pairs"][0]
