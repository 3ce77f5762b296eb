"""scales.parquet: each block scale that was compared is counted once for each side."""

from pathlib import Path
from typing import Any

import pandas as pd
import torch

from minite_diag.compare import ScaleCounts, compare_sites
from minite_diag.compare_site import Side
from minite_diag.site import Site

CODES = torch.full((2, 16), 0x22, dtype=torch.uint8)


def quantized(builder: Any, name: str, scales: list[list[float]], codes: torch.Tensor) -> None:
    block = torch.tensor(scales).to(torch.float8_e4m3fn)
    builder.static(name, "weight_codes", codes)
    builder.static(name, "weight_block_scale", block)
    builder.static(name, "weight_global_decode_scale", torch.tensor(1.0))


def counts_of(baseline: Any, target: Any) -> pd.DataFrame:
    counts = ScaleCounts()
    list(compare_sites(Side.of(baseline.done()), Side.of(target.done()), counts))
    return pd.DataFrame(list(counts.rows()))


def byte(value: float) -> int:
    return int(torch.tensor(value).to(torch.float8_e4m3fn).view(torch.uint8))


def test_blocks_are_counted_by_layer_and_value(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    name = "model.layers.3.mlp.up_proj"
    quantized(a, name, [[1.0, 2.0], [2.0, 4.0]], CODES)
    quantized(b, name, [[1.0, 1.0], [448.0, 4.0]], CODES)
    rows = counts_of(a, b)
    assert set(rows["layer_index"]) == {3}
    assert set(rows["kind"]) == {"weight_block_scale"}
    assert set(rows["mode"]) == {"static"}
    found = rows.set_index("code")[["baseline_blocks", "target_blocks"]].T.to_dict("list")
    assert found == {
        byte(1.0): [1, 2],
        byte(2.0): [2, 0],
        byte(4.0): [1, 1],
        byte(448.0): [0, 1],
    }


def test_blocks_of_zeros_are_not_counted(new_trace: Any) -> None:
    a, b = new_trace("a"), new_trace("b")
    codes = CODES.clone()
    codes[0, :8] = 0
    quantized(a, "m", [[0.5, 2.0], [2.0, 4.0]], codes)
    quantized(b, "m", [[1.0, 2.0], [2.0, 4.0]], codes)
    rows = counts_of(a, b)
    assert byte(0.5) not in set(rows["code"])
    assert rows[["baseline_blocks", "target_blocks"]].sum().tolist() == [3, 3]
    assert rows["layer_index"].isna().all()


def test_modules_that_share_their_input_are_counted_each(new_trace: Any) -> None:
    """q, k and v read the same bytes: one comparison, three sites."""
    builders = new_trace("a"), new_trace("b")
    for builder in builders:
        parts = [(f"model.layers.0.self_attn.{n}", i, i + 1) for i, n in enumerate(("q", "k", "v"))]
        builder.fuse("qkv", *parts)
        builder.call(range(2))
        builder.tensor("qkv", "act_codes", CODES)
        builder.tensor("qkv", "act_block_scale", torch.ones(2, 2).to(torch.float8_e4m3fn))
    rows = counts_of(*builders)
    assert rows["baseline_blocks"].tolist() == [12]
    assert rows["mode"].tolist() == ["score"]


def test_counts_of_no_scales_are_no_rows(tmp_path: Path) -> None:
    counts = ScaleCounts()
    assert list(counts.rows()) == []
    empty = torch.zeros(256, dtype=torch.int64)
    counts.add("score", Site("m", "act_block_scale"), (empty, empty))
    assert list(counts.rows()) == []
