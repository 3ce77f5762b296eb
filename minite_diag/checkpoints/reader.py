"""Reads safetensors folders one tensor at a time, trusting nothing that a file says.

Knows files, headers and bytes: no model, no quantization. Invariant: every `TensorInfo` that
leaves this module lies inside its file, overlaps no other tensor and has as many bytes as its
dtype and shape say, so reading it later can only fail if the file changed meanwhile.

The format (huggingface/safetensors, README "Format"): eight bytes of little-endian header length,
a JSON object name -> {dtype, shape, data_offsets}, then the data, offsets counted from its start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from minite_diag.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound; a 30B mixture-of-experts header has about 4 MB."""

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DOWNLOAD_AGAIN: Final = "the file is damaged: copy or download it again"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` counts from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors folder by name, headers validated, no data read.

    Raises CheckpointError for a missing folder or shard, pickled weights, a damaged or hostile
    header, or an index that disagrees with its shards.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in list_shards(folder):
        for name, info in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in {tensors[name].file.name} and in {file.name}",
                    f"keep one of the two shards' copies in {folder}",
                )
            tensors[name] = info
    for name, shard in _weight_map(folder).items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{folder / INDEX_FILE} places {name!r} in {shard}, which does not hold it",
                "the index and the shards come from different saves: copy the folder again",
            )
    return dict(sorted(tensors.items()))


def list_shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: the single file, or the index's shards."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}", "give a folder, demo or demo-moe")
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    shards = sorted({folder / shard for shard in _weight_map(folder).values()})
    if not shards:
        raise _no_weights(folder)
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(
                f"shard {shard.name} is missing in {folder}",
                f"{INDEX_FILE} needs it: finish the copy or the download",
            )
    return shards


def _no_weights(folder: Path) -> CheckpointError:
    files = sorted(p.name for p in folder.iterdir() if p.is_file())
    pickled = [name for name in files if name.endswith(_PICKLE_SUFFIXES)]
    if pickled:
        return CheckpointError(
            f"{folder / pickled[0]} is a pickle file, which can run code when it is loaded",
            "convert the checkpoint to safetensors (transformers: model.save_pretrained) first",
        )
    loose = [name for name in files if name.endswith(".safetensors")]
    if loose:
        return CheckpointError(
            f"{folder} has {loose[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}",
            f"rename a single file to {SINGLE_FILE}, or add the index of the shards",
        )
    return CheckpointError(
        f"{folder} holds no safetensors file", f"it needs {SINGLE_FILE}, or shards and {INDEX_FILE}"
    )


def _weight_map(folder: Path) -> dict[str, str]:
    file = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not file.is_file():
        return {}
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map", _DOWNLOAD_AGAIN)
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{file} places {name!r} in {shard!r}, which is not a plain file name",
                "don't use this checkpoint unless you know why its index points elsewhere",
            )
    return weight_map


def read_json(file: Path) -> dict[str, Any]:
    """Parse a JSON object; raises CheckpointError naming the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read {file}: {error}", _DOWNLOAD_AGAIN) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object", _DOWNLOAD_AGAIN)
    return content


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; raises CheckpointError for anything inconsistent."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{file} is cut short: {size} bytes", _DOWNLOAD_AGAIN)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file} claims a header of {length} bytes; the format allows "
                    f"{MAX_HEADER_BYTES}",
                    "it is no safetensors file, or a hostile one: don't use it",
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{file} is cut short: its header needs {8 + length} bytes, it has {size}",
                    _DOWNLOAD_AGAIN,
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"can't read {file}: {error}", "check its permissions") from error
    tensors = _parse_header(file, text, data_start=8 + length)
    _check_layout(file, tensors, start=8 + length, end=size)
    return tensors


def _parse_header(file: Path, text: bytes, data_start: int) -> dict[str, TensorInfo]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a broken header: {error}", _DOWNLOAD_AGAIN) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no JSON object", _DOWNLOAD_AGAIN)
    header.pop("__metadata__", None)
    return {name: _parse_entry(file, name, entry, data_start) for name, entry in header.items()}


def _parse_entry(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{file}: tensor {name!r} has a broken entry", _DOWNLOAD_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {dtype!r}",
            f"only these can be read: {', '.join(DTYPES)}",
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {shape!r} and offsets {offsets!r}", _DOWNLOAD_AGAIN
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{file}: tensor {name!r} has {end - begin} bytes; {dtype} {shape} needs {expected}",
            _DOWNLOAD_AGAIN,
        )
    return TensorInfo(file, dtype, tuple(shape), data_start + begin, expected)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_layout(file: Path, tensors: dict[str, TensorInfo], start: int, end: int) -> None:
    position = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if info.offset + info.num_bytes > end:
            raise CheckpointError(
                f"{file} is cut short: tensor {name!r} ends at byte "
                f"{info.offset + info.num_bytes}, the file at {end}",
                _DOWNLOAD_AGAIN,
            )
        if info.offset != position:
            what = "overlaps the tensor before it" if info.offset < position else "leaves a hole"
            raise CheckpointError(
                f"{file}: tensor {name!r} {what} (byte {info.offset}, expected {position})",
                "the format forbids it: don't use this file",
            )
        position += info.num_bytes
    if position != end:
        raise CheckpointError(
            f"{file} has {end - position} bytes after its last tensor",
            "the format forbids it: don't use this file",
        )


def load(info: TensorInfo) -> Tensor:
    """Read one tensor into fresh memory, in the file's dtype."""
    raw = torch.empty(info.num_bytes, dtype=torch.uint8)
    try:
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            count = stream.readinto(raw.numpy())  # type: ignore[arg-type]
    except OSError as error:
        raise CheckpointError(f"can't read {info.file}: {error}", _DOWNLOAD_AGAIN) from error
    if count != info.num_bytes:
        raise CheckpointError(f"{info.file} shrank while it was read", _DOWNLOAD_AGAIN)
    return raw.view(DTYPES[info.dtype]).reshape(info.shape)


def read_tensor(folder: Path, name: str) -> Tensor:
    """Read one tensor of a checkpoint folder; raises CheckpointError if it has none so named."""
    tensors = list_tensors(folder)
    if name not in tensors:
        raise CheckpointError(
            f"{folder} has no tensor {name!r}", f"it has {len(tensors)}, from {next(iter(tensors))}"
        )
    return load(tensors[name])


def iter_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder, by name, one in memory at a time."""
    for name, info in list_tensors(folder).items():
        yield name, load(info)
