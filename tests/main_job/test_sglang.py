"""The main job with SGLang: against the learner, against vLLM, and both samplers in one report."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from minite_diag.canonical.names import STATIC, index_trace
from minite_diag.canonical.tokens import read_site
from minite_diag.checkpoints import open_checkpoint, read_quantized
from minite_diag.plan import read_plan
from minite_diag.site import Site
from minite_diag.trace.store import Trace


@pytest.fixture(scope="module")
def two_samplers(compare: Any) -> Any:
    done = compare(
        "te-vllm-sglang",
        *("--learner", "te", "--sampler", "vllm", "--sampler", "sglang", "--model", "demo-moe"),
        *("--num-probes", "2", "--sample-tokens", "6", "--no-attribute"),
    )
    assert done.code == 0, done.stderr
    return done


def test_one_report_has_both_learner_gaps_and_the_gap_between_samplers(two_samplers: Any) -> None:
    summary = two_samplers.summary
    assert summary["verdict"] == "measured"
    labels = [(p["learner"]["label"], p["sampler"]["label"]) for p in summary["pairs"]]
    assert labels == [
        ("te-ref", "vllm-emu"),
        ("te-ref", "sglang-modelled"),
        ("vllm-emu", "sglang-modelled"),
    ]
    plan = read_plan(two_samplers.run)
    scored = sum(len(p.token_ids) - 1 for p in plan.probes)
    for pair in summary["pairs"]:
        found = pair["logprob"]["score"]
        assert found["tokens"] == scored
        assert 0.0 < found["mean_abs"] <= found["max_abs"]
        assert pair["sites"]["compared"] > 1000
    for engine in summary["engines"]:
        assert engine["silent_hooks"] == []
    html = (two_samplers.run / "report.html").read_text()
    assert "sglang-modelled" in html
    assert "vllm-emu" in html


def test_the_learner_scored_what_each_sampler_drew(two_samplers: Any) -> None:
    keys = ["mode", "source", "probe", "position", "token_id"]
    learner = Trace(two_samplers.run / "traces" / "learner-te").tokens
    for name in ("sampler-vllm", "sampler-sglang"):
        sampler = Trace(two_samplers.run / "traces" / name).tokens
        drawn = sampler[sampler["mode"] == "sample"]
        scored = learner[(learner["mode"] == "sample") & (learner["source"] == name)]
        pd.testing.assert_frame_equal(
            *(t[keys].sort_values(keys, ignore_index=True) for t in (drawn, scored))
        )


def test_the_output_says_what_is_sglang_s_own(two_samplers: Any) -> None:
    sglang = next(e for e in two_samplers.summary["engines"] if e["engine"] == "sglang")
    status = {item["op"]: item["status"] for item in sglang["evidence"]}
    for op in ("norm", "rope", "attention", "router", "lm_head", "logprobs", "linear"):
        assert status[op] == "native"
    for op in ("nvfp4_linear", "nvfp4_quantize", "experts"):
        assert status[op] == "modelled"


def test_both_samplers_hold_the_bytes_of_one_export(two_samplers: Any) -> None:
    plan = read_plan(two_samplers.run)
    exported = open_checkpoint(Path(plan.samplers[0].checkpoint))
    assert plan.samplers[0].checkpoint == plan.samplers[1].checkpoint
    trace = Trace(two_samplers.run / "traces" / "sampler-sglang")
    sites = index_trace(trace)[STATIC]
    assert len(plan.quantized) == 208
    for fqn in plan.quantized:
        stored = read_quantized(exported, fqn)
        codes = read_site(trace, sites[Site(fqn, "weight_codes")]).tensor
        scale = read_site(trace, sites[Site(fqn, "weight_block_scale")]).tensor
        decode = read_site(trace, sites[Site(fqn, "weight_global_decode_scale")]).tensor
        assert codes.equal(stored.codes), fqn
        assert scale.view(stored.block_scale.dtype).equal(stored.block_scale), fqn
        assert decode.item() == stored.global_scale.item(), fqn
    static = two_samplers.rows.query("mode == 'static' and status == 'compared'")
    between = static[
        static["baseline"].str.contains("vllm") & static["target"].str.contains("sglang")
    ]
    weights = between[between["kind"].isin(["weight", "weight_codes", "weight_block_scale"])]
    assert len(weights) > 400
    assert (weights["bitwise_fraction"] == 1.0).all()


def test_high_precision_hf_vllm_and_sglang_agree(compare: Any) -> None:
    done = compare(
        "hf-vllm-sglang-fp32",
        *("--learner", "hf", "--sampler", "vllm", "--sampler", "sglang", "--model", "demo-moe"),
        *("--dtype", "float32", "--quantize", "none", "--num-probes", "2", "--sample-tokens", "4"),
        "--no-attribute",
    )
    assert done.code == 0, done.stderr
    pairs = done.summary["pairs"]
    assert len(pairs) == 3
    for pair in pairs:
        assert pair["sampler"]["dtype"] == "float32"
        for mode in pair["logprob"].values():
            assert mode["max_abs"] < 1e-4
    weights = done.rows.query("mode == 'static' and status == 'compared'")
    assert (weights["bitwise_fraction"] == 1.0).all()


def test_without_the_environment_one_line_says_what_to_run(
    compare: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINITE_DIAG_ENVIRONMENTS", str(tmp_path_factory.mktemp("none")))
    done = compare("no-environment", "--sampler", "sglang", "--model", "demo-moe")
    assert done.code == 3
    assert "no environment in" in done.stderr
    assert "next:  minite-diag env create sglang" in done.stderr
    assert "Traceback" not in done.stderr
