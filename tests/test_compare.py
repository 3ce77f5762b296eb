"""One row for each site of either side: compared as the bytes are, or skipped with a reason."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
import torch

from minite_diag.compare import compare, compare_sites
from minite_diag.compare_site import SequencePair, Side
from minite_diag.site import Site

ROOT = Path(__file__).parent.parent


def rows_of(baseline: Any, target: Any) -> pd.DataFrame:
    found = compare_sites(Side.of(baseline.done()), Side.of(target.done()))
    return pd.DataFrame(list(found)).set_index(["fqn", "kind"])


def quantized(
    builder: Any, codes: torch.Tensor, block: torch.Tensor, scale: float, name: str = "m"
) -> None:
    builder.static(name, "weight_codes", codes)
    builder.static(name, "weight_block_scale", block.to(torch.float8_e4m3fn))
    builder.static(name, "weight_global_decode_scale", torch.tensor(scale))


def test_the_sign_of_a_zero_code_is_no_difference(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    codes = torch.full((2, 16), 0x31, dtype=torch.uint8)
    signed = codes.clone()
    codes[0, 0], signed[0, 0] = 0x00, 0x88
    codes[1, 1], signed[1, 1] = 0x30, 0x38
    other = signed.clone()
    other[1, 15] = 0x41
    block = torch.ones(2, 2)
    quantized(a, codes, block, 1.0)
    quantized(b, signed, block, 1.0)
    quantized(a, codes, block, 1.0, "n")
    quantized(b, other, block, 1.0, "n")
    rows = rows_of(a, b)
    assert rows.loc[("m", "weight_codes"), "bitwise_fraction"] == 1.0
    assert rows.loc[("m", "weight_codes"), "elements"] == 64
    assert rows.loc[("n", "weight_codes"), "mismatch_rate"] == 1 / 64


def test_blocks_of_zeros_are_masked(new_trace: Any) -> None:
    """Writers disagree on the scale of a block of zeros, and on codes under a zero scale."""
    a, b = new_trace("a"), new_trace("b")
    codes = torch.full((1, 24), 0x22, dtype=torch.uint8)
    codes[0, :8] = 0x00
    under_zero = codes.clone()
    under_zero[0, 8:16] = 0x77
    quantized(a, codes, torch.tensor([[1.0, 0.0, 2.0]]), 1.0)
    quantized(b, under_zero, torch.tensor([[0.5, 0.0, 2.0]]), 1.0)
    rows = rows_of(a, b)
    scale = rows.loc[("m", "weight_block_scale")]
    assert (scale["mismatch_rate"], scale["elements"]) == (0.0, 2)
    code = rows.loc[("m", "weight_codes")]
    assert (code["mismatch_rate"], code["elements"]) == (0.0, 32)


def test_a_block_that_is_zero_on_one_side_only_counts(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)
    quantized(a, codes, torch.tensor([[0.0, 1.0]]), 1.0)
    quantized(b, codes ^ 0x01, torch.tensor([[1.0, 1.0]]), 1.0)
    code = rows_of(a, b).loc[("m", "weight_codes")]
    assert (code["mismatch_rate"], code["elements"]) == (0.5, 32)


def test_a_power_of_two_between_the_scales_is_noted(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    codes = torch.full((4, 16), 0x22, dtype=torch.uint8)
    block = torch.tensor([[1.0, 2.0]]).repeat(4, 1)
    quantized(a, codes, block, 0.5)
    quantized(b, codes, block * 8, 0.0625)
    quantized(a, codes, block, 0.5, "n")
    quantized(b, codes, block * 8, 0.125, "n")
    rows = rows_of(a, b)
    shifted = rows.loc[("m", "weight_block_scale")]
    assert shifted["mismatch_rate"] == 1.0
    assert "2^-3" in shifted["reason"]
    assert rows.loc[("m", "weight_global_decode_scale"), "scale_ratio"] == 0.125
    assert rows.loc[("n", "weight_block_scale"), "reason"] == ""


def test_every_gap_is_a_row_with_a_reason(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    b.invisible = {"hidden:out*": "one fused kernel"}
    for builder in (a, b):
        builder.call(range(4))
        builder.tensor("both", "input", torch.ones(4, 2))
    a.tensor("only_a", "input", torch.ones(4, 2))
    a.tensor("hidden", "output", torch.ones(4, 2))
    a.tensor("l.experts.3.up_proj", "input", torch.ones(1, 2), [0])
    b.tensor("only_b", "output", torch.ones(4, 2))
    a.tensor("shape", "input", torch.ones(4, 2))
    b.tensor("shape", "input", torch.ones(4, 3))
    a.call(range(2), "lost")
    a.tensor("both", "input", torch.ones(2, 2))
    a.call(range(2), "apart")
    a.tensor("both", "input", torch.ones(2, 2))
    b.call(range(2, 4), "apart")
    b.tensor("both", "input", torch.ones(2, 2))
    rows = rows_of(a, b)
    assert not rows.reset_index().duplicated(["fqn", "kind", "probe"]).any()
    reasons = rows[rows["status"] == "skipped"].set_index("probe", append=True)["reason"]
    assert reasons[("only_a", "input", "p")] == "b has no such tensor"
    assert reasons[("only_b", "output", "p")] == "a has no such tensor"
    assert reasons[("hidden", "output", "p")].endswith("one fused kernel")
    assert "no token" in reasons[("l.experts.3.up_proj", "input", "p")]
    assert "(4, 2) and (4, 3)" in reasons[("shape", "input", "p")]
    assert "captured no tensors" in reasons[("both", "input", "lost")]
    assert "no common token" in reasons[("both", "input", "apart")]
    assert len(reasons) == 7


def test_statistics_only_runs(new_trace: Any) -> None:
    x = torch.randn(4, 8)
    a, b = new_trace("a", stats_only=True), new_trace("b", stats_only=True)
    b.fuse("fused", ("q", 0, 4), ("k", 4, 8))
    for builder, factor in ((a, 1.0), (b, 2.0)):
        builder.call(range(4))
        builder.tensor("same", "input", x)
        builder.tensor("twice", "output", x * factor)
    a.tensor("q", "output", x)
    b.tensor("fused", "output", x)
    rows = rows_of(a, b)
    assert rows.loc[("same", "input"), "bitwise_fraction"] == 1.0
    assert math.isnan(rows.loc[("twice", "output"), "bitwise_fraction"])
    assert rows.loc[("twice", "output"), "scale_ratio"] == 2.0
    assert "fused" in rows.loc[("q", "output"), "reason"]


def test_statistics_of_routed_rows_know_tokens_and_no_order(new_trace: Any) -> None:
    x = torch.randn(3, 8)
    a, b = new_trace("a", stats_only=True), new_trace("b", stats_only=True)
    for builder in (a, b):
        builder.call(range(6))
    a.tensor("l.experts.0.up_proj", "input", x, routed=[0, 2, 5])
    b.tensor("l.experts.0.up_proj", "input", x[[2, 0, 1]], routed=[5, 0, 2])
    a.tensor("l.experts.1.up_proj", "input", x, routed=[0, 2, 5])
    b.tensor("l.experts.1.up_proj", "input", x, routed=[0, 2, 4])
    a.tensor("l.experts.2.up_proj", "input", x, routed=[0, 2, 5])
    b.tensor("l.experts.2.up_proj", "input", x[:2], routed=[0, 2])
    a.tensor("l.experts.3.up_proj", "input", torch.ones(6, dtype=torch.int64))
    b.tensor("l.experts.3.up_proj", "input", torch.ones(6, dtype=torch.int32))
    rows = rows_of(a, b)
    assert rows.loc[("l.experts.0.up_proj", "input"), "bitwise_fraction"] == 1.0
    reasons = [rows.loc[(f"l.experts.{e}.up_proj", "input"), "reason"] for e in (1, 2, 3)]
    assert "other tokens" in reasons[0]
    assert "(3, 8) and (2, 8)" in reasons[1]
    assert "int64 and int32" in reasons[2]


def test_one_side_with_statistics_only(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b", stats_only=True)
    for builder in (a, b):
        builder.call(range(4))
        builder.tensor("m", "input", torch.ones(4, 2))
    row = rows_of(a, b).loc[("m", "input")]
    assert (row["status"], row["reason"]) == ("skipped", "one side kept statistics only")


def test_different_dtypes_meet_on_the_narrower_grid(new_trace: Any) -> None:
    x = torch.randn(4, 32)
    a, b = new_trace("a"), new_trace("b")
    for builder, tensor in ((a, x), (b, x.bfloat16())):
        builder.call(range(4))
        builder.tensor("m", "input", tensor)
    row = rows_of(a, b).loc[("m", "input")]
    assert (row["baseline_dtype"], row["target_dtype"]) == ("float32", "bfloat16")
    assert row["bitwise_fraction"] == 1.0
    assert row["max_abs_diff"] > 0.0
    assert row["ulp_max"] == 0.0


def test_positions_that_come_twice(new_trace: Any) -> None:
    """An engine that computed a token again: as many rows as both sides have, in order."""
    a, b = new_trace("a"), new_trace("b")
    values = torch.tensor([[0.0], [1.0], [1.0], [2.0]])
    for builder in (a, b):
        builder.call([0, 1])
        builder.tensor("m", "input", values[:2])
        builder.call([1, 2])
        builder.tensor("m", "input", values[2:])
    row = rows_of(a, b).loc[("m", "input")]
    assert (row["elements"], row["bitwise_fraction"]) == (4, 1.0)
    c, d = new_trace("c"), new_trace("d")
    c.call([0, 1, 1, 2])
    c.tensor("m", "input", values)
    d.call([0, 1, 2])
    d.tensor("m", "input", torch.tensor([[0.0], [1.0], [5.0]]))
    row = rows_of(c, d).loc[("m", "input")]
    assert row["elements"] == 3
    assert "3 common tokens of 4 (baseline) and 3 (target)" in row["reason"]
    assert row["first_row"] == 2


def test_the_first_row_is_a_position(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    for builder in (a, b):
        builder.call([3, 4, 5, 6])
        x = torch.ones(4, 3)
        x[2] += builder is b
        builder.tensor("m", "input", x)
    assert rows_of(a, b).loc[("m", "input"), "first_row"] == 5


def test_a_value_per_call_against_one_per_token(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    a.call(range(4))
    a.tensor("m", "act_global_decode_scale", torch.tensor(2.0))
    b.call(range(4))
    b.tensor("m", "act_global_decode_scale", torch.full((4, 1), 2.0))
    row = rows_of(a, b).loc[("m", "act_global_decode_scale")]
    assert row["bitwise_fraction"] == 1.0
    assert "per call" in row["reason"]


def test_routing(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    for builder, ids, weights in (
        (a, [[0, 1], [2, 3], [4, 5]], [[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]]),
        (b, [[1, 0], [2, 3], [4, 6]], [[0.4, 0.6], [0.7, 0.3], [0.1, 0.9]]),
    ):
        builder.call(range(3))
        builder.tensor("experts", "topk_ids", torch.tensor(ids))
        builder.tensor("experts", "topk_weights", torch.tensor(weights))
    rows = rows_of(a, b)
    assert rows.loc[("experts", "topk_ids"), "agreement"] == pytest.approx(2 / 3)
    weights = rows.loc[("experts", "topk_weights")]
    assert (weights["bitwise_fraction"], weights["elements"]) == (1.0, 4)


def test_equal_bytes_are_compared_once(
    new_trace: Any, score: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k and v have one input; their outputs and another call's input are their own."""
    x = torch.randn(4, 16)
    a, b = new_trace("a"), new_trace("b")
    a.fuse("qkv", ("q", 0, 4), ("k", 4, 8), ("v", 8, 12))
    for builder, tensor in ((a, x), (b, x + 1)):
        builder.call(range(4))
        for name in ("qkv",) if builder is a else "qkv":
            builder.tensor(name, "input", tensor)
            builder.tensor(name, "output", torch.randn(4, 12 if builder is a else 4))
    pair = SequencePair(Side.of(a.done()), Side.of(b.done()), score)
    results = {
        (fqn, kind): pair.compare(Site(fqn, kind)) for kind in ("input", "output") for fqn in "qkv"
    }
    assert results[("q", "input")] is results[("k", "input")] is results[("v", "input")]
    assert len({id(results[(fqn, "output")]) for fqn in "qkv"}) == 3


def test_parts_of_one_tensor_are_compared_apart(new_trace: Any, score: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    y = torch.randn(4, 8)
    for builder, tensor in ((a, y), (b, y + torch.arange(8.0))):
        builder.fuse("qk", ("q", 0, 1), ("k", 1, 8))
        builder.call(range(4))
        builder.tensor("qk", "output", tensor)
    rows = rows_of(a, b)
    assert rows.loc[("q", "output"), "bitwise_fraction"] == 1.0
    assert rows.loc[("k", "output"), "bitwise_fraction"] < 1.0


def write_run(run: Path, new_trace: Any) -> None:
    for name in ("learner-toy", "sampler-toy"):
        builder = new_trace(name)
        builder.call(range(5))
        builder.tensor("m", "input", torch.randn(5, 8))
        logits = torch.randn(5, 11)
        builder.tensor("lm_head", "logits", logits)
        builder.writer.tokens(
            [
                {
                    "mode": "score",
                    "source": "",
                    "probe": "p",
                    "position": i,
                    "token_id": i,
                    "logprob": -1.0 if i else None,
                    "phase": "prefill",
                    "generated": False,
                    "top_ids": [1, 2],
                    "top_logprobs": [-1.0, -2.0],
                }
                for i in range(5)
            ]
        )
        builder.done()
    (run / "plan.json").write_text(json.dumps(plan_record()))


def plan_record() -> dict[str, Any]:
    spec = {"engine": "toy", "python": "", "checkpoint": "", "checkpoint_format": "bf16"}
    model = {
        "name": "m",
        "path": "",
        "format": "bf16",
        "architecture": "",
        "fingerprint": "",
        "vocab_size": 11,
        "num_layers": 1,
    }
    return {
        "schema": 1,
        "model": model,
        "engines": [
            {"id": "learner-toy", "role": "learner", **spec},
            {"id": "sampler-toy", "role": "sampler", **spec},
        ],
        "probes": [],
        "dtype": "float32",
        "quantize": "none",
        "quantized": [],
        "export_recipe": "",
        "modes": ["score"],
        "capture": {},
    }


def test_the_stage_writes_tables_that_others_read(new_trace: Any, tmp_path: Path) -> None:
    write_run(tmp_path, new_trace)
    compare(tmp_path)
    rows = pd.read_parquet(tmp_path / "comparison.parquet")
    assert sorted(rows["kind"]) == ["input", "logits"]
    logprobs = pd.read_parquet(tmp_path / "logprobs.parquet")
    assert logprobs["position"].tolist() == [1, 2, 3, 4]
    assert (logprobs["full_kl"] > 0).all()
    assert (logprobs["topk_overlap"] == 1.0).all()
    query = f"select kind, rel_l2 from '{tmp_path}/comparison.parquet' order by kind"
    assert [kind for kind, _ in duckdb.sql(query).fetchall()] == ["input", "logits"]


MEMORY = """
import sys, torch
from pathlib import Path
from minite_diag.compare import compare_sites
from minite_diag.compare_site import Side
from minite_diag.trace.store import Row, Trace, TraceWriter

folder, action = Path(sys.argv[1]), sys.argv[2]
ROWS, COLUMNS, TENSORS = 4096, 2048, 8  # BF16: 16 MiB each, 128 MiB a side

def rss(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def write(name, rows):
    writer = TraceWriter(folder / name)
    writer.manifest({"engine": {"id": name}, "status": "ok"})
    writer.call(0, [Row("score", "", "p", i, "prefill") for i in range(rows)])
    tensor = torch.empty(rows, COLUMNS, dtype=torch.bfloat16)
    for number in range(TENSORS):
        for row in range(0, rows, 64):
            tensor[row : row + 64].normal_(generator=g)
        writer.tensor(f"m{number}", "output", tensor, call=0, order=number, rows="tokens")
    writer.close()

g = torch.Generator().manual_seed(0)
# Code and allocators that load on first use are not what is measured.
for name in ("c", "d"):
    write(name, 64)
list(compare_sites(*(Side.of(Trace(folder / name)) for name in ("c", "d"))))
if action == "write":
    Path("/proc/self/clear_refs").write_text("5")
    before = rss("VmRSS")
    write("a", ROWS)
    write("b", ROWS)
else:
    sides = [Side.of(Trace(folder / name)) for name in ("a", "b")]
    Path("/proc/self/clear_refs").write_text("5")
    before = rss("VmRSS")
    assert sum(row["bitwise_fraction"] < 1 for row in compare_sites(*sides)) == TENSORS
print((rss("VmHWM") - before) / (2 * ROWS * COLUMNS))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_memory_is_bounded_by_a_few_tensors(tmp_path: Path) -> None:
    """Peak of writing and of comparing, in largest tensors; a trace has 8 on each side."""
    peaks = {}
    for action in ("write", "compare"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path), action],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        peaks[action] = float(done.stdout)
    # The caller's own tensor and two buffers; two mapped tensors and chunks.
    assert 1.0 < peaks["write"] < 4.0
    assert 1.0 < peaks["compare"] < 4.0
