"""Writes checkpoint folders: shards tensor by tensor in any order, and the folder all at once.

Knows files only. Invariant: a folder appears complete or not at all; a shard's bytes depend on the declared tensors and their
values, never on the order of the writes; every declared tensor is written exactly once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from minite_diag.checkpoints.reader import DTYPES, INDEX_FILE, SINGLE_FILE
from minite_diag.errors import CheckpointError

SHARD_BYTES: Final = 2 << 30

_COPIED: Final = (
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block succeeds and vanishes when not.

    Raises CheckpointError if `folder` exists before or after.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", "give another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if not folder.exists():
                raise
            raise CheckpointError(
                f"{folder} appeared while it was being written", "give another folder"
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what goes with the weights: tokenizer, chat template, generation config."""
    for file in sorted(source.iterdir()):
        if file.is_file() and (file.name in _COPIED or file.name.startswith("tokenizer")):
            shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written: `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ShardWriter:
    """A context manager: declares all tensors, then takes their values one by one."""

    def __init__(self, folder: Path, outputs: Iterable[OutputTensor], shard_bytes: int) -> None:
        self._folder = folder
        self._shards = _split(list(outputs), shard_bytes)
        self._places: dict[str, tuple[BinaryIO, int, OutputTensor]] = {}
        self._files: list[BinaryIO] = []

    def __enter__(self) -> ShardWriter:
        for index, shard in enumerate(self._shards):
            stream = (self._folder / self._file_name(index)).open("w+b")
            self._files.append(stream)
            header, offsets = _header(shard)
            stream.write(header)
            stream.truncate(len(header) + sum(output.num_bytes for output in shard))
            for output in shard:
                self._places[output.name] = (stream, len(header) + offsets[output.name], output)
        if len(self._shards) > 1:
            self._write_index()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self._files:
            stream.close()
        if kind is None:
            assert not self._places, f"never written: {next(iter(self._places))}"

    def write(self, name: str, value: Tensor) -> None:
        """Write one declared tensor's bytes."""
        stream, offset, output = self._places.pop(name)
        assert DTYPES[output.dtype] == value.dtype, name
        assert output.shape == tuple(value.shape), name
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        stream.seek(offset)
        stream.write(flat.numpy())  # type: ignore[call-overload]

    def _file_name(self, index: int) -> str:
        if len(self._shards) == 1:
            return SINGLE_FILE
        return f"model-{index + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _write_index(self) -> None:
        weight_map = {
            output.name: self._file_name(index)
            for index, shard in enumerate(self._shards)
            for output in shard
        }
        total = sum(output.num_bytes for shard in self._shards for output in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=1, ensure_ascii=False) + "\n"
        (self._folder / INDEX_FILE).write_text(text, encoding="utf-8")


def _split(outputs: list[OutputTensor], shard_bytes: int) -> list[list[OutputTensor]]:
    shards: list[list[OutputTensor]] = [[]]
    used = 0
    for output in outputs:
        if shards[-1] and used + output.num_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(output)
        used += output.num_bytes
    return shards


def _header(shard: list[OutputTensor]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and each tensor's offset from the data's start."""
    # Larger items first keeps every tensor aligned to its dtype, as the reference writer does.
    ordered = sorted(shard, key=lambda o: (-DTYPES[o.dtype].itemsize, o.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for output in ordered:
        offsets[output.name] = position
        end = position + output.num_bytes
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
