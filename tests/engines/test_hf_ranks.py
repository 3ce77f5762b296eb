"""Engines on several ranks (gloo, two processes), and hf with layers on disk: the same numbers."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import transformers

from minite_diag.attribute.first_divergence import first_divergence
from minite_diag.attribute.operators import operator_findings
from minite_diag.canonical.names import STATIC, index_trace
from minite_diag.canonical.tokens import read_site
from minite_diag.capture import ranks, runner
from minite_diag.capture.shards import Shard
from minite_diag.compare import compare_sites
from minite_diag.compare_site import Side
from minite_diag.engines.hf import HfEngine
from minite_diag.engines.hf_device_map import parse_max_memory
from minite_diag.engines.hf_parallel import asked_ranks
from minite_diag.engines.te import TeEngine
from minite_diag.engines.vllm import VllmEngine
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, write_plan
from minite_diag.probe import Probe
from minite_diag.trace.store import Trace, tensor_bytes

from .conftest import PROBES, token_ids

RANKS = {"parallel": "fsdp2", "world_size": "2"}
TP = RANKS | {"parallel": "tp"}
DISK = {"device_map": "auto", "max_memory": "cpu:1200KiB"}


def make_plan(model, probes=PROBES, **engines):
    specs = tuple(
        EngineSpec(
            id.replace("_", "-"),
            "sampler" if number else "learner",
            id.partition("_")[0] if id.startswith("vllm") else "hf",
            sys.executable,
            str(model),
            "bf16",
            options,
        )
        for number, (id, options) in enumerate(engines.items())
    )
    return Plan(
        model=ModelRef("tiny", str(model), "bf16", "", "", 512, 2),
        engines=specs,
        probes=tuple(Probe.make(f"p{i}", ids, len(ids) // 2) for i, ids in enumerate(probes)),
        dtype="bfloat16",
        quantize="none",
        quantized=(),
        export_recipe="",
        modes=("score",),
        capture=CaptureSpec(top_k=5),
        timeout_s=200.0,
    )


@pytest.fixture(scope="module")
def one_thread():
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture(scope="module")
def run(models, tmp_path_factory, one_thread):
    """One MoE in one process, with layers on disk, on two ranks; in FP32 too."""
    folder = tmp_path_factory.mktemp("ranks")
    wide = {"dtype": "float32"}
    plan = make_plan(
        models["moe", "bfloat16"],
        one={},
        disk=DISK,
        fsdp2=RANKS,
        tp=TP,
        tp_fp32=TP | wide,
        vllm_tp=wide | {"tensor_parallel_size": "2"},
    )
    write_plan(plan, folder)
    results = runner.capture(plan, folder, lambda spec, event: None)
    assert {result.status for result in results} == {"ok"}, results
    return folder


def traces(run, *ids):
    return [Trace(run / "traces" / id) for id in ids]


def differing(run, first, second):
    """Logprobs and every tensor, as bytes; the sites that differ."""
    a, b = traces(run, first, second)
    sites_a, sites_b = index_trace(a), index_trace(b)
    assert {k: set(v) for k, v in sites_a.items()} == {k: set(v) for k, v in sites_b.items()}
    assert sum(map(len, sites_a.values())) > 300
    found = []
    for key, sites in sites_a.items():
        for site in sites:
            x, y = read_site(a, sites[site]), read_site(b, sites_b[key][site])
            if tensor_bytes(x.tensor) != tensor_bytes(y.tensor):
                found.append((key, site))
    return found


def logprobs(run, id):
    table = Trace(run / "traces" / id).tokens
    return table["logprob"].dropna().to_numpy()


@pytest.mark.parametrize("id", ["fsdp2", "disk"])
def test_the_bits_are_those_of_one_process(run, id):
    assert logprobs(run, id).tobytes() == logprobs(run, "one").tobytes()
    assert differing(run, "one", id) == []


def test_tensor_parallel_gathers_whole_weights(run):
    static = [site for key, site in differing(run, "one", "tp") if key == STATIC]
    assert static == []


@pytest.fixture(scope="module")
def by_transformers(models):
    """The log-probabilities of the probes, in FP32 and one process, with nothing of ours."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models["moe", "bfloat16"], dtype=torch.float32
    ).eval()
    found = []
    with torch.inference_mode():
        for ids in map(torch.tensor, PROBES):
            rows = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            found.append(rows.gather(1, ids[1:, None])[:, 0])
    return torch.cat(found).numpy()


@pytest.mark.parametrize("id", ["tp-fp32", "vllm-tp"])
def test_fp32_ranks_agree(run, by_transformers, id):
    gap = abs(logprobs(run, id) - by_transformers)
    assert 0 < gap.max() < 1e-4
    assert abs(by_transformers).max() > 1
    assert traces(run, id)[0].manifest["dtype"] == "float32"


def test_vllm_gathers_what_its_ranks_hold(run):
    one, two = (Side.of(trace) for trace in traces(run, "tp-fp32", "vllm-tp"))
    rows = pd.DataFrame(compare_sites(one, two))
    rows = rows[rows["status"] == "compared"]
    static = rows[rows["mode"] == "static"]
    assert len(static) > 60
    assert (static["bitwise_fraction"] == 1).all()
    assert len(rows) - len(static) > 50
    assert rows["rel_l2"].max() < 1e-4
    manifest = two.trace.manifest
    assert manifest["settings"]["tensor_parallel"] == "2"
    notes = {item["op"]: item["note"] for item in manifest["evidence"]}
    assert notes["collectives"].startswith("2 tensor-parallel ranks: CpuCommunicator")
    assert (run / "engine-vllm-tp-rank1.log").exists()


def test_the_gap_of_tensor_parallel_starts_at_a_sum_over_rows(run):
    rows = pd.DataFrame(compare_sites(*map(Side.of, traces(run, "one", "tp"))))
    assert set(rows["status"]) == {"compared"}
    found = first_divergence(rows)
    assert (found["site"], found["kind"]) == ("model.layers.0.self_attn.o_proj", "output")
    assert (found["input_equal"], found["weights_equal"]) == (True, True)
    assert {p["site"] for p in found["by_probe"]} == {"model.layers.0.self_attn.o_proj"}
    causes = {f.code: f.text for f in operator_findings(rows, "native", (1, 2))}
    assert "first at model.layers.0.self_attn.o_proj); summed over 1 and 2 ranks" in causes["MD211"]
    assert "MD208" not in causes
    assert "MD211" not in {f.code for f in operator_findings(rows, "native")}


def test_settings_are_read_back(run):
    one, disk, fsdp2, tp = (t.manifest for t in traces(run, "one", "disk", "fsdp2", "tp"))
    assert "parallel" not in one["settings"]
    assert fsdp2["settings"]["parallel"] == "fsdp2 (3 modules)"
    assert fsdp2["settings"]["collectives"] == "gloo: 3 allgather_base in a forward"
    assert fsdp2["settings"]["devices"] == "rank 0: cpu; rank 1: cpu"
    assert "q_proj.weight S(0) (2)" in fsdp2["settings"]["placements"]
    # attention and experts of two layers; the logits
    assert "4 allreduce" in tp["settings"]["collectives"]
    assert "1 all_gather_into_tensor" in tp["settings"]["collectives"]
    notes = {item["op"]: item["note"] for item in tp["evidence"]}
    assert notes["linear"] == "split over 2 ranks: 6 by columns, 2 by rows"
    assert notes["experts"] == "split over 2 ranks: 2 by columns, 2 by rows"
    assert "tp, 2 ranks" in notes["collectives"]
    assert disk["settings"]["device_map"].startswith("model.embed_tokens")
    assert "model.layers.1..model.norm: disk, computes on cpu" in disk["settings"]["device_map"]
    assert (run / "engine-tp-rank1.log").exists()


def processes_of(run):
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
                if os.fsencode(run) in words and ranks.RANK_FLAG.encode() in words:
                    found[int(folder.name)] = (folder / "environ").read_bytes()
            except OSError:
                continue
    return found


def rank_process(run, number):
    wanted = f"RANK={number}".encode()
    return next(p for p, env in processes_of(run).items() if wanted in env.split(b"\0"))


def wait_for_none(run):
    deadline = time.monotonic() + 10
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes_of(run)


@pytest.fixture
def long_plan(models, tmp_path, one_thread):
    probes = [token_ids(40, seed) for seed in range(200)]
    plan = make_plan(models["llama", "bfloat16"], probes, many=RANKS)
    write_plan(plan, tmp_path)
    return plan


def test_a_rank_that_dies_ends_the_run_with_its_name_and_log(long_plan, tmp_path):
    def kill_rank_1(spec, event):
        if event["event"] == "sequence" and event["done"] == 1:
            os.kill(rank_process(tmp_path, 1), signal.SIGKILL)

    began = time.monotonic()
    result = runner.capture_one(long_plan, tmp_path, long_plan.learner, kill_rank_1)
    assert (result.status, result.message) == ("error", "rank 1 of 2 was killed (SIGKILL)")
    assert str(tmp_path / "engine-many-rank1.log") in result.hint
    assert Trace(tmp_path / "traces" / "many").manifest["error"]["message"] == result.message
    assert time.monotonic() - began < 60
    assert wait_for_none(tmp_path) == {}


def test_ctrl_c_ends_all_ranks(long_plan, tmp_path):
    def interrupt(spec, event):
        if event["event"] == "sequence":
            assert len(processes_of(tmp_path)) >= 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.capture_one(long_plan, tmp_path, long_plan.learner, interrupt)
    assert wait_for_none(tmp_path) == {}
    error = Trace(tmp_path / "traces" / "many").manifest["error"]
    assert error["message"] == "interrupted"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "pp", "world_size": "2"}, "parallel=pp is unknown"),
        ({"parallel": "tp"}, "needs world_size"),
        ({"parallel": "tp", "world_size": "1"}, "needs world_size"),
        ({"world_size": "2"}, "world_size without parallel"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UsageError, match=message):
        asked_ranks(options)


def test_engines_say_how_many_ranks_they_take():
    assert (HfEngine.ranks(TP), HfEngine.ranks({})) == (2, 1)
    assert VllmEngine.ranks({"tensor_parallel_size": "4"}) == 4
    assert VllmEngine.ranks({}) == 1
    with pytest.raises(UsageError, match="'te' has no option 'parallel': it runs on one device"):
        TeEngine.ranks(TP)


def test_max_memory():
    wanted = {0: 20 * 2**30, "cpu": 3 * 2**29}
    assert parse_max_memory("0:20GiB/cpu:1.5GiB") == wanted
    assert parse_max_memory("") == {}
    with pytest.raises(UsageError, match="max_memory has '20GB'"):
        parse_max_memory("20GB")


def failure(exitcode, message="", kind="EngineError", *, lost=False):
    record = {"kind": kind, "message": message, "hint": "", "lost_peer": lost}
    data = {ranks.RECORD: record} if message else None
    return SimpleNamespace(exitcode=exitcode, error_file_data=data)


@pytest.mark.parametrize(
    ("failures", "message", "rank"),
    [
        ({0: failure(3, "gloo: closed", lost=True), 1: failure(-9)}, "rank 1 of 2 was killed", 1),
        ({0: failure(3, "x", lost=True), 1: failure(3, "disk full")}, "rank 1 of 2: disk full", 1),
        ({0: failure(3, "no such"), 1: failure(3, "no such")}, "no such", None),
        ({0: failure(-15), 1: failure(3, "wrong", "UsageError")}, "wrong", None),
        ({0: failure(-15), 1: failure(5)}, "rank 1 of 2 died (exit 5)", 1),
    ],
)
def test_the_cause_is_not_the_rank_that_lost_its_partner(failures, message, rank):
    found = ranks._cause(failures, 2, lambda number: Path(f"log-of-{number}"))
    assert found["message"].startswith(message)
    assert (f"log-of-{rank}" in found["hint"]) == (rank is not None)


def test_alignments_that_replace_modules_need_one_device():
    spec = EngineSpec("x", "learner", "hf", sys.executable, "", "bf16", RANKS, ("norm",))
    with pytest.raises(UsageError, match="alignment 'norm' replaces modules whose weights"):
        HfEngine()._place(spec)


def test_shards_make_the_whole():
    gate, up = torch.arange(8.0).view(1, 8), torch.arange(10.0, 18.0).view(1, 8)
    ranks_hold = [torch.cat((gate[:, i : i + 4], up[:, i : i + 4]), 1) for i in (0, 4)]
    fused = Shard("concatenate", sizes=(4, 4), width=16)
    assert fused.join(ranks_hold).equal(torch.cat((gate, up), 1))
    with pytest.raises(EngineError, match="no parts of 15"):
        Shard("concatenate", width=15).join(ranks_hold)
    assert Shard("add").join([gate, up]).equal(gate + up)
    reduced = Shard("add", unless_equal=True)
    assert reduced.join([gate, gate.clone()]).equal(gate)
    assert reduced.join([gate, up]).equal(gate + up)
    scales = [torch.ones(2, 2).to(torch.float8_e4m3fn), torch.zeros(2, 2).to(torch.float8_e4m3fn)]
    whole = Shard("concatenate", rows=3, dim=0).join(scales)
    assert (whole.dtype, whole.shape) == (torch.float8_e4m3fn, (3, 2))
    assert whole.float().tolist() == [[1, 1], [1, 1], [0, 0]]
