"""One engine as several ranks: its worker process becomes torchrun's launcher, its ranks workers.

    worker RUN ENGINE                launcher: no engine, the parent's pipes
      worker RUN ENGINE --rank PID   rank 0: writes the trace and talks to the parent
      worker RUN ENGINE --rank PID   rank 1 and up: the same calls; nothing is written but a log

Knows torch.distributed; no engine. Invariant: all ranks end when one does; the launcher says which
rank was the first and where its log is; a rank never outlives its launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from minite_diag.errors import MiniteDiagError
from minite_diag.trace.store import TraceWriter

RANK_FLAG: Final = "--rank"
PR_SET_PDEATHSIG: Final = 1
RECORD: Final = "minite_diag"
MONITOR_S: Final = 0.2
_LOST_PEER: Final = ("gloo", "nccl", "connection closed by peer", "connection reset")
_is_rank = _is_follower = False


def number() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def is_follower() -> bool:
    """Whether this process is a rank above 0, which writes nothing."""
    return _is_follower


def lost_step(error: Exception) -> bool:
    """Whether ranks may have lost step: an error that not all of them must have met alike."""
    return _is_rank and not isinstance(error, MiniteDiagError)


def log_file(run: Path, job: str, rank: int) -> Path:
    """Where a rank prints to: rank 0 to the worker's own log."""
    return run / (f"{job}-rank{rank}.log" if rank else f"{job}.log")


def launch(
    module: str, arguments: list[str], count: int, job: str, report: Callable[..., None]
) -> int:
    """Run `module` as `count` ranks until they end; returns 0, 130 (interrupted) or 3.

    `job` names the logs, as in `log_file`, in the run folder `arguments[0]`. `report` gets one
    error event that names the rank which failed first.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="minite-diag-ranks-") as folder:
        options = [
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={count}",
            "--max-restarts=0",
            f"--monitor-interval={MONITOR_S}",
            f"--log-dir={folder}",
        ]
        command = torchrun.parse_args([*options, "-m", module, *arguments, *_as_rank()])
        try:
            torchrun.run(command)
        except ChildFailedError as error:
            logs = partial(log_file, Path(arguments[0]), job)
            report("error", **_cause(error.failures, count, logs))
            return 3
        except (SignalException, KeyboardInterrupt):
            return 130
    return 0


def _as_rank() -> tuple[str, str]:
    """What tells a process that it is a rank, and whose: the launcher may be gone at its start."""
    return RANK_FLAG, str(os.getpid())


def launcher(arguments: list[str]) -> int | None:
    """The process whose rank this is; None for a process that is no rank."""
    return int(arguments[-1]) if RANK_FLAG in arguments else None


def _cause(failures: dict[int, Any], count: int, logs: Callable[[int], Path]) -> dict[str, str]:
    """The failure that the others follow from: a killed rank, then one that says why.

    A rank whose partner is gone fails too, and often first.
    """
    killed = [r for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    over = [rank for rank, f in failures.items() if f.exitcode != -signal.SIGTERM]
    told = {rank: _record(failure) for rank, failure in failures.items()}
    causes = {rank: record for rank, record in told.items() if record and not record["lost_peer"]}
    if killed:
        rank = min(killed)
        name = signal.Signals(-failures[rank].exitcode).name
        message, hint = f"rank {rank} of {count} was killed ({name})", ""
        if name == "SIGKILL":
            hint = "very likely out of memory; "
    elif causes:
        rank = min(causes)
        record = causes[rank]
        same = len(causes) == count and len({r["message"] for r in causes.values()}) == 1
        # What was asked for is wrong on every rank; the first to say so ended the others.
        everywhere = same or record["kind"] in ("UsageError", "EngineUnavailable")
        prefix = "" if everywhere else f"rank {rank} of {count}: "
        message, hint = prefix + record["message"], record["hint"]
        if everywhere:
            return {"kind": record["kind"], "message": message, "hint": hint}
        hint = f"{hint}; " if hint else ""
    else:
        rank = min(over or failures)
        message, hint = f"rank {rank} of {count} died (exit {failures[rank].exitcode})", ""
    return {"kind": "Rank", "message": message, "hint": f"{hint}read {logs(rank)}"}


def _record(failure: Any) -> dict[str, Any] | None:
    data = getattr(failure, "error_file_data", None)
    return data.get(RECORD) if isinstance(data, dict) else None


def report_failure(record: dict[str, str]) -> None:
    """Leave this rank's error where the launcher looks for it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    text = record["message"]
    lost = record["kind"].startswith("Dist") or any(w in text.lower() for w in _LOST_PEER)
    stamp = {"timestamp": str(int(time.time())), "py_callstack": ""}
    content = {
        "message": {"message": text, "extraInfo": stamp},
        RECORD: record | {"lost_peer": lost},
    }
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps(content), encoding="utf-8")


def begin(log: Path) -> None:
    """Make this process a rank: above 0 it prints to `log` and dies at once from Ctrl-C."""
    global _is_rank, _is_follower
    _is_rank, _is_follower = True, number() > 0
    _die_with_launcher()
    if not _is_follower:
        return
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(stream, 2)
    os.dup2(stream, 1)
    os.close(stream)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _die_with_launcher() -> None:
    """Let the kernel end this process with its launcher, also where no Python can run any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def join(device: str, timeout_s: float) -> None:
    """Meet the other ranks: gloo on CPU; on CUDA NCCL, and gloo for what lies on the CPU.

    `timeout_s` ends a collective that another rank doesn't come to.
    """
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def lines_of_first(stream: Any) -> Iterator[str]:
    """The lines that rank 0 reads from `stream`, on every rank."""
    import torch.distributed as dist

    while True:
        line = [stream.readline() if number() == 0 else None]
        dist.broadcast_object_list(line, src=0)
        if not line[0]:
            return
        yield line[0]


class _NoTrace:
    """What a rank above 0 writes to: nothing."""

    bytes_written = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def manifest(self, record: dict[str, Any]) -> None:
        pass

    def call(self, call: int, rows: Any) -> None:
        pass

    def tokens(self, rows: Any) -> None:
        pass

    def tensor(self, *args: Any, **kwargs: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def writer_of(folder: Path, *arguments: Any) -> TraceWriter:
    """The trace's writer; on a rank above 0 one that writes nothing."""
    if _is_follower:
        return cast("TraceWriter", _NoTrace(folder))
    return TraceWriter(folder, *arguments)
