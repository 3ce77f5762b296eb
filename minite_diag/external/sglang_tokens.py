"""Which tokens the rows of a dump are, from the `core` fields of SGLang's dumper.

A serving engine dumps input_ids, positions, seq_lens and request ids of each step; a training
framework input_ids with cu_seqlens_q, or [batch, tokens]. Knows files of the dumper; no engine.
Invariant: a row whose token is not in the dump (its prefix came from a cache) has no token, and
that is said.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.errors import UsageError
from minite_diag.external.sequences import MIN_TOKENS, Call, ExternalSequence, Token
from minite_diag.external.tensor_files import is_plain_tensor, load_pt

FIELDS: Final = (
    *("input_ids", "positions", "seq_lens", "rids", "req_pool_indices"),
    *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
)
"""The dumper's `core` fields: which token each row is."""


@dataclass(frozen=True)
class Dumped:
    """One file, not read yet."""

    file: Path
    step: int
    rank: int
    index: int
    name: str

    def load(self) -> dict[str, Any]:
        """`value` and `meta`; raises UsageError for a file that isn't what its name says."""
        found = load_pt(self.file)
        meta = found.get("meta") if isinstance(found, dict) else None
        if not isinstance(meta, dict) or "value" not in found:
            raise UsageError(f"{self.file} has no value and meta", "SGLang's dumper writes both")
        stated = tuple(meta.get(k) for k in ("step", "rank", "dump_index", "name"))
        if stated != (self.step, self.rank, self.index, self.name):
            raise UsageError(
                f"{self.file} holds step, rank, index and name {stated}", "the file was renamed"
            )
        return dict(found)

    def tensor(self) -> torch.Tensor:
        """The value; raises UsageError where it is no tensor."""
        value = self.load()["value"]
        if not is_plain_tensor(value):
            raise UsageError(f"{self.file}: the value is no dense tensor", "dump a tensor")
        return torch.Tensor.detach(value)


@dataclass
class _Growing:
    """A request's tokens while the steps are read."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    decoded_from: int | None = None

    def finished(self) -> ExternalSequence:
        """The sequence; what was not decoded is its prompt."""
        length = len(self.token_ids)
        return ExternalSequence(
            self.id,
            tuple(self.token_ids),
            min(self.decoded_from or 0, length - 1),
            (None,) * length,
            self.decoded_from,
        )


@dataclass
class Steps:
    """What the rows of a dump are: `calls[numbers[step]]` are those of a step.

    `last_rows` [requests] of each call: the rows that a serving engine computes logits of.
    """

    sequences: list[ExternalSequence] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    last_rows: list[list[int]] = field(default_factory=list)


def read_steps(dumps: list[Dumped], left_out: dict[str, str]) -> Steps:
    """From the `core` fields that rank 0 wrote; raises UsageError where no step has them."""
    by_step: dict[int, dict[str, Dumped]] = defaultdict(dict)
    for dumped in dumps:
        if dumped.rank == 0 and dumped.name in FIELDS:
            by_step[dumped.step].setdefault(dumped.name, dumped)
    reader = _Reader(left_out)
    for step in sorted({dumped.step for dumped in dumps}):
        if "input_ids" in by_step[step]:
            reader.read(step, by_step[step])
        else:
            left_out[f"step {step}"] = "it has no input_ids: which tokens its rows are is unknown"
    found = reader.result()
    if not found.sequences:
        raise UsageError(
            f"{dumps[0].file.parent}: no step says which tokens its rows are",
            "dump with DUMPER_NON_INTRUSIVE_MODE=core or all (input_ids, positions, seq_lens), or "
            "write sequences and calls into a manifest.json in that folder",
        )
    return found


def steps_of(
    calls: list[Call], sequences: list[ExternalSequence], numbers: dict[int, int]
) -> Steps:
    """Steps whose rows a manifest states."""
    last = [
        list({token.sequence: i for i, token in enumerate(c.rows) if token is not None}.values())
        for c in calls
    ]
    return Steps(sequences, calls, numbers, last)


def _integers(dumped: Dumped) -> torch.Tensor:
    tensor = dumped.tensor()
    if tensor.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"{dumped.file}: {tensor.dtype} for {dumped.name}", "dump integers")
    return tensor.to(torch.int64)


class _Reader:
    """Goes through the steps in order; requests grow until another one takes their name."""

    def __init__(self, left_out: dict[str, str]) -> None:
        self.left_out = left_out
        self._growing: dict[str, _Growing] = {}
        self._done: list[_Growing] = []
        self._found = Steps()

    def read(self, step: int, fields: dict[str, Dumped]) -> None:
        """Enter one step."""
        if "seq_lens" in fields:
            rows, last = self._serving(step, fields)
        else:
            rows, last = self._training(step, fields), []
        self._found.numbers[step] = len(self._found.calls)
        self._found.calls.append(Call(str(step), tuple(rows)))
        self._found.last_rows.append(last)

    def result(self) -> Steps:
        """All steps; a sequence of one token can't be compared."""
        done = [*self._done, *self._growing.values()]
        short = {request.id for request in done if len(request.token_ids) < MIN_TOKENS}
        for name in short:
            self.left_out[f"sequence {name}"] = f"fewer than {MIN_TOKENS} tokens"
        self._found.calls = [
            Call(c.name, tuple(None if t and t.sequence in short else t for t in c.rows))
            for c in self._found.calls
        ]
        self._found.sequences = [r.finished() for r in done if r.id not in short]
        return self._found

    def _serving(
        self, step: int, fields: dict[str, Dumped]
    ) -> tuple[list[Token | None], list[int]]:
        """Request i owns the rows up to position `seq_lens[i] - 1`."""
        tokens = _integers(fields["input_ids"]).flatten().tolist()
        if "positions" not in fields:
            raise UsageError(
                f"{fields['input_ids'].file.parent}: step {step} has input_ids and no positions",
                "dump both, or write sequences and calls into a manifest.json in that folder",
            )
        positions = _integers(fields["positions"]).flatten().tolist()
        lengths = _integers(fields["seq_lens"]).flatten().tolist()
        if len(tokens) != len(positions):
            raise UsageError(
                f"{fields['positions'].file}: {len(positions)} positions for {len(tokens)} tokens",
                "the dump is damaged: dump again",
            )
        rows: list[Token | None] = []
        last = []
        for name, length in zip(_request_names(fields, len(lengths)), lengths, strict=True):
            start = end = len(rows)
            while end < len(tokens) and positions[end] != length - 1:
                end += 1
            if end == len(tokens):
                raise UsageError(
                    f"{fields['seq_lens'].file}: no row of step {step} is position {length - 1} "
                    f"of request {name}",
                    "a padded batch can't be read: dump without CUDA graphs",
                )
            own = slice(start, end + 1)
            rows += self._grow(name, tokens[own], positions[own])
            last.append(end)
        return rows + [None] * (len(tokens) - len(rows)), last

    def _grow(self, name: str, tokens: list[int], positions: list[int]) -> list[Token | None]:
        """A request's rows of one step; one that starts anew ends the one of its name."""
        first = positions[0]
        if first == 0 and name in self._growing:
            self._done.append(self._growing.pop(name))
        if name not in self._growing:
            self._growing[name] = _Growing(self._unique(name))
        request = self._growing[name]
        known = len(request.token_ids)
        if positions != list(range(known, known + len(tokens))):
            self.left_out[f"request {name} at position {first}"] = (
                f"its first {first} tokens are not in the dump: they came from the prefix cache"
            )
            return [None] * len(tokens)
        if len(tokens) == 1 and known and request.decoded_from is None:
            request.decoded_from = first
        elif len(tokens) > 1:
            request.decoded_from = None
        request.token_ids += tokens
        return [Token(request.id, position) for position in positions]

    def _unique(self, name: str) -> str:
        taken = {request.id for request in (*self._done, *self._growing.values())}
        names = (name if i == 0 else f"{name}-{i + 1}" for i in range(len(taken) + 1))
        return next(n for n in names if n not in taken)

    def _training(self, step: int, fields: dict[str, Dumped]) -> list[Token | None]:
        """A batch of a training framework: packed with cu_seqlens_q, or [batch, tokens]."""
        ids = _integers(fields["input_ids"])
        if "cu_seqlens_q" in fields:
            return self._packed(step, ids.flatten().tolist(), fields["cu_seqlens_q"])
        if ids.dim() != 2:
            raise UsageError(
                f"{fields['input_ids'].file}: {list(ids.shape)} and no seq_lens or cu_seqlens_q",
                "write sequences and calls into a manifest.json in that folder",
            )
        batch = [_Growing(f"step-{step}-sequence-{i}", r) for i, r in enumerate(ids.tolist())]
        self._done += batch
        # Megatron's modules see [tokens, batch, hidden].
        return [Token(row.id, position) for position in range(ids.shape[1]) for row in batch]

    def _packed(self, step: int, tokens: list[int], bounds: Dumped) -> list[Token | None]:
        ends = _integers(bounds).flatten().tolist()
        if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > len(tokens):
            raise UsageError(
                f"{bounds.file}: {ends[:6]}... for {len(tokens)} tokens",
                "it must rise from 0 to the number of tokens",
            )
        rows: list[Token | None] = []
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            request = _Growing(f"step-{step}-sequence-{i}", tokens[start:end])
            self._done.append(request)
            rows += [Token(request.id, position) for position in range(end - start)]
        return rows + [None] * (len(tokens) - len(rows))


def _request_names(fields: dict[str, Dumped], count: int) -> list[str]:
    for key in ("rids", "req_pool_indices"):
        if key not in fields:
            continue
        value = fields[key].load()["value"]
        listed = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
        if isinstance(listed, (list, tuple)) and len(listed) == count:
            return [str(item) for item in listed]
    return [f"request-{i}" for i in range(count)]
