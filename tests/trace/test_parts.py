"""Tables that grow: each flushed row exactly once, wherever the writer stopped."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minite_diag.errors import TraceError
from minite_diag.trace import parts
from minite_diag.trace.parts import TableParts, read_parts
from minite_diag.trace.schema import CALLS


def row(number: int) -> dict[str, Any]:
    return {"call": number, "row": 0, "mode": "score", "source": "", "probe": "p", "position": 0}


def calls(folder: Path) -> list[int]:
    return read_parts(folder, CALLS)["call"].to_pylist()


@given(st.lists(st.integers(0, 5), max_size=12))
@settings(max_examples=30, deadline=None)
def test_every_flush_is_readable(tmp_path_factory: Any, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("parts")
    table = TableParts(folder, CALLS)
    total = 0
    for size in sizes:
        for number in range(total, total + size):
            table.append(row(number))
        total += size
        table.flush()
        assert calls(folder) == list(range(total))
    table.close()
    assert calls(folder) == list(range(total))
    assert [file.name for file in folder.iterdir()] == ["calls.parquet"]


def test_bytes_written_grow_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    native = parts.pq.write_table

    def count(table: Any, *args: Any, **options: Any) -> None:
        nonlocal written
        written += len(table)
        native(table, *args, **options)

    monkeypatch.setattr(parts.pq, "write_table", count)
    table = TableParts(tmp_path, CALLS)
    for number in range(128):
        table.append(row(number))
        table.flush()
    # Rewriting everything each time would be 128 * 129 / 2 = 8256 rows.
    assert written < 128 * 8


def test_parts_that_are_merged_already_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableParts(tmp_path, CALLS)
    for number in range(3):
        table.append(row(number))
        table.flush()
    # A writer that dies after the merged file is in place, before the parts are removed.
    monkeypatch.setattr(Path, "unlink", lambda self: None)
    table.append(row(3))
    table.close()
    assert len(list(tmp_path.glob("calls-*.parquet"))) > 0
    assert calls(tmp_path) == [0, 1, 2, 3]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    table = TableParts(tmp_path, CALLS)
    for number in range(4):
        table.append(row(number))
    table.flush()
    table.append(row(4))
    table.flush()
    (part,) = tmp_path.glob("calls-*.parquet")
    part.write_bytes(b"PAR1")
    with pytest.raises(TraceError, match=part.name):
        read_parts(tmp_path, CALLS)
