"""Probes: fixed token sequences, hashed, read from JSON lines.

Knows no tokenizer library at import time and no engine. Invariant: a Probe's `sha256` is the
SHA-256 of its ids as little-endian int32 bytes, so that two runs can prove they saw one input.
"""

from __future__ import annotations

import array
import hashlib
import importlib.resources
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minite_diag.errors import CheckpointError, UsageError

Encode = Callable[[str], list[int]]


def hash_token_ids(token_ids: Iterable[int]) -> str:
    """SHA-256 (hex) of the ids as little-endian int32."""
    ids = array.array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


@dataclass(frozen=True)
class Probe:
    """One token sequence; `prompt_length` is where `sample` mode starts to decode."""

    id: str
    category: str
    token_ids: tuple[int, ...]
    prompt_length: int
    sha256: str

    @classmethod
    def make(
        cls, id: str, token_ids: Sequence[int], prompt_length: int | None = None, category: str = ""
    ) -> Probe:
        """Build a probe and hash its ids; `prompt_length` defaults to half of the sequence."""
        ids = tuple(int(i) for i in token_ids)
        if len(ids) < 2:
            raise CheckpointError(
                f"probe {id!r} has {len(ids)} tokens", "a probe needs at least 2 tokens"
            )
        length = prompt_length if prompt_length is not None else max(1, len(ids) // 2)
        if not 1 <= length <= len(ids):
            raise CheckpointError(
                f"probe {id!r}: prompt_length {length} is outside of 1..{len(ids)}",
                "correct prompt_length in the probe file",
            )
        return cls(id, category, ids, length, hash_token_ids(ids))


def shipped_probe_file(name: str) -> Path:
    """Path of a shipped probe set (`default`, `smollm2`, `demo-moe`)."""
    file = importlib.resources.files("probes") / f"{name}.jsonl"
    return Path(str(file))


def load_probes(
    file: Path, vocab_size: int, encode: Encode | None = None, limit: int | None = None
) -> list[Probe]:
    """Read `file` (one JSON object a line: `token_ids`, or `text` which `encode` turns into ids).

    Raises CheckpointError, naming file and line, for anything that can't be used; ids must lie in
    [0, vocab_size).
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"can't read the probe file {file}: {error}", "give --probes a readable JSONL file"
        ) from error
    probes: list[Probe] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(probes) == limit:
            break
        probes.append(_parse_line(file, number, line, vocab_size, encode))
    if not probes:
        raise CheckpointError(f"{file} holds no probe", "add at least one line")
    seen: set[str] = set()
    for probe in probes:
        if probe.id in seen:
            raise CheckpointError(f"{file}: probe id {probe.id!r} occurs twice", "rename one")
        seen.add(probe.id)
    return probes


def _parse_line(
    file: Path, number: int, line: str, vocab_size: int, encode: Encode | None
) -> Probe:
    where = f"{file}:{number}"
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not JSON ({error.msg})", "one object a line") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{where}: not a JSON object", "one object a line")
    token_ids = record.get("token_ids")
    if token_ids is None:
        text = record.get("text")
        if not isinstance(text, str):
            raise CheckpointError(f"{where}: neither token_ids nor text", "give one of them")
        if encode is None:
            raise CheckpointError(
                f"{where}: text, but the checkpoint has no tokenizer", "give token_ids instead"
            )
        token_ids = encode(text)
        if text and not token_ids:
            raise CheckpointError(
                f"{where}: the checkpoint's tokenizer gives no token for this text",
                "the folder has no vocabulary: add the tokenizer's files, or give token_ids",
            )
    if not isinstance(token_ids, list) or not all(type(i) is int for i in token_ids):
        raise CheckpointError(f"{where}: token_ids is not a list of integers", "correct the line")
    outside = [i for i in token_ids if not 0 <= i < vocab_size]
    if outside:
        raise CheckpointError(
            f"{where}: token id {outside[0]} is outside of the vocabulary (0..{vocab_size - 1})",
            "use ids of this checkpoint's tokenizer, or give `text`",
        )
    prompt_length = record.get("prompt_length")
    if prompt_length is not None and type(prompt_length) is not int:
        raise CheckpointError(f"{where}: prompt_length is not an integer", "correct the line")
    probe = Probe.make(
        str(record.get("id", f"probe-{number}")),
        token_ids,
        prompt_length,
        str(record.get("category", "")),
    )
    stated = record.get("sha256")
    if stated is not None and stated != probe.sha256:
        raise CheckpointError(
            f"{where}: sha256 says {str(stated)[:12]}..., the ids hash to {probe.sha256[:12]}...",
            "the ids or the hash were edited: restore the file or drop sha256",
        )
    return probe


def select(probes: Sequence[Probe], ids: Sequence[str]) -> list[Probe]:
    """The probes named by `ids`, in that order; raises UsageError for an unknown one."""
    by_id = {probe.id: probe for probe in probes}
    unknown = [id for id in ids if id not in by_id]
    if unknown:
        raise UsageError(f"no probe {unknown[0]!r}", f"one of: {', '.join(by_id)}")
    return [by_id[id] for id in ids]
