import hashlib
import json
import struct
from pathlib import Path

import pytest

from minite_diag.errors import CheckpointError
from minite_diag.probe import Probe, hash_token_ids, load_probes


def write(folder: Path, *records: object) -> Path:
    file = folder / "probes.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return file


def test_hash_is_of_little_endian_int32() -> None:
    assert hash_token_ids([1, 258]) == hashlib.sha256(struct.pack("<2i", 1, 258)).hexdigest()


def test_reads_ids_and_text(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"id": "a", "token_ids": [1, 2, 3, 4], "prompt_length": 3},
        {"id": "b", "text": "hi"},
    )
    a, b = load_probes(file, 10, lambda text: [len(text), 5])
    assert a == Probe.make("a", [1, 2, 3, 4], 3)
    assert b.token_ids == (2, 5)
    assert b.prompt_length == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"token_ids": [1, 10]}, "token id 10 is outside"),
        ({"token_ids": [1, -1]}, "token id -1 is outside"),
        ({"token_ids": [1]}, "at least 2 tokens"),
        ({"token_ids": [1, 2], "prompt_length": 5}, "prompt_length 5 is outside"),
        ({"token_ids": [1, 2], "sha256": "00"}, "hash"),
        ({"token_ids": [1, True]}, "not a list of integers"),
        ({"token_ids": "12"}, "not a list of integers"),
        ({"text": "hi"}, "no tokenizer"),
        ({}, "neither token_ids nor text"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("", "holds no probe"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, record: object, said: str) -> None:
    file = write(tmp_path, record)
    with pytest.raises(CheckpointError) as caught:
        load_probes(file, 10)
    assert said in str(caught.value)
    assert file.name in str(caught.value) or "probe" in str(caught.value)
    assert caught.value.hint


def test_missing_file_and_duplicate_ids(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't read"):
        load_probes(tmp_path / "none.jsonl", 10)
    with pytest.raises(CheckpointError, match="occurs twice"):
        load_probes(write(tmp_path, *[{"id": "a", "token_ids": [1, 2]}] * 2), 10)
