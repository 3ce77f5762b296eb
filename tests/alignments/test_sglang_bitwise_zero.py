"""Exact equality through real SGLang: with the tool in charge, and with the plugin alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, minite

from minite_diag.alignments.base import known_alignments
from minite_diag.environments import engine_python
from minite_diag.plan import read_plan
from minite_diag.trace.store import Trace

ALL = [
    "weights",
    "pow2-scale",
    "norm",
    "rope",
    "attention",
    "activation",
    "router",
    "experts",
    "nvfp4-linear",
    "nvfp4-moe",
    "lm-head",
    "logprobs",
]


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = tmp_path_factory.mktemp("aligned-sglang") / "run"
    done = minite(
        "compare",
        *("--learner", "te", "--sampler", "sglang", "--model", "demo-moe"),
        *("--num-probes", "3", "--sample-tokens", "6", "--capture-sample"),
        *("--out", str(run), "--json", "-q", "--gate", "bitwise"),
        *(f"--align={name}" for name in ALL),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout)


def test_what_is_replaced_in_vllm_can_be_replaced_in_sglang_too() -> None:
    kernels = {
        name: alignment for name, alignment in known_alignments().items() if alignment.kernels
    }
    assert set(kernels) == set(ALL[2:])
    for name, alignment in kernels.items():
        assert {"vllm", "sglang"} <= set(alignment.engines), name


def test_every_logprob_and_every_tensor_is_bitwise_equal(aligned: Any) -> None:
    _, summary = aligned
    assert summary["verdict"] == "pass"
    (pair,) = summary["pairs"]
    for mode in ("score", "sample"):
        found = pair["logprob"][mode]
        assert found["equal"] == found["tokens"] > 0
        assert found["max_abs"] == 0.0
    assert pair["first_divergence"] is None
    sites = pair["sites"]
    assert sites["compared"] == sites["bitwise_equal"] > 4000
    assert sites["skipped"] == 0
    assert pair["causes"] == []


def test_the_output_says_what_is_ours_and_what_stays_native(aligned: Any) -> None:
    _, summary = aligned
    learner, sampler = (
        {item["op"]: item for item in engine["evidence"]} for engine in summary["engines"]
    )
    ours = ("norm", "rope", "attention", "activation", "router", "experts", "lm_head", "logprobs")
    for op in ours:
        assert learner[op]["status"] == sampler[op]["status"] == "replaced"
        assert sampler[op]["note"], op
    assert sampler["nvfp4_linear"]["status"] == "replaced"
    assert sampler["linear"]["status"] == "native"


def test_decoded_tokens_are_among_them(aligned: Any) -> None:
    run, _ = aligned
    tokens = Trace(run / "traces" / "sampler-sglang").tokens
    assert (tokens["phase"] == "decode").sum() == 3 * 5


def bare_sglang(checkpoint: str, prompts: list[list[int]], align: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            engine_python("sglang"),
            str(Path(__file__).with_name("run_sglang_plugin.py")),
            checkpoint,
        ],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        env={**os.environ, "MINITE_DIAG_ALIGN": align, "OMP_NUM_THREADS": "1"},
        timeout=300,
        cwd=ROOT / "tests",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_plugin_alone_gives_the_learners_bits(aligned: Any) -> None:
    """A user's own SGLang Engine: nothing of ours but the plugin and one variable."""
    run, _ = aligned
    plan = read_plan(run)
    prompts = [list(probe.token_ids) for probe in plan.probes]
    found = bare_sglang(plan.samplers[0].checkpoint, prompts, ",".join(ALL))
    learner = Trace(run / "traces" / "learner-te").tokens
    for probe, alone, batched in zip(plan.probes, found["alone"], found["batch"], strict=True):
        rows = learner[(learner["mode"] == "score") & (learner["probe"] == probe.id)]
        expected = rows.sort_values("position")["logprob"].dropna().tolist()
        assert alone == expected
        assert batched == expected
    assert found["decoded"] == found["rescored"]


def test_the_plugin_is_installed_in_both_environments() -> None:
    code = (
        "from importlib.metadata import entry_points as e\n"
        "print('minite_diag_align' in e(group='sglang.srt.plugins').names)"
    )
    for python in (sys.executable, engine_python("sglang")):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "True", python
