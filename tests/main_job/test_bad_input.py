"""Whatever is wrong, one clear error that names it and the next step; nothing measured is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT, minite, planted

TOY = (
    "compare",
    "--learner",
    "toy",
    "--sampler",
    "toy",
    "--model",
    "demo-moe",
    "--num-probes",
    "2",
)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--learner", "vlm"), 2, "did you mean 'vllm'?"),
        (("--sampler", "nothing"), 2, "no engine is called 'nothing'"),
        (("--learner", "te:recipe"), 2, "key=value"),
        (("--model", "/no/such/folder"), 2, "/no/such/folder"),
        (("--probes", "/no/such/file.jsonl"), 2, "/no/such/file.jsonl"),
        (("--dtype", "bfloat61"), 2, "did you mean bfloat16?"),
        (("--modes", "scorre"), 2, "did you mean score?"),
        (("--quantize", "model.layers.99.*"), 2, "model.layers.99.*"),
        (("--export-recipe", "modelop", "--sampler", "vllm"), 2, "modelopt"),
        (("--max-disk", "lots"), 2, "500MB"),
        (("--sites", "model.layers.*.self_atn.*"), 2, "model.layers.*.self_attn.*"),
        (("--python", "toy"), 2, "ENGINE=PATH"),
        (("--python", "toy=/no/python"), 3, "/no/python"),
        (("--gate", "bitwisse"), 2, "did you mean 'bitwise'?"),
    ],
)
def test_one_error_and_the_next_step(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = minite(*TOY, "--out", str(tmp_path / "run"), "-q", *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "next:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_json_errors_are_json(tmp_path: Path) -> None:
    done = minite(*TOY, "--learner", "vlm", "--out", str(tmp_path / "run"), "--json")
    record = json.loads(done.stdout)
    assert record["verdict"] == "error"
    assert "vlm" in record["error"]["message"]


def test_a_probe_outside_of_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "probes.jsonl"
    file.write_text('{"id": "a", "token_ids": [1, 999999]}\n')
    done = minite(*TOY, "--probes", str(file), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "999999" in done.stderr
    assert "probes.jsonl:1" in done.stderr


@pytest.mark.parametrize("learner", ["hf", "te"])
def test_an_architecture_that_no_engine_knows(tmp_path: Path, learner: str) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(ROOT / "minite_diag" / "checkpoints" / "demo_moe", odd)
    config = json.loads((odd / "config.json").read_text())
    config |= {"architectures": ["WeirdForCausalLM"], "model_type": "weird"}
    (odd / "config.json").write_text(json.dumps(config))
    done = minite(
        "compare",
        "--learner",
        learner,
        "--sampler",
        "hf",
        "--model",
        str(odd),
        "--probes",
        str(ROOT / "probes" / "demo-moe.jsonl"),
        "--num-probes",
        "1",
        "--out",
        str(tmp_path / "r"),
    )
    assert done.returncode in (2, 3)
    assert "weird" in done.stderr
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_read_only_place(tmp_path: Path) -> None:
    done = minite(*TOY, "--out", "/proc/minite-run")
    assert done.returncode == 2
    assert "can't write to /proc/minite-run" in done.stderr


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    first = minite(*TOY, "--out", str(tmp_path / "run"), "-q", "--modes", "score")
    assert first.returncode == 0, first.stderr
    again = minite(*TOY, "--out", str(tmp_path / "run"), "-q")
    assert again.returncode == 2
    assert "--resume" in again.stderr


def failing_toy(folder: Path, body: str) -> dict[str, str]:
    """A third-party engine that fails in its own way, found through an entry point."""
    (folder / "broken_engine.py").write_text(
        "import os, time\n"
        "from minite_diag.engines.toy import ToyEngine\n"
        "class Broken(ToyEngine):\n"
        "    name = 'broken'\n"
        "    count = 0\n"
        "    def score(self, sequence):\n"
        "        Broken.count += 1\n"
        f"        if Broken.count == 2:\n            {body}\n"
        "        return super().score(sequence)\n"
    )
    info = folder / "broken_engine-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-engine\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[minite_diag.engines]\nbroken = broken_engine:Broken\n")
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


BROKEN = (
    "compare",
    "--learner",
    "toy",
    "--sampler",
    "broken",
    "--model",
    "demo-moe",
    "--num-probes",
    "3",
    "--sample-tokens",
    "2",
    "-q",
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('the kernel gave up')", "the kernel gave up"),
        ("os._exit(7)", "the worker died (exit 7)"),
        ("os.kill(os.getpid(), 9)", "out of memory"),
        ("time.sleep(600)", "no end after 25 s"),
    ],
)
def test_a_failing_engine_keeps_what_was_captured(tmp_path: Path, body: str, said: str) -> None:
    environment = failing_toy(tmp_path, body)
    run = tmp_path / "run"
    done = minite(*BROKEN, "--out", str(run), "--timeout", "25", "--json", **environment)
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert summary["verdict"] == "error"
    broken = next(e for e in summary["engines"] if e["id"] == "sampler-broken")
    assert said in broken["error"]["message"]
    assert f"compare --resume {run}" in summary["next"]
    # The probe that was scored before the failure is compared all the same.
    (pair,) = summary["pairs"]
    assert pair["logprob"]["score"]["mean_abs"] == 0.0
    assert pair["sites"]["compared"] > 10
    # And with the cause gone, --resume recaptures that engine only.
    kept = (run / "traces" / "learner-toy" / "manifest.json").stat().st_mtime_ns
    (tmp_path / "broken_engine.py").write_text(
        "from minite_diag.engines.toy import ToyEngine\nclass Broken(ToyEngine):\n    name = 'broken'\n"
    )
    resumed = minite("compare", "--resume", str(run), "--json", **environment)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["verdict"] == "measured"
    assert (run / "traces" / "learner-toy" / "manifest.json").stat().st_mtime_ns == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_go_on(tmp_path: Path, number: signal.Signals) -> None:
    environment = failing_toy(tmp_path, "time.sleep(600)")
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "minite_diag.cli", *BROKEN, "--out", str(run)],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A background job's children ignore SIGINT: undo what this process may have inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    tokens = run / "traces" / "sampler-broken" / "tokens.parquet"
    deadline = time.monotonic() + 180
    while not tokens.exists() or tokens.stat().st_size < 1500:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "kept" in stderr
    alive = subprocess.run(["pgrep", "-f", f"capture.worker {run}"], capture_output=True)
    assert alive.returncode == 1, "a worker outlived its parent"
    shutil.rmtree(tmp_path / "broken_engine-0.0.1.dist-info")


def test_disk_budget_truncates_and_says_so(tmp_path: Path) -> None:
    done = minite(*TOY, "--out", str(tmp_path / "run"), "--json", "-q", "--max-disk", "200KB")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert {e["status"] for e in summary["engines"]} == {"truncated"}
    for engine in summary["engines"]:
        assert engine["bytes"] <= 200_000
    assert summary["pairs"][0]["logprob"]["score"]["tokens"] > 0


def test_damaged_runs_name_the_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert minite(*TOY, "--out", str(run), "-q", "--modes", "score").returncode == 0
    segment = next((run / "traces" / "sampler-toy" / "tensors").glob("data-*.bin"))
    segment.write_bytes(segment.read_bytes()[:1000])
    done = minite("compare", "--resume", str(run), "-q")
    assert done.returncode == 3
    assert "data-00000.bin" in done.stderr
    (run / "comparison.parquet").write_bytes(b"PAR1")
    for command in ("gate", "report"):
        done = minite(command, str(run))
        assert done.returncode == 3
        assert "comparison.parquet" in done.stderr
    done = minite("gate", str(tmp_path))
    assert "no run directory" in done.stderr


@pytest.mark.parametrize(
    ("fault", "site", "weights_equal"),
    [
        ("up_proj_gain", "model.layers.1.mlp.up_proj", False),
        ("stale_weight", "model.layers.1.mlp.down_proj", False),
        ("norm_cast_order", "model.layers.1.input_layernorm", True),
        ("rope_table_bf16", "model.layers.0.self_attn.q_rope", None),
        ("bias_dropped", "model.layers.0.self_attn.o_proj", True),
    ],
)
def test_the_first_split_is_where_the_fault_was_planted(
    tmp_path: Path, fault: str, site: str, weights_equal: bool | None
) -> None:
    pair = planted(fault, tmp_path / "run")
    first = pair["first_divergence"]
    assert first["site"] == site
    assert first["weights_equal"] is weights_equal
    # RoPE has no input site and no weights of its own.
    assert first["input_equal"] is (None if fault == "rope_table_bf16" else True)
    assert pair["logprob"]["score"]["max_abs"] > 0.0
