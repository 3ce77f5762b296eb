"""The main job on real vLLM, real transformers and a trained model: nothing here is a mock."""

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from command import minite

from minite_diag.canonical.names import STATIC, SequenceKey, index_trace
from minite_diag.canonical.tokens import read_site
from minite_diag.checkpoints import open_checkpoint, read_quantized, resolve
from minite_diag.plan import read_plan
from minite_diag.probe import shipped_probe_file
from minite_diag.site import Site
from minite_diag.trace.store import Trace

LAYERS = 4
LINEARS = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(LAYERS) for p in "qkvo"]


def tensors(run: Path, engine: str) -> tuple[Trace, dict[Any, Any]]:
    trace = Trace(run / "traces" / engine)
    return trace, index_trace(trace)


def test_it_measures_and_says_what_ran(te_vs_vllm: Any) -> None:
    assert te_vs_vllm.code == 0, te_vs_vllm.stderr
    summary = te_vs_vllm.summary
    assert (summary["schema"], summary["verdict"]) == (1, "measured")
    (pair,) = summary["pairs"]
    assert pair["learner"]["label"] == "te-ref"
    assert pair["sampler"]["label"] == "vllm-emu"
    assert pair["sampler"]["version"].startswith("0.32")
    for engine in summary["engines"]:
        assert engine["silent_hooks"] == []
        assert engine["evidence"]
    assert (te_vs_vllm.run / "report.html").stat().st_size > 10_000


def test_the_gap_is_measured_in_both_modes(te_vs_vllm: Any) -> None:
    modes = te_vs_vllm.summary["pairs"][0]["logprob"]
    plan = read_plan(te_vs_vllm.run)
    assert modes["score"]["tokens"] == sum(len(p.token_ids) - 1 for p in plan.probes)
    assert modes["sample"]["tokens"] == 6 * len(plan.probes)
    for mode in modes.values():
        assert 0.0 < mode["mean_abs"] <= mode["max_abs"]
        assert mode["mult_prob_error"] > 1.0
    assert modes["sample"]["k3_kl"] >= 0.0
    assert "k3_kl" not in modes["score"]
    assert modes["score"]["full_kl"] > 0.0


def test_the_learner_scored_exactly_what_the_sampler_drew(te_vs_vllm: Any) -> None:
    learner = Trace(te_vs_vllm.run / "traces" / "learner-te").tokens
    sampler = Trace(te_vs_vllm.run / "traces" / "sampler-vllm").tokens
    keys = ["mode", "source", "probe", "position", "token_id"]
    a, b = (t[t["mode"] == "sample"][keys].reset_index(drop=True) for t in (learner, sampler))
    pd.testing.assert_frame_equal(
        a.sort_values(keys, ignore_index=True), b.sort_values(keys, ignore_index=True)
    )
    assert set(sampler[sampler["generated"]]["phase"]) == {"prefill", "decode"}


def test_every_linear_and_expert_is_compared(te_vs_vllm: Any) -> None:
    rows = te_vs_vllm.rows
    compared = rows[(rows["mode"] == "score") & (rows["status"] == "compared")]
    seen = set(zip(compared["fqn"], compared["kind"], strict=True))
    for linear in LINEARS:
        for kind in ("input", "output", "act_codes", "act_block_scale", "act_global_decode_scale"):
            assert (linear, kind) in seen
    for layer in range(LAYERS):
        moe = f"model.layers.{layer}.mlp"
        assert {(f"{moe}.gate", "router_logits"), (f"{moe}.experts", "topk_ids")} <= seen
        experts = compared[compared["fqn"].str.startswith(f"{moe}.experts.")]
        assert experts["expert_index"].nunique() >= 8
        assert {"output", "act_codes", "act_block_scale"} <= set(experts["kind"])
    assert ("lm_head", "logits") in seen
    sample = rows[(rows["mode"] == "sample") & (rows["status"] == "compared")]
    assert set(sample["kind"]) >= {"output", "act_codes", "topk_ids"}


def test_every_skip_has_a_reason(te_vs_vllm: Any) -> None:
    rows = te_vs_vllm.rows
    skipped = rows[rows["status"] == "skipped"]
    assert (skipped["reason"].str.len() > 10).all()
    assert rows["status"].isin(["compared", "skipped"]).all()


def test_weights_differ_as_16x16_and_1x16_do(te_vs_vllm: Any) -> None:
    """The design's own measurement: 16x16 against 1x16 moves about 65 % of the codes."""
    static = te_vs_vllm.rows.query("mode == 'static' and kind == 'weight_codes'")
    assert len(static) == 208
    assert 0.5 < static["mismatch_rate"].mean() < 0.8


def test_vllm_holds_the_bytes_of_the_exported_checkpoint(te_vs_vllm: Any) -> None:
    plan = read_plan(te_vs_vllm.run)
    exported = open_checkpoint(Path(plan.samplers[0].checkpoint))
    trace, found = tensors(te_vs_vllm.run, "sampler-vllm")
    assert len(plan.quantized) == 208
    for fqn in plan.quantized:
        stored = read_quantized(exported, fqn)
        assert stored.direction == "decode"
        held = {
            kind: read_site(trace, found[STATIC][Site(fqn, kind)]).tensor
            for kind in ("weight_codes", "weight_block_scale", "weight_global_decode_scale")
        }
        assert torch.equal(held["weight_codes"], stored.codes), fqn
        assert torch.equal(
            held["weight_block_scale"].view(torch.uint8), stored.block_scale.view(torch.uint8)
        ), fqn
        assert torch.equal(
            held["weight_global_decode_scale"].reshape(()),
            stored.global_scale.reshape(()),
        ), fqn


def test_vllm_equals_itself(compare: Any) -> None:
    done = compare(
        "vllm-vllm",
        "--learner",
        "vllm",
        "--sampler",
        "vllm",
        "--model",
        "demo-moe",
        "--num-probes",
        "2",
        "--sample-tokens",
        "4",
        "--gate",
        "bitwise",
    )
    assert done.code == 0, done.stderr
    summary = done.summary
    assert summary["verdict"] == "pass"
    (pair,) = summary["pairs"]
    assert pair["first_divergence"] is None
    assert pair["sites"]["compared"] == pair["sites"]["bitwise_equal"] > 500
    assert pair["logprob"]["score"]["max_abs"] == 0.0


def test_high_precision_hf_and_vllm_agree(compare: Any) -> None:
    done = compare(
        "hf-vllm-fp32",
        "--learner",
        "hf",
        "--sampler",
        "vllm",
        "--model",
        "demo-moe",
        "--dtype",
        "float32",
        "--quantize",
        "none",
        "--num-probes",
        "2",
        "--sample-tokens",
        "4",
    )
    assert done.code == 0, done.stderr
    (pair,) = done.summary["pairs"]
    assert pair["sampler"]["dtype"] == "float32"
    for mode in ("score", "sample"):
        assert pair["logprob"][mode]["max_abs"] < 1e-4
    weights = done.rows.query("mode == 'static' and status == 'compared'")
    assert len(weights) > 200
    assert (weights["bitwise_fraction"] == 1.0).all()


def test_hf_is_the_high_precision_baseline_of_an_nvfp4_sampler(compare: Any) -> None:
    done = compare(
        "hf-vllm",
        "--learner",
        "hf",
        "--sampler",
        "vllm",
        "--model",
        "demo-moe",
        "--num-probes",
        "1",
        "--modes",
        "score",
        "--layout",
        "compressed-tensors",
    )
    assert done.code == 0, done.stderr
    (pair,) = done.summary["pairs"]
    assert pair["logprob"]["score"]["mean_abs"] > 0.0
    first = pair["first_divergence"]
    assert (first["site"], first["kind"]) == ("model.layers.0.self_attn.q_proj", "output")
    assert first["input_equal"] is True


def test_decode_rows_are_the_sampled_positions(te_vs_vllm: Any) -> None:
    plan = read_plan(te_vs_vllm.run)
    trace, found = tensors(te_vs_vllm.run, "sampler-vllm")
    for probe in plan.probes:
        key = SequenceKey("sample", "sampler-vllm", probe.id)
        site = read_site(trace, found[key][Site("model.layers.0.self_attn.o_proj", "input")])
        # The last sampled token is never fed back.
        assert site.positions is not None
        assert site.positions.tolist() == list(range(probe.prompt_length + 5))


def test_demo_moe_resolves_without_a_cache(tmp_path: Path) -> None:
    assert resolve("demo-moe", tmp_path).architecture == "Qwen3MoeForCausalLM"
    assert not list(tmp_path.iterdir())


def test_an_exported_checkpoint_is_a_model_too(compare: Any, tmp_path: Path) -> None:
    folder = tmp_path / "refit"
    done = minite(
        "export",
        "demo-moe",
        "-o",
        str(folder),
        "--recipe",
        "te",
        "--layout",
        "compressed-tensors",
        "--quantize",
        "experts",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder)
    found = compare(
        "from-export",
        "--learner",
        "te",
        "--sampler",
        "vllm",
        "--model",
        str(folder),
        "--probes",
        str(shipped_probe_file("demo-moe")),
        "--num-probes",
        "1",
        "--modes",
        "score",
    )
    assert found.code == 0, found.stderr
    summary = found.summary
    assert summary["quantize"] == {"pattern": "as in the checkpoint", "linears": 192}
    (pair,) = summary["pairs"]
    assert pair["logprob"]["score"]["mean_abs"] > 0.0
    attention = found.rows.query("fqn == 'model.layers.0.self_attn.q_proj' and kind == 'weight'")
    assert attention["bitwise_fraction"].tolist() == [1.0]
