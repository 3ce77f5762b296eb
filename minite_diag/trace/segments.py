"""Raw bytes of tensors, appended to segment files while the model computes on.

Knows torch and files; no schema. Tensors are copied once, into one of two buffers; a thread writes
the other one. Invariants: a buffer is as large as the largest tensor that went through it, so the
memory is two of them (weights and what is over STAGED_BYTES are written where they lie); offsets are multiples of ALIGNMENT; `bytes_written` is exactly what the files hold (after
`flush`) and never passes `max_disk`; what was flushed stays, whenever the process dies.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch

SEGMENT_BYTES: Final = 1 << 30
ALIGNMENT: Final = 64
"""Tensors start at multiples of it, so that they can be used where the file is mapped."""
SMALLEST_BUFFER: Final = 1 << 18
STAGED_BYTES: Final = 64 << 20
REMEMBERED: Final = 4
"""Tensors that may come again: x of q_proj, its codes, its scales, the output; then x of k_proj."""

_WIDE: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Place = tuple[str, int]
"""Segment and byte offset."""
Source = tuple[int, torch.dtype, torch.Size]
"""Address, dtype and shape in the engine: where a tensor that comes again is found."""


class DiskBudgetExceeded(Exception):
    """The next tensor would pass `max_disk`; what is written stays valid."""


@dataclass(frozen=True, eq=False)
class _Copy:
    """A tensor that lies in a buffer, and where it goes on disk."""

    tensor: torch.Tensor
    place: Place
    source: Source


class SegmentWriter:
    """Appends tensors to `data-NNNNN.bin` in a folder."""

    def __init__(self, folder: Path, max_disk: int | None = None) -> None:
        self.folder = folder
        self.max_disk = max_disk
        self.bytes_written = 0
        self._segment = -1
        self._name = ""
        self._file: BinaryIO | None = None
        self._offset = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._other = torch.empty(0, dtype=torch.uint8)
        self._filled = 0
        self._copies: deque[_Copy] = deque(maxlen=REMEMBERED)
        self._older: list[_Copy] = []
        self._thread = _WriterThread()

    def append(self, tensors: Sequence[torch.Tensor], *, direct: bool = False) -> list[Place]:
        """Append tensors to one segment; returns where each of them lies.

        A tensor whose bytes are among the last few is not written again; `direct` ones are neither
        copied nor remembered. Raises DiskBudgetExceeded, with nothing appended, where `max_disk`
        has no room.
        """
        # What comes again is the same tensor, handed to the next module; the engine may have
        # written to it meanwhile. Looking at others of its shape costs more than it finds.
        sources = [(t.data_ptr(), t.dtype, t.shape) for t in tensors]
        here = [t if t.device.type == "cpu" else t.detach().to("cpu") for t in tensors]
        known = [
            None if direct else self._recall(tensor, source)
            for tensor, source in zip(here, sources, strict=True)
        ]
        if not self._fits(here, known):
            known = [None] * len(here)
            self._fits(here, known)
        return [
            copy.place if copy is not None else self._write(tensor, source, direct)
            for tensor, source, copy in zip(here, sources, known, strict=True)
        ]

    def _recall(self, tensor: torch.Tensor, source: Source) -> _Copy | None:
        for copies in (self._copies, self._older):
            for copy in copies:
                if copy.source == source and _has_equal_bytes(copy.tensor, tensor):
                    if copies is self._copies:
                        self._copies.remove(copy)
                        self._copies.append(copy)
                    return copy
        return None

    def _fits(self, tensors: Sequence[torch.Tensor], known: Sequence[_Copy | None]) -> bool:
        """Make room in one segment; False if known copies lie in another one."""
        new = [t for t, copy in zip(tensors, known, strict=True) if copy is None]
        size = sum(_padded(t.numel() * t.element_size()) for t in new)
        places = {copy.place[0] for copy in known if copy is not None}
        rolls = self._file is None or self._offset + size > SEGMENT_BYTES
        if (new and places and (rolls or places != {self._name})) or len(places) > 1:
            return False
        if self.max_disk is not None and self.bytes_written + size > self.max_disk:
            raise DiskBudgetExceeded
        if new and rolls:
            self._roll()
        return True

    def _roll(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
        self._segment += 1
        self._name = f"data-{self._segment:05d}.bin"
        self._offset = 0
        self._file = (self.folder / self._name).open("wb", buffering=0)

    def _write(self, tensor: torch.Tensor, source: Source, direct: bool) -> Place:
        place = (self._name, self._offset)
        nbytes = tensor.numel() * tensor.element_size()
        if direct or nbytes > STAGED_BYTES:
            self._write_through(tensor.detach().contiguous())
        else:
            self._stage(tensor, nbytes, source, place)
        self._offset += _padded(nbytes)
        self.bytes_written += _padded(nbytes)
        return place

    def _write_through(self, tensor: torch.Tensor) -> None:
        assert self._file is not None
        self.flush()
        data = tensor.reshape(-1).view(torch.uint8)
        _write_all(self._file, data)
        _write_all(self._file, torch.zeros(_padded(len(data)) - len(data), dtype=torch.uint8))

    def _stage(self, tensor: torch.Tensor, nbytes: int, source: Source, place: Place) -> None:
        size = _padded(nbytes)
        self._make_room(size)
        start, end = self._filled, self._filled + nbytes
        view = self._buffer[start:end].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())
        if size > nbytes:
            self._buffer[end : start + size] = 0  # not what an earlier tensor left there
        self._filled += size
        if nbytes:
            self._copies.append(_Copy(view, place, source))

    def _make_room(self, size: int) -> None:
        if self._filled + size <= len(self._buffer):
            return
        if self._filled:
            self._hand_over()
        if size > len(self._buffer):
            self._buffer = torch.zeros(max(size, SMALLEST_BUFFER), dtype=torch.uint8)

    def _hand_over(self) -> None:
        """Let the thread write this buffer; go on with the other one."""
        assert self._file is not None
        self._thread.wait()
        # The other buffer is written: nothing may refer to it when it is filled again.
        self._older = list(self._copies)
        self._copies.clear()
        self._thread.write(self._file, self._buffer[: self._filled])
        self._buffer, self._other = self._other, self._buffer
        if len(self._buffer) < len(self._other):
            self._buffer = torch.zeros(len(self._other), dtype=torch.uint8)
        self._filled = 0

    def flush(self) -> None:
        """Return when every appended byte is in its file; raises what writing raised."""
        if self._filled:
            self._hand_over()
        self._thread.wait()

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            self._thread.stop()
            if self._file is not None:
                self._file.close()
                self._file = None


class _WriterThread:
    """Writes one buffer at a time; `wait` returns when it is done, or raises why it failed."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[BinaryIO, torch.Tensor] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None

    def write(self, file: BinaryIO, data: torch.Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
            self._thread.start()
        self._busy = True
        self._jobs.put((file, data))

    def wait(self) -> None:
        if self._busy:
            error = self._done.get()
            self._busy = False
            if error is not None:
                raise error

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            file, data = job
            try:
                _write_all(file, data)
            except BaseException as error:  # noqa: BLE001  raised again by `wait`
                self._done.put(error)
            else:
                self._done.put(None)


def _write_all(file: BinaryIO, data: torch.Tensor) -> None:
    left: memoryview = data.numpy().data
    while left:
        left = left[file.write(left) :]


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def _has_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bytes of two tensors of one shape and dtype; False for one that is not contiguous."""
    if not b.is_contiguous():
        return False
    # As wide integers: torch compares 8 bytes in the time of one.
    nbytes = a.numel() * a.element_size()
    wide = next(dtype for width, dtype in _WIDE if nbytes % width == 0)
    return torch.equal(a.reshape(-1).view(wide), b.reshape(-1).view(wide))
