"""One fault at a time in real transformers, te-ref and vLLM; attribution names its site and cause.

Every fault comes in by public means: a checkpoint or config that an engine loads, an engine option,
or an op replaced through the alignments' entry point. A clean engine in each group gives no cause.
"""

import json

import planted_faults
import pytest
from variants import (
    drop_biases,
    other_weight,
    permute_heads,
    qwen2,
    scale,
    stale,
    swap_gate_and_up,
    swizzled,
    untie,
    variant,
)

SHORT = ("--modes", "score", "--num-probes", "2")
PLAIN = ("--quantize", "none", *SHORT)
LAYER = "model.layers.1."
EXPERTS = LAYER + "mlp.experts."

OPS = {
    # fault: (cause, where it is found)
    "norm-casts-last": ("MD201", LAYER + "input_layernorm"),
    "rope-in-bf16": ("MD202", "model.layers.0.self_attn.q_rope"),
    "router-in-bf16": ("MD205", "model.layers.2.mlp.experts"),
    "zeroed-rows": ("MD208", LAYER + "self_attn.o_proj"),
    "experts-drop-the-last": ("MD206", "model.layers.0.mlp.experts"),
    "other-temperature": ("MD401", "log-probabilities"),
    "shifted": ("MD402", "log-probabilities"),
    "divided-logprobs": ("MD403", "log-probabilities"),
    "renormalized": ("MD404", "log-probabilities"),
    "raw-logits": ("MD405", "log-probabilities"),
}
FITTED = {
    "other-temperature": planted_faults.TEMPERATURE,
    "divided-logprobs": planted_faults.TEMPERATURE,
    "shifted": 1.0,
    "renormalized": 10.0,
}

CHECKPOINTS = {
    # variant: (tensors, config, cause, where, first divergence)
    "swapped": (swap_gate_and_up, {}, "MD302", EXPERTS + "0.gate_proj", EXPERTS + "0.gate_proj"),
    "stale": (
        stale(LAYER + "self_attn.o_proj.weight"),
        {},
        "MD301",
        LAYER + "self_attn.o_proj",
        LAYER + "self_attn.o_proj",
    ),
    "heads": (
        permute_heads(32),
        {},
        "MD303",
        LAYER + "self_attn.q_proj",
        LAYER + "self_attn.q_proj",
    ),
    "gain": (
        scale(LAYER + "self_attn.k_proj.weight", 1.25),
        {},
        "MD304",
        LAYER + "self_attn.k_proj",
        LAYER + "self_attn.k_proj",
    ),
    "embedding": (
        scale("embed_tokens.weight", 1.25),
        {},
        "MD304",
        "model.embed_tokens",
        "model.embed_tokens",
    ),
}
CONFIGS = {
    # key: (value, cause of the op that reads it, where)
    "rms_norm_eps": (1e-4, "MD201", "model.layers.0.input_layernorm"),
    "rope_theta": (50000.0, "MD202", "model.layers.0.self_attn.q_rope"),
    "norm_topk_prob": (False, "MD205", "model.layers.0.mlp.experts"),
    "num_experts_per_tok": (2, None, "model.layers.0.mlp.experts"),
    "hidden_act": ("gelu", "MD204", "model.layers.0.mlp.experts.0.down_proj"),
}
RECIPES = {
    "te:recipe=te-1d": ("MD102", "weight quantizer"),
    "te:recipe=te-row-scaled": ("MD101", "activation quantizer"),
    "te:recipe=te-4over6": ("MD105", "weight quantizer"),
    "te:recipe=te-fast-math": ("MD106", "activation quantizer"),
    "te:fused_weights=false": ("MD113", "model.layers.0.self_attn.qkv_proj"),
}


def causes(pair):
    return {(cause["code"], cause["where"]) for cause in pair["causes"]}


def only_follows_from_it(pair, code):
    """Beside the named cause nothing but what every divergence brings: other experts."""
    return {cause["code"] for cause in pair["causes"]} <= {code, "MD601"}


@pytest.fixture(scope="session")
def ops(compare):
    samplers = ["hf", *(f"hf:align=fault-{name}" for name in OPS)]
    _, pairs = compare("ops", "te", samplers, "--model", "demo-moe", *PLAIN)
    return dict(zip(["clean", *OPS], pairs, strict=True))


@pytest.mark.parametrize("fault", OPS)
def test_an_op_that_computes_otherwise(ops, fault):
    code, where = OPS[fault]
    pair = ops[fault]
    assert (code, where) == (pair["causes"][0]["code"], pair["causes"][0]["where"])
    assert only_follows_from_it(pair, code)
    assert pair["comparable"] is (code < "MD4")
    if code < "MD4":
        assert pair["first_divergence"]["site"] == where
    if fault in FITTED:
        assert pair["causes"][0]["evidence"]["value"] == pytest.approx(FITTED[fault], rel=0.01)


def test_a_clean_engine_has_no_cause(ops):
    assert ops["clean"]["causes"] == []
    assert ops["clean"]["logprob"]["score"]["max_abs"] == 0.0
    assert ops["clean"]["first_divergence"] is None


@pytest.fixture(scope="session")
def checkpoints(compare, demo_moe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    samplers = ["hf:attention=eager"]
    for name, (edit, config, *_) in CHECKPOINTS.items():
        samplers.append(f"hf:checkpoint={variant(demo_moe, folder / name, edit, **config)}")
    for key, (value, *_) in CONFIGS.items():
        samplers.append(f"hf:checkpoint={variant(demo_moe, folder / key, **{key: value})}")
    _, pairs = compare("checkpoints", "te", samplers, "--model", "demo-moe", *PLAIN)
    return dict(zip(["eager", *CHECKPOINTS, *CONFIGS], pairs, strict=True))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_weight_that_is_not_the_learners(checkpoints, name):
    *_, code, where, first = CHECKPOINTS[name]
    pair = checkpoints[name]
    assert (pair["causes"][0]["code"], pair["causes"][0]["where"]) == (code, where)
    assert pair["first_divergence"]["site"] == first
    assert only_follows_from_it(pair, code)
    assert pair["first_divergence"]["input_equal"] is not False


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_that_is_not_the_learners(checkpoints, key):
    value, code, where = CONFIGS[key]
    pair = checkpoints[key]
    first = pair["causes"][0]
    assert (first["code"], first["where"]) == ("MD307", "config.json")
    assert list(first["evidence"]["keys"]) == [key]
    assert first["evidence"]["keys"][key][1] == value
    assert pair["first_divergence"]["site"] == where
    assert code is None or (code, where) in causes(pair)


def test_another_attention_implementation(checkpoints):
    pair = checkpoints["eager"]
    assert pair["causes"][0]["code"] == "MD203"
    assert pair["first_divergence"]["site"] == "model.layers.0.self_attn.attn"
    assert only_follows_from_it(pair, "MD203")


def test_lm_head_in_another_precision(compare):
    _, (pair,) = compare(
        "head",
        "te",
        ["hf:align=fault-head-in-bf16"],
        *("--model", "demo-moe", "--dtype", "float32", *PLAIN),
    )
    assert causes(pair) == {("MD207", "lm_head")}


@pytest.fixture(scope="session")
def dense(compare, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    base = qwen2(folder / "base")
    biases = variant(base, folder / "biases", drop_biases(1))
    head = variant(base, folder / "head", untie, tie_word_embeddings=False)
    lines = [
        json.dumps({"id": f"p{i}", "token_ids": [(7 * j + 13 * i) % 280 for j in range(40)]})
        for i in range(2)
    ]
    probes = folder / "probes.jsonl"
    probes.write_text("\n".join(lines))
    _, pairs = compare(
        "dense",
        "te",
        [f"hf:checkpoint={biases}", f"hf:checkpoint={head}"],
        *("--model", base, "--probes", probes, *PLAIN),
    )
    return pairs


def test_biases_that_were_dropped(dense):
    (cause,) = dense[0]["causes"]
    assert cause["code"] == "MD305"
    assert set(cause["evidence"]["sites"]) == {LAYER + f"self_attn.{x}_proj" for x in "qkv"}
    assert dense[0]["first_divergence"]["site"] == LAYER + "self_attn.q_proj"


def test_a_tied_head_that_stayed_behind(dense):
    assert causes(dense[1]) == {("MD307", "config.json"), ("MD306", "lm_head")}
    assert dense[1]["first_divergence"]["site"] == "lm_head"


@pytest.fixture(scope="session")
def recipes(compare):
    samplers = ["te", *RECIPES]
    _, pairs = compare("recipes", "te", samplers, "--model", "demo-moe", *SHORT)
    return dict(zip(samplers, pairs, strict=True))


@pytest.mark.parametrize("sampler", RECIPES)
def test_another_rule_of_quantization(recipes, sampler):
    assert RECIPES[sampler] in causes(recipes[sampler])
    assert recipes["te"]["causes"] == []


@pytest.fixture(scope="session")
def nvfp4_vllm(compare, minite, tmp_path_factory):
    """Real vLLM against itself on NVFP4 checkpoints that differ in one thing."""
    folder = tmp_path_factory.mktemp("nvfp4")
    done = minite("export", "demo-moe", "-o", folder / "base")
    assert done.returncode == 0, done.stderr
    name = LAYER + "self_attn."
    edits = {
        "gain": scale(name + "k_proj.weight_scale_2", 1.25),
        "calibration": scale(name + "o_proj.input_scale", 0.25),
        "other": other_weight(name + "o_proj.weight"),
        "swizzled": swizzled(name + "o_proj.weight_scale"),
    }
    samplers = ["vllm:nvfp4_recipe=vllm-cuda"]
    samplers += [
        f"vllm:checkpoint={variant(folder / 'base', folder / key, edit)}"
        for key, edit in edits.items()
    ]
    samplers += [f"vllm:checkpoint={variant(folder / 'base', folder / 'eps', rms_norm_eps=1e-4)}"]
    learner = f"vllm:checkpoint={folder / 'base'}"
    arguments = ("--model", "demo-moe", "--modes", "score", "--num-probes", "1")
    _, pairs = compare("nvfp4-vllm", learner, samplers, *arguments)
    return dict(zip(["gemm", *edits, "eps"], pairs, strict=True))


def test_vllm_with_one_fused_scale_off(nvfp4_vllm):
    pair = nvfp4_vllm["gain"]
    assert pair["causes"][0]["code"] == "MD304"
    assert LAYER + "self_attn.k_proj" in pair["causes"][0]["evidence"]["sites"]
    assert pair["causes"][0]["evidence"]["gain"] == pytest.approx(1.25, rel=0.01)
    assert pair["first_divergence"]["site"].startswith(LAYER + "self_attn.")


def test_vllm_with_a_calibration_that_clips(nvfp4_vllm):
    pair = nvfp4_vllm["calibration"]
    where = LAYER + "self_attn.o_proj"
    assert ("MD118", where) in causes(pair)
    assert ("MD112", where) in causes(pair)
    assert pair["first_divergence"]["site"] == where


def test_vllm_with_another_weight(nvfp4_vllm):
    pair = nvfp4_vllm["other"]
    where = LAYER + "self_attn.o_proj"
    assert ("MD301", where) in causes(pair)
    assert pair["first_divergence"]["site"] == where


def test_vllm_with_swizzled_block_scales(nvfp4_vllm):
    pair = nvfp4_vllm["swizzled"]
    where = LAYER + "self_attn.o_proj"
    assert ("MD119", where) in causes(pair)
    assert pair["first_divergence"]["site"] == where


def test_vllm_with_another_epsilon(nvfp4_vllm):
    pair = nvfp4_vllm["eps"]
    assert pair["causes"][0]["code"] == "MD307"
    assert ("MD201", "model.layers.0.input_layernorm") in causes(pair)


def test_vllm_with_the_gemm_of_its_gpu_kernels(nvfp4_vllm):
    pair = nvfp4_vllm["gemm"]
    assert pair["causes"][0]["code"] == "MD109"
    assert pair["causes"][0]["basis"] == "modelled"
