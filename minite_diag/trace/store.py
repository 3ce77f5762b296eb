"""The trace on disk: a writer for the worker and a lazy reader for everybody else.

    manifest.json               what ran, how it ended (written first as `running`)
    tokens.parquet              token ids and log-probabilities (and tokens-NNNNN: see parts.py)
    calls.parquet               which token each row of each forward pass was
    tensors/data-NNNNN.bin      raw little-endian bytes, each tensor at a multiple of 64
    tensors/index-NNNNN.parquet where each tensor lies

Knows torch and the schema; no engine, no metric. Invariant: memory is bounded by a few tensors, and
whatever was flushed stays readable if the process dies.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from minite_diag.engines.base import Evidence, Layout, Part
from minite_diag.errors import TraceError
from minite_diag.trace.index import TensorIndex, TensorRef
from minite_diag.trace.parts import TableParts, read_parts
from minite_diag.trace.schema import CALLS, TENSORS, TOKENS, write_table
from minite_diag.trace.segments import DiskBudgetExceeded, SegmentWriter

MANIFEST_SCHEMA: Final = 1
MANIFEST_FILE: Final = "manifest.json"
STATISTICS_ELEMENTS: Final = 1 << 15
Array = np.ndarray[Any, Any]

__all__ = ["DiskBudgetExceeded", "Row", "TensorRef", "Trace", "TraceWriter", "traces_of"]


@dataclass(frozen=True)
class Row:
    """Which token a row of a forward pass is."""

    mode: str
    source: str
    probe: str
    position: int
    phase: str


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major, on the CPU; a view where it is contiguous already."""
    return _as_bytes(tensor).data


def _as_bytes(tensor: torch.Tensor) -> Array:
    return tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()


class TraceWriter:
    """Appends tensors, calls and tokens of one engine to its trace folder.

    `max_disk` bounds the bytes under tensors/data-*; `bytes_written` is their exact sum.
    """

    def __init__(self, folder: Path, max_disk: int | None = None, stats_only: bool = False) -> None:
        self.folder = folder
        self.stats_only = stats_only
        (folder / "tensors").mkdir(parents=True, exist_ok=True)
        self._segments = SegmentWriter(folder / "tensors", max_disk)
        self._index: list[dict[str, Any]] = []
        self._index_part = 0
        self._rows: torch.Tensor | None = None
        self._calls = TableParts(folder, CALLS)
        self._tokens = TableParts(folder, TOKENS)

    def manifest(self, record: dict[str, Any]) -> None:
        """Write manifest.json atomically."""
        file = self.folder / MANIFEST_FILE
        partial = file.with_suffix(".partial")
        text = json.dumps({"schema": MANIFEST_SCHEMA, **record}, indent=1, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(file)

    def call(self, call: int, rows: list[Row]) -> None:
        """Record which token each row of a forward pass is."""
        for i, row in enumerate(rows):
            self._calls.append({"call": call, "row": i, **row.__dict__})

    def tokens(self, rows: list[dict[str, Any]]) -> None:
        """Append rows of the `tokens` table."""
        for row in rows:
            self._tokens.append(row)

    def tensor(
        self,
        native: str,
        kind: str,
        tensor: torch.Tensor,
        *,
        call: int,
        order: int,
        rows: str,
        row_index: torch.Tensor | None = None,
    ) -> None:
        """Append one tensor; raises DiskBudgetExceeded before it passes `max_disk`."""
        entry: dict[str, Any] = {
            "order": order,
            "native": native,
            "kind": kind,
            "call": call,
            "rows": rows,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "file": "",
            "offset": 0,
            "nbytes": tensor.numel() * tensor.element_size(),
            "row_offset": -1,
            "digest": "",
            "abs_max": None,
            "l2": None,
            "mean": None,
        }
        if self.stats_only:
            entry.update(_statistics(tensor, row_index))
        else:
            entry |= self._place(tensor, row_index, is_static=rows == "static")
        self._index.append(entry)

    def _place(
        self, tensor: torch.Tensor, row_index: torch.Tensor | None, *, is_static: bool
    ) -> dict[str, Any]:
        """Append the tensor and its row indices; says where they lie."""
        if row_index is None:
            file, offset = self._segments.append([tensor], direct=is_static)[0]
            return {"file": file, "offset": offset}
        rows = row_index.to("cpu", torch.int32)
        if self._rows is not None and torch.equal(rows, self._rows):
            rows = self._rows  # gate and up: the segments know it by its address
        self._rows = rows
        (file, offset), (_, row_offset) = self._segments.append([tensor, rows])
        return {"file": file, "offset": offset, "row_offset": row_offset}

    @property
    def bytes_written(self) -> int:
        """Bytes under tensors/data-*."""
        return self._segments.bytes_written

    def flush(self) -> None:
        """Make all that was appended readable: called after each sequence."""
        # First the bytes: an index never points at what is not there.
        self._segments.flush()
        if self._index:
            name = f"index-{self._index_part:05d}.parquet"
            write_table(self.folder / "tensors" / name, self._index, TENSORS)
            self._index_part += 1
            self._index = []
        self._calls.flush()
        self._tokens.flush()

    def close(self) -> None:
        """Flush and close the open segment."""
        self.flush()
        self._calls.close()
        self._tokens.close()
        self._segments.close()


def _statistics(tensor: torch.Tensor, row_index: torch.Tensor | None) -> dict[str, Any]:
    """Of routed rows in token order: engines list them in orders of their own."""
    prefix = ""
    if row_index is not None:
        rows, order = row_index.to(tensor.device).sort(stable=True)
        tensor = tensor[order]
        prefix = _digest(rows.to("cpu", torch.int32)) + "/"
    digest = prefix + _digest(tensor)
    if tensor.numel() == 0:
        return {"digest": digest}
    largest, total, squares = [], [], []
    flat = tensor.detach().contiguous().reshape(-1)
    for values in flat.split(STATISTICS_ELEMENTS):
        wide = values.double()
        largest.append(wide.abs().max())
        total.append(wide.sum())
        squares.append(wide.square_().sum())
    return {
        "digest": digest,
        "abs_max": float(torch.stack(largest).max()),
        "l2": math.sqrt(math.fsum(torch.stack(squares).tolist())),
        "mean": math.fsum(torch.stack(total).tolist()) / tensor.numel(),
    }


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()


class Trace:
    """Reads one engine's trace; tensors are memory-mapped and read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
            self.manifest: dict[str, Any] = json.loads(text)
        except (OSError, ValueError) as error:
            raise TraceError(
                f"no readable trace in {folder}: {error}", "compare --resume RUN captures it"
            ) from error
        if self.manifest.get("schema") != MANIFEST_SCHEMA:
            raise TraceError(
                f"{folder / MANIFEST_FILE} has schema {self.manifest.get('schema')}, "
                f"this version reads {MANIFEST_SCHEMA}",
                "run compare again with this version",
            )
        self._maps: dict[str, tuple[mmap.mmap, Array]] = {}

    @property
    def id(self) -> str:
        """Engine id in the plan."""
        return str(self.manifest["engine"]["id"])

    @property
    def status(self) -> str:
        """ok, truncated, error or running (the worker died without a word)."""
        return str(self.manifest["status"])

    @cached_property
    def layout(self) -> Layout:
        """How native names map to checkpoint names."""
        record = self.manifest.get("layout") or {}
        parts = {
            native: tuple(Part(**part) for part in parts)
            for native, parts in record.get("parts", {}).items()
        }
        return Layout(parts, record.get("block_scale_layout", "linear"))

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """Who computed each op."""
        return tuple(Evidence(**record) for record in self.manifest.get("evidence", []))

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """The `tokens` table."""
        return read_parts(self.folder, TOKENS).to_pandas()

    @cached_property
    def calls(self) -> pd.DataFrame:
        """The `calls` table."""
        return self.call_table.to_pandas()

    @property
    def call_table(self) -> pa.Table:
        """The `calls` table in columns, read anew."""
        return read_parts(self.folder, CALLS)

    @cached_property
    def index(self) -> TensorIndex:
        """Every captured tensor, in the order written."""
        return TensorIndex(self.folder / "tensors")

    def read(self, ref: TensorRef) -> torch.Tensor:
        """The tensor as captured, where it lies in the mapped file: don't write to it.

        Raises TraceError if only statistics were kept.
        """
        if not ref.file:
            raise TraceError(
                f"{self.id}: {ref.native}:{ref.kind} holds statistics only",
                "capture again without --stats-only",
            )
        dtype = getattr(torch, ref.dtype)
        if ref.nbytes == 0:
            return torch.empty(ref.shape, dtype=dtype)
        return _as_tensor(self._bytes(ref.file, ref.offset, ref.nbytes), dtype, ref.shape)

    def read_rows(self, ref: TensorRef) -> torch.Tensor | None:
        """Row indices (int64 [R]) into the call's rows; None where dim 0 is all of them."""
        if ref.row_offset < 0:
            return None
        num_rows = ref.shape[0]
        if num_rows == 0:
            return torch.empty(0, dtype=torch.int64)
        data = self._bytes(ref.file, ref.row_offset, num_rows * 4)
        return _as_tensor(data, torch.int32, (num_rows,)).to(torch.int64)

    def release(self) -> None:
        """Let go of the pages that were read; tensors that are still in use read them again."""
        for mapped, _ in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, file: str, offset: int, nbytes: int) -> Array:
        if file not in self._maps:
            self._maps[file] = _map(self.folder / "tensors" / file)
        data = self._maps[file][1][offset : offset + nbytes]
        if len(data) != nbytes:
            raise TraceError(
                f"{self.folder / 'tensors' / file} ends at {len(self._maps[file][1])}, "
                f"a tensor lies at {offset}+{nbytes}",
                "the run is damaged: compare --resume RUN",
            )
        return data


def _map(path: Path) -> tuple[mmap.mmap, Array]:
    """A private mapping of a segment, and all of its bytes."""
    try:
        with path.open("rb") as file:
            # Copy on write, although nobody writes: torch has no read-only tensors.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"can't read {path}: {error}", "the run is damaged: compare --resume RUN"
        ) from error
    return mapped, np.frombuffer(mapped, np.uint8)


def _as_tensor(data: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if data.ctypes.data % dtype.itemsize:
        data = np.array(data)  # a trace of an earlier version, without alignment
    return torch.from_numpy(data).view(dtype).reshape(shape)


def traces_of(run: Path) -> Iterator[Trace]:
    """Every trace of a run that has a manifest, by engine id."""
    for folder in sorted((run / "traces").glob("*/")):
        if (folder / MANIFEST_FILE).exists():
            yield Trace(folder)
