"""What comparing costs: against reading the same files, and against SGLang's comparator.

Knows stored runs and the compare stage; no engine. Invariant: both sides of a ratio see the same
bytes, from a warm page cache, in this run; SGLang's comparator is SGLang's own code in a process
of its own, or there is no number.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.bench.measurement import Measurement, median_seconds
from minite_diag.canonical.names import SequenceKey
from minite_diag.compare import compare, one_thread
from minite_diag.compare_site import SequencePair, Side, Unpaired, paired_tensors
from minite_diag.errors import TraceError
from minite_diag.plan import Plan, read_plan
from minite_diag.site import Site
from minite_diag.trace.schema import COMPARISON, TableWriter
from minite_diag.trace.store import Trace

REPEATS: Final = 3
PEER_BYTES: Final = 256 << 20
"""Tensors given to the peer: it needs each of them as a file of its own."""
READ_BYTES: Final = 1 << 24
PEER: Final = "SGLang's comparator"
INSTALL: Final = (
    "pip install --no-deps --target DIR sglang==0.5.23; pip install --target DIR polars einops "
    "pydantic pyyaml pyzmq rich; then --peer DIR"
)
PEER_NEEDS: Final = ("polars", "einops", "pydantic", "yaml", "zmq", "rich")


@dataclass(frozen=True)
class _Chosen:
    """A site that both tools compare, and its bytes on both sides."""

    key: SequenceKey
    site: Site
    nbytes: int


def bench_compare(
    run: Path,
    peer: Path | None = None,
    repeats: int = REPEATS,
    peer_bytes: int = PEER_BYTES,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Measure the compare stage on a captured run; `peer` is where sglang was installed to."""
    plan = read_plan(run)
    baseline_id, target_id = plan.pairs[0]
    folders = [run / "traces" / name for name in (baseline_id, target_id)]
    with tempfile.TemporaryDirectory(prefix="minite-bench-") as name:
        scratch = Path(name)
        say("the whole stage against a plain read")
        rows = _against_read(run, plan, folders, scratch, repeats)
        say("the tensors that both tools compare")
        sides = Side.of(Trace(folders[0])), Side.of(Trace(folders[1]))
        chosen = list(_choose(*sides, peer_bytes))
        if not chosen:
            raise TraceError(f"{run} has no tensors that both sides hold", "capture them first")
        rows += _against_peer(folders, sides, chosen, scratch, peer, repeats, say)
    return rows


def _against_read(
    run: Path, plan: Plan, folders: list[Path], scratch: Path, repeats: int
) -> list[Measurement]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    _read_all(files)  # the page cache is warm from here on
    ours, read = median_seconds([lambda: compare(run, scratch), lambda: _read_all(files)], repeats)
    what = f"{nbytes / 1e6:.1f} MB, page cache warm, median of {repeats}"
    if len(plan.pairs) > 1:
        what += f", {len(plan.pairs)} pairs of engines"
    return [
        Measurement("plain read", read, "s", detail=what),
        Measurement("compare stage", ours, "s", "plain read", ours / read, what),
        Measurement("compare stage speed", nbytes / ours / 1e6, "MB/s", detail=what),
    ]


def _read_all(files: list[Path]) -> None:
    buffer = bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _choose(baseline: Side, target: Side, limit: int) -> Iterator[_Chosen]:
    """Sites that both sides hold in one shape, evenly spread up to `limit` bytes."""
    found = []
    for key in baseline.sites:
        if key in target.sites:
            pair = SequencePair(baseline, target, key)
            for site in sorted(set(pair.sites[0]) & set(pair.sites[1])):
                nbytes = _bytes_of(pair, site)
                if nbytes:
                    found.append(_Chosen(key, site, nbytes))
    total = sum(item.nbytes for item in found)
    step = max(1, -(-total // max(1, limit)))
    left = limit
    for item in found[::step]:
        left -= item.nbytes
        if left >= 0:
            yield item


def _bytes_of(pair: SequencePair, site: Site) -> int:
    try:
        x, y = paired_tensors(pair, site)
    except Unpaired:
        return 0
    return x.numel() * x.element_size() + y.numel() * y.element_size()


def _against_peer(
    folders: list[Path],
    sides: tuple[Side, Side],
    chosen: list[_Chosen],
    scratch: Path,
    peer: Path | None,
    repeats: int,
    say: Callable[[str], None],
) -> list[Measurement]:
    nbytes = sum(item.nbytes for item in chosen)
    (ours,) = median_seconds([lambda: _compare_chosen(folders, chosen, scratch)], repeats)
    what = f"{len(chosen)} pairs of tensors, {nbytes / 1e6:.1f} MB, median of {repeats}"
    speed = nbytes / ours / 1e6
    missing = _missing(peer)
    if missing:
        note = f"peer not installed ({missing}): {INSTALL}"
        return [
            Measurement("compare, same tensors", speed, "MB/s", detail=what),
            Measurement(PEER, None, "MB/s", detail=note),
        ]
    assert peer is not None
    say(f"{PEER}: writing {len(chosen)} pairs as its dumps (not timed)")
    dumps = scratch / "baseline", scratch / "target"
    _write_dumps(sides, chosen, dumps)
    say(f"{PEER}: running")
    found = _run_peer(peer, dumps, repeats)
    theirs = nbytes / found["seconds"] / 1e6
    counted = ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "skipped", "errored"))
    name = f"{PEER} {found['version']}"
    return [
        Measurement(name, theirs, "MB/s", detail=f"{what}; {counted}"),
        Measurement("compare, same tensors", speed, "MB/s", name, speed / theirs, what),
    ]


def _compare_chosen(folders: list[Path], chosen: list[_Chosen], scratch: Path) -> None:
    """What `compare` does for these sites: index, read, measure, write rows."""
    baseline, target = (Side.of(Trace(folder)) for folder in folders)
    with one_thread(), TableWriter(scratch / "chosen.parquet", COMPARISON) as table:
        pair: SequencePair | None = None
        for item in chosen:
            if pair is None or pair.key != item.key:
                pair = SequencePair(baseline, target, item.key)
            row = {"fqn": item.site.fqn, "kind": item.site.kind, "probe": item.key.probe}
            try:
                table.append(row | pair.compare(item.site))
            except Unpaired as unpaired:
                table.append(row | {"status": "skipped", "reason": str(unpaired)})


def _write_dumps(sides: tuple[Side, Side], chosen: list[_Chosen], dumps: tuple[Path, Path]) -> None:
    """Each tensor as SGLang's dumper writes it: the tags are in the file's name."""
    for folder in dumps:
        folder.mkdir()
    pair: SequencePair | None = None
    for number, item in enumerate(chosen):
        if pair is None or pair.key != item.key:
            pair = SequencePair(*sides, item.key)
        meta = {"step": 0, "rank": 0, "dump_index": number, "name": f"{number}.{item.site.kind}"}
        file = "___".join(f"{key}={value}" for key, value in meta.items()) + ".pt"
        for folder, tensor in zip(dumps, paired_tensors(pair, item.site), strict=True):
            torch.save({"value": tensor.clone(), "meta": meta}, folder / file)


def _missing(peer: Path | None) -> str:
    if peer is None:
        return "no folder given"
    if not (peer / "sglang" / "srt" / "debug_utils" / "comparator").is_dir():
        return f"no sglang in {peer}"
    lacking = [
        name
        for name in PEER_NEEDS
        if importlib.util.find_spec(name) is None and not (peer / name).exists()
    ]
    return f"no {', '.join(lacking)}" if lacking else ""


def _run_peer(peer: Path, dumps: tuple[Path, Path], repeats: int) -> dict[str, Any]:
    script = Path(__file__).with_name("sglang_peer.py")
    done = subprocess.run(
        [sys.executable, str(script), str(peer.resolve()), *map(str, dumps), str(repeats)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        check=False,
    )
    if done.returncode != 0:
        raise TraceError(
            f"{PEER} failed: {done.stderr.strip().splitlines()[-1:]}", f"install it: {INSTALL}"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
