"""Where each tensor of a trace lies, column by column.

Knows pyarrow and numpy; no torch, no engine. Invariant: a row costs some 80 bytes, because a trace
of a large mixture of experts has millions of them; a `TensorRef` exists only while it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from minite_diag.trace.schema import TENSORS, read_table

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
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


class Coded:
    """A column of few distinct strings: `codes` int32 [rows] into `names`."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        encoded = pa.chunked_array([column.combine_chunks()]).dictionary_encode()
        whole = encoded.unify_dictionaries().combine_chunks()
        chunk = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
        self.names: list[str] = chunk.dictionary.to_pylist()
        self.codes: Array = chunk.indices.to_numpy(zero_copy_only=False).astype(np.int32)

    def __getitem__(self, row: int) -> str:
        return self.names[self.codes[row]]


class TensorIndex(Sequence[TensorRef]):
    """All rows of a trace's index, in the order written."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("index-*.parquet"))
        empty = [TENSORS.empty_table()]
        table = pa.concat_tables([read_table(file, TENSORS) for file in files] or empty)
        self.native = Coded(table["native"])
        self.kind = Coded(table["kind"])
        self.rows = Coded(table["rows"])
        self.order = table["order"].to_numpy()
        self.call = table["call"].to_numpy()
        self.nbytes = table["nbytes"].to_numpy()
        self._dtype = Coded(table["dtype"])
        self._file = Coded(table["file"])
        self._offset = table["offset"].to_numpy()
        self._row_offset = table["row_offset"].to_numpy()
        shapes = table["shape"].combine_chunks()
        self._shape_ends = shapes.offsets.to_numpy()
        self._shape_sizes = shapes.values.to_numpy()
        # Digests and statistics are read only where --stats-only left nothing else.
        self._statistics = [table[name] for name in ("digest", "abs_max", "l2", "mean")]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[TensorRef]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, row: int) -> TensorRef: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[TensorRef]: ...

    def __getitem__(self, row: int | slice) -> TensorRef | Sequence[TensorRef]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row = int(row) % len(self)
        file = self._file[row]
        digest, abs_max, l2, mean = (
            ("", None, None, None) if file else (column[row].as_py() for column in self._statistics)
        )
        return TensorRef(
            order=int(self.order[row]),
            native=self.native[row],
            kind=self.kind[row],
            call=int(self.call[row]),
            rows=self.rows[row],
            dtype=self._dtype[row],
            shape=tuple(
                self._shape_sizes[self._shape_ends[row] : self._shape_ends[row + 1]].tolist()
            ),
            file=file,
            offset=int(self._offset[row]),
            nbytes=int(self.nbytes[row]),
            row_offset=int(self._row_offset[row]),
            digest=digest,
            abs_max=abs_max,
            l2=l2,
            mean=mean,
        )
