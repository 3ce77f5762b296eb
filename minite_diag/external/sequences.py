"""Token sequences of a trace from outside, and which token each row of a call is.

Knows plain records and numbers; no file and no tensor. Invariant: nothing is guessed: a value that
can't be a token id or a log-probability is an error that says where it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from minite_diag.errors import UsageError

MIN_TOKENS: Final = 2


@dataclass(frozen=True)
class ExternalSequence:
    """One sequence of one side; `logprobs` [T] has None where the side gives none.

    `decoded_from` is the first position that the side computed one token at a time.
    """

    id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[float | None, ...]
    decoded_from: int | None = None


@dataclass(frozen=True)
class Token:
    """What one row of a call is: a position of a sequence."""

    sequence: str
    position: int


@dataclass(frozen=True)
class Call:
    """One forward pass: the token of each row of its flat batch, None for padding."""

    name: str
    rows: tuple[Token | None, ...]


def read_token_ids(where: str, record: dict[str, Any], key: str = "token_ids") -> tuple[int, ...]:
    """The ids under `key`; raises UsageError."""
    ids = record.get(key)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise UsageError(f"{where}: {key} is not a list of token ids", "give integers from 0")
    if len(ids) < MIN_TOKENS:
        raise UsageError(f"{where}: {len(ids)} tokens", "a sequence needs at least 2")
    return tuple(ids)


def read_prompt_length(where: str, record: dict[str, Any], length: int) -> int:
    """`prompt_length` of a sequence of `length` tokens; 0 if it isn't given."""
    prompt = record.get("prompt_length", 0)
    if type(prompt) is not int or not 0 <= prompt < length:
        raise UsageError(
            f"{where}: prompt_length {prompt!r} of {length} tokens", "response tokens must follow"
        )
    return prompt


def read_logprobs(
    where: str, record: dict[str, Any], key: str, length: int, prompt: int
) -> tuple[float | None, ...]:
    """[T] of the values under `key`, which has one for each token or for each of the response."""
    values = record.get(key)
    if not isinstance(values, list) or not all(_is_logprob(v) for v in values):
        raise UsageError(
            f"{where}: {key} is not a list of numbers or null", "give one for each token"
        )
    if len(values) not in (length, length - prompt):
        raise UsageError(
            f"{where}: {key} has {len(values)} values for {length} tokens "
            f"({length - prompt} after the prompt)",
            "give one for each token, or for each token of the response",
        )
    padded: list[float | None] = [*([None] * (length - len(values))), *values]
    # The first token of a sequence has no log-probability, whatever a tool wrote there.
    return (None, *(None if v is None else float(v) for v in padded[1:]))


def _is_logprob(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_sequence(where: str, record: dict[str, Any], number: int) -> ExternalSequence:
    """One sequence of one side: token_ids, and id, prompt_length, logprobs where they are given."""
    ids = read_token_ids(where, record)
    prompt = read_prompt_length(where, record, len(ids))
    logprobs: tuple[float | None, ...] = (None,) * len(ids)
    if record.get("logprobs") is not None:
        logprobs = read_logprobs(where, record, "logprobs", len(ids), prompt)
    name = record.get("id", f"sequence-{number}")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: id {name!r} is not a text", "give each sequence its own id")
    return ExternalSequence(name, ids, prompt, logprobs)


def check_ids(where: str, sequences: list[ExternalSequence]) -> None:
    """Raises UsageError where two sequences have one id."""
    seen: set[str] = set()
    for sequence in sequences:
        if sequence.id in seen:
            raise UsageError(f"{where}: id {sequence.id!r} occurs twice", "give each its own id")
        seen.add(sequence.id)
