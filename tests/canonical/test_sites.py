"""Fused modules, routed rows, chunks and scales end as the checkpoint names and orders them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minite_diag.canonical.names import STATIC, SequenceKey, index_trace
from minite_diag.canonical.scales import (
    power_of_two_shift,
    to_decode,
    unpack,
    unsigned_zero,
    zero_blocks,
)
from minite_diag.canonical.tokens import read_site
from minite_diag.compare_site import Side
from minite_diag.errors import TraceError
from minite_diag.site import Site

QKV = (("l.q_proj", 0, 8), ("l.k_proj", 8, 12), ("l.v_proj", 12, 16))


def read(trace: Any, key: SequenceKey, fqn: str, kind: str) -> Any:
    return read_site(trace, index_trace(trace)[key][Site(fqn, kind)])


def test_fused_qkv_is_split(new_trace: Any, score: SequenceKey) -> None:
    builder = new_trace("a")
    builder.fuse("l.qkv_proj", *QKV)
    x, y = torch.randn(3, 32), torch.randn(3, 16)
    codes = torch.randint(0, 256, (16, 16), dtype=torch.uint8)
    block = torch.rand(16, 2).to(torch.float8_e4m3fn)
    builder.static("l.qkv_proj", "weight_codes", codes)
    builder.static("l.qkv_proj", "weight_block_scale", block)
    builder.static("l.qkv_proj", "weight_global_decode_scale", torch.tensor(0.5))
    builder.call(range(3))
    builder.tensor("l.qkv_proj", "input", x)
    builder.tensor("l.qkv_proj", "output", y)
    trace = builder.done()
    for fqn, start, stop in QKV:
        assert torch.equal(read(trace, score, fqn, "input").tensor, x)
        assert torch.equal(read(trace, score, fqn, "output").tensor, y[:, start:stop])
        assert torch.equal(read(trace, STATIC, fqn, "weight_codes").tensor, codes[start:stop])
        held = read(trace, STATIC, fqn, "weight_block_scale").tensor
        assert torch.equal(held.view(torch.uint8), block[start:stop].view(torch.uint8))
        assert float(read(trace, STATIC, fqn, "weight_global_decode_scale").tensor) == 0.5
    assert not any(site.fqn == "l.qkv_proj" for site in index_trace(trace)[score])


def test_a_scale_for_each_part(new_trace: Any) -> None:
    builder = new_trace("a")
    builder.fuse("l.qkv_proj", *QKV)
    builder.static("l.qkv_proj", "weight_global_decode_scale", torch.tensor([1.0, 2.0, 3.0]))
    trace = builder.done()
    found = [
        float(read(trace, STATIC, fqn, "weight_global_decode_scale").tensor) for fqn, _, _ in QKV
    ]
    assert found == [1.0, 2.0, 3.0]


def test_w13_of_each_expert(new_trace: Any, score: SequenceKey) -> None:
    builder = new_trace("a")
    for expert in range(3):
        parts = (f"e.{expert}.gate_proj", 0, 4), (f"e.{expert}.up_proj", 4, 8)
        builder.fuse("e.w13", *parts, expert=expert)
    weight = torch.randn(3, 8, 16)
    builder.static("e.w13", "weight", weight)
    builder.static("e.w13", "weight_global_decode_scale", torch.tensor([[1.0, 2.0]] * 3))
    trace = builder.done()
    for expert in range(3):
        up = read(trace, STATIC, f"e.{expert}.up_proj", "weight").tensor
        assert torch.equal(up, weight[expert, 4:])
        scale = read(trace, STATIC, f"e.{expert}.up_proj", "weight_global_decode_scale").tensor
        assert float(scale) == 2.0


def test_a_layout_that_can_t_be_right(new_trace: Any) -> None:
    builder = new_trace("a")
    builder.fuse("l.qkv_proj", ("l.q_proj", 0, 99))
    builder.static("l.qkv_proj", "weight", torch.randn(16, 4))
    trace = builder.done()
    with pytest.raises(TraceError, match=r"l\.q_proj: rows 0:99"):
        read(trace, STATIC, "l.q_proj", "weight")


def test_routed_rows_of_two_sequences(new_trace: Any) -> None:
    """A batch of two probes; the expert lists its rows in its own order."""
    builder = new_trace("a")
    builder.batch([("p", 0), ("p", 1), ("q", 0), ("q", 1), ("p", 2)])
    rows = [4, 3, 0]
    y = torch.tensor(rows)[:, None] * torch.ones(1, 6)
    builder.tensor("e.0.down_proj", "output", y, rows)
    trace = builder.done()
    p = read(trace, SequenceKey("score", "", "p"), "e.0.down_proj", "output")
    assert p.positions.tolist() == [0, 2]
    assert p.tensor[:, 0].tolist() == [0.0, 4.0]
    q = read(trace, SequenceKey("score", "", "q"), "e.0.down_proj", "output")
    assert q.positions.tolist() == [1]
    assert q.tensor[:, 0].tolist() == [3.0]


def test_an_expert_without_a_token_of_the_sequence(new_trace: Any) -> None:
    builder = new_trace("a")
    builder.batch([("p", 0), ("q", 0)])
    builder.tensor("e.0.down_proj", "output", torch.ones(1, 6), [0])
    trace = builder.done()
    q = read(trace, SequenceKey("score", "", "q"), "e.0.down_proj", "output")
    assert (len(q.positions), tuple(q.tensor.shape)) == (0, (0, 6))


@given(st.permutations(list(range(9))), st.lists(st.integers(1, 4), min_size=9, max_size=9))
@settings(max_examples=25, deadline=None)
def test_chunks_in_any_order(tmp_path_factory: Any, order: list[int], sizes: list[int]) -> None:
    """Prefill in chunks, out of order, beside another sequence: rows come out by position."""
    from minite_diag.trace.store import Row, Trace, TraceWriter

    folder = tmp_path_factory.mktemp("chunks")
    writer = TraceWriter(folder)
    writer.manifest({"engine": {"id": "a"}, "status": "ok"})
    for call, start in enumerate(range(0, len(order), sizes[0])):
        chunk = order[start : start + sizes[0]]
        rows = [("q", 7), *(("p", i) for i in chunk)]
        writer.call(call, [Row("score", "", p, i, "prefill") for p, i in rows])
        tensor = torch.tensor([[100.0 * (p == "q") + i] for p, i in rows])
        writer.tensor("m", "output", tensor, call=call, order=0, rows="tokens")
    writer.close()
    found = read(Trace(folder), SequenceKey("score", "", "p"), "m", "output")
    assert found.positions.tolist() == sorted(order)
    assert found.tensor[:, 0].tolist() == [float(i) for i in sorted(order)]


def test_encode_scales_become_decode_scales(new_trace: Any, score: SequenceKey) -> None:
    encode = torch.tensor(2688.0 / 3.7)
    builder = new_trace("a")
    builder.static("m", "weight_global_encode_scale", encode)
    builder.call(range(2))
    builder.tensor("m", "act_global_encode_scale", encode)
    trace = builder.done()
    for key, kind in ((STATIC, "weight_global_decode_scale"), (score, "act_global_decode_scale")):
        assert torch.equal(read(trace, key, "m", kind).tensor, 1.0 / encode)
    assert torch.equal(to_decode(encode, "weight_global_decode_scale"), encode)


def test_a_static_activation_scale_is_shared(new_trace: Any) -> None:
    """By every sequence in which the module quantized something, and by no other."""
    builder = new_trace("a")
    builder.static("m", "act_global_decode_scale", torch.tensor(0.25))
    builder.static("m", "weight", torch.randn(2, 2))
    for probe in ("p", "q", "r"):
        builder.call(range(2), probe)
        if probe != "r":
            builder.tensor("m", "act_codes", torch.zeros(2, 8, dtype=torch.uint8))
        builder.tensor("m", "output", torch.randn(2, 2))
    trace = builder.done()
    sites = index_trace(trace)
    scale = Site("m", "act_global_decode_scale")
    held = [key.probe for key in sites if scale in sites[key]]
    assert held == ["p", "q"]
    assert float(read_site(trace, sites[SequenceKey("score", "", "q")][scale]).tensor) == 0.25
    order = Side.of(trace).order(SequenceKey("score", "", "q"))
    assert order[scale] == order[Site("m", "act_codes")] == 0


def test_scales_of_several_calls_are_a_vector(new_trace: Any, score: SequenceKey) -> None:
    builder = new_trace("a")
    for call in range(3):
        builder.call([call])
        builder.tensor("m", "act_global_decode_scale", torch.tensor(float(call)))
    found = read(builder.done(), score, "m", "act_global_decode_scale")
    assert found.positions is None
    assert found.tensor.tolist() == [0.0, 1.0, 2.0]


def test_sequences_are_looked_up_one_at_a_time(new_trace: Any) -> None:
    builder = new_trace("a")
    for probe in ("b", "a", "c"):
        builder.call(range(2), probe)
        builder.tensor("m", "input", torch.randn(2, 4))
    sites = index_trace(builder.done())
    assert [key.probe for key in sites] == ["b", "a", "c"]
    assert SequenceKey("score", "", "d") not in sites
    assert sites.get(SequenceKey("score", "", "d")) is None
    assert all(len(sites[key]) == 1 for key in sites)


def naive_unsigned_zero(codes: np.ndarray) -> np.ndarray:
    nibbles = np.stack([codes & 15, codes >> 4], -1)
    nibbles[nibbles == 8] = 0
    return nibbles


def test_unsigned_zero_of_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    found = unpack(unsigned_zero(codes)).reshape(4, 64, 2).numpy()
    assert np.array_equal(found, naive_unsigned_zero(codes.numpy()))


def test_zero_blocks() -> None:
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    codes[0, 3], codes[1, 15] = 1, 0x10
    assert zero_blocks(codes).tolist() == [[False, True], [True, False]]
    assert zero_blocks(torch.zeros(2, 12, dtype=torch.uint8)) is None


@given(st.floats(allow_nan=True))
def test_power_of_two_shift(ratio: float) -> None:
    shift = power_of_two_shift(ratio)
    assert shift is None or 2.0**shift == ratio
    assert power_of_two_shift(2.0**-12) == -12
