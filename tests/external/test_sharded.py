"""A real trace, cut as Megatron cuts it, is imported as the very bits that it was cut from."""

import json
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from minite_diag.attribute.stage import attribute
from minite_diag.canonical.names import SequenceKey
from minite_diag.errors import UsageError
from minite_diag.external import manifest as manifest_module
from minite_diag.external.join import Rank, RanksDiffer, Shard, join
from minite_diag.external.manifest import read_manifest
from minite_diag.external.modules import (
    PARALLEL,
    SPLITS,
    TABLES,
    HeadCounts,
    ModuleRule,
    ModuleTable,
)
from minite_diag.external.run import FORMATS, ImportRequest, import_traces, match_sequences
from minite_diag.external.sequences import ExternalSequence
from minite_diag.external.side import ImportedSide
from minite_diag.trace.store import Trace
from tests.external.conftest import TOKENS, minite
from tests.external.megatron_writer import MegatronWriter
from tests.external.test_te_dumps import Runs

VARIANTS = {
    "one-rank": {},
    "tp2-ep2": {"tensor": 2},
    "dp2-ep2": {"data": 2},
    "tp2-sp-sbh": {"tensor": 2, "sp": True, "layout": "sbh", "length": 14},
    "tp2-dp2-ep4": {"tensor": 2, "data": 2},
    "bsh": {"layout": "bsh", "length": 12},
}


def sp_rules():
    """The table of Megatron with sequence parallelism, as a user would list it."""
    from minite_diag.external.modules import MEGATRON

    spread = ("replicated", "row", "vocab", "column")
    listed = []
    for rule in MEGATRON:
        record = {"native": rule.native, "fqn": list(rule.fqns), "parallel": rule.parallel}
        if rule.split != "none":
            record["split"] = rule.split
        if rule.parallel in spread and "local_experts" not in rule.native:
            record["sequence_parallel"] = True
        listed.append(record)
    return listed


@pytest.fixture(scope="session")
def dump(hf_run, tmp_path_factory):
    """A function from a variant's name to a folder of its own; `edit` changes the writer first."""
    trace = Trace(hf_run / "traces" / "learner-hf")
    written = {}

    def write(name, edit=None):
        folder = tmp_path_factory.mktemp(name) / "dump"
        options = VARIANTS[name]
        modules = sp_rules() if options.get("sp") else "megatron"
        if edit is not None:
            writer = MegatronWriter(trace, TOKENS, **options)
            edit(writer)
            return writer.write(folder, modules)
        if name not in written:
            writer = MegatronWriter(trace, TOKENS, **options)
            written[name] = writer.write(tmp_path_factory.mktemp(name) / "kept", modules)
        shutil.copytree(written[name], folder)
        return folder

    return write


def imported(folder, run, out):
    import_traces(ImportRequest(learner=folder, run=run), out, lambda text: None)
    rows = pd.read_parquet(out / "comparison.parquet")
    return rows, pd.read_parquet(out / "logprobs.parquet")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_site_and_logprob_is_bitwise_equal(variant, dump, hf_run, tmp_path):
    before = pd.read_parquet(hf_run / "comparison.parquet")
    rows, logprobs = imported(dump(variant), hf_run, tmp_path / "run")
    assert set(rows["baseline"]) == {"learner-external"}
    skipped = rows[rows["status"] == "skipped"]
    assert not len(skipped), skipped[["fqn", "kind", "reason"]].to_string()
    assert set(rows["bitwise_fraction"].dropna()) == {1.0}
    assert set(rows["agreement"].dropna()) == {1.0}
    place = ["mode", "probe", "fqn", "kind"]
    assert set(map(tuple, rows[place].to_numpy())) == set(map(tuple, before[place].to_numpy()))
    assert len(logprobs) == sum(len(ids) - 1 for ids in TOKENS.values())
    assert (logprobs["baseline_logprob"] == logprobs["target_logprob"]).all()


@pytest.mark.parametrize("options", [{}, {"tensor": 2}])
def test_codes_and_scales_of_a_quantized_learner(options, te_run, tmp_path):
    """NVFP4 of te-ref, cut by rows and by blocks: bits, recipe and findings stay the same."""
    writer = MegatronWriter(Trace(te_run / "traces" / "learner-te"), TOKENS, **options)
    rows, _ = imported(writer.write(tmp_path / "dump"), te_run, tmp_path / "run")
    skipped = rows[rows["status"] == "skipped"]
    assert not len(skipped), skipped[["fqn", "kind", "reason"]].to_string()
    assert set(rows["bitwise_fraction"].dropna()) == {1.0}
    assert set(rows["mismatch_rate"].dropna()) == {0.0}
    kinds = {"weight_codes", "weight_block_scale", "act_codes", "act_block_scale"}
    assert kinds <= set(rows["kind"])
    found = attribute(tmp_path / "run", lambda spec, event: None)["pairs"][0]
    mine, theirs = found["contracts"]
    assert mine["engine"] == "learner-external"
    for operand in ("weight", "activation", "gemm"):
        assert mine[operand]["recipe"] == theirs[operand]["recipe"], operand
    before = attribute(te_run, lambda spec, event: None)["pairs"][0]
    assert [f["code"] for f in found["findings"]] == [f["code"] for f in before["findings"]]


def test_a_wrong_interleave_is_seen_where_it_is(dump, hf_run, tmp_path):
    """Key and value change places in each group of linear_qkv: nothing but k and v may differ."""

    def swap(writer):
        writer.swap_kv = True

    rows, _ = imported(dump("tp2-ep2", swap), hf_run, tmp_path / "run")
    different = rows[rows["bitwise_fraction"] < 1]
    assert {(r.fqn.rpartition(".")[2], r.kind) for r in different.itertuples()} == {
        (name, kind) for name in ("k_proj", "v_proj") for kind in ("weight", "output")
    }
    assert len(different) == 2 * 2 * (1 + len(TOKENS))
    assert (different["rel_l2"] > 0.5).all()


def test_one_command_imports_gates_and_reports(dump, hf_run, tmp_path):
    """A user's Megatron dump against the sampler of a run, through the command line."""
    folder = dump("tp2-dp2-ep4")
    out = tmp_path / "run"
    arguments = ["import", "--learner", str(folder), "--run", str(hf_run), "-o", str(out)]
    done = minite(*arguments, "--gate", "bitwise", "--json")
    summary = json.loads(done.stdout)
    assert (done.exit_code, summary["verdict"]) == (0, "pass"), done.stderr
    pair = summary["pairs"][0]
    assert pair["logprob"]["score"]["equal"] == pair["logprob"]["score"]["tokens"] == 17
    assert "2 sequences, 19 tokens (sharded)" in done.stderr
    assert (out / "report.html").exists()
    gated = minite("gate", str(out), "--profile", "bitwise")
    assert gated.exit_code == 0, gated.output
    again = minite(*arguments)
    assert (again.exit_code, "holds a run already" in again.output) == (2, True)


def test_a_dump_without_logprobs_takes_them_from_its_logits(dump, hf_run, tmp_path, as_json):
    folder = dump("one-rank")

    def strip(record):
        for sequence in record["sequences"]:
            del sequence["logprobs"]

    as_json(folder / "manifest.json", strip)
    _, logprobs = imported(folder, hf_run, tmp_path / "run")
    assert len(logprobs) == 17
    gap = (logprobs["baseline_logprob"] - logprobs["target_logprob"]).abs().max()
    assert gap < 1e-5
    settings = Trace(tmp_path / "run/traces/learner-external").manifest["settings"]
    assert settings["logprobs"] == "FP32 log-softmax of the dumped logits"


def test_sums_of_ranks_are_added_where_the_manifest_says_so(dump, hf_run, tmp_path, as_json):
    folder = dump("tp2-ep2")
    name = "decoder.layers.{layer}.self_attention.linear_proj"
    rules = sp_rules()
    for rule in rules:
        rule.pop("sequence_parallel", None)
        if rule["native"] == name:
            rule["partial"] = True
    as_json(folder / "manifest.json", _key("modules", rules))
    tensors = load_file(folder / "rank-1.safetensors")
    for layer in (0, 1):
        tensors[f"step-0/{name.replace('{layer}', str(layer))}:output"].zero_()
    save_file(tensors, folder / "rank-1.safetensors")
    rows, _ = imported(folder, hf_run, tmp_path / "run")
    assert set(rows["bitwise_fraction"].dropna()) == {1.0}
    assert "o_proj" in set(rows["fqn"].str.rpartition(".")[2])


def test_what_only_all_ranks_together_have_is_skipped():
    """SGLang adds sums as late as it can; a global scale belongs to what its rank quantized."""
    name = "model.layers.{layer}.self_attn.o_proj"
    table = ModuleTable([ModuleRule(name, (name,), "row", may_be_partial=True)])
    module = table.find("model.layers.3.self_attn.o_proj")
    shards = [Shard(Rank(f"rank {i}", tensor=i), torch.full((2, 2), i), "file") for i in (0, 1)]
    with pytest.raises(RanksDiffer, match="rank 0 and rank 1 differ: each has its own sum"):
        join(module, "output", shards, 2)
    numbers = [Shard(s.rank, s.tensor[0, 0].float(), s.where) for s in shards]
    with pytest.raises(RanksDiffer, match="each quantized its own part"):
        join(module, "act_global_decode_scale", numbers, 2)
    assert join(module, "input", shards, 2).shape == (2, 4)


def edit(folder, change):
    file = folder / "rank-0.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _set(key, make):
    return lambda folder: edit(folder, lambda t: t.__setitem__(key, make(t.get(key))))


def _drop(key):
    return lambda folder: edit(folder, lambda t: t.pop(key))


QKV = "decoder.layers.0.self_attention.linear_qkv"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1"
ROUTED = f"step-0/{EXPERT}"

BAD_TENSORS = {
    "missing shard": (_drop(f"{QKV}:weight"), "lacks the shard of tensor rank 0.*rank-1"),
    "missing expert": (_drop(f"{EXPERT}:weight"), "lacks expert 1.*rank-0.safetensors"),
    "shape": (
        _set(f"{QKV}:weight", lambda t: t[:, :16].contiguous()),
        "rank-1.safetensors.*can't be joined along dim 0",
    ),
    "half a shard": (
        _set(f"step-0/{QKV}:output", lambda t: t[:, :16].contiguous()),
        "linear_qkv:output' has 48 output features, .*weight' 64",
    ),
    "rows": (
        _set("step-0/decoder.final_layernorm:input", lambda t: t[:5].contiguous()),
        "decoder.final_layernorm:input differs between .*rank-0",
    ),
    "dtype": (
        _set("decoder.layers.0.mlp.router:weight", lambda t: t.double()),
        "mlp.router:weight differs between",
    ),
    "integers": (
        _set(f"{EXPERT}:weight", lambda t: t.to(torch.int32)),
        "rank-0.safetensors.*weight is int32",
    ),
    "row twice": (_set(f"{ROUTED}:rows", torch.zeros_like), "a row occurs twice"),
    "row out of range": (_set(f"{ROUTED}:rows", lambda t: t + 99), "of a call of 19 rows"),
    "rows as floats": (_set(f"{ROUTED}:rows", lambda t: t.float()), "one integer for each row"),
    "kind": (_set(f"{QKV}:wait", lambda t: torch.zeros(3)), "no name of a tensor"),
    "call": (_set(f"step-9/{QKV}:output", lambda t: torch.zeros(3)), "no call 'step-9'"),
    "expert of another rank": (
        _set(
            "decoder.layers.0.mlp.experts.local_experts.7.linear_fc1:weight",
            lambda t: torch.zeros(3),
        ),
        "expert 7 of a rank that holds 4",
    ),
    "weight of a call": (
        _set(f"step-0/{QKV}:weight", lambda t: torch.zeros(32, 32, dtype=torch.bfloat16)),
        "lacks the shard of tensor rank 1|a weight has no call",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_wrong_shard_is_one_error_with_its_file(name, dump, hf_run, tmp_path):
    change, said = BAD_TENSORS[name]
    folder = dump("tp2-ep2")
    change(folder)
    with pytest.raises(UsageError, match=said) as error:
        imported(folder, hf_run, tmp_path / "run")
    assert error.value.hint
    assert not (tmp_path / "run").exists()


def _rank(number, **changes):
    return lambda record: record["ranks"][number].update(changes)


def _key(key, value):
    return lambda record: record.__setitem__(key, value)


def _sequence(**changes):
    return lambda record: record["sequences"][0].update(changes)


BAD_MANIFESTS = {
    "missing rank": (lambda r: r["ranks"].pop(0), "no rank has tensor 0"),
    "gap of experts": (_rank(1, experts=[5, 8]), "expert 4 is on no rank"),
    "overlap of experts": (_rank(1, experts=[3, 8]), "expert 3 is twice"),
    "too few experts": (_rank(1, experts=[4, 7]), "up to 6, the model has 8"),
    "head count": (
        _key(
            "model",
            {"num_attention_heads": 2, "num_query_groups": 2, "head_dim": 8, "num_experts": 8},
        ),
        "64 output features; 2 heads and 2 query groups of 8 are 48",
    ),
    "group count": (
        _key(
            "model",
            {"num_attention_heads": 6, "num_query_groups": 1, "head_dim": 8, "num_experts": 8},
        ),
        None,
    ),
    "traversal": (_rank(0, files=["../rank-0.safetensors"]), "no file name inside"),
    "absolute": (_rank(0, files=["/etc/passwd"]), "no file name inside"),
    "missing file": (_rank(0, files=["rank-7.safetensors"]), "rank-7.safetensors is missing"),
    "other file": (_rank(0, files=["manifest.json"]), "no tensor file"),
    "same file twice": (
        _rank(0, files=["rank-0.safetensors", "rank-0.safetensors"]),
        "is in .* and in",
    ),
    "unknown key": (_key("secuences", []), "unknown key 'secuences'"),
    "version": (_key("version", 2), "version 2"),
    "format": (_key("format", "megatron"), "format is 'megatron'"),
    "no calls": (lambda r: r.pop("calls"), "has no calls"),
    "token ids": (_sequence(token_ids=[1, -3]), "not a list of token ids"),
    "logprobs": (_sequence(logprobs=[0.0]), "1 values for 12 tokens"),
    "NaN": (_sequence(logprobs=[float("nan")] * 12), "not a list of numbers"),
    "other tokens": (_sequence(token_ids=[5, 9, 11] * 4), "equal up to position 3"),
    "unknown sequence": (
        _key("calls", [{"name": "step-0", "sequences": ["chat", "nobody"]}]),
        "no id of",
    ),
    "missing positions": (
        _key("calls", [{"name": "step-0", "sequences": ["chat"]}]),
        "call 'step-0' has 12 rows",
    ),
    "short padding": (
        _key("calls", [{"name": "step-0", "sequences": ["chat"], "layout": "sbh", "length": 3}]),
        "layout sbh of length 3 with 12 tokens",
    ),
    "modules": (_key("modules", "meg"), "modules is 'meg'"),
    "no module": (
        _key("modules", [{"native": "x.{layer}", "fqn": "y.{layer}"}]),
        "no tensor has a name",
    ),
    "template": (_key("modules", [{"native": "x.{layer}", "fqn": "y"}]), "in native and in fqn"),
    "parts": (
        _key("modules", [{"native": "x", "fqn": ["a", "b"], "split": "qkv"}]),
        "give 3|with 2 names",
    ),
    "parallel": (
        _key("modules", [{"native": "x", "fqn": "a", "parallel": "both"}]),
        "not one of replicated",
    ),
}


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_a_wrong_manifest_is_one_error(name, dump, hf_run, tmp_path, as_json):
    change, said = BAD_MANIFESTS[name]
    folder = dump("tp2-ep2")
    as_json(folder / "manifest.json", change)
    if said is None:  # head counts of the same width can't be an error; the rows say it
        rows, _ = imported(folder, hf_run, tmp_path / "run")
        reasons = rows[rows["fqn"].str.endswith("q_proj") & (rows["kind"] == "output")]["reason"]
        assert reasons.str.startswith("shapes differ").all()
        return
    with pytest.raises(UsageError, match=said):
        imported(folder, hf_run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_hostile_files(dump, hf_run, tmp_path, as_json):
    def attempt(folder, said):
        with pytest.raises(UsageError, match=said):
            imported(folder, hf_run, tmp_path / "run")
        assert not (tmp_path / "ran").exists()

    folder = dump("tp2-ep2")
    whole = (folder / "rank-1.safetensors").read_bytes()
    (folder / "rank-1.safetensors").write_bytes(whole[: len(whole) // 2])
    attempt(folder, "rank-1.safetensors is cut short")
    torch.save({"x:weight": Runs(tmp_path / "ran")}, folder / "rank-1.pt")
    as_json(folder / "manifest.json", _rank(1, files=["rank-1.pt"]))
    attempt(folder, "rank-1.pt holds more than tensors")
    os.symlink("/etc/hostname", folder / "link.pt")
    as_json(folder / "manifest.json", _rank(1, files=["link.pt"]))
    attempt(folder, "is a link out of the folder")
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text('{"format": "sharded", "format": "sharded"}')
    attempt(folder, "occurs twice in one object")
    (folder / "manifest.json").write_bytes(b"\xff\xfe")
    attempt(folder, "can't read .*manifest.json")
    (folder / "manifest.json").write_text(manifest.replace("link.pt", "link.pt\\u0000"))
    attempt(folder, "not a printable text")


def test_pt_files_and_nan_are_read(dump, hf_run, tmp_path, as_json):
    """A `.pt` file of plain tensors is as good; a NaN is a finding, not an error."""
    folder = dump("tp2-ep2")
    tensors = load_file(folder / "rank-1.safetensors")
    torch.save(tensors, folder / "rank-1.pt")
    as_json(folder / "manifest.json", _rank(1, files=["rank-1.pt"]))
    key = f"step-0/{QKV}:output"
    edit(folder, lambda t: t[key].view(-1)[:3].fill_(float("nan")))
    rows, _ = imported(folder, hf_run, tmp_path / "run")
    broken = rows[rows["nonfinite"] > 0]
    assert set(broken["fqn"]) == {"model.layers.0.self_attn.q_proj"}


def test_sides_must_be_a_learner_and_samplers(dump, hf_run, tmp_path):
    folder = dump("one-rank")
    for request, said in (
        (ImportRequest(learner=folder), "here is no sampler"),
        (ImportRequest(samplers=(folder,)), "here is no learner"),
        (ImportRequest(file=folder), "is it the learner's"),
        (ImportRequest(learner=tmp_path, run=hf_run), "no dump that is known"),
        (ImportRequest(learner=folder, run=hf_run, format="te-dumps"), "is of format sharded"),
        (ImportRequest(learner=folder, run=hf_run, format="x"), "no format 'x'"),
    ):
        with pytest.raises(UsageError, match=said):
            import_traces(request, tmp_path / "run", lambda text: None)
    import_traces(
        ImportRequest(learner=folder, samplers=(folder, folder)), tmp_path / "two", lambda _: None
    )
    rows = pd.read_parquet(tmp_path / "two" / "comparison.parquet")
    assert set(rows["target"]) == {"sampler-external", "sampler-external-2"}
    assert set(rows["bitwise_fraction"].dropna()) == {1.0}


PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_the_example_of_the_page_is_a_manifest(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    example = text.partition("```json\n")[2].partition("```")[0]
    (tmp_path / "manifest.json").write_text(example)
    manifest = read_manifest(tmp_path)
    assert [call.name for call in manifest.calls] == ["step-0"]
    assert [token and token.sequence for token in manifest.calls[0].rows] == [
        *("a", "b") * 3, "a", None,
    ]  # fmt: skip
    assert manifest.rules[0].split == "qkv-interleaved"


def test_every_key_and_value_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    source = Path(manifest_module.__file__).read_text(encoding="utf-8")
    keys = set(re.findall(r'record\.\w+\(\s*"(\w+)"', source))
    assert {"format", "ranks", "expert_tensor", "layer_offset", "sequence_parallel"} <= keys
    assert not [key for key in sorted(keys) if f"{key}`" not in text and f'"{key}"' not in text]
    values = {*PARALLEL, *SPLITS, *manifest_module.LAYOUTS, *TABLES, *FORMATS}
    assert not [value for value in sorted(values) if f"`{value}`" not in text]


def test_sequences_meet_by_their_tokens(dump):
    """Given and drawn tokens of a run; a dump of a decode lacks the token that came last."""
    given, drawn = SequenceKey("score", "", "a"), SequenceKey("sample", "vllm", "a")
    known = {given: (1, 2, 3), drawn: (1, 2, 9, 8)}

    def keys(*sequences):
        found = [ExternalSequence(f"s{i}", ids, 1, ()) for i, ids in enumerate(sequences)]
        side = ImportedSide(PAGE, "sharded", "", "", HeadCounts(), tuple(found), (), iter)
        return list(match_sequences(side, known).values())

    assert keys((1, 2, 3), (1, 2, 9, 8)) == [given, drawn]
    assert keys((1, 2, 9)) == [drawn]
    with pytest.raises(UsageError, match=r"nearest is a \(3\), equal up to position 2"):
        keys((1, 2, 4))
    with pytest.raises(UsageError, match="s0 and s1 have the same tokens"):
        keys((1, 2, 9), (1, 2, 9, 8))


def test_the_run_that_sides_are_taken_from_is_not_changed(dump, hf_run, tmp_path):
    def content():
        return {
            file.relative_to(hf_run): file.read_bytes()
            for file in sorted(hf_run.rglob("*"))
            if file.is_file()
        }

    before = content()
    imported(dump("one-rank"), hf_run, tmp_path / "run")
    attribute(tmp_path / "run", lambda spec, event: None)
    again = ImportRequest(learner=dump("tp2-ep2"), run=tmp_path / "run")
    import_traces(again, tmp_path / "second", lambda text: None)
    assert content() == before
    assert {p.name for p in (tmp_path / "second/traces").iterdir()} == {
        "learner-external",
        "sampler-hf",
    }
