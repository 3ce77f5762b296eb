"""A folder that SGLang's dumper wrote (`sglang/srt/debug_utils/dumper.py`) -> one imported side.

One file per tensor, `step=0___rank=0___dump_index=7___name=...___....pt`, with a dict of `value` and
`meta`. The dumper's `core` fields say which token each row is; its names in mode `all`
(`non_intrusive__MODULE.inputs.0`, `...output`) say what each tensor is. Any program may have run
the dumper: SGLang, or a training framework with modules of Megatron's names.

Knows names; no engine. Invariant: a tensor gets a site only where the module's name and
the place in its inputs or outputs leave no doubt; all others are listed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.errors import UsageError
from minite_diag.external.join import Rank
from minite_diag.external.manifest import (
    FILE,
    Manifest,
    calls_by_number,
    has_manifest,
    read_manifest,
)
from minite_diag.external.modules import (
    TABLES,
    HeadCounts,
    Module,
    ModuleRule,
    ModuleTable,
    output_kind,
)
from minite_diag.external.sequences import Call
from minite_diag.external.sglang_tokens import FIELDS, Dumped, Steps, read_steps, steps_of
from minite_diag.external.sharded import EXPERT_ROWS, ROWS, Held, ShardGroups
from minite_diag.external.side import STATIC, ImportedSide
from minite_diag.site import KINDS, STATIC_KINDS

PREFIX: Final = "non_intrusive__"
PARAMETER: Final = "param__"
_PLACE: Final = re.compile(r"(?:(?P<module>.+)\.)?(?P<way>inputs|output)(?:\.(?P<rest>[\w.]+))?")
_PROBABILITIES: Final = ("router",)
"""Megatron's router returns probabilities, not logits."""
_EMBEDDINGS: Final = ("embed_tokens", "word_embeddings")
_LAYER: Final = re.compile(r"(.*\blayers\.)(\d+)$")


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
        named = calls_by_number(own, {dumped.step for dumped in dumps}, "step")
        steps = steps_of(list(own.calls), list(own.sequences), named)
    else:
        steps = read_steps(dumps, left_out)
    manifest = _manifest(folder, own, dumps, steps.calls)
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
        sequences=tuple(steps.sequences),
        calls=tuple(steps.calls),
        tensors=groups.tensors,
        left_out=left_out,
        invisible=groups.invisible,
    )


def _producer(first: Dumped) -> str:
    meta = first.load()["meta"]
    found = [k.removesuffix("_parallel_info") for k in meta if str(k).endswith("_parallel_info")]
    return f"{' and '.join(found) or 'a program'} with SGLang's dumper"


def _manifest(
    folder: Path, own: Manifest | None, dumps: list[Dumped], calls: list[Call]
) -> Manifest:
    """What the folder says of itself, filled up with what the dumper wrote."""
    base = own or Manifest(str(folder / FILE), "sglang-dumper")
    states = _parallel_states(dumps)
    ranks = base.ranks or tuple(_rank(*item) for item in states.items())
    if not base.calls and any(rank.data for rank in ranks):
        raise UsageError(
            f"{folder}: ranks of several batches wrote, and each dumped its own tokens",
            "write sequences and calls, data rank by data rank, into a manifest.json there",
        )
    rules = base.rules or _best_table(dumps)
    if not base.rules and any("sp_rank" in state for state in states.values()):
        rules = tuple(_spread(rule) for rule in rules)
    return dataclasses.replace(base, ranks=ranks, rules=rules, calls=tuple(calls))


def _parallel_states(dumps: list[Dumped]) -> dict[Path, dict[str, Any]]:
    """The first file of each rank, and the parallel state that the dumper wrote into it."""
    first: dict[int, Dumped] = {}
    for dumped in dumps:
        first.setdefault(dumped.rank, dumped)
    missing = sorted(set(range(max(first) + 1)) - first.keys())
    if missing:
        raise UsageError(
            f"{dumps[0].file.parent}: rank {missing[0]} of {max(first) + 1} wrote nothing",
            "copy the files of every rank",
        )
    states = {}
    for _, dumped in sorted(first.items()):
        meta = dumped.load()["meta"]
        state = meta.get("sglang_parallel_info") or meta.get("megatron_parallel_info") or {}
        is_alone = len(first) == 1
        states[dumped.file] = state if is_alone or "tp_rank" in state else {}
    return states


_UNKNOWN_ROWS: Final = ("attn_dp_size", "attn_cp_size", "cp_size", "moe_dp_size")
_UNKNOWN_NAMES: Final = ("pp_size", "ep_size")
"""Of Megatron: a rank counts its own layers and experts from 0."""


def _rank(file: Path, state: dict[str, Any]) -> Rank:
    number = int(_tags(file.name)["rank"])
    if not state and number:
        raise UsageError(
            f"{file}: several ranks wrote, and there is no parallel state in `meta`",
            "say what they are: `ranks` in a manifest.json in that folder",
        )
    for key in _UNKNOWN_ROWS:
        if state.get(key, 1) != 1:
            raise UsageError(
                f"{file}: {key} is {state[key]}", "its rows can't be put together: dump without it"
            )
    for key in _UNKNOWN_NAMES:
        if "moe_ep_size" not in state and state.get(key, 1) != 1:
            raise UsageError(
                f"{file}: {key} is {state[key]}, and layers and experts are counted on each rank",
                "list `ranks` with layer_offset and experts in a manifest.json in that folder",
            )
    return Rank(f"rank {number}", (), int(state.get("tp_rank", 0)), 0, int(state.get("dp_rank", 0)))


def _best_table(dumps: list[Dumped]) -> tuple[ModuleRule, ...]:
    """The table of names that most of the dump's modules are in."""
    modules = {place[0] for d in dumps if (place := _place(d.name)) and place[0]}

    def known(rules: tuple[ModuleRule, ...]) -> int:
        table = ModuleTable(rules)
        return sum(table.find(name) is not None for name in modules)

    return tuple(_as_served(rule) for rule in max(TABLES.values(), key=known))


def _as_served(rule: ModuleRule) -> ModuleRule:
    """SGLang gathers the logits before a hook sees them, and adds ranks' sums as late as it can."""
    if rule.native == "lm_head":
        return dataclasses.replace(rule, parallel="replicated")
    is_sum = rule.parallel == "row" or rule.native.endswith(".mlp.experts")
    return dataclasses.replace(rule, may_be_partial=is_sum and rule.native.startswith("model."))


def _spread(rule: ModuleRule) -> ModuleRule:
    """Megatron's sequence parallelism: rows outside of attention and MLP are spread."""
    is_spread = rule.parallel != "heads" and "{expert}" not in rule.native
    return dataclasses.replace(rule, sequence_parallel=is_spread)


def _place(name: str) -> tuple[str, str, str] | None:
    """(module, inputs or output, index) of a name of mode `all`."""
    if not name.startswith(PREFIX):
        return None
    match = _PLACE.fullmatch(name.removeprefix(PREFIX))
    return (match["module"] or "", match["way"], match["rest"] or "") if match else None


class _Reader:
    """Gives each dumped tensor its module and kind, and the calls their rows."""

    def __init__(
        self, manifest: Manifest, groups: ShardGroups, steps: Steps, names: set[str]
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
        is_parameter = dumped.name.startswith(PARAMETER)
        if dumped.name in FIELDS or not (is_parameter or dumped.step in self.steps.numbers):
            return
        if "recompute_status=recompute" in dumped.file.name:
            self.groups.left_out[dumped.name] = "computed again for the backward pass"
            return
        if dumped.rank >= len(self.manifest.ranks):
            raise UsageError(
                f"{self.manifest.where}: the dump has a rank {dumped.rank}", "list every rank"
            )
        rank = self.manifest.ranks[dumped.rank]
        place = rank.layer_offset, (rank.experts or (0, 0))[0]
        found = [
            (module, output_kind(module) if kind == "output" else kind)
            for native, kind in self._sites(dumped.name)
            if (module := self.table.find(native, *place)) is not None
        ]
        if not found:
            self.groups.left_out.setdefault(dumped.name, "its name says no site")
        for module, kind in found:
            if module.is_expert and kind not in STATIC_KINDS:
                self.groups.left_out.setdefault(dumped.name, EXPERT_ROWS)
            else:
                self._enter(dumped, module, kind)

    def _sites(self, name: str) -> list[tuple[str, str]]:
        """(module, kind) of a dumped name; a name may also say them itself, as MODULE:KIND."""
        native, _, kind = name.rpartition(":")
        if native and kind in KINDS:
            return [(native, kind)]
        if name.startswith(PARAMETER):
            native, _, kind = name.removeprefix(PARAMETER).rpartition(".")
            return [(native, kind)] if kind in ("weight", "bias") else []
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
            return [] if leaf in _PROBABILITIES else [(module, "output")]
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
        rank = self.manifest.ranks[dumped.rank]
        is_static = kind in STATIC_KINDS
        place = (STATIC if is_static else dumped.step, dumped.rank, module.native, kind)
        before = self._seen.setdefault(place, dumped)
        if before is not dumped and is_static and before.step != dumped.step:
            self.groups.left_out[f"{dumped.name} of step {dumped.step}"] = (
                f"the one of step {before.step} is read"
            )
            return
        if before is not dumped:
            raise UsageError(
                f"{before.file} and {dumped.file.name} are the same tensor of one step",
                "call dumper.step() after each forward pass",
            )
        where = str(dumped.file)
        if is_static:
            held = Held(rank, dumped.tensor, where)
            self.groups.add(STATIC, module, kind, held, order=dumped.index)
            return
        call = self.steps.numbers[dumped.step]
        rows = self.manifest.calls[call].rows
        load = _by_row(dumped, len(rows)) if kind != "logits" else dumped.tensor
        self.groups.add(call, module, kind, Held(rank, load, where), order=dumped.index)
        if kind == "logits" and dumped.name.endswith("next_token_logits"):
            last = torch.tensor(self.steps.last_rows[call], dtype=torch.int64)
            self.groups.add(call, module, ROWS, Held(rank, lambda: last, where))


def _by_row(dumped: Dumped, num_rows: int) -> Callable[[], torch.Tensor]:
    """A tensor with a row for each token: norms of heads have one for each head of it."""

    def load() -> torch.Tensor:
        tensor = dumped.tensor()
        is_by_head = tensor.dim() == 2 and num_rows and len(tensor) > num_rows
        if is_by_head and len(tensor) % num_rows == 0:
            return tensor.reshape(num_rows, -1)
        return tensor

    return load
