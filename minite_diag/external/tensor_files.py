"""Tensors in files that somebody else wrote: safetensors, or `.pt` without running what they say.

Knows files; no name and no model. Invariant: no object of a pickle is ever built but tensors, plain
containers, numbers and texts (and stand-ins that a caller passes): `torch.load(weights_only=True)`;
and no path leaves the folder that was given.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.checkpoints import reader
from minite_diag.errors import CheckpointError, UsageError

SUFFIXES: Final = (".safetensors", ".pt")

Loader = Callable[[], torch.Tensor]


def inside(folder: Path, name: str, where: str) -> Path:
    """The file `name` of `folder`; raises UsageError if it is missing or lies elsewhere."""
    plain = name and not Path(name).is_absolute() and ".." not in Path(name).parts
    file = folder / name
    if not plain or "\\" in name or "\0" in name:
        raise UsageError(
            f"{where}: {name!r} is no file name inside of the folder", "name files relative to it"
        )
    if not file.is_file():
        raise UsageError(f"{where}: {file} is missing", "copy that file, or correct the manifest")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{where}: {file} is a link out of the folder", "copy the file itself")
    return file


def load_pt(file: Path, stand_ins: Sequence[tuple[Any, str]] = ()) -> Any:
    """What a `.pt` file holds, tensors on the CPU; raises UsageError for anything else.

    `stand_ins` are (class or function, the global's name in the pickle): our own inert ones in the
    place of classes of a library.
    """
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            # Pages are read when a tensor is: a dump is larger than what is compared of it.
            mmap = zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a hostile file can raise anything
        said = " ".join(str(error).split())
        if "nsupported" in said or "WeightsUnpickler" in said or "weights_only" in said.lower():
            raise UsageError(
                f"{file} holds more than tensors, numbers and texts: {_culprit(said)}",
                "it is not opened, because a pickle can run code; dump plain tensors",
            ) from error
        raise UsageError(
            f"can't read {file}: {said[:200]}", "the file is damaged: copy it again"
        ) from error


def _culprit(said: str) -> str:
    """The name of what the unpickler refused, out of its long advice."""
    for marker in ("Unsupported global: GLOBAL ", "GLOBAL "):
        if marker in said:
            return said.split(marker, 1)[1].split(" ", 1)[0]
    return said[:120]


def open_tensors(file: Path) -> Mapping[str, Loader]:
    """Each tensor of a file by name, read when it is asked for (a `.pt` file at once).

    Raises UsageError for a damaged file, or one that isn't a dict of tensors.
    """
    if file.suffix == ".safetensors":
        try:
            header = reader.read_header(file)
        except CheckpointError as error:
            raise UsageError(error.message, error.hint) from error
        return {name: _lazy(info) for name, info in header.items()}
    if file.suffix != ".pt":
        raise UsageError(f"{file} is no tensor file", f"it must end in {' or '.join(SUFFIXES)}")
    found = load_pt(file)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and is_plain_tensor(value) for name, value in found.items()
    ):
        raise UsageError(f"{file} is no dict of texts to tensors", "save one, or safetensors")
    return {name: _held(value) for name, value in found.items()}


def is_plain_tensor(value: Any) -> bool:
    """Whether it is a dense tensor, as kernels read it."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _lazy(info: reader.TensorInfo) -> Loader:
    def load() -> torch.Tensor:
        try:
            return reader.load(info)
        except CheckpointError as error:
            raise UsageError(error.message, error.hint) from error

    return load


def _held(value: torch.Tensor) -> Loader:
    return lambda: value.detach()
