"""manifest.json of a folder of tensors from outside: what docs/traces.md describes, read strictly.

Knows records; no tensor. Invariant: an unknown key, a missing one or a value of another type is an
error that says where it stands; nothing has a meaning that the page doesn't give.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minite_diag.errors import UsageError
from minite_diag.external.join import Rank
from minite_diag.external.modules import (
    PARALLEL,
    SPLITS,
    TABLES,
    HeadCounts,
    ModuleRule,
)
from minite_diag.external.sequences import (
    Call,
    ExternalSequence,
    Token,
    check_ids,
    read_sequence,
)

FILE: Final = "manifest.json"
TOKENS_FILE: Final = "tokens.jsonl"
FORMATS: Final = ("sharded", "te-dumps", "sglang-dumper")
VERSION: Final = 1
LAYOUTS: Final = ("packed", "bsh", "sbh")
"""Order of a call's rows: sequences one after the other; or padded to `length`, sequence by
sequence (bsh) or position by position (sbh, Megatron's)."""

DTYPES: Final = ("bfloat16", "float16", "float32")
_REQUIRED: Final = object()


@dataclass(frozen=True)
class Manifest:
    """What a folder says of itself; empty tuples where it says nothing."""

    where: str
    format: str
    producer: str = ""
    dtype: str = ""
    counts: HeadCounts = field(default_factory=HeadCounts)
    num_experts: int = 0
    ranks: tuple[Rank, ...] = ()
    rules: tuple[ModuleRule, ...] = ()
    sequences: tuple[ExternalSequence, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def tensor_ranks(self) -> int:
        """Ranks that share the tensors of a layer."""
        return 1 + max((rank.tensor for rank in self.ranks), default=0)

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share the tensors of an expert."""
        return 1 + max((rank.expert_tensor for rank in self.ranks), default=0)


class Record:
    """A JSON object that is read key by key."""

    def __init__(self, where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise UsageError(f"{where} is not a JSON object", "see docs/traces.md")
        self.where = where
        self._left = dict(value)
        self._known: list[str] = []

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        if key in self._left:
            return self._left.pop(key)
        if default is _REQUIRED:
            raise UsageError(f"{self.where} has no {key!r}", "see docs/traces.md")
        return default

    def _wrong(self, key: str, value: Any, what: str) -> UsageError:
        shown = json.dumps(value, ensure_ascii=True)
        shown = shown if len(shown) < 60 else shown[:57] + "..."
        return UsageError(f"{self.where}: {key} is {shown}, not {what}", "see docs/traces.md")

    def text(self, key: str, default: Any = _REQUIRED, known: Iterable[str] | None = None) -> str:
        """A text that isn't empty, one of `known` if that is given."""
        value = self._take(key, default)
        if value == default and default is not _REQUIRED:
            return str(value)
        if known is not None and value not in known:
            raise self._wrong(key, value, f"one of {', '.join(known)}")
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self._wrong(key, value, "a printable text")
        return value

    def integer(self, key: str, default: Any = _REQUIRED, least: int = 0) -> int:
        """An integer of at least `least`."""
        value = self._take(key, default)
        if type(value) is not int or not least <= value < 2**31:
            raise self._wrong(key, value, f"an integer from {least}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false if it isn't there."""
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def items(self, key: str, default: Any = _REQUIRED) -> list[Any]:
        """A list that isn't empty, unless it isn't there."""
        value = self._take(key, default)
        if not isinstance(value, list) or (not value and value is not default):
            raise self._wrong(key, value, "a list with something in it")
        return value

    def texts(self, key: str, default: Any = _REQUIRED) -> tuple[str, ...]:
        """A text or a list of them."""
        value = self._take(key, default)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, (list, tuple)) or not all(
            isinstance(item, str) and item.isprintable() and item for item in listed
        ):
            raise self._wrong(key, value, "a printable text or a list of them")
        return tuple(listed)

    def span(self, key: str) -> tuple[int, int] | None:
        """[start, stop), or None if it isn't there."""
        value = self._take(key, None)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(v) is int for v in value)
            or not 0 <= value[0] < value[1]
        ):
            raise self._wrong(key, value, "[start, stop] with start < stop")
        return value[0], value[1]

    def whole(self, key: str, default: Any) -> Any:
        """Whatever is there."""
        return self._take(key, default)

    def done(self) -> None:
        """Raises UsageError for a key that nobody asked for."""
        if self._left:
            unknown = sorted(self._left)[0]
            near = difflib.get_close_matches(unknown, self._known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self._known)}"
            raise UsageError(f"{self.where}: unknown key {unknown!r}", hint)


def read_json(file: Path) -> Any:
    """Parse a file; raises UsageError, also for a name that occurs twice in one object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} occurs twice in one object")
        return dict(pairs)

    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"can't read {file}: {error}", "give JSON in UTF-8") from error


def has_manifest(folder: Path) -> bool:
    """Whether the folder describes itself."""
    return (folder / FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read and check FOLDER/manifest.json; raises UsageError."""
    where = str(folder / FILE)
    record = Record(where, read_json(folder / FILE))
    format = record.text("format", known=FORMATS)
    version = record.integer("version")
    if version != VERSION:
        raise UsageError(f"{where} has version {version}", f"this version reads {VERSION}")
    producer = record.text("producer", "")
    dtype = record.text("dtype", "", DTYPES)
    counts, num_experts = _model(where, record.whole("model", None))
    is_sharded = format == "sharded"
    ranks = tuple(_ranks(where, record.items("ranks", _REQUIRED if is_sharded else []), is_sharded))
    rules = _rules(where, record.whole("modules", []))
    sequences = [
        read_sequence(f"{where}: sequences[{i}]", _known_sequence(where, i, item), i)
        for i, item in enumerate(record.items("sequences", []))
    ]
    check_ids(where, sequences)
    calls = tuple(_calls(where, record.items("calls", []), sequences))
    record.done()
    _check_ranks(where, ranks, num_experts)
    return Manifest(
        where, format, producer, dtype, counts, num_experts, ranks, rules, tuple(sequences), calls
    )


def _model(where: str, value: Any) -> tuple[HeadCounts, int]:
    if value is None:
        return HeadCounts(), 0
    record = Record(f"{where}: model", value)
    counts = HeadCounts(
        record.integer("num_attention_heads", 0),
        record.integer("num_query_groups", 0),
        record.integer("head_dim", 0),
    )
    num_experts = record.integer("num_experts", 0)
    record.done()
    return counts, num_experts


def _ranks(where: str, items: list[Any], is_sharded: bool) -> Iterator[Rank]:
    for i, item in enumerate(items):
        record = Record(f"{where}: ranks[{i}]", item)
        rank = Rank(
            f"ranks[{i}]",
            record.texts("files") if is_sharded else (),
            record.integer("tensor", 0),
            record.integer("expert_tensor", 0),
            record.integer("data", 0),
            record.span("experts"),
            record.integer("layer_offset", 0),
        )
        record.done()
        yield rank


def _check_ranks(where: str, ranks: tuple[Rank, ...], num_experts: int) -> None:
    for name in ("tensor", "expert_tensor", "data"):
        there = {getattr(rank, name) for rank in ranks}
        missing = sorted(set(range(max(there, default=-1) + 1)) - there)
        if missing:
            raise UsageError(
                f"{where}: no rank has {name} {missing[0]}, one has {max(there)}",
                "add the rank that is missing, or count from 0",
            )
    spans = sorted({rank.experts for rank in ranks if rank.experts is not None})
    if not spans and not num_experts:
        return
    reached = 0
    for start, stop in spans:
        if start != reached:
            what = "twice" if start < reached else "on no rank"
            raise UsageError(
                f"{where}: expert {min(start, reached)} is {what}: the ranks hold "
                f"{', '.join(f'{a} to {b - 1}' for a, b in spans)}",
                "correct `experts` of the ranks",
            )
        reached = stop
    if reached != num_experts:
        raise UsageError(
            f"{where}: the ranks hold experts up to {reached - 1}, the model has {num_experts}",
            "add the rank that is missing, or correct model.num_experts",
        )


def _rules(where: str, value: Any) -> tuple[ModuleRule, ...]:
    if isinstance(value, str):
        if value not in TABLES:
            raise UsageError(
                f"{where}: modules is {value!r}", f"name {' or '.join(TABLES)}, or list them"
            )
        return TABLES[value]
    if not isinstance(value, list):
        raise UsageError(
            f"{where}: modules is no list", f"name {' or '.join(TABLES)}, or list them"
        )
    return tuple(_rule(f"{where}: modules[{i}]", item) for i, item in enumerate(value))


def _rule(where: str, item: Any) -> ModuleRule:
    record = Record(where, item)
    rule = ModuleRule(
        record.text("native"),
        record.texts("fqn"),
        record.text("parallel", "replicated", PARALLEL),
        record.text("split", "none", SPLITS),
        record.flag("sequence_parallel"),
        record.flag("partial"),
    )
    record.done()
    expected = {"none": 1, "qkv": 3, "qkv-interleaved": 3}.get(rule.split)
    if not rule.fqns or (expected is not None and len(rule.fqns) != expected):
        raise UsageError(
            f"{where}: split {rule.split!r} with {len(rule.fqns)} names in fqn",
            f"give {expected or 'two or more'}",
        )
    for fqn in rule.fqns:
        for name in ("{layer}", "{expert}"):
            if (name in fqn) != (name in rule.native):
                raise UsageError(
                    f"{where}: {name} must be in native and in fqn, or in neither", f"see {fqn}"
                )
    return rule


def _known_sequence(where: str, number: int, item: Any) -> dict[str, Any]:
    record = Record(f"{where}: sequences[{number}]", item)
    known = ("id", "token_ids", "prompt_length", "logprobs")
    found = {key: record.whole(key, None) for key in known}
    record.done()
    return {key: value for key, value in found.items() if value is not None}


def _calls(where: str, items: list[Any], sequences: list[ExternalSequence]) -> Iterator[Call]:
    lengths = {sequence.id: len(sequence.token_ids) for sequence in sequences}
    seen: set[str] = set()
    for i, item in enumerate(items):
        record = Record(f"{where}: calls[{i}]", item)
        name = record.text("name")
        if name in seen or "/" in name:
            raise UsageError(
                f"{where}: calls[{i}]: name {name!r} occurs twice or has a /", "rename it"
            )
        seen.add(name)
        layout = record.text("layout", "packed", LAYOUTS)
        spans = [
            _span(f"{record.where}.sequences[{k}]", value, lengths)
            for k, value in enumerate(record.items("sequences"))
        ]
        length = record.integer("length", 0)
        record.done()
        yield Call(name, tuple(call_rows(record.where, layout, spans, length)))


def _span(where: str, value: Any, lengths: dict[str, int]) -> tuple[str, int, int]:
    """A sequence's id, or {id, start, stop}: the tokens of it that a call computed."""
    start, stop = 0, None
    if isinstance(value, dict):
        record = Record(where, value)
        value = record.text("id")
        start, stop = record.integer("start", 0), record.whole("stop", None)
        record.done()
    if not isinstance(value, str) or value not in lengths:
        raise UsageError(f"{where} is {value!r}, no id of `sequences`", "name one of them")
    stop = lengths[value] if stop is None else stop
    if type(stop) is not int or not start < stop <= lengths[value]:
        raise UsageError(
            f"{where}: {start} to {stop} of {lengths[value]} tokens", "give positions of it"
        )
    return value, start, stop


def call_rows(
    where: str, layout: str, spans: list[tuple[str, int, int]], length: int
) -> list[Token | None]:
    """The token of each row, spans (id, start, stop) laid out; raises UsageError."""
    columns: list[list[Token | None]] = [
        [Token(id, position) for position in range(start, stop)] for id, start, stop in spans
    ]
    if layout == "packed":
        return [token for column in columns for token in column]
    longest = max(len(column) for column in columns)
    if length < longest:
        raise UsageError(
            f"{where}: layout {layout} of length {length} with {longest} tokens",
            "give the padded length of the batch",
        )
    padded = [column + [None] * (length - len(column)) for column in columns]
    if layout == "bsh":
        return [token for column in padded for token in column]
    return [column[i] for i in range(length) for column in padded]


def calls_by_number(own: Manifest, there: Iterable[int], word: str) -> dict[int, int]:
    """Number of a dump's step -> the call that is named so; `word` is the dump's name for a step.

    Raises UsageError for a call whose name is none of the numbers that are there.
    """
    numbers = sorted(there)
    found = {}
    for i, call in enumerate(own.calls):
        if not call.name.isdigit() or int(call.name) not in numbers:
            raise UsageError(
                f"{own.where}: calls[{i}]: no {word} {call.name!r} in the dump",
                f"name calls by the {word}s: {', '.join(map(str, numbers[:5]))}",
            )
        found[int(call.name)] = i
    return found


def read_tokens(folder: Path) -> list[tuple[ExternalSequence, int | None]]:
    """Sequences of FOLDER/tokens.jsonl in the order of the rows, each with its `step` if given."""
    file = folder / TOKENS_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"can't read {file}: {error}", "write one JSON object a line: id, token_ids, step"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: not JSON ({error})", "one object a line") from error
        record = Record(where, value)
        step = record.whole("step", None)
        if step is not None and (type(step) is not int or step < 0):
            raise UsageError(f"{where}: step is {step!r}", "give the iteration's number")
        rest = {key: item for key, item in value.items() if key != "step"}
        found.append((read_sequence(where, _known_sequence(where, number, rest), number), step))
    check_ids(str(file), [sequence for sequence, _ in found])
    if not found:
        raise UsageError(f"{file} holds no sequence", "one JSON object a line")
    return found
