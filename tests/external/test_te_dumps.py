"""Transformer Engine's debug dumps: real ones of an H200, and its writer's on the CPU."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from minite_diag.attribute.stage import attribute
from minite_diag.errors import UsageError
from minite_diag.external.modules import HeadCounts
from minite_diag.external.run import ImportRequest, import_traces
from minite_diag.external.sharded import EXPERT_ROWS
from minite_diag.external.te_dumps import Nvfp4Parts, nvfp4_tensors, read_te_dumps, unusable
from minite_diag.trace.store import Trace
from minite_kernels.nvfp4.layout import swizzle_scale
from minite_kernels.nvfp4.quantize import quantize
from tests.external.conftest import TOKENS, minite
from tests.external.megatron_writer import LAYERS, MegatronWriter
from tests.external.te_writer import Dumps

REAL = Path(__file__).parents[1] / "data" / "te_dumps"
COUNTS = HeadCounts(4, 2, 8)
PROJ = "decoder.layers.0.self_attention.linear_proj"
QKV = "decoder.layers.0.self_attention.linear_qkv"


def copy_of(case, tmp_path, step=None):
    """A real dump with its tokens, to be changed."""
    folder = tmp_path / case
    shutil.copytree(REAL / case, folder)
    lines = [json.loads(line) for line in (REAL / "bf16/tokens.jsonl").read_text().splitlines()]
    records = [line if step is None else line | {"step": step} for line in lines]
    (folder / "tokens.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def model_of(tmp_path, heads=4, groups=2, head_dim=8):
    """A checkpoint's folder, as far as an import reads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim}
    config["vocab_size"] = 1000
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def by_site(folder):
    side = read_te_dumps(folder, COUNTS)
    return side, {(t.module.native, t.kind): t.tensor for t in side.tensors()}


def proof(case, name):
    return torch.load(REAL / case / "proof" / "step-0" / f"{name}.pt", weights_only=True)


def said(out):
    return Trace(out / "traces" / "learner-external").manifest["left_out"]


def compared(out):
    rows = pd.read_parquet(out / "comparison.parquet")
    return rows.set_index(["fqn", "kind", "probe"])["bitwise_fraction"]


def test_a_real_dump_holds_what_hooks_saw(tmp_path):
    side, tensors = by_site(copy_of("bf16", tmp_path, step=0))
    for theirs, kind in (("activation", "input"), ("weight", "weight"), ("output", "output")):
        assert torch.equal(bits(tensors[PROJ, kind]), bits(proof("bf16", f"{PROJ}--{theirs}")))
    assert [call.name for call in side.calls] == ["0"]
    assert "the tokens of its iteration are not given" in side.left_out.values()


def test_real_dumps_are_two_sides_of_a_run(tmp_path):
    learner, sampler = (copy_of("bf16", tmp_path / side, step=0) for side in ("a", "b"))
    name = "decoder_layers_0_self_attention_linear_qkv_output.pt"
    file = sampler / "tensor_dumps/rank_0/iter_000000" / name
    held = torch.load(file, weights_only=True, map_location="cpu")
    held["high_precision"][:, 16:24] += 1  # the key head of the first query group
    torch.save(held, file)
    model = str(model_of(tmp_path))
    sides = ["--learner", str(learner), "--sampler", str(sampler), "--model", model]
    arguments = ["import", *sides, "-o", str(tmp_path / "run"), "--gate", "bitwise", "--json"]
    done = minite(*arguments)
    summary = json.loads(done.stdout)
    assert done.exit_code in (1, 3), done.stderr  # no log-probabilities, and a planted difference
    assert (summary["model"]["name"], len(summary["pairs"])) == ("model", 1)
    found = compared(tmp_path / "run")
    changed = found[found < 1]
    assert {(fqn, kind) for fqn, kind, _ in changed.index} == {
        ("model.layers.0.self_attn.k_proj", "output")
    }
    assert set(changed) == {0.5}
    assert {"model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.v_proj"} <= set(
        found.index.get_level_values("fqn")
    )


def test_codes_and_scales_of_real_nvfp4_tensors(tmp_path):
    _, tensors = by_site(copy_of("nvfp4-tensor", tmp_path))
    for theirs, ours, high in (("activation", "act", "input"), ("weight", "weight", "weight")):
        codes, scale = (tensors[QKV, f"{ours}_{part}"] for part in ("codes", "block_scale"))
        assert torch.equal(codes, proof("nvfp4-tensor", f"{QKV}--{theirs}-codes"))
        held = proof("nvfp4-tensor", f"{QKV}--{theirs}-block-scale")
        assert torch.equal(bits(scale), held)
        role = "weight" if ours == "weight" else "activation"
        model = quantize(tensors[QKV, high], "te-python-cuda", role=role)
        assert torch.equal(bits(model.block_scale), held)
        assert torch.equal(model.codes, codes)
        decode = tensors[QKV, f"{ours}_global_decode_scale"]
        assert torch.equal(
            decode, quantize(tensors[QKV, high], "te", role=role).global_decode_scale
        )


def test_nvfp4_dumps_are_attributed(tmp_path):
    """The recipe of the dumped codes is found in them: the wheel's reference on a GPU."""
    folders = [copy_of("nvfp4-tensor", tmp_path / name) for name in ("a", "b")]
    # Tiles of 16 rows lie inside of a head, as they do in any model of some size.
    model = model_of(tmp_path, 2, 1, 16)
    request = ImportRequest(learner=folders[0], samplers=(folders[1],), model=model)
    plan = import_traces(request, tmp_path / "run", lambda text: None)
    assert plan.quantized == tuple(f"model.layers.0.self_attn.{n}_proj" for n in "kqv")
    found = attribute(tmp_path / "run", lambda spec, event: None)["pairs"][0]
    assert found["comparable"]
    contracts = {contract["engine"]: contract for contract in found["contracts"]}
    assert set(contracts) == {"learner-external", "sampler-external"}
    for contract in contracts.values():
        for operand in ("weight", "activation"):
            assert "te" in json.dumps(contract[operand]), contract
    assert not [f for f in found["findings"] if f["code"] == "MD199"]


def test_what_has_no_site_is_said(tmp_path):
    for case, kind in (("fp8-current", "input"), ("fp8-block", "input")):
        side, tensors = by_site(copy_of(case, tmp_path))
        assert list(tensors) == [(PROJ, kind)]
        assert set(side.left_out.values()) == {"FP8 tensors have no site"}
    with pytest.raises(UsageError, match="no layer has a known name"):
        by_site(copy_of("bf16-backward", tmp_path))
    with pytest.raises(UsageError, match="statistics of tensors") as error:
        read_te_dumps(REAL / "statistics", COUNTS)
    assert "DumpTensors" in error.value.hint


def test_the_writer_of_the_wheel_gives_a_trace_back(hf_run, tmp_path):
    """Everything that te.Linear would dump of a real model, through TE's own code."""
    writer = MegatronWriter(Trace(hf_run / "traces/learner-hf"), TOKENS)
    writer.statics()
    writer.call(0)
    writer.routed()
    dumps = Dumps(tmp_path / "dump")
    names = {"input": "activation", "output": "output", "weight": "weight"}
    for key, tensor in writer.ranks[0].items():
        layer, _, kind = key.removeprefix("step-0/").rpartition(":")
        if "linear" in layer and kind in names:
            grouped = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)", r"\2.gemm_\1", layer)
            dumps.dump(grouped, names[kind], tensor, iteration=3)
    records = [{"id": name, "token_ids": ids} for name, ids in TOKENS.items()]
    (dumps.root / "tokens.jsonl").write_text("\n".join(map(json.dumps, records)))
    manifest = {"format": "te-dumps", "version": 1, "ranks": [{"experts": [0, 8]}]}
    manifest |= {"model": {"num_experts": 8}, "modules": "megatron"}
    (dumps.root / "manifest.json").write_text(json.dumps(manifest))
    assert (dumps.root / "tensor_dumps/rank_0/iter_000003").is_dir()
    import_traces(ImportRequest(learner=dumps.root, run=hf_run), tmp_path / "run", lambda _: None)
    found = compared(tmp_path / "run").dropna()
    assert set(found) == {1.0}
    assert ("model.layers.1.mlp.experts.7.up_proj", "weight", "") in found.index
    assert EXPERT_ROWS in set(said(tmp_path / "run").values())
    for i in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for kind in ("input", "output"):
                for probe in TOKENS:
                    assert (f"model.layers.{i}.self_attn.{name}", kind, probe) in found.index
    rows = pd.read_parquet(tmp_path / "run" / "comparison.parquet")
    reasons = rows[rows["status"] == "skipped"]["reason"]
    assert reasons.str.startswith("learner-external has no such tensor").all()


def test_swizzled_and_padded_scales():
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = quantize(x, "te")
    scale = q.block_scale.view(torch.uint8)
    padded = torch.zeros(128, 8, dtype=torch.uint8)
    padded[:20, :6] = scale
    amax = q.amax.reshape(1)
    plain = Nvfp4Parts((20, 96), q.codes, padded, None, None, amax, None)
    swizzled = swizzle_scale(scale, "128x4").reshape(128, 8)
    other = Nvfp4Parts((20, 96), q.codes, swizzled, None, None, amax, None, is_swizzled=True)
    for parts in (plain, other):
        found = nvfp4_tensors(parts, "x")
        assert torch.equal(bits(found["block_scale"]), scale)
        assert torch.equal(found["global_decode_scale"], q.global_decode_scale)
    one_sided = Nvfp4Parts((20, 96), None, None, q.codes, padded, None, amax)
    assert unusable(one_sided) == "it holds the transposed copy only"
    with pytest.raises(UsageError, match="with scales"):
        nvfp4_tensors(Nvfp4Parts((20, 96), q.codes, padded[:8], None, None, amax, None), "x")


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def hostile(tmp_path, name):
    """A dump with one thing wrong."""
    folder = copy_of("bf16", tmp_path, step=0)
    file = next((folder / "tensor_dumps/rank_0/iter_000000").glob("*proj_output.pt"))
    if name == "code":
        torch.save({"high_precision": Runs(tmp_path / "ran")}, file)
    elif name == "plain-pickle":
        file.write_bytes(pickle.dumps({"high_precision": Runs(tmp_path / "ran")}))
    elif name == "truncated":
        file.write_bytes(file.read_bytes()[:2000])
    elif name == "no-tensor":
        torch.save({"high_precision": "abc"}, file)
    elif name == "other-dict":
        torch.save({"value": torch.zeros(3)}, file)
    elif name == "dtype":
        torch.save({"high_precision": torch.zeros(32, 32, dtype=torch.float64)}, file)
    elif name == "rows":
        torch.save({"high_precision": torch.zeros(31, 32)}, file)
    elif name == "no-tokens":
        (folder / "tokens.jsonl").unlink()
    elif name == "step":
        copied = (folder / "tokens.jsonl").read_text().replace('"step": 0', '"step": 7')
        (folder / "tokens.jsonl").write_text(copied)
    elif name == "no-step":
        shutil.copyfile(REAL / "bf16/tokens.jsonl", folder / "tokens.jsonl")
    elif name == "ranks":
        shutil.copytree(folder / "tensor_dumps/rank_0", folder / "tensor_dumps/rank_1")
    elif name == "not-utf8":
        (folder / "tensor_dumps/rank_0/iter_000000" / b"a\xff_output.pt".decode(errors="surrogateescape")).touch()  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("code", "holds more than tensors"),
        ("plain-pickle", "holds more than tensors|can't read"),
        ("truncated", "can't read .*proj_output.pt"),
        ("no-tensor", "a str, not a tensor"),
        ("other-dict", "no dict of high_precision and quantized"),
        ("dtype", "output is float64"),
        ("rows", "call '0' has 32 rows"),
        ("no-tokens", "doesn't say which tokens"),
        ("step", "step 7 of sequence-0 is not in the dump"),
        ("no-step", "names no step"),
        ("ranks", "2 ranks wrote"),
        ("not-utf8", "no UTF-8 name"),
    ],
)
def test_bad_dumps_are_refused_with_their_file(name, said, tmp_path):
    folder = hostile(tmp_path, name)
    request = ImportRequest(learner=folder, samplers=(folder,), model=model_of(tmp_path))
    with pytest.raises(UsageError, match=said):
        import_traces(request, tmp_path / "run", lambda text: None)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()
