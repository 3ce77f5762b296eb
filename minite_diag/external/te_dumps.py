"""A folder that Transformer Engine's debug features wrote (nvdlfw-inspect) -> one imported side.

DumpTensors writes `tensor_dumps/rank_R/iter_NNNNNN/LAYER_TENSOR.pt`, LAYER with `_` for its dots
and TENSOR one of activation, weight, output (and gradient, wgrad, dgrad, which no site has): a dict
of `high_precision` and `quantized`. The quantized one is a pickled object of Transformer Engine; it
is read into a record of its parts, without Transformer Engine and without running its code. The
statistics features write a log of numbers, not tensors: such a folder is refused with that reason.

Knows files and names; no engine. Invariant: which token each row is comes from the user
(tokens.jsonl, or manifest.json): the dump doesn't say it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.errors import UsageError
from minite_diag.external.join import Rank
from minite_diag.external.manifest import (
    FILE,
    TOKENS_FILE,
    Manifest,
    calls_by_number,
    has_manifest,
    read_manifest,
    read_tokens,
)
from minite_diag.external.modules import TABLES, HeadCounts, Module, ModuleTable, output_kind
from minite_diag.external.sequences import Call, ExternalSequence, Token
from minite_diag.external.sharded import EXPERT_ROWS, Held, ShardGroups
from minite_diag.external.side import STATIC, ImportedSide
from minite_diag.external.tensor_files import is_plain_tensor, load_pt
from minite_kernels.nvfp4.layout import unswizzle_scale
from minite_kernels.nvfp4.quantize import global_scale

DUMPS: Final = "tensor_dumps"
STATISTICS: Final = "nvdlfw_inspect_statistics_logs"
E4M3_MAX: Final = 448
BLOCK: Final = 16
NVFP4_KINDS: Final = ("codes", "block_scale", "global_decode_scale")
KINDS: Final = {"activation": "input", "weight": "weight", "output": "output"}
_FILE: Final = re.compile(r"(.+)_(activation|weight|output|gradient|wgrad|dgrad)\.pt", re.S)
_ITERATION: Final = re.compile(r"iter_(\d{6,})")
_RANK: Final = re.compile(r"rank_(\d+)")
_TENSOR: Final = "transformer_engine.pytorch.tensor"


class Number(int):
    """Stands for an enum of Transformer Engine."""


class Nothing:
    """Stands for a quantizer: what it was told is not read."""


@dataclass(frozen=True)
class Nvfp4Parts:
    """What Transformer Engine pickles of an NVFP4Tensor, in its order."""

    shape: tuple[int, ...]
    codes: torch.Tensor | None
    block_scale: torch.Tensor | None
    columnwise_codes: torch.Tensor | None
    columnwise_block_scale: torch.Tensor | None
    amax: torch.Tensor | None
    columnwise_amax: torch.Tensor | None
    fp4_dtype: int = 0
    dtype: torch.dtype = torch.bfloat16
    quantizer: Any = None
    is_swizzled: bool = False
    is_row_scaled: bool = False
    uses_4over6: bool = False
    e4m3_max: int = E4M3_MAX


class OtherParts:
    """Stands for a tensor of another format (FP8): it has no site."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


STAND_INS: Final = (
    (Number, "transformer_engine.pytorch.constants.DType"),
    (Nvfp4Parts, f"{_TENSOR}.nvfp4_tensor._make_nvfp4_tensor_in_reduce_ex"),
    (Nothing, f"{_TENSOR}.nvfp4_tensor.NVFP4Quantizer"),
    (OtherParts, f"{_TENSOR}.float8_tensor._make_float8_tensor_in_reduce_ex"),
    (Nothing, f"{_TENSOR}.float8_tensor.Float8Quantizer"),
    (Nothing, f"{_TENSOR}.float8_tensor.Float8CurrentScalingQuantizer"),
    (OtherParts, f"{_TENSOR}.float8_blockwise_tensor._make_float8_blockwise_tensor_in_reduce_ex"),
    (Nothing, f"{_TENSOR}.float8_blockwise_tensor.Float8BlockQuantizer"),
    (OtherParts, f"{_TENSOR}.mxfp8_tensor._make_mxfp8_tensor_in_reduce_ex"),
    (Nothing, f"{_TENSOR}.mxfp8_tensor.MXFP8Quantizer"),
)
"""Ours, in the place of what Transformer Engine 2.20 pickles by name."""


def is_te_dump(folder: Path) -> bool:
    """Whether nvdlfw-inspect wrote here: dumped tensors or statistics."""
    return _dumps(folder) is not None or (folder / STATISTICS).is_dir()


def _dumps(folder: Path) -> Path | None:
    """The folder of the ranks' folders."""
    for candidate in (folder / DUMPS, folder):
        if candidate.is_dir() and any(_RANK.fullmatch(p.name) for p in candidate.iterdir()):
            return candidate
    return None


def read_te_dumps(folder: Path, counts: HeadCounts) -> ImportedSide:
    """Read a folder of DumpTensors; raises UsageError for what is wrong or says no tokens."""
    root = _dumps(folder)
    if root is None:
        raise UsageError(
            f"{folder} holds statistics of tensors (LogTensorStats and the like), no tensors: a "
            "minimum or a norm has no rows that could be compared",
            "add DumpTensors to the nvdlfw-inspect configuration and run that step again",
        )
    files = list(_files(root))
    if not files:
        raise UsageError(
            f"{root} holds no LAYER_TENSOR.pt", "DumpTensors writes rank_R/iter_NNNNNN/*.pt"
        )
    own = read_manifest(folder) if has_manifest(folder) else None
    left_out: dict[str, str] = {}
    iterations = sorted({file.iteration for file in files})
    if own is not None and own.calls:
        sequences, calls, steps = (
            list(own.sequences),
            list(own.calls),
            calls_by_number(own, iterations, "iteration"),
        )
    else:
        sequences, calls, steps = _tokens(folder, iterations)
    manifest = _manifest(folder, own, files, calls)
    groups = ShardGroups(manifest, left_out)
    reader = _Reader(manifest, groups, steps)
    for file in files:
        reader.add(file)
    if not len(groups):
        raise UsageError(
            f"{folder}: no layer has a known name; there is {next(iter(left_out), 'nothing')}",
            "name the modules as Megatron does (te.Linear(name=...)), or list `modules` in a "
            "manifest.json in that folder",
        )
    groups.check_experts()
    return ImportedSide(
        folder=folder,
        format="te-dumps",
        producer=manifest.producer or "Transformer Engine debug dump",
        dtype=manifest.dtype,
        counts=manifest.counts if manifest.counts.is_known else counts,
        sequences=tuple(sequences),
        calls=tuple(calls),
        tensors=groups.tensors,
        left_out=left_out,
        invisible=groups.invisible,
    )


@dataclass(frozen=True)
class DumpFile:
    """One file of DumpTensors."""

    path: Path
    rank: int
    iteration: int
    layer: str
    tensor: str


def _files(root: Path) -> Iterator[DumpFile]:
    for rank_folder in sorted(root.iterdir()):
        rank = _RANK.fullmatch(rank_folder.name)
        if rank is None or not rank_folder.is_dir():
            continue
        for folder in sorted(rank_folder.iterdir()):
            iteration = _ITERATION.fullmatch(folder.name)
            if iteration is None or not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                if not path.name.isprintable():
                    raise UsageError(f"{folder}: {path.name!r} is no UTF-8 name", "rename it")
                match = _FILE.fullmatch(path.name)
                if match:
                    yield DumpFile(path, int(rank[1]), int(iteration[1]), match[1], match[2])


def _tokens(
    folder: Path, iterations: list[int]
) -> tuple[list[ExternalSequence], list[Call], dict[int, int]]:
    """Sequences of tokens.jsonl, one after the other in the rows of their iteration."""
    file = folder / TOKENS_FILE
    if not file.is_file():
        raise UsageError(
            f"{folder}: the dump doesn't say which tokens its rows are",
            f"write {file}: one JSON object a line with id, token_ids and step, in the order of "
            "the rows (docs/traces.md)",
        )
    by_step: dict[int, list[ExternalSequence]] = defaultdict(list)
    for sequence, step in read_tokens(folder):
        if step is None and len(iterations) > 1:
            raise UsageError(
                f"{file}: {sequence.id} names no step, and iterations "
                f"{', '.join(map(str, iterations[:5]))} are dumped",
                "say which iteration computed it: add step",
            )
        chosen = iterations[0] if step is None else step
        if chosen not in iterations:
            raise UsageError(
                f"{file}: step {chosen} of {sequence.id} is not in the dump",
                f"it has {', '.join(map(str, iterations[:5]))}",
            )
        by_step[chosen].append(sequence)
    calls = [
        Call(str(step), tuple(Token(s.id, i) for s in found for i in range(len(s.token_ids))))
        for step, found in sorted(by_step.items())
    ]
    steps = {step: i for i, step in enumerate(sorted(by_step))}
    return [s for _, found in sorted(by_step.items()) for s in found], calls, steps


def _manifest(
    folder: Path, own: Manifest | None, files: list[DumpFile], calls: list[Call]
) -> Manifest:
    """What the folder says of itself, filled up with what the names say."""
    base = own or Manifest(str(folder / FILE), "te-dumps")
    count = 1 + max(file.rank for file in files)
    if not base.ranks and count > 1:
        raise UsageError(
            f"{folder}: {count} ranks wrote, and nothing says how they share the model",
            "list `ranks` in a manifest.json in that folder, in the order of their numbers",
        )
    ranks = base.ranks or (Rank("rank_0"),)
    if len(ranks) != count:
        raise UsageError(
            f"{base.where}: {len(ranks)} ranks, the dump has rank_0 to rank_{count - 1}",
            "list every rank",
        )
    layers = {file.layer for file in files}

    def known(name: str) -> int:
        table = ModuleTable(TABLES[name], sanitized=True)
        return sum(table.find(layer) is not None for layer in layers)

    rules = base.rules or TABLES[max(TABLES, key=known)]
    return dataclasses.replace(base, ranks=ranks, rules=rules, calls=tuple(calls))


class _Reader:
    """Gives each file its module and kinds, and its iteration the call."""

    def __init__(self, manifest: Manifest, groups: ShardGroups, steps: dict[int, int]) -> None:
        self.manifest, self.groups, self.steps = manifest, groups, steps
        self.table = ModuleTable(manifest.rules, sanitized=True)
        self._parts = functools.lru_cache(maxsize=2)(_parts)
        self._weights: dict[tuple[int, str], int] = {}

    def add(self, file: DumpFile) -> None:
        """Enter a file, or say why it is left out."""
        rank = self.manifest.ranks[file.rank]
        module = self.table.find(file.layer, rank.layer_offset, (rank.experts or (0, 0))[0])
        if module is None:
            self.groups.left_out.setdefault(file.layer, "no module has this name")
            return
        reason = self._reason(file, module)
        if reason is None:
            self._enter(file, module, rank)
        else:
            what = f"{file.layer} {file.tensor} of iteration {file.iteration}"
            self.groups.left_out.setdefault(what, reason)

    def _reason(self, file: DumpFile, module: Module) -> str | None:
        if file.tensor not in KINDS:
            return "gradients have no site"
        if file.iteration not in self.steps:
            return "the tokens of its iteration are not given"
        if file.tensor != "weight":
            return EXPERT_ROWS if module.is_expert else None
        first = self._weights.setdefault((file.rank, file.layer), file.iteration)
        return None if first == file.iteration else f"the weight of iteration {first} is read"

    def _enter(self, file: DumpFile, module: Module, rank: Rank) -> None:
        call = STATIC if file.tensor == "weight" else self.steps[file.iteration]
        found = self._parts(file.path)

        def enter(kind: str, name: str) -> None:
            def load() -> torch.Tensor:
                return _part(self._parts(file.path), file.path, name)

            self.groups.add(call, module, kind, Held(rank, load, str(file.path)))

        kind = output_kind(module) if file.tensor == "output" else KINDS[file.tensor]
        quantized = found.get("quantized")
        if "high_precision" in found:
            enter(kind, "high_precision")
        elif is_plain_tensor(quantized):
            enter(kind, "quantized")  # without quantization both are the module's own tensor
        if quantized is None or is_plain_tensor(quantized):
            return
        reason = unusable(quantized)
        if reason is not None:
            self.groups.left_out[f"{file.layer} {file.tensor} quantized"] = reason
            return
        prefix = "weight" if file.tensor == "weight" else "act"
        for name in NVFP4_KINDS:
            enter(f"{prefix}_{name}", name)


def _parts(file: Path) -> dict[str, Any]:
    """What a file holds; its pages stay on disk until they are asked for."""
    found = load_pt(file, STAND_INS)
    if not isinstance(found, dict) or not found.keys() <= {"high_precision", "quantized"}:
        raise UsageError(
            f"{file} is no dict of high_precision and quantized",
            "Transformer Engine's DumpTensors writes that",
        )
    return found


def _part(found: dict[str, Any], file: Path, name: str) -> torch.Tensor:
    """A tensor of a file: high_precision, quantized, or one of NVFP4_KINDS."""
    value: Any = found.get(name)
    if name in NVFP4_KINDS:
        value = nvfp4_tensors(found["quantized"], str(file))[name]
    if not is_plain_tensor(value):
        raise UsageError(f"{file}: a {type(value).__name__}, not a tensor", "dump it again")
    return torch.Tensor.detach(value)


def unusable(parts: Any) -> str | None:
    """Why a quantized object can't be read as codes and scales of its rows."""
    if not isinstance(parts, Nvfp4Parts):
        return "FP8 tensors have no site"
    if not all(is_plain_tensor(t) for t in (parts.codes, parts.block_scale, parts.amax)):
        return "it holds the transposed copy only"
    if parts.uses_4over6 or parts.e4m3_max != E4M3_MAX:
        return "4over6 scales have another largest value"
    return None


def nvfp4_tensors(parts: Nvfp4Parts, where: str) -> dict[str, torch.Tensor]:
    """Codes [M, K/2], block_scale [M, K/16] without padding, global_decode_scale [] or [M]."""
    codes, scale, amax = parts.codes, parts.block_scale, parts.amax
    assert codes is not None
    assert scale is not None
    assert amax is not None
    codes = codes.reshape(-1, codes.shape[-1]) if codes.dim() else codes
    wrong = codes.dim() != 2 or scale.dim() != 2 or codes.dtype != torch.uint8
    rows, blocks = (0, 0) if wrong else (codes.shape[0], codes.shape[1] * 2 // BLOCK)
    if wrong or scale.shape[0] < rows or scale.shape[1] < blocks or scale.element_size() != 1:
        raise UsageError(
            f"{where}: codes {list(codes.shape)} with scales {list(scale.shape)}",
            "the dump is damaged: dump it again",
        )
    if parts.is_swizzled:
        scale = unswizzle_scale(scale.view(torch.uint8), (rows, blocks))
    scale = scale[:rows, :blocks].contiguous().view(torch.float8_e4m3fn)
    one = amax.float().reshape(()) if amax.numel() == 1 else amax.float().reshape(-1)[:rows]
    # Transformer Engine keeps the amax; its GEMM multiplies by amax / (448 * 6).
    decode = global_scale(
        torch.empty(rows, codes.shape[1] * 2, dtype=torch.bfloat16),
        "te-row-scaled" if parts.is_row_scaled else "te",
        amax=one,
    ).decode
    return {"codes": codes, "block_scale": scale, "global_decode_scale": decode}
