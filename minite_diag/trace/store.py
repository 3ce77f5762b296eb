"""The trace on disk: a writer for the worker and a lazy reader for everybody else.

    manifest.json               what ran, how it ended (written first as `running`)
    tokens.parquet              token ids and log-probabilities
    calls.parquet               which token each row of each forward pass was
    tensors/data-NNNNN.bin      raw little-endian bytes, back to back
    tensors/index-NNNNN.parquet where each tensor lies

Knows torch and the schema; no engine, no metric. Invariant: memory is bounded by one tensor (the
writer keeps the last few to write equal inputs of fused modules once), and whatever was flushed
stays readable if the process dies.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pandas as pd
import torch

from minite_diag.engines.base import Evidence, Layout, Part
from minite_diag.errors import TraceError
from minite_diag.trace.schema import CALLS, TENSORS, TOKENS, read_table, write_table

MANIFEST_SCHEMA: Final = 1
MANIFEST_FILE: Final = "manifest.json"
SEGMENT_BYTES: Final = 1 << 30
RECENT_TENSORS: Final = 3
RECENT_KINDS: Final = frozenset({"input", "act_codes", "act_block_scale"})
"""Kinds that several modules share: each is written once and referred to."""


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
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy())


class DiskBudgetExceeded(Exception):
    """The next tensor would pass `max_disk`; what is written stays valid."""


class TraceWriter:
    """Appends tensors, calls and tokens of one engine to its trace folder."""

    def __init__(self, folder: Path, max_disk: int | None = None, stats_only: bool = False) -> None:
        self.folder = folder
        self.max_disk = max_disk
        self.stats_only = stats_only
        self.bytes_written = 0
        (folder / "tensors").mkdir(parents=True, exist_ok=True)
        self._segment = -1
        self._file: BinaryIO | None = None
        self._index: list[dict[str, Any]] = []
        self._index_part = 0
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any]] = []
        self._recent: deque[tuple[torch.Tensor, tuple[str, int]]] = deque(maxlen=RECENT_TENSORS)

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
        self._tokens.extend(rows)

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
            entry.update(_statistics(tensor))
        else:
            entry["file"], entry["offset"] = self._place(kind, tensor)
            if row_index is not None:
                file, entry["row_offset"] = self._append(row_index.to(torch.int32))
                if file != entry["file"]:
                    entry["file"], entry["offset"] = self._append(tensor)
                    _, entry["row_offset"] = self._append(row_index.to(torch.int32))
        self._index.append(entry)

    def _place(self, kind: str, tensor: torch.Tensor) -> tuple[str, int]:
        for i, (recent, where) in enumerate(self._recent):
            if _has_bytes_of(recent, tensor):
                del self._recent[i]
                self._recent.append((recent, where))
                return where
        where = self._append(tensor)
        if kind in RECENT_KINDS and tensor.dim() > 0:
            self._recent.append((tensor.detach().contiguous().clone(), where))
        return where

    def _append(self, tensor: torch.Tensor) -> tuple[str, int]:
        data = tensor_bytes(tensor)
        if self.max_disk is not None and self.bytes_written + len(data) > self.max_disk:
            raise DiskBudgetExceeded
        if self._file is None or self._file.tell() + len(data) > SEGMENT_BYTES:
            if self._file is not None:
                self._file.close()
            self._segment += 1
            self._file = (self.folder / "tensors" / f"data-{self._segment:05d}.bin").open("wb")
        offset = self._file.tell()
        self._file.write(data)
        self.bytes_written += len(data)
        return f"data-{self._segment:05d}.bin", offset

    def flush(self) -> None:
        """Make all that was appended readable: called after each sequence."""
        if self._file is not None:
            self._file.flush()
        if self._index:
            name = f"index-{self._index_part:05d}.parquet"
            write_table(self.folder / "tensors" / name, self._index, TENSORS)
            self._index_part += 1
            self._index = []
        write_table(self.folder / "calls.parquet", self._calls, CALLS)
        write_table(self.folder / "tokens.parquet", self._tokens, TOKENS)

    def close(self) -> None:
        """Flush and close the open segment."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _has_bytes_of(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def _statistics(tensor: torch.Tensor) -> dict[str, Any]:
    digest = hashlib.blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()
    if tensor.numel() == 0:
        return {"digest": digest}
    values = tensor.detach().to(torch.float64)
    return {
        "digest": digest,
        "abs_max": float(values.abs().max()),
        "l2": float(values.norm()),
        "mean": float(values.mean()),
    }


@dataclass(frozen=True)
class TensorRef:
    """One captured tensor of the index; `row_offset` >= 0 where its rows are a subset."""

    order: int
    native: str
    kind: str
    call: int
    rows: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    row_offset: int
    digest: str
    abs_max: float | None
    l2: float | None
    mean: float | None


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
        self._maps: dict[str, np.memmap[Any, Any]] = {}

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
        return read_table(self.folder / "tokens.parquet", TOKENS).to_pandas()

    @cached_property
    def calls(self) -> pd.DataFrame:
        """The `calls` table."""
        return read_table(self.folder / "calls.parquet", CALLS).to_pandas()

    @cached_property
    def index(self) -> list[TensorRef]:
        """Every captured tensor, in the order written."""
        files = sorted((self.folder / "tensors").glob("index-*.parquet"))
        refs: list[TensorRef] = []
        for file in files:
            records = read_table(file, TENSORS).to_pylist()
            refs += [TensorRef(**{**r, "shape": tuple(r["shape"])}) for r in records]
        return refs

    def read(self, ref: TensorRef) -> torch.Tensor:
        """The tensor as captured; raises TraceError if only statistics were kept."""
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

    def _bytes(self, file: str, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        if file not in self._maps:
            path = self.folder / "tensors" / file
            try:
                self._maps[file] = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise TraceError(
                    f"can't read {path}: {error}", "the run is damaged: compare --resume RUN"
                ) from error
        data = self._maps[file][offset : offset + nbytes]
        if len(data) != nbytes:
            raise TraceError(
                f"{self.folder / 'tensors' / file} ends at {len(self._maps[file])}, "
                f"a tensor lies at {offset}+{nbytes}",
                "the run is damaged: compare --resume RUN",
            )
        return data


def _as_tensor(
    data: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    # A copy: memory-mapped pages are read-only and may be misaligned for the dtype.
    return torch.from_numpy(np.array(data)).view(dtype).reshape(shape)


def traces_of(run: Path) -> Iterator[Trace]:
    """Every trace of a run that has a manifest, by engine id."""
    for folder in sorted((run / "traces").glob("*/")):
        if (folder / MANIFEST_FILE).exists():
            yield Trace(folder)
