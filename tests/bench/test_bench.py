"""Each bench runs once at a tiny size and reports what it measured; no test judges a speed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from minite_diag.bench import compare as bench
from minite_diag.bench.capture import bench_capture
from minite_diag.bench.cli import app
from minite_diag.bench.compare import bench_compare
from minite_diag.bench.measurement import Measurement, median_seconds
from minite_diag.compare_site import Side
from minite_diag.errors import TraceError

KEYS = {"name", "value", "unit", "peer", "ratio", "detail"}
INSTALLED = os.environ.get("MINITE_BENCH_PEER")


@pytest.fixture
def run(new_trace: Any, tmp_path: Path) -> Path:
    from minite_diag.plan import EngineSpec, ModelRef, Plan, write_plan

    for name in ("learner-toy", "sampler-toy"):
        builder = new_trace(name)
        builder.static("m", "weight", torch.ones(8, 8))
        builder.call(range(6))
        builder.tensor("m", "input", torch.randn(6, 8).bfloat16())
        builder.tensor("m", "act_codes", torch.randint(0, 256, (6, 8), dtype=torch.uint8))
        builder.tensor("m", "act_block_scale", torch.ones(6, 1).to(torch.float8_e4m3fn))
        builder.tensor("m", "act_global_decode_scale", torch.tensor(2.0))
        builder.done()
    specs = tuple(
        EngineSpec(f"{role}-toy", role, "toy", "", "", "bf16") for role in ("learner", "sampler")
    )
    model = ModelRef("m", "", "bf16", "", "", 8, 1)
    write_plan(Plan(model, specs, (), "bfloat16", "none", (), ""), tmp_path)
    return tmp_path


def by_name(rows: list[Measurement]) -> dict[str, Measurement]:
    return {row.name: row for row in rows}


def test_capture_measures_time_and_memory() -> None:
    found = by_name(bench_capture("demo-moe", "toy", tokens=8, repeats=2))
    bare = found["bare forward"]
    for name in ("hooked, full tensors", "hooked, statistics only"):
        row = found[name]
        assert (row.peer, row.unit) == ("bare forward", "s")
        assert row.ratio == row.value / bare.value > 0
        used = found[f"{name}, processor time"]
        assert (used.unit, used.peer[:12]) == ("s", "bare forward")
        assert used.ratio > 0
    assert found["written per forward"].value > 0
    memory = found["peak extra memory"]
    assert "largest tensor" in memory.peer
    assert memory.value is None or memory.ratio >= 0


def test_compare_names_a_peer_that_is_not_there(run: Path, tmp_path: Path) -> None:
    before = set(run.rglob("*"))
    for peer in (None, tmp_path):
        found = by_name(bench_compare(run, peer, repeats=1))
        assert found["compare stage"].ratio > 0
        assert found["compare stage"].peer == "plain read"
        row = found["SGLang's comparator"]
        assert (row.value, row.ratio) == (None, None)
        assert "peer not installed" in row.detail
        assert "pip install" in row.detail
        assert found["compare, same tensors"].ratio is None
    assert set(run.rglob("*")) == before


@pytest.mark.skipif(not INSTALLED, reason="MINITE_BENCH_PEER names no folder with sglang")
def test_compare_runs_the_real_peer(run: Path) -> None:
    found = by_name(bench_compare(run, Path(str(INSTALLED)), repeats=1))
    row = found["compare, same tensors"]
    assert row.peer.startswith("SGLang's comparator 0.")
    peer = found[row.peer]
    assert row.ratio == row.value / peer.value > 0
    assert "0 errored" in peer.detail
    assert "5 pairs" in peer.detail


def test_dumps_hold_the_tensors_that_are_compared(run: Path, tmp_path: Path) -> None:
    from minite_diag.trace.store import Trace

    sides = tuple(Side.of(Trace(run / "traces" / name)) for name in ("learner-toy", "sampler-toy"))
    chosen = list(bench._choose(*sides, 1 << 20))
    folders = tmp_path / "a", tmp_path / "b"
    bench._write_dumps(sides, chosen, folders)
    files = [sorted(folder.iterdir()) for folder in folders]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    sizes = 0
    for file in (*files[0], *files[1]):
        record = torch.load(file, weights_only=True)
        tags = dict(tag.split("=", 1) for tag in file.stem.split("___"))
        assert tags == {key: str(value) for key, value in record["meta"].items()}
        sizes += record["value"].numel() * record["value"].element_size()
    assert sizes == sum(item.nbytes for item in chosen)
    assert len(list(bench._choose(*sides, sizes // 2))) < len(chosen)


def test_a_run_without_tensors_is_an_error(run: Path) -> None:
    for file in run.glob("traces/learner-toy/tensors/*"):
        file.unlink()
    with pytest.raises(TraceError, match="no tensors that both sides hold"):
        bench_compare(run, None, repeats=1)


def test_commands_print_rows(run: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(run), "--repeats", "1", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 5
    assert all(set(row) == KEYS for row in rows)
    assert "bench compare" in done.stderr
    done = CliRunner().invoke(app, ["compare", str(run / "nothing")])
    assert done.exit_code == 3
    assert "next:" in done.stderr


def test_functions_take_turns() -> None:
    seen: list[str] = []
    found = median_seconds([lambda: seen.append("a"), lambda: seen.append("b")], 3)
    assert seen == ["a", "b"] * 3
    assert all(seconds > 0 for seconds in found)


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, minite_diag.bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
