"""Real SGLang on tiny checkpoints: what it computes, what is captured, and that both are the same."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import minite_diag
from minite_diag.canonical.names import STATIC, SequenceKey
from minite_diag.checkpoints import (
    calibrate,
    export,
    open_checkpoint,
    quantized_names,
    read_quantized,
    read_tensor,
)
from minite_diag.engines.base import TokenSequence
from minite_diag.engines.sglang import INSTALL, SglangEngine
from minite_diag.engines.sglang_plugin.hooks import Running, batch_rows
from minite_diag.environments import engine_python
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import EngineSpec
from minite_kernels.nvfp4.quantize import quantize
from tests.engines.conftest import PROBES, SAMPLE_TOKENS, TIMEOUT_S, VOCAB_SIZE, Run, make_job
from tests.engines.test_vllm import (
    DENSE,
    EXPERT,
    MLP,
    bytes_of,
    dequantize,
    expected_sites,
    reference_logprobs,
    same_bytes,
)

SCRIPT = Path(__file__).with_name("run_sglang.py")
NAMES = [
    "llama-fp32",
    "moe-fp32",
    "moe-bf16-chunked",
    "llama-nvfp4",
    "moe-nvfp4",
    "moe-nvfp4-ct",
]
NVFP4 = {"llama-nvfp4": 14, "moe-nvfp4": 56, "moe-nvfp4-ct": 56}
LAYOUTS = ("modelopt", "compressed-tensors")
EXPERTS_OF_LAYER_1 = "model.layers.1.mlp.experts"


def start(job, root, name):
    job_file = root / f"{name}.json"
    job_file.write_text(json.dumps(job))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(Path(minite_diag.__file__).parents[1])
    # For a user's own processes: where the tool is in charge, the plan says what is aligned.
    environment["MINITE_DIAG_ALIGN"] = "norm"
    # Threads that wait for busy cores cost more than these sizes gain.
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [engine_python("sglang"), str(SCRIPT), str(job_file)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (Path(job["out"]) / "results.json").exists(), done.stderr[-4000:]
    return Run(Path(job["out"]))


@pytest.fixture(scope="module")
def refits(models, tmp_path_factory):
    """Configuration -> NVFP4 checkpoint and the names of its quantized linears."""
    root = tmp_path_factory.mktemp("sglang-nvfp4")
    found = {}
    for kind, layouts in (("llama", LAYOUTS[:1]), ("moe", LAYOUTS)):
        master = open_checkpoint(models[kind, "bfloat16"])
        names = quantized_names(master, "default")
        amax = calibrate(master, PROBES, names)
        for layout in layouts:
            name = f"{kind}-nvfp4" + ("-ct" if layout == "compressed-tensors" else "")
            folder = root / name
            found[name] = (export(master, "modelopt", layout, folder, calibration=amax), names)
    return found


@pytest.fixture(scope="module")
def runs(models, refits, tmp_path_factory):
    """A function from a configuration's name to its Run; each runs once."""
    root = tmp_path_factory.mktemp("sglang-runs")
    cache = {}

    def describe(name):
        kind, precision, *_ = name.split("-")
        if precision == "nvfp4":
            checkpoint, names = refits[name]
            return make_job(checkpoint.path, root / name, "bfloat16", checkpoint.format, names)
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        options = {"chunked": {"chunked_prefill_size": 16}, "tp2": {"tp_size": 2}}
        chosen = options.get(name.split("-")[-1], {})
        return make_job(models[kind, dtype], root / name, dtype, precision, **chosen)

    def run(name):
        if name not in cache:
            cache[name] = start(describe(name), root, name)
        return cache[name]

    return run


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


@pytest.mark.parametrize("name", NAMES)
def test_hooks_change_no_logprob(runs, name):
    results = runs(name).results
    assert results["hooked"] == results["bare"]
    assert results["after_errors"] == results["bare"][0]


def test_two_ranks_score_and_sample_as_one(runs):
    """Each rank draws its own tokens: they are equal only with equal generators."""
    one, two = runs("moe-fp32"), runs("moe-fp32-tp2")
    assert two.results["settings"]["tensor_parallel"] == "2"
    assert two.results["hooked"] == two.results["bare"]
    for a, b in zip(one.results["hooked"], two.results["hooked"], strict=True):
        gap = np.subtract(a["logprobs"][1:], b["logprobs"][1:])
        assert 0.0 < np.abs(gap).max() < 1e-4
    for sampled, rescored in zip(two.results["sampled"], two.results["rescored"], strict=True):
        length = sampled["sequence"]["prompt_length"]
        gap = np.subtract(sampled["logprobs"][length:], rescored["logprobs"][length:])
        assert np.abs(gap).max() < 1e-4


def test_two_ranks_show_the_tensors_of_one(runs, models):
    """Shards of heads, features and experts are put together; partial sums are added up."""
    one, two = runs("moe-fp32"), runs("moe-fp32-tp2")
    assert two.results["silent"] == []
    key = SequenceKey("score", "", "p0")
    assert set(two.sites[key]) == set(one.sites[key])
    for site in one.sites[key]:
        a, b = one.read(key, site.fqn, site.kind), two.read(key, site.fqn, site.kind)
        assert a.positions.tolist() == b.positions.tolist(), site
        assert torch.allclose(a.tensor.float(), b.tensor.float(), atol=1e-4), site
    assert set(two.sites[STATIC]) == set(one.sites[STATIC])
    for site in one.sites[STATIC]:
        stored = one.static(site.fqn, site.kind)
        assert same_bytes(two.static(site.fqn, site.kind), stored), site


@pytest.mark.parametrize("name", ["llama-fp32", "moe-fp32"])
def test_batches_and_chunks_score_the_same_tokens(runs, name):
    results = runs(name).results
    for alone, batched in zip(results["bare"], results["batch"], strict=True):
        gap = np.subtract(alone["logprobs"][1:], batched["logprobs"][1:])
        assert np.abs(gap).max() < 1e-4
    gap = np.subtract(results["bare"][0]["logprobs"][1:], results["chunked"]["logprobs"][1:])
    assert np.abs(gap).max() < 1e-4
    assert results["chunks"] == -(-len(PROBES[0]) // 16)


@pytest.mark.parametrize("name", NAMES)
def test_every_site_of_every_layer_is_seen(runs, name):
    run = runs(name)
    assert run.results["silent"] == []
    for key, sites in run.sites.items():
        if key.mode == "score":
            found = {(site.fqn, site.kind) for site in sites if site.expert_index is None}
            assert found == expected_sites(name), key


@pytest.mark.parametrize("name", ["moe-nvfp4", "moe-nvfp4-ct", "moe-bf16-chunked"])
def test_expert_sites_follow_the_routing(runs, name):
    run = runs(name)
    kinds = ("input", "output", *(("act_codes", "act_block_scale") if "nvfp4" in name else ()))
    for layer in ("model.layers.0", "model.layers.1"):
        topk_ids, _ = run.scored(f"{layer}.mlp.experts", "topk_ids")
        for expert in range(8):
            tokens = (topk_ids == expert).any(1).nonzero()[:, 0].tolist()
            for part in EXPERT:
                for kind in kinds:
                    if tokens:
                        site = f"{layer}.mlp.experts.{expert}.{part}"
                        assert run.scored(site, kind)[1].tolist() == tokens, f"{site}:{kind}"


def test_unquantized_experts_are_seen_as_they_ran(runs, models):
    """SGLang's loop multiplies rows sorted by expert: the captured rows are those rows."""
    run = runs("moe-fp32")
    for expert in range(8):
        site = f"{EXPERTS_OF_LAYER_1}.{expert}"
        x, _ = run.scored(f"{site}.up_proj", "input")
        up, _ = run.scored(f"{site}.up_proj", "output")
        gate, _ = run.scored(f"{site}.gate_proj", "output")
        weight = run.static(f"{site}.up_proj", "weight")
        assert torch.allclose(x @ weight.T, up, atol=1e-5)
        hidden, _ = run.scored(f"{site}.down_proj", "input")
        assert torch.allclose(torch.nn.functional.silu(gate) * up, hidden, atol=1e-6)


@pytest.mark.parametrize("name", ["moe-nvfp4", "moe-fp32"])
def test_captured_experts_add_up_to_the_layer(runs, name):
    run = runs(name)
    ids, _ = run.scored(EXPERTS_OF_LAYER_1, "topk_ids")
    weights, _ = run.scored(EXPERTS_OF_LAYER_1, "topk_weights")
    total = torch.zeros(len(ids), 128)
    for expert in ids.unique().tolist():
        out, positions = run.scored(f"{EXPERTS_OF_LAYER_1}.{expert}.down_proj", "output")
        share = (weights * (ids == expert)).sum(1)[positions, None]
        total[positions] += out.float() * share
    output, _ = run.scored(EXPERTS_OF_LAYER_1, "output")
    assert (output.float() - total).norm() < 0.01 * total.norm()


@pytest.mark.parametrize("name", ["llama-fp32", "moe-fp32", "moe-bf16-chunked"])
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


@pytest.mark.parametrize(("name", "count"), NVFP4.items())
def test_nvfp4_weights_are_the_exported_bytes(runs, refits, name, count):
    run, (checkpoint, names) = runs(name), refits[name]
    assert len(names) == count
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


def input_scales(checkpoint, names):
    return torch.stack([read_quantized(checkpoint, name).input_global_scale for name in names])


def test_activation_scales_are_fused_by_sglang(runs, refits):
    """The largest of the fused parts, and for experts of all experts, turned by one division."""
    run, (checkpoint, _) = runs("moe-nvfp4"), refits["moe-nvfp4"]
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    encode = run.native("model.layers.0.self_attn.qkv_proj", "act_global_encode_scale")
    assert encode.item() == (1 / input_scales(checkpoint, parts).max()).item()
    for fused, leaves in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        experts = [f"{EXPERTS_OF_LAYER_1}.{e}.{leaf}" for e in range(8) for leaf in leaves]
        scales = input_scales(checkpoint, experts)
        held = run.native(f"{EXPERTS_OF_LAYER_1}.{fused}", "act_global_encode_scale")
        assert held.tolist() == [(1 / scales.max()).item()] * 8
        if fused == "w2":
            assert scales.unique().numel() > 1


def test_compressed_tensors_scales_are_fused_by_sglang(runs, refits):
    """The file holds encode scales: the largest of the fused parts, and each expert its own."""
    run, (checkpoint, _) = runs("moe-nvfp4-ct"), refits["moe-nvfp4-ct"]
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    encode = run.native("model.layers.0.self_attn.qkv_proj", "act_global_encode_scale")
    assert encode.item() == input_scales(checkpoint, parts).max().item()
    down = [f"{EXPERTS_OF_LAYER_1}.{e}.down_proj" for e in range(8)]
    held = run.native(f"{EXPERTS_OF_LAYER_1}.w2", "act_global_encode_scale")
    assert held.tolist() == input_scales(checkpoint, down).tolist()
    assert held.unique().numel() > 1


@pytest.mark.parametrize("name", ["moe-nvfp4", "moe-nvfp4-ct"])
def test_multiplied_codes_give_the_captured_output(runs, name):
    """Integer products of codes and scales, alpha in FP32, one rounding: linears and experts."""
    run = runs(name)
    busiest = int(run.scored(EXPERTS_OF_LAYER_1, "topk_ids")[0].flatten().mode().values)
    for fqn in (
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.self_attn.o_proj",
        f"{EXPERTS_OF_LAYER_1}.{busiest}.gate_proj",
        f"{EXPERTS_OF_LAYER_1}.{busiest}.up_proj",
        f"{EXPERTS_OF_LAYER_1}.{busiest}.down_proj",
    ):
        values, scale = dequantize(
            run.scored(fqn, "act_codes")[0], run.scored(fqn, "act_block_scale")[0]
        )
        x = (values * scale).flatten(-2).double()
        values, scale = dequantize(
            run.static(fqn, "weight_codes"), run.static(fqn, "weight_block_scale")
        )
        accumulator = (x @ (values * scale).flatten(-2).double().T).float()
        decode = run.scored(fqn, "act_global_decode_scale")[0]
        alpha = decode * run.static(fqn, "weight_global_decode_scale")
        output, _ = run.scored(fqn, "output")
        # SGLang's alpha rounds elsewhere: of the decode scales of the file, or one reciprocal.
        close = (output.float() - accumulator * alpha).abs() <= 2**-8 * output.float().abs() + 1e-6
        assert bool(close.all()), fqn


def test_codes_are_the_recipe_s_own(runs):
    run = runs("llama-nvfp4")
    fqn = "model.layers.0.self_attn.q_proj"
    x, _ = run.scored(fqn, "input")
    encode = run.native("model.layers.0.self_attn.qkv_proj", "act_global_encode_scale")
    expected = quantize(x, "sglang", global_encode_scale=encode.reshape(()))
    assert same_bytes(run.scored(fqn, "act_codes")[0], expected.codes)
    assert same_bytes(run.scored(fqn, "act_block_scale")[0], expected.block_scale)


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
        assert logits.tensor.shape[-1] == VOCAB_SIZE
        logprobs = logits.tensor.float().log_softmax(-1)
        first = 0 if sequence["mode"] == "score" else prompt - 1
        assert logits.positions.tolist() == list(range(first, forwarded))
        for row, position in zip(logprobs, logits.positions.tolist(), strict=True):
            if position + 1 < len(ids):
                said = scored["logprobs"][position + 1]
                assert abs(row[ids[position + 1]].item() - said) < 1e-5


@pytest.mark.parametrize(
    ("name", "label", "statuses"),
    [
        ("moe-bf16-chunked", "sglang", {"native"}),
        ("llama-nvfp4", "sglang-modelled", {"native", "modelled"}),
        ("moe-nvfp4", "sglang-modelled", {"native", "modelled"}),
        ("moe-nvfp4-ct", "sglang-modelled", {"native", "modelled"}),
    ],
)
def test_evidence_says_what_ran(runs, name, label, statuses):
    results = runs(name).results
    assert (results["label"], results["version"]) == (label, "0.5.23")
    assert {e["status"] for e in results["evidence"]} == statuses
    assert all(e["impl"] for e in results["evidence"])
    ours = {e["op"] for e in results["evidence"] if e["impl"].startswith("minite_")}
    assert ours == {e["op"] for e in results["evidence"] if e["status"] == "modelled"}
    assert ("experts" in ours) == name.startswith("moe-nvfp4")
    settings = results["settings"]
    assert ("ModelOptFp4LinearMethod" in settings["linears"]) == name.endswith("nvfp4")
    assert ("CompressedTensorsLinearMethod" in settings["linears"]) == name.endswith("ct")
    assert settings["attention"].endswith("TorchNativeAttnBackend")
    assert results["patched_by_plugin"] == {}
    assert (settings["radix_cache"], settings["tensor_parallel"]) == ("False", "1")


def test_bad_requests_are_errors_and_the_engine_goes_on(runs):
    errors = runs("llama-fp32").results["errors"]
    assert errors["outside"]["kind"] == errors["too_long"]["kind"] == "EngineError"
    assert "512 is outside of the vocabulary" in errors["outside"]["message"]
    assert "max_model_len" in errors["too_long"]["message"]
    assert errors["broken"]["kind"] == "EngineError"
    assert "RuntimeError: a kernel failed" in errors["broken"]["message"]


def test_a_hook_that_does_not_take_hold_is_an_error(runs):
    results = runs("llama-fp32").results
    for case, words in (("missing_hook", "RMSNorm.no"), ("taken_hook", "another plugin")):
        assert results[case]["kind"] == "EngineUnavailable"
        assert words in results[case]["message"]


@pytest.fixture(scope="module")
def load_errors(models, refits, tmp_path_factory):
    """Error records of engines that must not load, all from one process."""
    root = tmp_path_factory.mktemp("sglang-errors")
    model = models["llama", "bfloat16"]
    unknown = root / "unknown"
    unknown.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (unknown / "config.json").write_text(json.dumps(config))
    truncated = root / "truncated"
    shutil.copytree(model, truncated)
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    jobs = {
        "architecture": make_job(unknown, root, "bfloat16"),
        "missing": make_job(root / "nowhere", root, "bfloat16"),
        "option": make_job(model, root, "bfloat16", chunks=3),
        "recipe": make_job(model, root, "bfloat16", nvfp4_recipe="te"),
        "pointless": make_job(model, root, "bfloat16", nvfp4_recipe="flashinfer-exact"),
        "format": make_job(model, root, "bfloat16", format="nvfp4-modelopt"),
        "truncated": make_job(truncated, root, "bfloat16"),
    }
    return start({"jobs": jobs, "out": str(root / "out")}, root, "errors").results


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("architecture", "EngineError", "NobodysForCausalLM"),
        ("missing", "EngineError", "config.json"),
        ("option", "UsageError", "'chunks'"),
        ("recipe", "UsageError", "nvfp4_recipe=te"),
        ("pointless", "UsageError", "bf16 checkpoint"),
        ("format", "EngineError", "describes no quantization"),
        ("truncated", "EngineError", "truncated: SafetensorError"),
    ],
)
def test_what_cannot_load_says_why(load_errors, case, kind, words):
    assert load_errors[case]["kind"] == kind
    assert words in load_errors[case]["message"]


def test_without_sglang_the_command_that_builds_it_is_given():
    script = textwrap.dedent(
        """
        import sys
        sys.modules["sglang"] = None
        from minite_diag.engines.sglang import _import_sglang
        from minite_diag.errors import EngineUnavailable
        try:
            _import_sglang()
        except EngineUnavailable as error:
            print(error.hint)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == INSTALL


def test_unknown_options_are_refused_before_sglang_is_imported():
    spec = EngineSpec("sglang", "sampler", "sglang", "", "nowhere", "bf16", {"eager": "1"})
    with pytest.raises(UsageError, match="'eager'"):
        SglangEngine().load(spec, None)


def running(**lengths):
    return {
        id: Running(TokenSequence("score", "", id, (1,) * 9, 9), prompt)
        for id, prompt in lengths.items()
    }


def test_batch_rows_splits_requests_and_phases():
    rows = batch_rows([4, 5, 3, 0, 1], [2, 1, 2], ["a", "b", "c"], running(a=5, b=3, c=9))
    assert [(row.probe, row.position, row.phase) for row, _ in rows] == [
        ("a", 4, "prefill"),
        ("a", 5, "decode"),
        ("b", 3, "decode"),
        ("c", 0, "prefill"),
        ("c", 1, "prefill"),
    ]


def test_batch_rows_refuses_padding_and_strangers():
    with pytest.raises(EngineError, match="padded"):
        batch_rows([0, 1, 2], [2], ["a"], running(a=2))
    with pytest.raises(EngineError, match="unknown request"):
        batch_rows([0], [1], ["z"], running(a=2))
