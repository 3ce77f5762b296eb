"""Live attribution of real transformers, te-ref and vLLM: bits, not tolerances."""

import shutil

import pytest

from minite_diag.attribute.live import attribute_live
from minite_diag.attribute.local_error import born_here
from minite_diag.attribute.operands import PARTS

LAYERS = 4
CACHING = "vllm:prefix_caching=true,block_size=32"
PATCHES = ("model.layers.2.self_attn.o_proj:output",)


def ignore(spec, event):
    pass


@pytest.fixture(scope="session")
def found(real):
    """`found(name)`: (run, live attribution) of one pair on demo-moe, once."""
    short = ("--model", "demo-moe", "--num-probes", "1")
    pairs = {
        "hf-vllm": ("--learner", "hf", "--sampler", CACHING, "--quantize", "none"),
        "te-vllm": ("--learner", "te", "--sampler", "vllm"),
        "hf-te": ("--learner", "hf", "--sampler", "te"),
        "weights": ("--learner", "te", "--sampler", "te:recipe=te-1d"),
        "activation rule": ("--learner", "te", "--sampler", "te:recipe=te-fast-math"),
        "gemm rule": ("--learner", "vllm", "--sampler", "vllm:nvfp4_recipe=vllm-cuda"),
    }
    done = {}

    def run(name):
        if name not in done:
            modes = ("--modes", "score")
            if name == "hf-vllm":
                modes = ("--sample-tokens", "6", "--capture-sample")
            folder = real(name, *pairs[name], *short, *modes)
            done[name] = attribute_live(folder, ignore, patches=PATCHES)
            assert done[name]["errors"] == []
        return done[name]

    return run


@pytest.mark.parametrize("pair", ["hf-vllm", "te-vllm", "hf-te"])
def test_every_op_corrected_leaves_no_bit_of_the_gap(found, pair):
    """The intervention reaches every op of the engine: nothing is left that it can't see."""
    (causal,) = found(pair)["causal"]
    assert causal["gap"]["mean_abs"] > 0.0
    assert causal["gap_all"]["max_abs"] == 0.0
    assert causal["gap_all"]["equal"] == causal["gap_all"]["tokens"] == causal["gap"]["tokens"]
    assert causal["prefix"][-1]["closed"] == 1.0
    smallest = causal["smallest"]
    assert smallest["ops"]
    assert smallest["layers"]
    assert min(smallest["closed_ops"], smallest["closed_layers"]) == smallest["closed"] >= 0.95


@pytest.mark.parametrize("pair", ["hf-vllm", "te-vllm", "hf-te"])
def test_singles_and_interaction_add_up(found, pair):
    (causal,) = found(pair)["causal"]
    for name in ("ops", "layers"):
        parts = causal[f"interaction_{name}"]
        assert parts["sum_of_singles"] == pytest.approx(sum(s["closed"] for s in causal[name]))
        assert parts["total"] == 1.0
        assert parts["interaction"] == parts["total"] - parts["sum_of_singles"]
    dominated = abs(causal["interaction_ops"]["interaction"]) > 0.5
    assert (causal["verdict"] == "inconclusive") is dominated


@pytest.mark.parametrize("pair", ["hf-vllm", "te-vllm", "hf-te"])
def test_hidden_states_of_the_baseline_leave_what_comes_after_them(found, pair):
    """After the last layer only the final norm and lm_head can differ: vLLM's norm does not, where
    it is handed the rounded sum."""
    (causal,) = found(pair)["causal"]
    assert [step["upto"] for step in causal["upstream"]] == [str(i) for i in range(LAYERS)]
    assert causal["upstream"][-1]["gap"]["max_abs"] == 0.0
    assert causal["upstream"][0]["gap"]["mean_abs"] > 0.0


def test_bf16_vllm_is_born_in_four_kinds_of_ops(found):
    """As measured by replacing ops one by one: everything else is bitwise equal already."""
    born = {row["op"] for row in born_here(found("hf-vllm")["local"])}
    assert born >= {"norm", "rope", "attention", "experts"}
    assert born <= {"norm", "rope", "attention", "experts", "router"}


def test_norms_differ_where_the_residual_is_added_and_nowhere_else(found):
    rows = {(r["site"], r["kind"]): r for r in found("hf-vllm")["local"]}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        assert rows[name + "post_attention_layernorm", "output"]["bitwise_local"] < 1.0
        assert (rows[name + "input_layernorm", "output"]["bitwise_local"] < 1.0) is (layer > 0)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            assert rows[name + norm, "output"]["bitwise_local"] == 1.0
        # The sum itself is rounded alike.
        assert rows[name + "post_attention_layernorm", "input"]["bitwise_local"] == 1.0
    assert rows["model.norm", "output"]["bitwise_local"] < 1.0


@pytest.mark.parametrize("op", ["embedding", "linear", "lm_head", "residual"])
def test_ops_that_agree_agree_in_every_bit(found, op):
    rows = [row for row in found("hf-vllm")["local"] if row["op"] == op]
    assert rows
    assert {(row["error_local"], row["bitwise_local"]) for row in rows} == {(0.0, 1.0)}
    if op == "linear":
        assert any(row["error_inherited"] > 0.0 for row in rows)
        assert {row["error_inherited"] for row in rows} == {row["error_total"] for row in rows}


def test_nvfp4_linears_and_experts_are_named(found):
    born = {row["op"]: row for row in born_here(found("te-vllm")["local"])}
    assert {"linear", "quantize", "norm", "rope", "attention"} <= set(born)
    assert born["linear"]["sites"] > 100
    assert "embedding" not in born
    assert "lm_head" not in born


def test_only_quantized_linears_split_te_from_hf(found):
    local = found("hf-te")["local"]
    assert {row["op"] for row in born_here(local)} == {"linear"}
    sites = {row["site"] for row in local if row["bitwise_local"] < 1.0}
    assert sites
    assert all(site.endswith("_proj") for site in sites)
    (causal,) = found("hf-te")["causal"]
    assert {share["name"] for share in causal["ops"]} == {"linear", "experts"}


def test_routing_replayed_is_measured_in_nats(found):
    (routing,) = found("te-vllm")["routing"]
    assert routing["rows_changed"] > 0
    assert routing["rows"] == routing["gap"]["tokens"] * LAYERS + LAYERS
    assert routing["nats"] == routing["gap"]["mean_abs"] - routing["gap_replayed"]["mean_abs"]
    assert routing["patched"] == 2 * LAYERS


def test_the_legs_of_real_engines(found):
    legs = {(row["engine"], row["leg"]): row for row in found("te-vllm")["legs"]}
    for engine in ("learner-te", "sampler-vllm"):
        for leg in ("observer", "repeat"):
            row = legs[engine, leg]
            assert row["status"] == "measured"
            assert (row["code"], row["max_abs"]) == (None, 0.0)
            assert row["equal"] == row["tokens"] > 0
    # One amax over the whole batch: te-ref's activation scale depends on its neighbours.
    assert legs["learner-te", "batch-4"]["code"] == "MD503"
    assert found("te-vllm")["noise"]["learner-te"]["mean_abs"] > 0.0
    decode = {
        row["leg"]: row for row in found("hf-vllm")["legs"] if row["engine"] == "sampler-vllm"
    }
    assert decode["prefill-decode"]["tokens"] == 5
    assert decode["batch-decode"]["status"] == "measured"
    assert 1 <= decode["batch-decode"]["tokens"] <= 6


@pytest.mark.parametrize("part", ["weights", "activation rule"])
def test_the_operand_that_differs_closes_the_whole_gap(found, part):
    """te-ref differs from itself in one rule: the rule's share is all, the others' is nothing."""
    (causal,) = found(part)["causal"]
    shares = {share["name"]: share for share in causal["operands"]}
    assert causal["operand_sites"] == 208, causal["notes"]
    assert causal["gap"]["mean_abs"] > 0.0
    assert shares[part]["gap"]["max_abs"] == 0.0
    assert shares[part]["closed"] == shares["all operands"]["closed"] == 1.0
    for other in {"weights", "activation rule", "gemm rule"} - {part}:
        assert (shares[other]["closed"], shares[other]["changed"]) == (0.0, 0)
    if part == "weights":
        # Codes without their scales, or scales without their codes, are no weight at all.
        assert min(shares["weight codes"]["closed"], shares["weight scales"]["closed"]) < 0.0


def test_the_gemm_of_real_vllm_is_swapped_for_its_gpu_s(found):
    (causal,) = found("gemm rule")["causal"]
    shares = {share["name"]: share for share in causal["operands"]}
    assert shares["gemm rule"]["changed"] > 0
    assert shares["weights"]["changed"] == 0
    # The emulation rounds some ties of the activations otherwise than the GPU's quantizer.
    assert shares["activation rule"]["changed"] < shares["gemm rule"]["changed"]
    # Not all: the emulation's experts apply the router weight before they round.
    assert shares["gemm rule"]["changed"] == causal["operand_sites"] >= 200
    assert shares["all operands"]["closed"] > 0.0


def test_operands_of_two_engines_are_swapped_where_the_model_is_exact(found):
    (causal,) = found("te-vllm")["causal"]
    shares = {share["name"]: share for share in causal["operands"]}
    assert causal["operand_sites"] >= 140
    assert set(shares) == {*PARTS, "all operands"}
    assert all(share["changed"] > 0 for share in shares.values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_vllm_is_not_the_eager_one(found):
    """Norms and activations are fused under compilation, and no longer rounded in between."""
    legs = {(row["engine"], row["leg"]): row for row in found("hf-vllm")["legs"]}
    row = legs["sampler-vllm", "production"]
    assert (row["status"], row["code"]) == ("measured", "MD507")
    assert 0 < row["equal"] < row["tokens"]
    assert 0.0 < row["mean_abs"] < 0.05


def test_a_prefix_from_the_cache_gives_the_bits_of_its_prefill(found):
    legs = {(row["engine"], row["leg"]): row for row in found("hf-vllm")["legs"]}
    row = legs["sampler-vllm", "decode-again"]
    assert (row["status"], row["code"]) == ("measured", None)
    assert "32 tokens of the prompt from the prefix cache" in row["note"]
    assert row["equal"] == row["tokens"] > 0


def test_vllm_s_nvfp4_emulation_does_not_compile_on_cpu_and_that_is_said(found):
    legs = {(row["engine"], row["leg"]): row for row in found("te-vllm")["legs"]}
    row = legs["sampler-vllm", "production"]
    assert row["status"] == "skipped"
    assert "vllm can't load" in row["reason"]
    assert ("learner-te", "production") not in legs


def test_the_weights_of_one_linear_can_be_patched(found):
    """te-ref against te-ref of another tile, in real forwards: one of 208 linears."""
    patches = {p["part"]: p for p in found("weights")["causal"][0]["patches"]}
    assert set(patches) == {"output", *PARTS}
    assert {p["sites"] for p in patches.values()} == {1}
    assert patches["weights"]["closed"] not in (0.0, 1.0)
    assert patches["activation rule"]["closed"] == patches["gemm rule"]["closed"] == 0.0
