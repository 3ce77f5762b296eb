"""The baseline file: nothing gets worse, what is better is kept, an upgrade is told."""

import json
from pathlib import Path

import numpy as np
import pytest
from gate_runs import judge, rounding, write_run

from minite_diag.errors import UsageError


def test_a_ratchet_only_tightens(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    first = write_run(run / "a", rounding(0.02, 40, 60))
    gate = judge(first, baseline=file, update_baseline=True)
    assert gate["verdict"] == "pass"
    assert gate["baseline"]["pairs"][0]["state"] == "updated"
    kept = file.read_bytes()

    worse = write_run(run / "b", rounding(0.03, 40, 60, seed=1))
    assert judge(worse)["verdict"] == "pass", "the profile alone does not see it"
    gate = judge(worse, baseline=file, update_baseline=True)
    assert gate["verdict"] == "fail"
    failed = [c for c in gate["checks"] if c["verdict"] == "fail"]
    assert {c["rule"] for c in failed} == {"baseline"}
    assert "worse than the baseline" in gate["reasons"][0]
    assert file.read_bytes() == kept, "a worse run never loosens the file"

    better = write_run(run / "c", rounding(0.01, 40, 60, seed=2))
    assert judge(better, baseline=file, update_baseline=True)["verdict"] == "pass"
    assert file.read_bytes() != kept
    assert judge(first, baseline=file)["verdict"] == "fail"


def test_the_same_run_again_is_not_worse(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    for seed in range(5):
        written = write_run(run / str(seed), rounding(0.02, 40, 60, seed=seed))
        gate = judge(written, baseline=file, update_baseline=seed == 0)
        assert gate["verdict"] == "pass", gate["reasons"]


def test_a_gap_of_zero_stays_zero(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    judge(write_run(run / "a", [np.zeros(9)] * 5), baseline=file, update_baseline=True)
    one = [np.zeros(9) for _ in range(5)]
    one[0][0] = 1e-6
    gate = judge(write_run(run / "b", one), baseline=file)
    assert gate["verdict"] == "fail"


def test_a_project_may_start_from_a_gap_that_fails(run: Path, tmp_path: Path) -> None:
    """The profile fails; the ratchet still holds what there is."""
    file = tmp_path / "baseline.json"
    written = write_run(run, rounding(0.3, 40, 60))
    gate = judge(written, baseline=file, update_baseline=True)
    assert gate["verdict"] == "fail"
    assert len(json.loads(file.read_text())["entries"]) == 1


def test_an_upgrade_has_another_key_and_is_told(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    judge(write_run(run / "a", rounding(0.02, 40, 60)), baseline=file, update_baseline=True)
    upgraded = write_run(run / "b", rounding(0.03, 40, 60), version="2.0")
    gate = judge(upgraded, baseline=file)
    assert gate["verdict"] == "pass"
    (note,) = [n for n in gate["notes"] if "has no entry" in n]
    assert "toy 2.0 cpu" in note
    assert "nearest" in note
    assert "toy 1.0 cpu" in note
    judge(upgraded, baseline=file, update_baseline=True)
    assert len(json.loads(file.read_text())["entries"]) == 2


def test_another_model_is_not_near(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    judge(write_run(run / "a", rounding(0.02, 40, 60)), baseline=file, update_baseline=True)
    gate = judge(write_run(run / "b", rounding(0.02, 40, 60), name="other"), baseline=file)
    (note,) = [n for n in gate["notes"] if "has no entry" in n]
    assert "nearest" not in note


@pytest.mark.parametrize("text", ["{", '{"schema": 9, "entries": {}}', "[]"])
def test_a_damaged_file_is_an_error(run: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    write_run(run, rounding(0.02, 5, 5))
    with pytest.raises(UsageError, match=r"baseline\.json"):
        judge(run, baseline=file)
    assert file.read_text() == text


def test_a_run_that_was_not_measured_is_not_kept(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    judge(
        write_run(run, rounding(0.02, 40, 60), status="error"), baseline=file, update_baseline=True
    )
    assert not file.exists()
