"""All alignments but one, in real engines: the gap that returns is attributed to the one left out."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT, minite

from minite_diag.align.leave_one_out import _row, expected_causes
from minite_diag.alignments.base import known_alignments


def test_every_op_has_the_cause_that_leaving_it_out_brings_back() -> None:
    expected = {name: expected_causes(name) for name, a in known_alignments().items() if a.kernels}
    nvfp4 = {"nvfp4-linear", "nvfp4-moe"}
    assert all(expected[name] is None for name in nvfp4)
    assert expected["norm"] == {"MD201"}
    assert expected["logprobs"] == {"MD210"}
    assert all(codes for name, codes in expected.items() if name not in nvfp4)


def summary_without(site: str | None, *codes: str) -> dict:
    """A measured run whose first divergence is at `site`; None: bitwise equal."""
    equal = 9 if site is None else 5
    pair = {
        "causes": [{"code": code, "where": "", "text": ""} for code in codes],
        "logprob": {"score": {"tokens": 4, "equal": 4 if site is None else 1, "mean_abs": 0.1}},
        "sites": {"compared": 9, "bitwise_equal": equal},
        "first_divergence": None if site is None else {"site": site, "kind": "act_codes"},
    }
    return {"pairs": [pair], "run": "r", "verdict": "measured"}


def test_dense_linears_and_experts_are_told_apart() -> None:
    expert, dense = "model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"
    for name, site, other in (("nvfp4-moe", expert, dense), ("nvfp4-linear", dense, expert)):
        assert _row(name, summary_without(site, "MD101", "MD601"))["attributed"] is True
        assert _row(name, summary_without(other, "MD101"))["attributed"] is False
        assert _row(name, summary_without(site, "MD201"))["attributed"] is False
        assert _row(name, summary_without(site))["attributed"] is False
        assert _row(name, summary_without(site, "MD115", "MD206"))["attributed"] is (site == expert)
        # Recipes that differ without a bit that does: nothing came back.
        assert _row(name, summary_without(None, "MD101"))["attributed"] is None


ALIGN = ("--align", "norm", "--align", "attention")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """te-ref against transformers: the ladder of two rungs is short, and the engines are real."""
    folder = tmp_path_factory.mktemp("left-out") / "run"
    done = minite(
        *("compare", "--learner", "te", "--sampler", "hf:attention=eager", "--model", "demo-moe"),
        *("--quantize", "none", "--num-probes", "2", "--modes", "score", "--out", str(folder)),
        "-q",
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def interrupted(run: Path) -> tuple[int, int]:
    """Ctrl-C in the second rung: the exit code, and when the first was compared."""
    command = [sys.executable, "-m", "minite_diag.cli", "align", str(run), *ALIGN]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # A background job's children ignore SIGINT: undo what this process may have inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    second = run / "align" / "2-attention"
    deadline = time.monotonic() + 300
    while not (second / "plan.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert not (run / "align.json").exists()
    return process.returncode, _compared(run)


def _compared(run: Path) -> int:
    return (run / "align" / "1-norm" / "comparison.parquet").stat().st_mtime_ns


@pytest.fixture(scope="module")
def result(run: Path, interrupted: tuple[int, int]) -> dict:
    done = minite("align", str(run), *ALIGN, "--leave-one-out", "--price", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_folder_that_cannot_be_written_says_so(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("align*"))
    (copy / "align").write_text("in the way")
    done = minite("align", str(copy), *ALIGN)
    assert done.returncode == 2
    assert f"can't write to {copy}/align/1-norm" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


def test_ctrl_c_keeps_what_was_climbed_and_the_next_call_goes_on(
    run: Path, interrupted: tuple[int, int], result: dict
) -> None:
    code, compared = interrupted
    assert code == 130
    assert _compared(run) == compared
    rungs = [rung["rung"] for rung in result["ladder"]]
    assert rungs == ["as it is", "+ norm", "+ attention"]


def test_what_is_left_out_is_what_is_named(result: dict) -> None:
    rows = {row["left_out"]: row for row in result["left_out"]}
    assert set(rows) == {"norm", "attention"}
    # The aligned norm is transformers' own order: leaving it out on both sides changes nothing.
    assert rows["norm"]["attributed"] is None
    assert rows["norm"]["causes"] == []
    assert rows["attention"]["attributed"] is True
    assert rows["attention"]["causes"][0]["code"] == "MD203"
    assert rows["attention"]["first_divergence"]["site"] == "model.layers.0.self_attn.attn"


def test_the_end_is_zero_and_its_price_is_measured_without_hooks(result: dict) -> None:
    assert result["ladder"][-1]["closed"]["score"] == 1.0
    for row in result["bare_price"]:
        assert row["error"] is None
        assert row["tokens_per_second"] > 0
        assert row["speed_ratio"] == row["tokens_per_second"] / row["tokens_per_second_before"]


def test_the_report_shows_the_ladder(result: dict) -> None:
    text = (Path(result["before"]["run"]) / "report.html").read_text()
    for said in ("Gap after each alignment", "+ attention", "without attention", "without hooks"):
        assert said in text
