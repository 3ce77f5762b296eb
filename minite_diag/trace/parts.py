"""A table that grows while its writer may die at any moment.

    tokens.parquet        all rows up to some flush
    tokens-00007.parquet  rows of one later flush

Knows pyarrow and the schema. Parquet files can't be appended to, and rewriting one at each flush
costs the square of its length: so each flush is a small file of its own, and they are merged when
they hold as many rows as the merged file. Invariant: every flushed row is read exactly once,
wherever the writer died; `close` leaves one file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from minite_diag.trace.schema import read_table

_MERGED = b"merged_parts"


class TableParts:
    """Rows of one declared table, under `folder`, flushed bit by bit."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder = folder
        self.schema = schema
        self.name = schema.metadata[b"table"].decode()
        self._rows: list[dict[str, Any]] = []
        self._next = 0
        self._merged_rows = -1
        self._part_rows = 0

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is readable after the next `flush`."""
        self._rows.append(row)

    def flush(self) -> None:
        """Make all rows readable."""
        table = pa.Table.from_pylist(self._rows, schema=self.schema)
        self._part_rows += len(table)
        if self._part_rows >= self._merged_rows:
            self._merge(table)
        elif self._rows:
            self._write(f"{self.name}-{self._next:05d}.parquet", table)
            self._next += 1
        self._rows = []

    def close(self) -> None:
        """Flush, and leave one file."""
        self.flush()
        if self._part_rows:
            self._merge(self.schema.empty_table())

    def _merge(self, new: pa.Table) -> None:
        old = [read_parts(self.folder, self.schema)] if self._merged_rows >= 0 else []
        merged = pa.concat_tables([*old, new])
        schema = self.schema.with_metadata(
            {**self.schema.metadata, _MERGED: str(self._next).encode()}
        )
        self._write(f"{self.name}.parquet", merged.cast(schema))
        for file in _parts(self.folder, self.name):
            file.unlink()
        self._merged_rows, self._part_rows = len(merged), 0

    def _write(self, name: str, table: pa.Table) -> None:
        partial = self.folder / f"{name}.partial"
        pq.write_table(table, partial, compression="zstd")
        partial.replace(self.folder / name)


def _parts(folder: Path, name: str) -> list[Path]:
    return sorted(
        file
        for file in folder.glob(f"{name}-*.parquet")
        if re.fullmatch(rf"{name}-\d+\.parquet", file.name)
    )


def read_parts(folder: Path, schema: pa.Schema) -> pa.Table:
    """All flushed rows of a table; raises TraceError where it is missing or damaged."""
    name = schema.metadata[b"table"].decode()
    merged = read_table(folder / f"{name}.parquet", schema)
    # A writer that died between merging and removing left parts that are already in the file.
    first = int((merged.schema.metadata or {}).get(_MERGED, b"0"))
    later = [
        read_table(file, schema)
        for file in _parts(folder, name)
        if int(file.stem.rpartition("-")[2]) >= first
    ]
    return pa.concat_tables([table.cast(schema) for table in (merged, *later)])
