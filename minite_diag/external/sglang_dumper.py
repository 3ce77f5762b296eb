"""A folder that SGLang's dumper wrote (`sglang/srt/debug_utils/dumper.py`) -> one imported side.

One file per tensor, `step=0___rank=0___dump_index=7___name=...___....pt`, with a dict of `value` and
`meta`. The dumper's `core` fields say which token each row is; its names in mode `all`
(`non_intrusive__MODULE.inputs.0`, `...output`) say what each tensor is. Any program may have run
the dumper: SGLang, or a training framework with modules of Megatron's names.

Knows files and names; no engine. Invariant: a tensor gets a site only where the module's name and
the place in its inputs or outputs leave no doubt; all others are listed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.errors import UsageError
from minite_diag.external.join import Rank
from minite_diag.external.manifest import FILE, Manifest, has_manifest, read_manifest
from minite_diag.external.modules import TABLES, HeadCounts, Module, ModuleRule, ModuleTable
from minite_diag.external.sequences import MIN_TOKENS, Call, ExternalSequence, Token
from minite_diag.external.sharded import ROWS, Held, ShardGroups
from minite_diag.external.side import ImportedSide
from minite_diag.external.tensor_files import is_plain_tensor, load_pt
from minite_diag.site import KINDS

PREFIX: Final = "non_intrusive__"
_PLACE: Final = re.compile(r"(?:(?P<module>.+)\.)?(?P<way>inputs|output)(?:\.(?P<rest>[\w.]+))?")
_FIELDS: Final = (
    *("input_ids", "positions", "seq_lens", "rids", "req_pool_indices"),
    *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
)
"""The dumper's `core` fields: which token each row is."""
_EMBEDDINGS: Final = ("embed_tokens", "word_embeddings")
_LAYER: Final = re.compile(r"(.*\blayers\.)(\d+)$")


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


def is_sglang_dump(folder: Path) -> bool:
    """Whether the folder, or one folder in it, holds files of the dumper."""
    return bool(_experiments(folder))


def _experiments(folder: Path) -> list[Path]:
    candidates = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
    return [p for p in candidates if next(p.glob("step=*___rank=*___dump_index=*.pt"), None)]


def _list(folder: Path) -> list[Dumped]:
    found = []
    for file in sorted(folder.glob("*.pt")):
        if not file.name.isprintable():
            raise UsageError(f"{folder}: {file.name!r} is no UTF-8 name", "rename or remove it")
        if not file.name.startswith("step="):
            continue
        tags = _tags(file.name.removesuffix(".pt"))
        try:
            step, rank, index = (int(tags[k]) for k in ("step", "rank", "dump_index"))
            found.append(Dumped(file, step, rank, index, tags["name"]))
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"{file} lacks step, rank, dump_index or name", "SGLang's dumper writes them"
            ) from error
    return sorted(found, key=lambda d: (d.step, d.rank, d.index))


def _tags(stem: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in stem.split("___"))
    tags: dict[str, str] = {}
    for key, _, value in pairs:
        tags.setdefault(key, value)
    return tags


def read_sglang_dump(folder: Path, counts: HeadCounts) -> ImportedSide:
    """Read a dumper's folder; raises UsageError for what is wrong or says nothing of its tokens."""
    experiments = _experiments(folder)
    if len(experiments) != 1:
        names = ", ".join(p.name for p in experiments[:3])
        raise UsageError(
            f"{folder} holds {len(experiments) or 'no'} dumps {names}",
            "give the folder of one: the dumper's DUMPER_EXP_NAME",
        )
    own = read_manifest(folder) if has_manifest(folder) else None
    dumps = _list(experiments[0])
    left_out: dict[str, str] = {}
    if own is not None and own.calls:
        sequences, calls, steps = list(own.sequences), list(own.calls), _named_steps(own, dumps)
    else:
        sequences, calls, steps = _tokens(dumps, left_out)
    manifest = _manifest(folder, own, dumps, calls)
    groups = ShardGroups(manifest, left_out)
    reader = _Reader(manifest, groups, steps, {dumped.name for dumped in dumps})
    for dumped in dumps:
        reader.add(dumped)
    if not len(groups):
        raise UsageError(
            f"{folder}: no tensor has a known name; there is {next(iter(left_out), 'nothing')}",
            "dump with DUMPER_NON_INTRUSIVE_MODE=all, or list `modules` in a manifest.json",
        )
    return ImportedSide(
        folder=folder,
        format="sglang-dumper",
        producer=manifest.producer or _producer(dumps[0]),
        dtype=manifest.dtype,
        counts=manifest.counts if manifest.counts.is_known else counts,
        sequences=tuple(sequences),
        calls=tuple(calls),
        tensors=groups.tensors,
        left_out=left_out,
        invisible=groups.invisible,
    )


def _producer(first: Dumped) -> str:
    meta = first.load()["meta"]
    found = [k.removesuffix("_parallel_info") for k in meta if str(k).endswith("_parallel_info")]
    return f"{' and '.join(found) or 'a program'} with SGLang's dumper"


def _named_steps(own: Manifest, dumps: list[Dumped]) -> dict[int, int]:
    """Step -> call, whose name is the step's number."""
    there = {dumped.step for dumped in dumps}
    steps = {}
    for i, call in enumerate(own.calls):
        if not call.name.isdigit() or int(call.name) not in there:
            raise UsageError(
                f"{own.where}: calls[{i}]: no step {call.name!r} in the dump",
                f"name calls by the steps: {', '.join(map(str, sorted(there)[:5]))}",
            )
        steps[int(call.name)] = i
    return steps


def _manifest(
    folder: Path, own: Manifest | None, dumps: list[Dumped], calls: list[Call]
) -> Manifest:
    """What the folder says of itself, filled up with what the dumper wrote."""
    base = own or Manifest(str(folder / FILE), "sglang-dumper")
    ranks = base.ranks or tuple(_ranks(dumps))
    rules = base.rules or _best_table(dumps)
    return dataclasses.replace(base, ranks=ranks, rules=rules, calls=tuple(calls))


def _ranks(dumps: list[Dumped]) -> Iterator[Rank]:
    """Places of the ranks from the parallel state that the dumper wrote into each file."""
    first: dict[int, Dumped] = {}
    for dumped in dumps:
        first.setdefault(dumped.rank, dumped)
    for number in range(max(first) + 1):
        if number not in first:
            raise UsageError(
                f"{dumps[0].file.parent}: rank {number} of {max(first) + 1} wrote nothing",
                "copy the files of every rank",
            )
        meta = first[number].load()["meta"]
        info = meta.get("sglang_parallel_info") or meta.get("megatron_parallel_info") or {}
        if len(first) > 1 and "tp_rank" not in info:
            raise UsageError(
                f"{first[number].file}: {len(first)} ranks, and no parallel state in `meta`",
                "say what they are: `ranks` in a manifest.json in that folder",
            )
        for key in ("attn_dp_size", "attn_cp_size", "cp_size", "moe_dp_size"):
            if info.get(key, 1) != 1:
                raise UsageError(
                    f"{first[number].file}: {key} is {info[key]}",
                    "its rows can't be put together: dump without it",
                )
        yield Rank(
            f"rank {number}", (), int(info.get("tp_rank", 0)), 0, int(info.get("dp_rank", 0))
        )


def _best_table(dumps: list[Dumped]) -> tuple[ModuleRule, ...]:
    """The table of names that most of the dump's modules are in."""
    modules = {place[0] for d in dumps if (place := _place(d.name)) and place[0]}

    def known(rules: tuple[ModuleRule, ...]) -> int:
        table = ModuleTable(rules)
        return sum(table.find(name) is not None for name in modules)

    best = max(TABLES.values(), key=known)
    # SGLang gathers the logits of all ranks before a hook sees them.
    return tuple(
        dataclasses.replace(rule, parallel="replicated") if rule.native == "lm_head" else rule
        for rule in best
    )


def _place(name: str) -> tuple[str, str, str] | None:
    """(module, inputs or output, index) of a name of mode `all`."""
    if not name.startswith(PREFIX):
        return None
    match = _PLACE.fullmatch(name.removeprefix(PREFIX))
    return (match["module"] or "", match["way"], match["rest"] or "") if match else None


@dataclass
class _Growing:
    """A request's tokens while the steps are read."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    decoded_from: int | None = None


def _tokens(
    dumps: list[Dumped], left_out: dict[str, str]
) -> tuple[list[ExternalSequence], list[Call], dict[int, int]]:
    """Sequences and calls from the `core` fields of rank 0 (of every data rank, if several)."""
    by_step: dict[int, dict[str, Dumped]] = defaultdict(dict)
    for dumped in dumps:
        if dumped.rank == 0 and dumped.name in _FIELDS:
            by_step[dumped.step].setdefault(dumped.name, dumped)
    growing: dict[str, _Growing] = {}
    done: list[_Growing] = []
    calls: list[Call] = []
    steps: dict[int, int] = {}
    for step in sorted({dumped.step for dumped in dumps}):
        fields = by_step[step]
        if "input_ids" not in fields:
            left_out[f"step {step}"] = "it has no input_ids: which tokens its rows are is unknown"
            continue
        rows = _rows_of_step(step, fields, growing, done, left_out)
        steps[step] = len(calls)
        calls.append(Call(str(step), tuple(rows)))
    done += growing.values()
    short = {g.id for g in done if len(g.token_ids) < MIN_TOKENS}
    for name in short:
        left_out[f"sequence {name}"] = "fewer than 2 tokens"
    calls = [
        Call(c.name, tuple(None if t and t.sequence in short else t for t in c.rows)) for c in calls
    ]
    sequences = [_finished(g) for g in done if g.id not in short]
    if not sequences:
        raise UsageError(
            f"{dumps[0].file.parent}: no step says which tokens its rows are",
            "dump with DUMPER_NON_INTRUSIVE_MODE=core or all (input_ids, positions, seq_lens), or "
            "write sequences and calls into a manifest.json in that folder",
        )
    return sequences, calls, steps


def _finished(growing: _Growing) -> ExternalSequence:
    length = len(growing.token_ids)
    prompt = growing.decoded_from or 0
    return ExternalSequence(
        growing.id,
        tuple(growing.token_ids),
        min(prompt, length - 1),
        (None,) * length,
        growing.decoded_from,
    )


def _integers(dumped: Dumped) -> torch.Tensor:
    tensor = dumped.tensor()
    if tensor.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"{dumped.file}: {tensor.dtype} for {dumped.name}", "dump integers")
    return tensor.to(torch.int64)


def _rows_of_step(
    step: int,
    fields: dict[str, Dumped],
    growing: dict[str, _Growing],
    done: list[_Growing],
    left_out: dict[str, str],
) -> list[Token | None]:
    ids = _integers(fields["input_ids"])
    if "seq_lens" not in fields:
        return _rows_of_training_step(step, fields, ids, done)
    if "positions" not in fields:
        raise UsageError(
            f"{fields['input_ids'].file.parent}: step {step} has input_ids and no positions",
            "dump both, or write sequences and calls into a manifest.json in that folder",
        )
    positions = _integers(fields["positions"]).flatten().tolist()
    lengths = _integers(fields["seq_lens"]).flatten().tolist()
    names = _request_names(fields, len(lengths))
    tokens = ids.flatten().tolist()
    if len(tokens) != len(positions):
        raise UsageError(
            f"{fields['positions'].file}: {len(positions)} positions for {len(tokens)} tokens",
            "the dump is damaged: dump again",
        )
    rows: list[Token | None] = []
    for name, length in zip(names, lengths, strict=True):
        start = len(rows)
        end = start
        while end < len(tokens) and positions[end] != length - 1:
            end += 1
        if end == len(tokens):
            raise UsageError(
                f"{fields['seq_lens'].file}: no row of step {step} is position {length - 1} of "
                f"request {name}",
                "a padded batch can't be read: dump without CUDA graphs",
            )
        own = slice(start, end + 1)
        rows += _grow(name, tokens[own], positions[own], growing, done, left_out)
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


def _grow(
    name: str,
    tokens: list[int],
    positions: list[int],
    growing: dict[str, _Growing],
    done: list[_Growing],
    left_out: dict[str, str],
) -> list[Token | None]:
    """A request's rows of one step; a request that starts anew ends the one of its name."""
    first = positions[0]
    if first == 0 and name in growing:
        done.append(growing.pop(name))
    if name not in growing:
        taken = {g.id for g in (*done, *growing.values())}
        unique = next(n for i in range(len(taken) + 1) if (n := _numbered(name, i)) not in taken)
        growing[name] = _Growing(unique)
    request = growing[name]
    if positions != list(range(len(request.token_ids), len(request.token_ids) + len(tokens))):
        left_out[f"request {name} at position {first}"] = (
            f"its first {first} tokens are not in the dump: they came from the prefix cache"
        )
        return [None] * len(tokens)
    if len(tokens) == 1 and request.token_ids and request.decoded_from is None:
        request.decoded_from = first
    elif len(tokens) > 1:
        request.decoded_from = None
    request.token_ids += tokens
    return [Token(request.id, position) for position in positions]


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name}-{number + 1}"


def _rows_of_training_step(
    step: int, fields: dict[str, Dumped], ids: torch.Tensor, done: list[_Growing]
) -> list[Token | None]:
    """A batch of a training framework: packed with cu_seqlens_q, or [batch, tokens]."""
    if "cu_seqlens_q" in fields:
        ends = _integers(fields["cu_seqlens_q"]).flatten().tolist()
        flat = ids.flatten().tolist()
        if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > len(flat):
            raise UsageError(
                f"{fields['cu_seqlens_q'].file}: {ends[:6]}... for {len(flat)} tokens",
                "it must rise from 0 to the number of tokens",
            )
        rows: list[Token | None] = []
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            done.append(_Growing(f"step-{step}-sequence-{i}", flat[start:end]))
            rows += [Token(done[-1].id, position) for position in range(end - start)]
        return rows + [None] * (len(flat) - len(rows))
    if ids.dim() != 2:
        raise UsageError(
            f"{fields['input_ids'].file}: {list(ids.shape)} and no seq_lens or cu_seqlens_q",
            "write sequences and calls into a manifest.json in that folder",
        )
    batch = [_Growing(f"step-{step}-sequence-{i}", row) for i, row in enumerate(ids.tolist())]
    done += batch
    # Megatron's modules see [tokens, batch, hidden].
    return [Token(row.id, position) for position in range(ids.shape[1]) for row in batch]


class _Reader:
    """Gives each dumped tensor its module and kind, and the calls their rows."""

    def __init__(
        self, manifest: Manifest, groups: ShardGroups, steps: dict[int, int], names: set[str]
    ) -> None:
        self.manifest, self.groups, self.steps = manifest, groups, steps
        self.table = ModuleTable(manifest.rules)
        self._seen: dict[tuple[int, int, str, str], Dumped] = {}
        places = [place for name in names if (place := _place(name))]
        # A fused add and norm returns (normal, sum): what it normalized is the sum.
        self._fused = {module for module, way, rest in places if (way, rest) == ("output", "1")}
        layers = [int(m[2]) for module, _, _ in places if (m := _LAYER.fullmatch(module))]
        self._last_layer = max(layers, default=0)

    def add(self, dumped: Dumped) -> None:
        """Enter one file."""
        if dumped.name in _FIELDS or dumped.step not in self.steps:
            return
        if "recompute_status=recompute" in dumped.file.name:
            self.groups.left_out[dumped.name] = "computed again for the backward pass"
            return
        found = [
            (module, kind)
            for native, kind in self._sites(dumped.name)
            if (module := self.table.find(native)) is not None
        ]
        if not found:
            self.groups.left_out.setdefault(dumped.name, "its name says no site")
        for module, kind in found:
            self._enter(dumped, module, kind)

    def _sites(self, name: str) -> list[tuple[str, str]]:
        """(module, kind) of a dumped name; a name may also say them itself, as MODULE:KIND."""
        native, _, kind = name.rpartition(":")
        if native and kind in KINDS:
            return [(native, kind)]
        place = _place(name)
        if place is None:
            return []
        module, way, rest = place
        leaf = module.rpartition(".")[2]
        if "norm" in leaf:
            return self._norm_sites(module, way, rest)
        first = rest in ("", "0")
        if leaf == "logits_processor":
            return [("lm_head", "logits")] * (rest == "next_token_logits")
        if leaf == "topk":
            experts = module.removesuffix("topk") + "experts"
            kinds = {("output", "0"): "topk_weights", ("output", "1"): "topk_ids"}
            return [(experts, kinds[way, rest])] if (way, rest) in kinds else []
        if leaf == "attn" and way == "inputs":
            parent = module.removesuffix("attn")
            ropes = {"0": "q_rope", "1": "k_rope"}
            return [(parent + ropes[rest], "output")] if rest in ropes else []
        if _LAYER.fullmatch(module) and (way == "inputs" or self._fused):
            return []  # positions; and the sum of the two addends is in the next norm
        if leaf in _EMBEDDINGS and way == "inputs":
            return []
        if way == "output" and first:
            return [(module, "router_logits" if leaf == "gate" else "output")]
        return [(module, "input")] if way == "inputs" and first else []

    def _norm_sites(self, module: str, way: str, rest: str) -> list[tuple[str, str]]:
        if way == "output" and rest in ("", "0"):
            return [(module, "output")]
        if way == "inputs":
            return [(module, "input")] if rest == "0" and module not in self._fused else []
        found = [(module, "input")] if rest == "1" else []
        parent, _, leaf = module.rpartition(".")
        layer = _LAYER.fullmatch(parent)
        if found and leaf == "input_layernorm" and layer is not None:
            found.append((f"{layer[1]}{int(layer[2]) - 1}", "output"))
        elif found and leaf == "norm" and layer is None:
            found.append((f"{parent}.layers.{self._last_layer}", "output"))
        return found

    def _enter(self, dumped: Dumped, module: Module, kind: str) -> None:
        if dumped.rank >= len(self.manifest.ranks):
            raise UsageError(
                f"{self.manifest.where}: the dump has a rank {dumped.rank}", "list every rank"
            )
        before = self._seen.setdefault((dumped.step, dumped.rank, module.native, kind), dumped)
        if before is not dumped:
            raise UsageError(
                f"{before.file} and {dumped.file.name} are the same tensor of one step",
                "call dumper.step() after each forward pass",
            )
        call = self.steps[dumped.step]
        rank = self.manifest.ranks[dumped.rank]
        rows = self.manifest.calls[call].rows
        load = _by_row(dumped, len(rows)) if kind != "logits" else dumped.tensor
        held = Held(rank, load, str(dumped.file))
        self.groups.add(call, module, kind, held, order=dumped.index)
        if kind == "logits" and dumped.name.endswith("next_token_logits"):
            self.groups.add(call, module, ROWS, Held(rank, lambda: _last_rows(rows), held.where))


def _by_row(dumped: Dumped, num_rows: int) -> Callable[[], torch.Tensor]:
    """A tensor with a row for each token: norms of heads have one for each head of it."""

    def load() -> torch.Tensor:
        tensor = dumped.tensor()
        is_by_head = tensor.dim() == 2 and num_rows and len(tensor) > num_rows
        if is_by_head and len(tensor) % num_rows == 0:
            return tensor.reshape(num_rows, -1)
        return tensor

    return load


def _last_rows(rows: Sequence[Token | None]) -> torch.Tensor:
    """Index of each sequence's last row: what SGLang computes logits of."""
    last = {token.sequence: i for i, token in enumerate(rows) if token is not None}
    return torch.tensor(list(last.values()), dtype=torch.int64)
