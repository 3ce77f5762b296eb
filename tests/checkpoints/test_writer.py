"""The shard writer: order of writes is free, data is aligned, folders appear all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minite_diag.checkpoints.reader import read_header
from minite_diag.checkpoints.writer import OutputTensor, ShardWriter, atomic_folder
from minite_diag.errors import CheckpointError

OUTPUTS = [
    OutputTensor("odd", "U8", (3,)),
    OutputTensor("number", "F32", ()),
    OutputTensor("halves", "BF16", (5,)),
    OutputTensor("scales", "F8_E4M3", (1, 7)),
    OutputTensor("empty", "F32", (0, 2)),
]
VALUES = {
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "number": torch.tensor(2.5),
    "halves": torch.arange(5).bfloat16(),
    "scales": torch.arange(7).view(1, 7).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 2),
}


def write(folder: Path, order: list[str], shard_bytes: int = 1 << 20) -> Path:
    folder.mkdir()
    with ShardWriter(folder, OUTPUTS, shard_bytes) as writer:
        for name in order:
            writer.write(name, VALUES[name])
    return folder


def test_order_of_writes_changes_no_byte_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    order = [output.name for output in OUTPUTS]
    a = write(tmp_path / "a", order) / "model.safetensors"
    b = write(tmp_path / "b", order[::-1]) / "model.safetensors"
    assert a.read_bytes() == b.read_bytes()
    for name, info in read_header(a).items():
        assert info.offset % VALUES[name].dtype.itemsize == 0, name
    for name, value in load_file(a).items():
        assert value.dtype == VALUES[name].dtype
        assert value.float().equal(VALUES[name].float())


def test_a_tensor_that_is_never_written_or_has_another_shape_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="never written: odd"):
        write(tmp_path / "a", ["number", "halves", "scales", "empty"])
    (tmp_path / "b").mkdir()
    with (
        pytest.raises(AssertionError, match="halves"),
        ShardWriter(tmp_path / "b", OUTPUTS, 1 << 20) as writer,
    ):
        writer.write("halves", torch.zeros(4).bfloat16())


def test_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "new") as temporary:
        (temporary / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "x"
    with pytest.raises(CheckpointError, match="exists already"), atomic_folder(tmp_path / "new"):
        pytest.fail("entered")
    with pytest.raises(KeyError), atomic_folder(tmp_path / "broken") as temporary:
        raise KeyError
    with (
        pytest.raises(CheckpointError, match="appeared while"),
        atomic_folder(tmp_path / "raced") as temporary,
    ):
        (tmp_path / "raced").mkdir()
        (tmp_path / "raced" / "theirs").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "raced"]
