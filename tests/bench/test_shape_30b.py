"""The bench of the 30B-A3B shape runs at a tiny size; nothing here judges a speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = "--layers 2 --experts 4 --shrink 64 --probes 1 --tokens 8"


def test_every_stage_runs_and_is_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/bench/shape_30b.py", str(tmp_path / "run"), *TINY.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert [rows[name]["exit"] for name in ("compare", "report")] == [0, 0]
    for name in ("compare", "gate, first", "gate, again", "report"):
        assert rows[name]["exit"] in (0, 3)
        assert rows[name]["processor_seconds"] > 0
        assert rows[name]["peak_mib"] > 20
    assert rows["files"]["report.html"] > 10_000
