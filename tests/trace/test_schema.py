"""The declared tables: streamed, atomic, versioned."""

from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minite_diag.errors import TraceError
from minite_diag.trace import schema
from minite_diag.trace.schema import COMPARISON, TABLES, TableWriter, read_table


def test_batches_are_written_while_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "BATCH_ROWS", 10)
    file = tmp_path / "comparison.parquet"
    with TableWriter(file, COMPARISON) as table:
        for number in range(25):
            table.append({"fqn": f"m{number}", "elements": number})
            assert len(table._rows) < 10
            assert not file.exists()
    found = pd.read_parquet(file)
    assert found["elements"].tolist() == list(range(25))
    assert found["rel_l2"].isna().all()
    assert pq.read_metadata(file).num_row_groups == 3
    assert duckdb.sql(f"select count(*), max(fqn) from '{file}'").fetchall() == [(25, "m9")]
    assert read_table(file, COMPARISON).schema.field("fqn").metadata[b"doc"]


def test_an_unfinished_table_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "comparison.parquet"
    with TableWriter(file, COMPARISON) as table:
        table.append({"fqn": "old"})
    with pytest.raises(RuntimeError), TableWriter(file, COMPARISON) as table:
        table.append({"fqn": "new"})
        raise RuntimeError
    assert pd.read_parquet(file)["fqn"].tolist() == ["old"]
    assert list(tmp_path.iterdir()) == [file]


def test_an_unknown_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="fqnn"), TableWriter(tmp_path / "t", COMPARISON) as table:
        table.append({"fqn": "a"})
        table.append({"fqnn": "b"})


def test_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "comparison.parquet"
    other = COMPARISON.with_metadata({"table": "comparison", "schema_version": "99"})
    pq.write_table(pa.Table.from_pylist([], schema=other), file)
    with pytest.raises(TraceError, match="schema 99"):
        read_table(file, COMPARISON)


@pytest.mark.parametrize("name", TABLES)
def test_every_column_is_documented(name: str) -> None:
    for field in TABLES[name]:
        assert len(field.metadata[b"doc"]) > 3, field.name
