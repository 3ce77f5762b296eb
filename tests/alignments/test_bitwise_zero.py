"""Exact equality through real vLLM: with the tool in charge, and with the plugin alone.

The tool's run is the end of the ladder: vLLM's own NVFP4 linears on static power-of-two scales. In a
user's own process on CPU vLLM has none, so the plugin puts ours there.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command import ROOT, minite

from minite_diag.attribute.live import attribute_live
from minite_diag.capture.runner import capture
from minite_diag.checkpoints import open_checkpoint
from minite_diag.checkpoints.input_scales import read_input_scales
from minite_diag.plan import Plan, read_plan, write_plan
from minite_diag.prepare import prepare, read_request
from minite_diag.trace.store import Trace

OPS = ["norm", "rope", "attention", "activation", "router", "experts"]
LADDER = ["weights", "pow2-scale", "static-scale", *OPS]
BY_TOKEN = ["weights", "pow2-scale", *OPS, "nvfp4-linear", "nvfp4-moe"]


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
        *(f"--align={name}" for name in LADDER),
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
    assert learner["nvfp4_linear"] == learner["nvfp4_quantize"] == "modelled"
    # Equal without us: the engines' own code is kept, vLLM's NVFP4 linears among it.
    assert sampler["nvfp4_linear"] == sampler["nvfp4_quantize"] == "emulated"
    for op in ("lm_head", "logprobs"):
        assert learner[op] == sampler[op] == "native"


def test_the_learner_quantizes_under_the_scales_that_the_sampler_loaded(aligned: Any) -> None:
    """Codes and scales of every quantized input, byte for byte; the scales are the file's."""
    run, _ = aligned
    plan = read_plan(run)
    rows = pd.read_parquet(run / "comparison.parquet")
    for kind in ("act_codes", "act_block_scale", "act_global_decode_scale"):
        found = rows[rows["kind"] == kind]
        assert set(found["fqn"]) == set(plan.quantized)
        assert (found["bitwise_fraction"] == 1.0).all()
        assert found["scale_ratio"].dropna().eq(1.0).all()
    stored = open_checkpoint(Path(plan.samplers[0].checkpoint))
    scales = read_input_scales(stored, plan.quantized)
    used = {}
    trace = Trace(run / "traces" / "learner-te")
    for ref in trace.index:
        if ref.kind == "act_global_decode_scale":
            used.setdefault(ref.native, set()).add(float(trace.read(ref)))
    assert used == {fqn: {float(scales[fqn].value)} for fqn in used}
    assert len(used) > 100


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


def learner_alone(run: Path, names: list[str]) -> tuple[Plan, Path]:
    """The run's learner captured under other alignments, without a sampler."""
    folder = run.with_name("by-token")
    folder.mkdir()
    request = dataclasses.replace(read_request(run), align=tuple(names), modes=("score",))
    plan = prepare(request, folder, lambda _: None)
    alone = dataclasses.replace(plan, engines=(plan.learner,))
    write_plan(alone, folder)
    (result,) = capture(alone, folder, lambda *_: None)
    assert result.status == "ok", result
    return plan, folder


def test_the_plugin_alone_gives_the_learners_bits(aligned: Any) -> None:
    """A user's own vLLM process: nothing of ours but the installed plugin and one variable."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "minite_diag_align" in points.names, "install the package: pip install -e ."
    run, _ = aligned
    plan, folder = learner_alone(run, BY_TOKEN)
    prompts = [list(probe.token_ids) for probe in plan.probes]
    found = bare_vllm(plan.samplers[0].checkpoint, prompts, ",".join(BY_TOKEN))
    learner = Trace(folder / "traces" / "learner-te").tokens
    for probe, alone, batched in zip(plan.probes, found["alone"], found["batch"], strict=True):
        rows = learner[(learner["mode"] == "score") & (learner["probe"] == probe.id)]
        expected = rows.sort_values("position")["logprob"].dropna().tolist()
        assert alone == expected
        assert batched == expected
    assert found["decoded"] == found["rescored"]
