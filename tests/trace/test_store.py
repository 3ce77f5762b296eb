"""What was written comes back, byte for byte, whatever happens to the writer."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minite_diag.errors import TraceError
from minite_diag.trace import segments
from minite_diag.trace.segments import ALIGNMENT, DiskBudgetExceeded, SegmentWriter
from minite_diag.trace.store import Trace, TraceWriter

ROOT = Path(__file__).parents[2]
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaN among them."""
    g = torch.Generator().manual_seed(seed)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=g)
    return raw.view(dtype).reshape(shape)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 5), (7, 1, 3), (257, 33)], ids=str)
def test_round_trip(new_trace: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bytes(dtype, shape)
    builder = new_trace("a")
    builder.static("m", "weight", tensor)
    builder.call(range(3))
    builder.tensor("m", "input", torch.ones(3))
    builder.tensor("n", "output", tensor)
    trace = builder.done()
    for ref in (trace.index[0], trace.index[2]):
        found = trace.read(ref)
        assert (found.dtype, found.shape) == (dtype, shape)
        assert as_bytes(found) == as_bytes(tensor)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3), st.booleans()),
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_mixture_comes_back(tmp_path_factory: Any, items: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    writer = TraceWriter(folder)
    writer.manifest({"engine": {"id": "a"}, "status": "ok"})
    tensors = []
    for number, (dtype, shape, again) in enumerate(items):
        same = tensors[-1] if again and tensors else random_bytes(dtype, tuple(shape), number)
        tensors.append(same)
        writer.tensor(f"m{number}", "input", same, call=0, order=number, rows="tokens")
    writer.close()
    trace = Trace(folder)
    assert [as_bytes(trace.read(ref)) for ref in trace.index] == [as_bytes(t) for t in tensors]
    sizes = [file.stat().st_size for file in (folder / "tensors").glob("data-*.bin")]
    assert sum(sizes) == writer.bytes_written
    assert all(ref.offset % ALIGNMENT == 0 for ref in trace.index)


def test_reads_are_views_of_the_file(new_trace: Any) -> None:
    builder = new_trace("a")
    builder.call(range(4))
    builder.tensor("m", "input", torch.randn(4, 1000))
    trace = builder.done()
    a, b = trace.read(trace.index[0]), trace.read(trace.index[0])
    assert a.data_ptr() == b.data_ptr()
    before = a.clone()
    trace.release()
    assert torch.equal(a, before)


def test_strided_tensors_are_written_row_major(new_trace: Any) -> None:
    tensor = torch.randn(6, 4).T
    builder = new_trace("a")
    builder.call(range(4))
    builder.tensor("m", "output", tensor)
    trace = builder.done()
    assert torch.equal(trace.read(trace.index[0]), tensor)


def test_equal_inputs_of_fused_modules_are_written_once(new_trace: Any) -> None:
    x, codes = torch.randn(4, 64), torch.randint(0, 256, (4, 32), dtype=torch.uint8)
    builder = new_trace("a")
    builder.call(range(4))
    for name in "qkv":
        builder.tensor(name, "input", x)
        builder.tensor(name, "act_codes", codes)
        builder.tensor(name, "output", torch.randn(4, 64))
    trace = builder.done()
    places = [(ref.file, ref.offset) for ref in trace.index if ref.kind == "input"]
    assert len(set(places)) == 1
    assert len({ref.offset for ref in trace.index if ref.kind == "act_codes"}) == 1
    assert len({ref.offset for ref in trace.index if ref.kind == "output"}) == 3


def test_a_buffer_that_is_used_again_is_no_duplicate(new_trace: Any) -> None:
    """Engines overwrite in place: the same memory with other bytes is another tensor."""
    x = torch.randn(4, 64)
    builder = new_trace("a")
    builder.call(range(4))
    first = x.clone()
    builder.tensor("a", "input", x)
    x[-1, -1] += 1
    builder.tensor("b", "input", x)
    trace = builder.done()
    assert torch.equal(trace.read(trace.index[0]), first)
    assert torch.equal(trace.read(trace.index[1]), x)


def test_bytes_that_are_equal_in_another_dtype_keep_it(new_trace: Any) -> None:
    x = torch.randn(4, 64)
    builder = new_trace("a")
    builder.call(range(4))
    builder.tensor("a", "input", x)
    builder.tensor("b", "input", x.view(torch.int32))
    trace = builder.done()
    assert [ref.dtype for ref in trace.index] == ["float32", "int32"]
    assert torch.equal(trace.read(trace.index[1]), x.view(torch.int32))


def test_many_segments_and_buffers(new_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors cross buffers and segments; rows stay in the segment of their tensor."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 10_000)
    monkeypatch.setattr(segments, "SMALLEST_BUFFER", 3_000)
    monkeypatch.setattr(segments, "STAGED_BYTES", 6_000)
    g = torch.Generator().manual_seed(0)
    builder = new_trace("a")
    builder.call(range(40))
    written = []
    for number in range(60):
        rows = int(torch.randint(1, 40, (), generator=g))
        tensor = torch.randn(rows, 50, generator=g) if number % 5 else torch.full((7, 9), 2.0)
        routed = sorted(torch.randperm(40, generator=g)[: len(tensor)].tolist())
        builder.tensor(f"m{number}", "input", tensor, routed)
        written.append((tensor, routed))
    trace = builder.done()
    assert len({ref.file for ref in trace.index}) > 5
    for ref, (tensor, routed) in zip(trace.index, written, strict=True):
        assert torch.equal(trace.read(ref), tensor)
        assert trace.read_rows(ref).tolist() == routed


@given(st.integers(0, 6000), st.lists(st.integers(0, 700), max_size=20))
@settings(max_examples=60, deadline=None)
def test_max_disk_holds_exactly(tmp_path_factory: Any, limit: int, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("disk")
    writer = SegmentWriter(folder, limit)
    kept = 0
    for number, size in enumerate(sizes):
        try:
            writer.append([torch.full((size,), number, dtype=torch.uint8), torch.tensor([number])])
            kept += 1
        except DiskBudgetExceeded:
            break
    writer.close()
    on_disk = sum(file.stat().st_size for file in folder.glob("data-*"))
    assert on_disk == writer.bytes_written <= limit
    if kept < len(sizes):
        padded = -(-sizes[kept] // ALIGNMENT) * ALIGNMENT
        assert on_disk + padded + ALIGNMENT > limit


CRASH = """
import os, sys, torch
from pathlib import Path
from minite_diag.trace.store import Row, TraceWriter
writer = TraceWriter(Path(sys.argv[1]))
writer.manifest({"engine": {"id": "a"}, "status": "running"})
for call in range(6):
    writer.call(call, [Row("score", "", f"p{call}", i, "prefill") for i in range(8)])
    for name in range(3):
        tensor = torch.full((8, 100), float(call))
        writer.tensor(f"m{name}", "output", tensor, call=call, order=name, rows="tokens")
    if call == 5:
        os._exit(9)
    writer.tokens([{"mode": "score", "probe": f"p{call}", "position": i} for i in range(8)])
    writer.flush()
"""


def test_a_crash_leaves_every_flushed_sequence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 9
    trace = Trace(tmp_path)
    assert trace.status == "running"
    assert trace.tokens["probe"].tolist() == [f"p{i}" for i in range(5) for _ in range(8)]
    assert trace.calls["call"].tolist() == [i for i in range(5) for _ in range(8)]
    assert len(trace.index) == 15
    for ref in trace.index:
        assert (trace.read(ref) == ref.call).all()


@pytest.mark.parametrize("damage", ["truncated", "empty", "removed"])
def test_a_damaged_segment_is_named(new_trace: Any, damage: str) -> None:
    builder = new_trace("a")
    builder.call(range(4))
    builder.tensor("m", "input", torch.randn(4, 1000))
    trace = builder.done()
    file = trace.folder / "tensors" / "data-00000.bin"
    file.unlink() if damage == "removed" else os.truncate(file, 100 * (damage == "truncated"))
    with pytest.raises(TraceError, match=r"data-00000\.bin") as caught:
        trace.read(trace.index[0])
    assert "--resume" in caught.value.hint


def test_statistics_only(new_trace: Any) -> None:
    x = torch.randn(300, 400).bfloat16()
    builder = new_trace("a", stats_only=True)
    builder.call(range(300))
    builder.tensor("m", "input", x)
    builder.tensor("n", "input", x.clone())
    builder.tensor("o", "input", torch.empty(0, 4))
    trace = builder.done()
    first, second, empty = trace.index
    assert first.digest == second.digest != empty.digest
    assert first.abs_max == float(x.double().abs().max())
    assert first.l2 == pytest.approx(float(x.double().norm()), rel=1e-13)
    assert first.mean == pytest.approx(float(x.double().mean()), rel=1e-9)
    assert empty.l2 is None
    assert not list((trace.folder / "tensors").glob("data-*"))
    with pytest.raises(TraceError, match="statistics only"):
        trace.read(first)


def test_a_full_disk_is_an_error(new_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments, "_write_all", fail)
    builder = new_trace("a")
    builder.call(range(4))
    builder.tensor("m", "input", torch.randn(4, 1000))
    with pytest.raises(OSError, match="No space left"):
        builder.writer.flush()


def test_others_read_the_tables_without_us(new_trace: Callable[..., Any]) -> None:
    builder = new_trace("a")
    for probe in ("p", "q"):
        builder.call(range(4), probe)
        builder.tensor("m", "input", torch.randn(4, 16))
        builder.writer.tokens([{"mode": "score", "probe": probe, "position": i} for i in range(4)])
        builder.writer.flush()
    folder = builder.done().folder
    assert len(pd.read_parquet(folder / "tokens.parquet")) == 8
    assert sorted(pd.read_parquet(folder / "calls.parquet")["probe"].unique()) == ["p", "q"]
    found = duckdb.sql(f"select sum(nbytes) from '{folder}/tensors/index-*.parquet'").fetchall()
    assert found == [(2 * 4 * 16 * 4,)]
    # And they find the bytes by themselves.
    index = pd.read_parquet(folder / "tensors" / "index-00000.parquet").iloc[0]
    raw = np.fromfile(folder / "tensors" / index["file"], np.float32, 64, offset=index["offset"])
    assert np.array_equal(raw.reshape(index["shape"]), Trace(folder).read(Trace(folder).index[0]))
