"""Real vLLM on tiny checkpoints: what it computes, what is captured, and that both are the same."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from minite_diag.canonical.names import SequenceKey
from minite_diag.checkpoints import read_quantized, read_tensor
from minite_diag.engines.base import TokenSequence
from minite_diag.engines.vllm import INSTALL, VllmEngine
from minite_diag.engines.vllm_plugin.hooks import Request, batch_rows, pack_e2m1
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import EngineSpec
from minite_kernels.nvfp4.quantize import quantize
from tests.engines.conftest import MODELLED, PROBES, SAMPLE_TOKENS, VOCAB_SIZE, build_model

DENSE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERT = ("gate_proj", "up_proj", "down_proj")


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


def same_bytes(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def reference_logprobs(kind, ids):
    with torch.no_grad():
        logits = build_model(kind).float()(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_fp32_scores_equal_transformers(runs, kind):
    run = runs(f"{kind}-fp32")
    for ids, scored in zip(PROBES, run.results["hooked"], strict=True):
        logprobs = reference_logprobs(kind, ids)
        expected = [logprobs[i - 1, ids[i]].item() for i in range(1, len(ids))]
        assert scored["logprobs"][0] is None
        assert np.abs(np.subtract(scored["logprobs"][1:], expected)).max() < 1e-4
        top = logprobs[:-1].topk(5)
        assert scored["top_ids"][1:] == top.indices.tolist()
        assert np.abs(np.subtract(scored["top_logprobs"][1:], top.values.tolist())).max() < 1e-4


NAMES = [
    "llama-fp32",
    "llama-bf16",
    "moe-fp32",
    "moe-bf16-chunked",
    "llama-nvfp4",
    "moe-nvfp4",
    "moe-nvfp4-modelled",
]


@pytest.mark.parametrize("name", NAMES)
def test_hooks_change_no_logprob(runs, name):
    results = runs(name).results
    assert results["hooked"] == results["bare"]
    assert results["after_errors"] == results["bare"][0]


def test_rerun_is_bitwise_equal(runs):
    one, two = runs("llama-bf16"), runs("llama-bf16-again")
    assert one.results["hooked"] == two.results["hooked"]
    assert one.results["sampled"] == two.results["sampled"]
    assert len(one.trace.index) == len(two.trace.index) > 500
    for a, b in zip(one.trace.index, two.trace.index, strict=True):
        assert (a.native, a.kind, a.call, a.order) == (b.native, b.kind, b.call, b.order)
        assert same_bytes(one.trace.read(a), two.trace.read(b)), f"{a.native}:{a.kind}"


def expected_sites(name):
    kind, precision = name.split("-")[:2]
    nvfp4 = precision == "nvfp4"
    sites = {("model.embed_tokens", "output"), ("lm_head", "input"), ("lm_head", "logits")}
    sites |= {("model.norm", k) for k in ("input", "output")}
    linears = []
    for layer in ("model.layers.0", "model.layers.1"):
        sites.add((layer, "output"))
        sites |= {(f"{layer}.self_attn.{s}", "output") for s in ("q_rope", "k_rope", "attn")}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sites |= {(f"{layer}.{norm}", k) for k in ("input", "output")}
        linears += [f"{layer}.{leaf}" for leaf in DENSE]
        if kind == "llama":
            linears += [f"{layer}.{leaf}" for leaf in MLP]
            sites.add((f"{layer}.mlp.act_fn", "output"))
            continue
        for norm in ("q_norm", "k_norm"):
            sites |= {(f"{layer}.self_attn.{norm}", k) for k in ("input", "output")}
        sites |= {(f"{layer}.mlp.gate", k) for k in ("input", "router_logits")}
        experts = f"{layer}.mlp.experts"
        sites |= {(experts, k) for k in ("input", "topk_ids", "topk_weights", "output")}
    quantized = ("act_codes", "act_block_scale", "act_global_decode_scale")
    kinds = ("input", "output", *(quantized if nvfp4 else ()))
    return sites | {(linear, k) for linear in linears for k in kinds}


@pytest.mark.parametrize("name", NAMES)
def test_every_site_of_every_layer_is_seen(runs, name):
    run = runs(name)
    assert run.results["silent"] == []
    for key, sites in run.sites.items():
        if key.mode == "score":
            found = {(site.fqn, site.kind) for site in sites if site.expert_index is None}
            assert found == expected_sites(name), key


def test_expert_sites_follow_the_routing(runs):
    run = runs("moe-nvfp4")
    for layer in ("model.layers.0", "model.layers.1"):
        topk_ids, _ = run.scored(f"{layer}.mlp.experts", "topk_ids")
        for expert in range(8):
            tokens = (topk_ids == expert).any(1).nonzero()[:, 0].tolist()
            for part in EXPERT:
                site = f"{layer}.mlp.experts.{expert}.{part}"
                for kind in ("input", "act_codes", "act_block_scale", "output"):
                    if tokens:
                        _, positions = run.scored(site, kind)
                        assert positions.tolist() == tokens, f"{site}:{kind}"


def test_fused_experts_are_listed_as_invisible(runs):
    run = runs("moe-fp32")
    assert "model.layers.0.mlp.experts.*.down_proj:*put" in run.results["invisible"]
    assert not runs("moe-nvfp4").results["invisible"]


@pytest.mark.parametrize("name", ["llama-fp32", "llama-bf16", "moe-fp32", "moe-bf16-chunked"])
def test_weights_are_the_checkpoint_bytes(runs, models, name):
    run, (kind, precision) = runs(name), name.split("-")[:2]
    folder = models[kind, {"fp32": "float32", "bf16": "bfloat16"}[precision]]
    names = ["model.embed_tokens", "lm_head", "model.norm", "model.layers.1.input_layernorm"]
    names += [f"model.layers.{n}.{leaf}" for n in (0, 1) for leaf in DENSE]
    if kind == "llama":
        names += [f"model.layers.{n}.{leaf}" for n in (0, 1) for leaf in MLP]
    else:
        names += [f"model.layers.{n}.mlp.gate" for n in (0, 1)]
        names += [
            f"model.layers.{n}.mlp.experts.{e}.{part}"
            for n in (0, 1)
            for e in range(8)
            for part in EXPERT
        ]
    for fqn in names:
        assert same_bytes(run.static(fqn, "weight"), read_tensor(folder, f"{fqn}.weight")), fqn


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_nvfp4_weights_are_the_exported_bytes(runs, exported, kind):
    layout = "modelopt" if kind == "llama" else "compressed-tensors"
    run, (checkpoint, names) = runs(f"{kind}-nvfp4"), exported[kind, layout]
    for fqn in names:
        stored = read_quantized(checkpoint, fqn)
        assert same_bytes(run.static(fqn, "weight_codes"), stored.codes), fqn
        block_scale = run.static(fqn, "weight_block_scale")
        assert block_scale.dtype == torch.float8_e4m3fn
        assert torch.equal(bytes_of(block_scale), bytes_of(stored.block_scale)), fqn
        decode = stored.global_scale
        if stored.direction == "encode":
            decode = decode.reciprocal()
        assert run.static(fqn, "weight_global_decode_scale").item() == decode.item(), fqn


def dequantize(codes, block_scale):
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = grid[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return values.unflatten(-1, (-1, 16)), block_scale.float().unsqueeze(-1)


@pytest.mark.parametrize("name", ["llama-nvfp4", "moe-nvfp4"])
def test_captured_codes_reproduce_the_linear(runs, name):
    """vLLM's emulation on the captured codes gives the captured output, bit for bit."""
    run = runs(name)
    for leaf in ("self_attn.k_proj", "self_attn.o_proj"):
        fqn = f"model.layers.1.{leaf}"
        values, scale = dequantize(
            run.scored(fqn, "act_codes")[0], run.scored(fqn, "act_block_scale")[0]
        )
        encode = run.native(fqn.replace("k_proj", "qkv_proj"), "act_global_encode_scale")
        x = (values * (scale / encode)).flatten(-2).bfloat16()
        values, scale = dequantize(
            run.static(fqn, "weight_codes"), run.static(fqn, "weight_block_scale")
        )
        w = (values * (scale * run.static(fqn, "weight_global_decode_scale"))).flatten(-2)
        expected = x.float() @ w.bfloat16().float().T
        output, _ = run.scored(fqn, "output")
        close = (output.float() - expected).abs() <= 2**-7 * expected.abs() + 1e-5
        assert bool(close.all())
        unquantized, _ = run.scored(fqn, "input")
        assert (x - unquantized).abs().max() > 0.01


def test_modelled_arithmetic_is_exact_on_the_captured_codes(runs):
    """Integer products of codes and scales, alpha in FP32, one rounding: linears and experts."""
    run = runs("moe-nvfp4-modelled")
    experts = "model.layers.1.mlp.experts"
    busiest = int(run.scored(experts, "topk_ids")[0].flatten().mode().values)
    for fqn in (
        "model.layers.1.self_attn.o_proj",
        f"{experts}.{busiest}.up_proj",
        f"{experts}.{busiest}.down_proj",
    ):
        values, scale = dequantize(
            run.scored(fqn, "act_codes")[0], run.scored(fqn, "act_block_scale")[0]
        )
        x = (values * scale).flatten(-2).double()
        values, scale = dequantize(
            run.static(fqn, "weight_codes"), run.static(fqn, "weight_block_scale")
        )
        accumulator = (x @ (values * scale).flatten(-2).double().T).float()
        alpha = run.scored(fqn, "act_global_decode_scale")[0]
        alpha = alpha * run.static(fqn, "weight_global_decode_scale")
        output, _ = run.scored(fqn, "output")
        assert same_bytes((accumulator * alpha).bfloat16(), output), fqn


def test_modelled_codes_are_the_recipe_s_own(runs):
    run = runs("moe-nvfp4-modelled")
    fqn = "model.layers.0.self_attn.q_proj"
    x, _ = run.scored(fqn, "input")
    encode = run.native("model.layers.0.self_attn.qkv_proj", "act_global_encode_scale")
    expected = quantize(x, MODELLED, global_encode_scale=encode)
    assert same_bytes(run.scored(fqn, "act_codes")[0], expected.codes)
    assert same_bytes(run.scored(fqn, "act_block_scale")[0], expected.block_scale)


@pytest.mark.parametrize("name", ["llama-nvfp4", "moe-nvfp4"])
def test_kept_dequantized_weights_change_nothing(runs, name):
    assert runs(name).results["kept"]


def test_captured_experts_add_up_to_the_layer(runs):
    run = runs("moe-nvfp4")
    experts = "model.layers.1.mlp.experts"
    ids, _ = run.scored(experts, "topk_ids")
    weights, _ = run.scored(experts, "topk_weights")
    total = torch.zeros(len(ids), 128)
    for expert in ids.unique().tolist():
        out, positions = run.scored(f"{experts}.{expert}.down_proj", "output")
        share = (weights * (ids == expert)).sum(1)[positions, None]
        total[positions] += out.float() * share
    output, _ = run.scored(experts, "output")
    assert (output.float() - total).norm() < 0.01 * total.norm()


@pytest.mark.parametrize("name", NAMES)
def test_sampled_logprobs_equal_their_rescoring(runs, name):
    results = runs(name).results
    tolerance = 1e-4 if "fp32" in name else 0.1
    for prompt, sampled, rescored in zip(
        PROBES, results["sampled"], results["rescored"], strict=True
    ):
        ids, length = sampled["sequence"]["token_ids"], max(1, len(prompt) // 2)
        assert ids[:length] == prompt[:length]
        assert len(ids) == length + SAMPLE_TOKENS
        assert all(0 <= i < VOCAB_SIZE for i in ids)
        assert sampled["logprobs"][:length] == [None] * length
        assert sampled["phases"] == ["prefill"] * (length + 1) + ["decode"] * (SAMPLE_TOKENS - 1)
        gap = np.subtract(sampled["logprobs"][length:], rescored["logprobs"][length:])
        assert np.abs(gap).max() < tolerance


@pytest.mark.parametrize("name", ["llama-fp32", "moe-bf16-chunked"])
def test_rows_are_the_tokens_that_they_are_said_to_be(runs, name):
    """Embedding rows name their token; logits rows give the logprob of the next one."""
    run = runs(name)
    embedding = run.static("model.embed_tokens", "weight")
    sequences = run.results["hooked"] + run.results["sampled"]
    calls = run.trace.calls
    for scored in sequences:
        sequence = scored["sequence"]
        ids = torch.tensor(sequence["token_ids"])
        mine = calls[(calls["mode"] == sequence["mode"]) & (calls["probe"] == sequence["probe"])]
        forwarded = len(ids) - (sequence["mode"] == "sample")
        assert mine["position"].tolist() == list(range(forwarded))
        prompt = len(ids) if sequence["mode"] == "score" else sequence["prompt_length"]
        assert mine["phase"].tolist() == ["prefill"] * prompt + ["decode"] * (forwarded - prompt)
        if name.endswith("chunked"):
            assert mine.groupby("call").size().max() <= 16
        key = SequenceKey(sequence["mode"], sequence["source"], sequence["probe"])
        rows = run.read(key, "model.embed_tokens", "output")
        assert same_bytes(rows.tensor, embedding[ids[:forwarded]])
        logits = run.read(key, "lm_head", "logits")
        logprobs = logits.tensor.float().log_softmax(-1)
        for row, position in zip(logprobs, logits.positions.tolist(), strict=True):
            if position + 1 < len(ids):
                said = scored["logprobs"][position + 1]
                assert abs(row[ids[position + 1]].item() - said) < 1e-5


@pytest.mark.parametrize(
    ("name", "label", "statuses"),
    [
        ("llama-bf16", "vllm", {"native"}),
        ("llama-nvfp4", "vllm-emu", {"native", "emulated"}),
        ("moe-nvfp4", "vllm-emu", {"native", "emulated", "replaced"}),
        ("moe-nvfp4-modelled", "vllm-modelled", {"native", "modelled"}),
    ],
)
def test_evidence_says_what_ran(runs, name, label, statuses):
    results = runs(name).results
    assert results["label"] == label
    assert {e["status"] for e in results["evidence"]} == statuses
    assert all(e["impl"] for e in results["evidence"])
    ours = {e["op"] for e in results["evidence"] if e["impl"].startswith("minite_")}
    assert ours == {e["op"] for e in results["evidence"] if e["status"] in ("replaced", "modelled")}
    assert ("experts" in ours) == name.startswith("moe")
    assert ("EmulationNvFp4LinearKernel" in results["settings"]["linears"]) == (
        name.endswith("nvfp4")
    )


def test_bad_requests_are_errors_and_the_engine_goes_on(runs):
    errors = runs("llama-fp32").results["errors"]
    assert errors["outside"]["kind"] == errors["too_long"]["kind"] == "EngineError"
    assert "512 is outside of the vocabulary" in errors["outside"]["message"]
    assert "max_model_len" in errors["too_long"]["message"]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("architecture", "EngineError", "NobodysForCausalLM"),
        ("missing", "EngineError", "config.json"),
        ("option", "UsageError", "'chunks'"),
        ("recipe", "UsageError", "nvfp4_recipe=te"),
        ("pointless", "UsageError", "bf16 checkpoint"),
        ("format", "EngineError", "nvfp4-modelopt"),
        ("truncated", "EngineError", "truncated: SafetensorError"),
    ],
)
def test_what_cannot_load_says_why(load_errors, case, kind, words):
    assert load_errors[case]["kind"] == kind
    assert words in load_errors[case]["message"]


def test_without_vllm_the_install_command_is_given():
    script = textwrap.dedent(
        """
        import sys
        sys.modules["vllm"] = None
        from minite_diag.engines.vllm import _import_vllm
        from minite_diag.errors import EngineUnavailable
        try:
            _import_vllm(compiles=False)
        except EngineUnavailable as error:
            print(error.hint)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == INSTALL


def test_unknown_options_are_refused_before_vllm_is_imported():
    spec = EngineSpec("vllm", "sampler", "vllm", "", "nowhere", "bf16", {"eager": "1"})
    with pytest.raises(UsageError, match="'eager'"):
        VllmEngine().load(spec, None)


def requests(**lengths):
    return {
        id: Request(TokenSequence("score", "", id, (1,) * 9, 9), prompt)
        for id, prompt in lengths.items()
    }


def test_batch_rows_splits_requests_and_phases():
    rows = batch_rows([4, 5, 3, 0, 1], [0, 2, 3, 5], ["a-f00", "b", "c"], requests(a=5, b=3, c=9))
    assert [(row.probe, row.position, row.phase) for row, _ in rows] == [
        ("a", 4, "prefill"),
        ("a", 5, "decode"),
        ("b", 3, "decode"),
        ("c", 0, "prefill"),
        ("c", 1, "prefill"),
    ]


def test_batch_rows_refuses_padding_and_strangers():
    with pytest.raises(EngineError, match="padded"):
        batch_rows([0, 1, 2], [0, 2], ["a"], requests(a=2))
    with pytest.raises(EngineError, match="unknown request"):
        batch_rows([0], [0, 1], ["z"], requests(a=2))


def test_pack_e2m1_covers_the_grid_with_signs():
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([grid + [-v for v in grid]])
    assert pack_e2m1(values).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


@pytest.mark.parametrize("value", [0.25, 0.75, 1.25, 5.0, 8.0, -12.0, float("inf"), float("nan")])
def test_pack_e2m1_refuses_what_is_not_on_the_grid(value):
    with pytest.raises(ValueError, match="E2M1"):
        pack_e2m1(torch.tensor([[value, 1.0]]))
