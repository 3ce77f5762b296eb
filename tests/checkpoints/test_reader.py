"""Reading safetensors: right bytes for good files, one clear error for each kind of bad one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minite_diag.checkpoints import iter_tensors, list_tensors, read_tensor
from minite_diag.errors import CheckpointError


def raw_file(folder: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    """A hand-made safetensors file; `header` is JSON-encoded unless it is bytes already."""
    folder.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(prefix + text + data)
    return folder


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_all_dtypes_and_shapes_come_back_as_the_library_wrote_them(tmp_path: Path) -> None:
    written = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(3, 5).half(),
        "bf16": torch.randn(2, 3, 4).bfloat16(),
        "f8": torch.randn(16).to(torch.float8_e4m3fn),
        "f64": torch.randn(2).double(),
        "bool": torch.tensor([True, False]),
        "i64": torch.arange(5),
        "u8": torch.arange(7, dtype=torch.uint8),
    }
    save_file(written, tmp_path / "model.safetensors")
    read = dict(iter_tensors(tmp_path))
    assert list(read) == sorted(written)
    for name, value in written.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        assert read[name].view(-1).view(torch.uint8).equal(value.view(-1).view(torch.uint8))


def test_shards_give_the_same_tensors_as_one_file(dense: Path, sharded: Path) -> None:
    whole = load_file(dense / "model.safetensors")
    assert list_tensors(sharded).keys() == whole.keys()
    for name, value in iter_tensors(sharded):
        assert value.equal(whole[name])


def test_read_tensor_names_the_folder_for_an_unknown_name(dense: Path) -> None:
    assert read_tensor(dense, "model.norm.weight").equal(torch.ones(64).bfloat16())
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        read_tensor(dense, "nope")


def test_reading_is_lazy(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minite_diag.checkpoints import reader

    loaded: list[str] = []
    real = reader.load
    monkeypatch.setattr(reader, "load", lambda info: loaded.append(info.dtype) or real(info))
    tensors = iter_tensors(dense)
    next(tensors)
    assert len(loaded) == 1


HOSTILE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "header length beyond the format's bound": ({}, b"", 1 << 60, "claims a header"),
    "header length beyond the file": ({}, b"", 5000, "cut short"),
    "not JSON": (b"{nope", b"", None, "broken header"),
    "not UTF-8": (b"\xff\xfe{}", b"", None, "broken header"),
    "nested beyond the parser": (b"[" * 200_000, b"", None, "broken header"),
    "a list": ([], b"", None, "no JSON object"),
    "a name twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'  # noqa: ISC004
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        "occurs twice",
    ),
    "data cut short": ({"a": entry(0, 64, [16])}, b"\0" * 40, None, "cut short"),
    "offset outside of the file": ({"a": entry(4096, 4160, [16])}, b"\0" * 64, None, "cut short"),
    "dtype lies about the size": ({"a": entry(0, 32, [16])}, b"\0" * 32, None, "needs 64"),
    "shape overflows": ({"a": entry(0, 4, [2**40, 2**40])}, b"\0" * 4, None, "needs"),
    "negative offset": ({"a": entry(-4, 0, [1])}, b"\0" * 4, None, "offsets"),
    "negative shape": ({"a": entry(0, 4, [-1])}, b"\0" * 4, None, "shape"),
    "true as a size": ({"a": entry(0, 4, [True])}, b"\0" * 4, None, "shape"),
    "unknown dtype": ({"a": entry(0, 4, [1], "Q9")}, b"\0" * 4, None, "dtype 'Q9'"),
    "entry is no object": ({"a": 5}, b"", None, "broken entry"),
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12, None, "overlaps"),
    "hole": ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"\0" * 12, None, "hole"),
    "trailing bytes": ({"a": entry(0, 4, [1])}, b"\0" * 9, None, "after its last tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_with_its_name(case: str, tmp_path: Path) -> None:
    header, data, length, message = HOSTILE[case]
    folder = raw_file(tmp_path / "bad", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        list_tensors(folder)
    assert "model.safetensors" in caught.value.message
    assert caught.value.hint


def test_file_of_a_few_bytes_and_truncations_are_refused(dense: Path) -> None:
    file = dense / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut short|broken header"):
            list_tensors(dense)
    file.write_bytes(whole)
    assert list_tensors(dense)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", "a\\b", 3, ""],
)
def test_index_may_only_name_files_beside_it(sharded: Path, shard: Any) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        list_tensors(sharded)


def _remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _forget_tensor(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    part = load_file(file)
    del part[sorted(part)[0]]
    save_file(part, file)


def _duplicate_tensor(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    first = load_file(folder / "model-00001-of-00003.safetensors")
    name = sorted(first)[0]
    save_file(load_file(file) | {name: first[name]}, file)


def _break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_shard, "model-00002-of-00003.safetensors is missing"),
        (_forget_tensor, "does not hold it"),
        (_duplicate_tensor, "is in model-0000"),
        (_break_index, "index.json"),
    ],
)
def test_damaged_shards_are_refused(
    sharded: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        list_tensors(sharded)


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04never loaded")
    with pytest.raises(CheckpointError, match="pickle") as caught:
        list_tensors(tmp_path)
    assert "safetensors" in caught.value.hint


def test_folder_without_weights_or_without_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        list_tensors(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        list_tensors(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors but neither"):
        list_tensors(tmp_path)
