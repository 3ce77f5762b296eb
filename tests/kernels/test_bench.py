"""The benchmark's own logic: ratios, goals, peers that are not installed; and that peers compute it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from data import matrix

from minite_kernels.bench import __main__ as command
from minite_kernels.bench import peers, published, quantizer, run_benchmarks
from minite_kernels.bench.goals import GOALS, judge
from minite_kernels.bench.row import Row, measure
from minite_kernels.nvfp4.quantize import quantize


def test_ratios_are_of_one_case_warm_and_cold() -> None:
    rows = [Row("b", "c", "ours", 2.0, 4.0, 1.0, tokens=8), Row("b", "c", "peer", 3.0, 10.0)]
    rows.append(Row("b", "another case", "peer", 100.0))
    record = rows[0].as_dict(rows)
    assert record["speedup"] == {"peer": 1.5}
    assert record["speedup_cold"] == {"peer": 2.5}
    assert record["of_floor"] == 0.5
    assert record["tokens_per_s"] == 4e6


def test_a_goal_is_met_or_says_by_how_much_it_is_missed_and_what_bounds_it() -> None:
    rows = [
        Row("update", GOALS[-1].case, "ours W4A4 (te)", 25.0),
        Row("update", GOALS[-1].case, "BF16", 20.0),
        Row("update", GOALS[-1].case, "NVFP4 emulation, torch", 400.0),
    ]
    missed, met = judge([row.as_dict(rows) for row in rows])
    assert missed["met"] is False and missed["missed_by"] == pytest.approx(0.1)
    assert missed["bound"]
    assert met["met"] is True and met["missed_by"] is None and met["ratio"] == 16.0


def test_a_goal_without_its_peer_was_not_measured() -> None:
    row = Row("update", GOALS[-1].case, "ours W4A4 (te)", 25.0)
    assert all(goal["met"] is None for goal in judge([row.as_dict([row])]))


def test_a_missing_package_is_a_row_that_says_so() -> None:
    def missing() -> list[object]:
        raise ModuleNotFoundError("No module named 'a_peer'", name="a_peer")

    row = measure("b", "c", "peer", missing, torch.device("cpu"))  # type: ignore[arg-type]
    assert row.error == "not installed: a_peer" and row.warm_us is None


def test_unknown_benchmark() -> None:
    with pytest.raises(ValueError, match="unknown benchmarks"):
        run_benchmarks("cpu", ["no such"])


def test_command_prints_rows_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantizer, "CPU_SHAPES", ((16, 64),))
    file = tmp_path / "rows.json"
    assert command.main(["quantizer", "--device", "cpu", "--json", str(file)]) == 0
    names = {row["implementation"] for row in json.loads(file.read_text())["rows"]}
    assert {"copy", "torchao", "compressed-tensors", "vLLM emulation"} <= names
    assert "ours, amax a token" in capsys.readouterr().out


def test_our_emulation_peer_is_vllms() -> None:
    x = matrix("normal", 5, 64).bfloat16()
    encode = published.quantize_encode_scale(x)
    w = quantize(matrix("normal", 48, 64, seed=1), "vllm-emulation", role="weight", impl="ref")
    theirs = published.vllm_emulation(x, encode, w)()
    assert torch.equal(peers.emulate_torch(x, encode, w), theirs)  # type: ignore[arg-type]
