"""Folders that SGLang's own dumper wrote: in real SGLang, and under Megatron's names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import minite_diag
from minite_diag.environments import engine_python
from minite_diag.errors import UsageError
from minite_diag.external.run import ImportRequest, detect_format, import_traces
from minite_diag.plan import read_plan
from minite_diag.trace.store import Trace
from tests.engines.conftest import build_model, token_ids
from tests.external.conftest import TOKENS, minite
from tests.external.megatron_writer import LAYERS, MegatronWriter
from tests.external.test_te_dumps import Runs

HERE = Path(__file__).parent
ROOT = Path(minite_diag.__file__).parents[1]
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def site():
    """Where the SGLang environment keeps its packages."""
    python = Path(engine_python("sglang"))
    return next((python.parents[1] / "lib").glob("python*/site-packages"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(run with our trace, dump folder) of the same passes of real SGLang."""
    root = tmp_path_factory.mktemp("served")
    build_model("moe").to(torch.bfloat16).save_pretrained(root / "model")
    probes = {"long": token_ids(40, 1), "short": token_ids(7, 2)}
    job = {"checkpoint": str(root / "model"), "probes": probes, "run": str(root / "run")}
    (root / "job.json").write_text(json.dumps(job))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DUMPER_ENABLE": "1",
        "DUMPER_NON_INTRUSIVE_MODE": "all",
        "DUMPER_DIR": str(root / "dumps"),
        "DUMPER_EXP_NAME": "served",
        "DUMPER_ENABLE_OUTPUT_CONSOLE": "0",
    }
    done = subprocess.run(
        [engine_python("sglang"), str(HERE / "run_sglang_dump.py"), str(root / "job.json")],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (root / "run/traces/learner-sglang/tokens.parquet").exists(), done.stderr[-4000:]
    return root / "run", root / "dumps"


def test_what_the_dumper_saw_is_what_our_hooks_saw(served, tmp_path):
    run, dump = served
    assert detect_format(dump) == "sglang-dumper"
    sides = ["--sampler", str(dump), "--run", str(run)]
    done = minite("import", *sides, "-o", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert "its name says no site" in done.output
    rows = pd.read_parquet(tmp_path / "run" / "comparison.parquet")
    compared = rows[rows["status"] == "compared"]
    assert set(compared["bitwise_fraction"]) == {1.0}
    assert set(compared["agreement"].dropna()) == {1.0}
    assert set(map(tuple, compared[["mode", "probe"]].to_numpy())) == {
        ("score", "long"), ("score", "short"), ("sample", "long"),
    }  # fmt: skip
    per_layer = {
        *(f"self_attn.{n}_proj:{kind}" for n in "qkvo" for kind in ("input", "output")),
        *(f"self_attn.{n}_norm:output" for n in "qk"),
        *(f"self_attn.{n}:output" for n in ("q_rope", "k_rope", "attn")),
        *(
            f"{n}_layernorm:{kind}"
            for n in ("input", "post_attention")
            for kind in ("input", "output")
        ),
        *("mlp.gate:router_logits", "mlp.experts:topk_ids", "mlp.experts:topk_weights"),
        *("mlp.experts:output", ":output"),
    }
    expected = {f"model.layers.{i}.{s}".replace(".:", ":") for i in (0, 1) for s in per_layer}
    expected |= {"model.embed_tokens:output", "model.norm:output", "lm_head:logits"}
    for key, found in compared.groupby(["mode", "probe"]):
        names = set(found["fqn"] + ":" + found["kind"])
        assert expected <= names, (key, expected - names)
    decoded = compared[(compared["mode"] == "sample") & (compared["kind"] == "output")]
    assert set(decoded["fqn"].str.contains("q_proj")) == {True, False}
    only = rows[(rows["status"] == "skipped") & rows["reason"].str.startswith("learner-sglang")]
    assert not len(only), only[["fqn", "kind"]].to_string()
    logprobs = pd.read_parquet(tmp_path / "run" / "logprobs.parquet")
    assert len(logprobs) == 5  # decoded tokens but the last: of its logits no row is known
    gap = (logprobs["baseline_logprob"] - logprobs["target_logprob"]).abs().max()
    assert gap < 1e-5


def replay(root, site, tensors, arguments, named=None, world=1):
    """Dump `tensors` (one dict per rank) with the dumper's own hooks; returns its folder."""
    root.mkdir(parents=True)
    processes = []
    for rank in range(world):
        file = root / f"rank-{rank}.pt"
        torch.save({"tensors": tensors[rank], "arguments": arguments, "named": named or {}}, file)
        command = [sys.executable, str(HERE / "run_dumper.py"), str(site), str(file)]
        processes.append(
            subprocess.Popen(
                [*command, str(root / "dumps"), str(rank), str(world)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors[-2000:]
    return root / "dumps"


def megatron_tensors(run, tensor):
    """Each rank's tensors as Megatron's modules would get and give them."""
    trace = Trace(run / "traces/learner-hf")
    writer = MegatronWriter(trace, TOKENS, tensor=tensor, sp=tensor > 1)
    writer.statics()
    writer.call(0)
    kinds = ("input", "output", "weight")
    found = []
    for rank in writer.ranks:
        plain = {key.removeprefix("step-0/"): value for key, value in rank.items()}
        found.append(
            {
                key: value
                for key, value in plain.items()
                if key.rpartition(":")[2] in kinds
                and "experts" not in key
                and "rope" not in key
                and key.removeprefix("decoder.layers.").rpartition(":")[0] not in ("0", "1")
            }
        )
    return found


def packed_arguments(padding=0):
    ids = [i for sequence in TOKENS.values() for i in sequence]
    ends = [0, len(TOKENS["chat"]), len(ids)]
    return {
        "input_ids": torch.tensor([ids + [0] * padding]),
        "cu_seqlens_q": torch.tensor(ends, dtype=torch.int32),
    }


def rows_of(out):
    rows = pd.read_parquet(out / "comparison.parquet")
    return rows[rows["status"] == "compared"]


def test_a_training_side_dumped_with_sglangs_dumper(hf_run, site, tmp_path):
    """Megatron's names, packed sequences, weights; and a tensor named as a site by hand."""
    tensors = megatron_tensors(hf_run, 1)
    trace = MegatronWriter(Trace(hf_run / "traces/learner-hf"), TOKENS)
    named = {
        f"decoder.layers.{i}.self_attention.core_attention:output": trace.batch(
            0, f"model.layers.{i}.self_attn.attn", "output"
        )
        for i in range(LAYERS)
    }
    for i in range(LAYERS):  # by hand instead
        del tensors[0][f"decoder.layers.{i}.self_attention.core_attention:output"]
    dump = replay(tmp_path / "dump", site, tensors, packed_arguments(), named)
    request = ImportRequest(learner=dump, run=hf_run)
    import_traces(request, tmp_path / "run", lambda _: None)
    plan = read_plan(hf_run)
    rows = rows_of(tmp_path / "run")
    assert set(rows["bitwise_fraction"]) == {1.0}
    names = set(rows["fqn"] + ":" + rows["kind"])
    for part in ("q_proj:output", "k_proj:weight", "o_proj:input", "attn:output", "q_norm:output"):
        assert f"model.layers.1.self_attn.{part}" in names
    assert {"model.norm:input", "model.embed_tokens:weight"} <= names

    both = ImportRequest(learner=dump, samplers=(dump,), model=Path(plan.engines[0].checkpoint))
    import_traces(both, tmp_path / "both", lambda _: None)
    assert set(rows_of(tmp_path / "both")["bitwise_fraction"]) == {1.0}


def test_tensor_parallel_ranks_of_a_dump_are_joined(hf_run, site, tmp_path):
    """Two ranks, rows spread as Megatron's sequence parallelism spreads them."""
    tensors = megatron_tensors(hf_run, 2)
    dump = replay(tmp_path / "dump", site, tensors, packed_arguments(padding=1), world=2)
    request = ImportRequest(learner=dump, run=hf_run)
    import_traces(request, tmp_path / "run", lambda _: None)
    rows = rows_of(tmp_path / "run")
    assert set(rows["bitwise_fraction"]) == {1.0}
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "input_layernorm", "embed_tokens", "norm"}
    assert names <= set(rows["fqn"].str.rpartition(".")[2])
    files = sorted((dump / "dump_it").glob("*___rank=1___*"), key=dump_index)

    def attempt(change, said):
        change_value(files[0], lambda held: change(held["meta"]))
        with pytest.raises(UsageError, match=said):
            import_traces(request, tmp_path / "other", lambda _: None)

    info = "megatron_parallel_info"
    attempt(lambda meta: meta[info].update(cp_size=2), "cp_size is 2")
    attempt(lambda meta: meta[info].update(cp_size=1, pp_size=2), "pp_size is 2")
    attempt(lambda meta: meta[info].update(pp_size=1, dp_rank=1), "ranks of several batches")
    attempt(lambda meta: meta.pop(info), "no parallel state")
    manifest = {"format": "sglang-dumper", "version": 1, "ranks": [{"tensor": 0}, {"tensor": 1}]}
    (dump / "manifest.json").write_text(json.dumps(manifest))
    import_traces(request, tmp_path / "named", lambda _: None)
    next((dump / "dump_it").glob("*rank=1*linear_qkv.output*")).unlink()
    with pytest.raises(UsageError, match="linear_qkv:output lacks the shard of tensor rank 1"):
        import_traces(request, tmp_path / "other", lambda _: None)


def dump_index(file):
    return int(re.search(r"dump_index=(\d+)", file.name)[1])


def one_file(dump, pattern):
    return next((dump / "served").glob(f"step=0___*{pattern}*"))


def change_value(file, change):
    held = torch.load(file, weights_only=True)
    change(held)
    torch.save(held, file)


def damage(dump, name, tmp_path):
    """One thing wrong with a real dump."""
    file = one_file(dump, "layers.0.self_attn.o_proj.output")
    if name == "code":
        torch.save({"value": Runs(tmp_path / "ran"), "meta": {}}, file)
    elif name == "truncated":
        file.write_bytes(file.read_bytes()[:1500])
    elif name == "renamed":
        file.rename(file.with_name(file.name.replace("dump_index=", "dump_index=5")))
    elif name == "no-meta":
        torch.save({"value": torch.zeros(3)}, file)
    elif name == "rows":
        change_value(file, lambda d: d.update(value=d["value"][:5]))
    elif name == "dtype":
        change_value(file, lambda d: d.update(value=d["value"].double()))
    elif name == "duplicate":

        def again(held):
            held["meta"]["dump_index"] = 9999

        copied = file.with_name(file.name.replace("dump_index=", "dump_index=9999___x="))
        shutil.copyfile(file, copied)
        change_value(copied, again)
    elif name == "no-positions":
        for found in (dump / "served").glob("*___name=positions___*"):
            found.unlink()
    elif name == "no-tokens":
        for found in (dump / "served").glob("*___name=input_ids___*"):
            found.unlink()
    elif name == "lengths":
        change_value(one_file(dump, "name=seq_lens"), lambda d: d["value"].fill_(99))
    elif name == "two":
        shutil.copytree(dump / "served", dump / "other")
    elif name == "not-utf8":
        bad = b"step=0___rank=0___dump_index=1___name=a\xff.pt".decode(errors="surrogateescape")
        (dump / "served" / bad).touch()
    elif name == "no-index":
        (dump / "served" / "step=x___rank=0___dump_index=1___name=a.pt").touch()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("code", "o_proj.output.* holds more than tensors"),
        ("truncated", "can't read .*o_proj.output"),
        ("renamed", "holds step, rank, index and name"),
        ("no-meta", "has no value and meta"),
        ("rows", "o_proj.output.*shape .*call '0' has 47 rows"),
        ("dtype", "output is float64"),
        ("duplicate", "are the same tensor of one step"),
        ("no-positions", "has input_ids and no positions"),
        ("no-tokens", "no step says which tokens"),
        ("lengths", "no row of step 0 is position 98"),
        ("two", "holds 2 dumps"),
        ("not-utf8", "no UTF-8 name"),
        ("no-index", "lacks step, rank, dump_index or name"),
    ],
)
def test_a_damaged_dump_is_one_error_with_its_file(name, said, served, tmp_path):
    run, dump = served
    copied = tmp_path / "dump"
    shutil.copytree(dump, copied)
    damage(copied, name, tmp_path)
    with pytest.raises(UsageError, match=said):
        import_traces(ImportRequest(samplers=(copied,), run=run), tmp_path / "run", lambda _: None)
    assert not (tmp_path / "ran").exists()


def test_a_cached_prefix_has_no_tokens(served, tmp_path):
    """SGLang's prefix cache leaves rows out: what is left out is said, not shifted."""
    run, dump = served
    copied = tmp_path / "dump"
    shutil.copytree(dump, copied)
    name = one_file(copied, "name=rids")
    change_value(name, lambda d: d.update(value=["a", "b"]))
    for found in (copied / "served").glob("step=0___*"):
        held = torch.load(found, weights_only=True)
        value = held["value"]
        if isinstance(value, torch.Tensor) and len(value) == 47:
            held["value"] = torch.cat((value[:40], value[43:]))
            torch.save(held, found)
        elif isinstance(value, torch.Tensor) and len(value) % 47 == 0 and value.dim() == 2:
            per = len(value) // 47
            held["value"] = torch.cat((value[: 40 * per], value[43 * per :]))
            torch.save(held, found)
    said = []
    import_traces(ImportRequest(samplers=(copied,), run=run), tmp_path / "run", said.append)
    assert any("came from the prefix cache" in line for line in said)
    rows = rows_of(tmp_path / "run")
    assert set(rows["bitwise_fraction"]) == {1.0}
    assert "short" not in set(rows["probe"])
