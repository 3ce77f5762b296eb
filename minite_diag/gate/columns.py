"""Arrow columns as numpy arrays.

Knows pyarrow's buffers and numpy. Invariant: pandas is not imported; pyarrow's own conversions and
its compute functions do so, which costs half a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from minite_diag.gate.statistics import Floats

Bools = npt.NDArray[np.bool_]


class Labels:
    """A dictionary column of strings: `codes` int32 [rows] into `names`; null is ""."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        encoded = _whole(column.unify_dictionaries())
        self.names: list[str] = encoded.dictionary.to_pylist()
        self.codes = _values(encoded.indices, np.dtype(np.int32)).copy()
        missing = ~_valid(encoded.indices)
        if missing.any():
            self.names.append("")
            self.codes[missing] = len(self.names) - 1

    def equals(self, name: str) -> Bools:
        """Rows that hold `name`."""
        return self.isin([name])

    def isin(self, names: list[str]) -> Bools:
        """Rows that hold one of `names`."""
        wanted = set(names)
        chosen = np.array([name in wanted for name in self.names], dtype=bool)
        return chosen[self.codes] if len(self.names) else np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        return len(self.codes)


def floats(column: pa.ChunkedArray) -> Floats:
    """A float64 column; null becomes NaN."""
    array = _whole(column)
    values = _values(array, np.dtype(np.float64))
    return np.where(_valid(array), values, np.nan)


def integers(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """An int32 column; null becomes -1."""
    array = _whole(column)
    values = _values(array, np.dtype(np.int32)).astype(np.int64)
    return np.where(_valid(array), values, -1)


def booleans(column: pa.ChunkedArray) -> Bools:
    """A bool column; null becomes False."""
    array = _whole(column)
    return _bits(array.buffers()[1], array.offset, len(array)) & _valid(array)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _values(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not len(array):
        return np.zeros(0, dtype)
    values = np.frombuffer(array.buffers()[1], dtype)
    return values[array.offset : array.offset + len(array)]


def _valid(array: pa.Array) -> Bools:
    if not array.null_count:
        return np.ones(len(array), dtype=bool)
    return _bits(array.buffers()[0], array.offset, len(array))


def _bits(buffer: pa.Buffer | None, offset: int, count: int) -> Bools:
    if buffer is None or not count:
        return np.zeros(count, dtype=bool)
    found = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return found[offset : offset + count].astype(bool)
