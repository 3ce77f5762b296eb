"""A folder of per-rank tensors with a manifest (docs/traces.md) -> one imported side.

Knows files and the manifest; no engine. Invariant: shards are joined by what the manifest says of
their module, and a shard, an expert or a rank that is missing is an error with its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from minite_diag.canonical.scales import ENCODE_KINDS
from minite_diag.errors import UsageError
from minite_diag.external.join import Rank, RanksDiffer, Shard, concatenate, join
from minite_diag.external.manifest import Manifest, read_manifest
from minite_diag.external.modules import HeadCounts, Module, ModuleTable
from minite_diag.external.side import STATIC, ImportedSide, ImportedTensor
from minite_diag.external.tensor_files import Loader, inside, open_tensors
from minite_diag.site import KINDS, STATIC_KINDS

ROWS: Final = "rows"
"""Native kind: which rows of the call a routed module saw."""
EXPERT_ROWS: Final = "which tokens an expert saw is not in the dump"
"""Why a dump without `rows` has no activations of experts."""
NATIVE_KINDS: Final = (*KINDS, *ENCODE_KINDS, ROWS)
_LAST: Final = ("output", "router_logits", "topk_ids", "topk_weights", "logits")
_KIND_ORDER: Final = {
    kind: i for i, kind in enumerate((*(k for k in NATIVE_KINDS if k not in _LAST), *_LAST))
}
"""What one module produces, in order: its output comes after the codes of its input."""


@dataclass(frozen=True)
class Held:
    """One rank's tensor of a module, not read yet."""

    rank: Rank
    load: Loader
    where: str

    def shard(self, kind: str) -> Shard:
        """Read it, its leading dims as one where they are rows of tokens."""
        tensor = self.load()
        if kind not in STATIC_KINDS and tensor.dim() > 2:
            tensor = tensor.flatten(0, -2)
        return Shard(self.rank, tensor, self.where)


Group = tuple[int, Module, str]
"""Call, module, kind."""


class ShardGroups:
    """Every tensor of a dump by call, module and kind, and the joined ones in order."""

    def __init__(self, manifest: Manifest, left_out: dict[str, str]) -> None:
        self.manifest, self.left_out = manifest, left_out
        self.invisible: dict[str, str] = {}
        self._held: dict[Group, list[Held]] = defaultdict(list)
        self._order: dict[Group, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self, call: int, module: Module, kind: str, held: Held, *, order: int | None = None
    ) -> None:
        """Enter one rank's tensor; `order` says when it ran, else the table of modules does."""
        self._held[call, module, kind].append(held)
        place = (*module.place, _KIND_ORDER[kind]) if order is None else (order,)
        self._order.setdefault((call, module, kind), place)

    def tensors(self) -> Iterator[ImportedTensor]:
        """Static tensors, then call by call in order."""
        for group in sorted(self._held, key=lambda g: (g[0], self._order[g])):
            if group[2] != ROWS:
                item = self._joined(group)
                if item is not None:
                    yield item

    def _joined(self, group: Group) -> ImportedTensor | None:
        call, module, kind = group
        expert = module.is_expert
        ranks = self.manifest.expert_tensor_ranks if expert else self.manifest.tensor_ranks
        try:
            shards = self._by_data(group, ranks)
            tensor = self._over_data(group, shards)
        except RanksDiffer as differ:
            for fqn in module.fqns:
                self.invisible[f"{fqn}:{ENCODE_KINDS.get(kind, kind)}"] = str(differ)
            return None
        index = None
        if (call, module, ROWS) in self._held:
            rows = (call, module, ROWS)
            index = self._over_data(rows, self._by_data(rows, ranks))
        return ImportedTensor(module, kind, call, tensor, shards[0].where, index, ranks)

    def _by_data(self, group: Group, ranks: int) -> list[Shard]:
        """One joined shard for each data rank that has the tensor."""
        _, module, kind = group
        found: dict[int, list[Shard]] = defaultdict(list)
        for held in self._held[group]:
            found[held.rank.data].append(held.shard(kind))
        return [
            Shard(shards[0].rank, join(module, kind, shards, ranks), shards[0].where)
            for _, shards in sorted(found.items())
        ]

    def _over_data(self, group: Group, shards: list[Shard]) -> torch.Tensor:
        call, module, kind = group
        if call == STATIC or len(shards) == 1:
            self._check_data(group, shards)
            return shards[0].tensor
        self._check_data(group, shards)
        return concatenate(shards, 0, f"{module.native}:{kind}")

    def _check_data(self, group: Group, shards: list[Shard]) -> None:
        """Raises UsageError where data ranks differ in a weight, or one has no rows."""
        call, module, kind = group
        if call == STATIC:
            join(module, kind, [Shard(Rank(""), s.tensor, s.where) for s in shards], 1)
            return
        ranks = {rank.data for rank in self.manifest.ranks}
        missing = sorted(ranks - {shard.rank.data for shard in shards})
        if missing and (call, module, ROWS) not in self._held:
            raise UsageError(
                f"{module.native}:{kind} lacks the rows of data rank {missing[0]}: there is only "
                f"{', '.join(shard.where for shard in shards)}",
                "add that rank's file, or correct the ranks in manifest.json",
            )

    def check_experts(self) -> None:
        """Raises UsageError where some experts of a layer have a weight and others don't."""
        seen: dict[tuple[str, str], set[int]] = defaultdict(set)
        for call, module, kind in self._held:
            if call == STATIC and module.is_expert:
                layer = module.rule.native.replace("{layer}", str(module.place[1]))
                seen[layer, kind].add(module.place[3])
        for (name, kind), experts in sorted(seen.items()):
            missing = sorted(set(range(self.manifest.num_experts)) - experts)
            if missing:
                holder = next(
                    rank
                    for rank in self.manifest.ranks
                    if rank.experts and rank.experts[0] <= missing[0] < rank.experts[1]
                )
                raise UsageError(
                    f"{name}:{kind} lacks expert {missing[0]}, which {holder.name} "
                    f"({', '.join(holder.files)}) should hold",
                    "add it to that file, or correct `experts` in manifest.json",
                )


def read_sharded(folder: Path, model: HeadCounts | None = None) -> ImportedSide:
    """Read a folder with a manifest of format `sharded`; raises UsageError for what is wrong."""
    manifest = read_manifest(folder)
    if not manifest.rules:
        raise UsageError(f"{manifest.where} has no modules", "name a table or list them")
    if not manifest.sequences or not manifest.calls:
        raise UsageError(
            f"{manifest.where} has no {'calls' if manifest.sequences else 'sequences'}",
            "say which token each row is",
        )
    left_out: dict[str, str] = {}
    groups = ShardGroups(manifest, left_out)
    for rank in manifest.ranks:
        _read_rank(folder, manifest, rank, groups)
    if not len(groups):
        example = next(iter(left_out), "nothing")
        raise UsageError(
            f"{folder}: no tensor has a name that `modules` knows; there is {example}",
            "correct `modules` in manifest.json",
        )
    groups.check_experts()
    counts = manifest.counts if manifest.counts.is_known or model is None else model
    return ImportedSide(
        folder=folder,
        format="sharded",
        producer=manifest.producer,
        dtype=manifest.dtype,
        counts=counts,
        sequences=manifest.sequences,
        calls=manifest.calls,
        tensors=groups.tensors,
        left_out=left_out,
        invisible=groups.invisible,
    )


def _read_rank(folder: Path, manifest: Manifest, rank: Rank, groups: ShardGroups) -> None:
    table = ModuleTable(manifest.rules)
    calls = {call.name: i for i, call in enumerate(manifest.calls)}
    seen: dict[str, Path] = {}
    for name in rank.files:
        file = inside(folder, name, f"{manifest.where}: {rank.name}")
        for key, load in open_tensors(file).items():
            if key in seen:
                raise UsageError(f"{key!r} is in {seen[key]} and in {file}", "keep one of them")
            seen[key] = file
            where = f"{file}: {key!r}"
            call, native, kind = _parse(where, key, calls)
            module = table.find(native, rank.layer_offset, (rank.experts or (0, 0))[0])
            if module is None:
                groups.left_out.setdefault(native, "no module of the manifest has this name")
                continue
            _check_expert(where, module, rank, manifest)
            groups.add(call, module, kind, Held(rank, load, where))


def _parse(where: str, key: str, calls: dict[str, int]) -> tuple[int, str, str]:
    """CALL/NATIVE:KIND, or NATIVE:KIND of what doesn't depend on tokens."""
    name, _, kind = key.rpartition(":")
    call, slash, native = name.rpartition("/")
    if not native or kind not in NATIVE_KINDS or not key.isprintable():
        raise UsageError(
            f"{where} is no name of a tensor",
            f"write CALL/MODULE:KIND, KIND one of {', '.join(NATIVE_KINDS)}",
        )
    if slash and call not in calls:
        raise UsageError(f"{where}: no call {call!r}", f"`calls` has {', '.join(list(calls)[:5])}")
    return calls[call] if slash else STATIC, native, kind


def _check_expert(where: str, module: Module, rank: Rank, manifest: Manifest) -> None:
    if not module.is_expert:
        return
    if rank.experts is None:
        raise UsageError(f"{where}: an expert, but {rank.name} has no `experts`", "give its range")
    if module.place[3] >= rank.experts[1]:
        raise UsageError(
            f"{where}: expert {module.place[3] - rank.experts[0]} of a rank that holds "
            f"{rank.experts[1] - rank.experts[0]}",
            "experts are counted from 0 on each rank; correct `experts` or the name",
        )
