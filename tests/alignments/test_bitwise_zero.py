"""Exact equality through real vLLM: with the tool in charge, and with the plugin alone."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, minite

from minite_diag.attribute.live import attribute_live
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
]


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run = tmp_path_factory.mktemp("aligned") / "run"
    done = minite(
        "compare",
        "--learner",
        "te",
        "--sampler",
        "vllm",
        "--model",
        "demo-moe",
        "--num-probes",
        "3",
        "--sample-tokens",
        "6",
        "--capture-sample",
        "--out",
        str(run),
        "--json",
        "-q",
        "--gate",
        "bitwise",
        *(f"--align={name}" for name in ALL),
    )
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout)


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
        {item["op"]: item["status"] for item in engine["evidence"]} for engine in summary["engines"]
    )
    ours = {"norm", "rope", "attention", "activation", "router", "experts"}
    for op in ours:
        assert learner[op] == sampler[op] == "replaced"
    assert sampler["nvfp4_linear"] == "replaced"
    assert learner["nvfp4_linear"] == "modelled"
    # Equal without us: the engines' own code is kept.
    for op in ("lm_head", "logprobs"):
        assert learner[op] == sampler[op] == "native"


def test_decode_differs_from_nothing_either(aligned: Any) -> None:
    run, _ = aligned
    tokens = Trace(run / "traces" / "sampler-vllm").tokens
    assert (tokens["phase"] == "decode").sum() == 3 * 5


def test_no_batch_chunk_or_decode_changes_a_bit(aligned: Any) -> None:
    """Both engines, run again: alone, in batches of 2, 4 and 8, chunked, decoded."""
    run, _ = aligned
    found = attribute_live(run, lambda *_: None)
    assert found["errors"] == []
    legs = {(row["engine"], row["leg"]): row for row in found["legs"]}
    batches = {f"batch-{size}" for size in (2, 4, 8)}
    common = {"observer", "repeat", "chunked-prefill", *batches}
    sampler = common | {"prefill-decode", "batch-decode", "decode-again"}
    for engine, names in (("learner-te", common), ("sampler-vllm", sampler)):
        for name in names:
            row = legs[engine, name]
            assert row["status"] == "measured", (engine, name, row["reason"])
            assert row["equal"] == row["tokens"] > 0, (engine, name)
            assert row["max_abs"] == 0.0
    (causal,) = found["causal"]
    assert causal["verdict"] == "equal"


def bare_vllm(checkpoint: str, prompts: list[list[int]], align: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_plugin.py")), checkpoint],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "MINITE_DIAG_ALIGN": align,
            "PYTHONPATH": str(ROOT),
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_plugin_alone_gives_the_learners_bits(aligned: Any) -> None:
    """A user's own vLLM process: nothing of ours but the installed plugin and one variable."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "minite_diag_align" in points.names, "install the package: pip install -e ."
    run, _ = aligned
    plan = read_plan(run)
    prompts = [list(probe.token_ids) for probe in plan.probes]
    found = bare_vllm(plan.samplers[0].checkpoint, prompts, ",".join(ALL))
    learner = Trace(run / "traces" / "learner-te").tokens
    for probe, alone, batched in zip(plan.probes, found["alone"], found["batch"], strict=True):
        rows = learner[(learner["mode"] == "score") & (learner["probe"] == probe.id)]
        expected = rows.sort_values("position")["logprob"].dropna().tolist()
        assert alone == expected
        assert batched == expected
    assert found["decoded"] == found["rescored"]
