"""One imported side: its tensors in checkpoint terms, written as a trace like an engine's own.

Knows torch and the trace's writer; no foreign format and no engine. Invariant: what a trace holds
are the bytes of the dump (shards joined, rows of padding dropped), under the names that the layout
explains; what could not be used is listed with its reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from minite_diag.canonical.names import SequenceKey
from minite_diag.canonical.scales import public_kind
from minite_diag.capture.sequences import token_rows
from minite_diag.engines.base import Part, ScoredTokens, TokenSequence
from minite_diag.errors import UsageError
from minite_diag.external.join import FEATURES_FIRST, OUTPUTS
from minite_diag.external.modules import HeadCounts, Module, parts_of
from minite_diag.external.sequences import Call, ExternalSequence
from minite_diag.plan import EngineSpec
from minite_diag.site import KINDS, STATIC_KINDS
from minite_diag.trace.store import Row, TraceWriter

STATIC: Final = -1
FLUSH_TENSORS: Final = 4096
"""Tensors whose index rows are in memory."""
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS: Final = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class ImportedTensor:
    """One tensor of a call (or static); `row_index` [R] are its rows among the call's.

    `tensor_ranks`: how many ranks' outputs were joined; `where` says the file, for errors.
    """

    module: Module
    kind: str
    call: int
    tensor: torch.Tensor
    where: str
    row_index: torch.Tensor | None = None
    tensor_ranks: int = 1


@dataclass
class ImportedSide:
    """All that a folder gives. `tensors` yields them in the order in which they ran."""

    folder: Path
    format: str
    producer: str
    dtype: str
    counts: HeadCounts
    sequences: tuple[ExternalSequence, ...]
    calls: tuple[Call, ...]
    tensors: Callable[[], Iterator[ImportedTensor]]
    left_out: dict[str, str] = field(default_factory=dict)
    """Name in the dump -> why it is not in the trace."""
    invisible: dict[str, str] = field(default_factory=dict)
    """Site glob -> why this side can't show it."""


@dataclass
class _Slice:
    """One sequence's rows of a call: a call of their own in the trace.

    An expert that saw a batch saw, of some of its sequences, no token; in a trace that is a tensor
    that isn't there.
    """

    sequence: str
    rows: torch.Tensor
    positions: list[int]
    call: int = STATIC


def _slices(call: Call) -> list[_Slice]:
    rows: dict[str, list[int]] = {}
    for i, token in enumerate(call.rows):
        if token is not None:
            rows.setdefault(token.sequence, []).append(i)
    return [
        _Slice(name, torch.tensor(own), [t.position for i in own if (t := call.rows[i])])
        for name, own in rows.items()
    ]


class SideWriter:
    """Writes one side into `run/traces/ID`."""

    def __init__(
        self, run: Path, spec: EngineSpec, side: ImportedSide, keys: Mapping[str, SequenceKey]
    ) -> None:
        self.spec, self.side, self.keys = spec, side, keys
        self.writer = TraceWriter(run / "traces" / spec.id)
        self._parts: dict[str, tuple[Part, ...]] = {}
        self._widths: dict[str, tuple[int, str]] = {}
        self._slices = [_slices(call) for call in side.calls]
        self._orders: dict[int, int] = {}
        self._logprobs: dict[tuple[str, int], float] = {}
        self._kinds: set[str] = set()
        self._has_experts = False
        self.count = 0
        self.quantized: set[str] = set()

    def write(self) -> None:
        """Calls, tensors, tokens, manifest; raises UsageError for what doesn't fit."""
        number = 0
        for slices in self._slices:
            for part in slices:
                part.call = number
                self.writer.call(number, self._rows(part))
                number += 1
        for item in self.side.tensors():
            self._tensor(item)
            self.count += 1
            if self.count % FLUSH_TENSORS == 0:
                self.writer.flush()
        for sequence in self.side.sequences:
            self.writer.tokens(token_rows(self._scored(sequence)))
        self._manifest()
        self.writer.close()

    def _rows(self, part: _Slice) -> list[Row]:
        start = next(s.decoded_from for s in self.side.sequences if s.id == part.sequence)
        return [
            Row(
                *self.keys[part.sequence],
                position,
                "decode" if start is not None and position >= start else "prefill",
            )
            for position in part.positions
        ]

    def _tensor(self, item: ImportedTensor) -> None:
        _check_dtype(item)
        kind = public_kind(item.kind)
        self._layout(item, kind)
        self._kinds.add(kind)
        if kind in ("weight_codes", "act_codes"):
            self.quantized.update(item.module.fqns)
        self._has_experts |= item.module.is_expert
        if item.call == STATIC:
            if kind not in STATIC_KINDS:
                raise UsageError(f"{item.where}: {kind} without a call", "name it CALL/NAME")
            self._write(item, STATIC, item.tensor, "static", None)
            return
        if kind in STATIC_KINDS:
            raise UsageError(f"{item.where}: {kind} of a call", "a weight has no call in its name")
        slices = self._slices[item.call]
        if item.tensor.numel() == 1 and item.kind.endswith("_scale"):
            for part in slices:
                self._write(item, part.call, item.tensor.reshape(()), "call", None)
        elif item.row_index is None:
            self._of_tokens(item, slices)
        else:
            self._routed(item, self._row_index(item, len(self.side.calls[item.call].rows)), slices)

    def _of_tokens(self, item: ImportedTensor, slices: list[_Slice]) -> None:
        call = self.side.calls[item.call]
        if item.tensor.dim() == 0 or len(item.tensor) != len(call.rows):
            raise UsageError(
                f"{item.where}: shape {list(item.tensor.shape)}, but call {call.name!r} has "
                f"{len(call.rows)} rows",
                "correct the sequences of that call, or give the tensor's rows",
            )
        for part in slices:
            self._write(item, part.call, item.tensor[part.rows], "tokens", None)
            self._keep_logprobs(item, item.tensor, part, range(len(part.rows)), part.rows)

    def _routed(self, item: ImportedTensor, index: torch.Tensor, slices: list[_Slice]) -> None:
        """The rows of each sequence; a sequence that sent none here has no such tensor."""
        for part in slices:
            place = torch.full((len(self.side.calls[item.call].rows),), -1)
            place[part.rows] = torch.arange(len(part.rows))
            own = place[index]
            chosen = (own >= 0).nonzero().reshape(-1)
            if len(chosen):
                self._write(item, part.call, item.tensor[chosen], "routed", own[chosen])
                self._keep_logprobs(item, item.tensor, part, own[chosen].tolist(), chosen)

    def _write(
        self,
        item: ImportedTensor,
        call: int,
        tensor: torch.Tensor,
        rows: str,
        index: torch.Tensor | None,
    ) -> None:
        order = STATIC
        if call != STATIC:
            order = self._orders.get(call, 0)
            self._orders[call] = order + 1
        self.writer.tensor(
            item.module.native,
            item.kind,
            tensor.contiguous(),
            call=call,
            order=order,
            rows=rows,
            row_index=index,
        )

    def _row_index(self, item: ImportedTensor, num_rows: int) -> torch.Tensor:
        index = item.row_index
        assert index is not None
        wrong = index.dtype not in INTEGERS or index.dim() != 1
        if wrong or item.tensor.dim() == 0 or len(index) != len(item.tensor):
            raise UsageError(
                f"{item.where}: rows are {list(index.shape)} of {index.dtype} for a tensor of "
                f"shape {list(item.tensor.shape)}",
                "give one integer for each row of the tensor",
            )
        index = index.to(torch.int64)
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= num_rows):
            raise UsageError(
                f"{item.where}: row {int(index.max())} of a call of {num_rows} rows",
                "count the rows of the whole call from 0",
            )
        if len(index.unique()) != len(index):
            raise UsageError(f"{item.where}: a row occurs twice", "give each token once an expert")
        return index

    def _layout(self, item: ImportedTensor, kind: str) -> None:
        native, module = item.module.native, item.module
        if kind not in FEATURES_FIRST | OUTPUTS:
            self._parts.setdefault(native, tuple(Part(fqn) for fqn in module.fqns))
            return
        if item.tensor.dim() == 0:
            raise UsageError(f"{item.where}: {kind} is one number", "dump the whole tensor")
        width = item.tensor.shape[0 if kind in FEATURES_FIRST else -1]
        known, where = self._widths.setdefault(native, (width, item.where))
        if module.rule.split != "none" and known != width:
            raise UsageError(
                f"{item.where} has {width} output features, {where} {known}",
                "one of them is not this module's, or lacks a shard",
            )
        self._parts[native] = parts_of(
            module, width, self.side.counts, item.tensor_ranks, item.where
        )

    def _keep_logprobs(
        self,
        item: ImportedTensor,
        logits_TV: torch.Tensor,
        part: _Slice,
        places: Sequence[int],
        rows: torch.Tensor,
    ) -> None:
        """Of the token after each place of a slice, where the side gave none: row by row."""
        sequence = next(s for s in self.side.sequences if s.id == part.sequence)
        if item.kind != "logits" or _has_logprobs(sequence):
            return
        ids = sequence.token_ids
        for row, place in zip(rows.tolist(), places, strict=True):
            following = part.positions[place] + 1
            if following < len(ids) and ids[following] < logits_TV.shape[1]:
                logprobs = logits_TV[row].float().log_softmax(-1)
                self._logprobs[sequence.id, following] = float(logprobs[ids[following]])

    def _scored(self, sequence: ExternalSequence) -> ScoredTokens:
        key = self.keys[sequence.id]
        length = len(sequence.token_ids)
        start = length if sequence.decoded_from is None else sequence.decoded_from
        logprobs = sequence.logprobs
        if not _has_logprobs(sequence):
            logprobs = tuple(self._logprobs.get((sequence.id, i)) for i in range(length))
        return ScoredTokens(
            TokenSequence(*key, sequence.token_ids, sequence.prompt_length),
            logprobs,
            ("prefill",) * min(start, length) + ("decode",) * max(0, length - start),
        )

    def _manifest(self) -> None:
        side = self.side
        parts = {
            native: [dataclasses.asdict(part) for part in parts]
            for native, parts in self._parts.items()
            if parts != (Part(native),)
        }
        settings = {"source": side.format}
        if self._logprobs:
            settings["logprobs"] = "FP32 log-softmax of the dumped logits"
        self.writer.manifest(
            {
                "engine": {**self.spec.__dict__, "align": list(self.spec.align)},
                "status": "ok",
                "error": None,
                "label": side.producer or side.format,
                "version": "",
                "device": "",
                "dtype": side.dtype,
                "evidence": [],
                "layout": {"parts": parts, "block_scale_layout": "linear"},
                "invisible": {**self._absent(), **side.invisible},
                "settings": settings,
                "left_out": dict(sorted(side.left_out.items())),
            }
        )

    def _absent(self) -> dict[str, str]:
        """What no tensor of this dump is, so that a site that lacks it says why."""
        absent = {f"*:{kind}": "the dump holds no tensor of that kind" for kind in KINDS}
        for kind in self._kinds:
            absent.pop(f"*:{kind}", None)
        if not self._has_experts:
            absent["*.experts.*"] = "the dump holds no tensor of single experts"
        return absent


def _has_logprobs(sequence: ExternalSequence) -> bool:
    return any(value is not None for value in sequence.logprobs)


def _check_dtype(item: ImportedTensor) -> None:
    """Raises UsageError for a dtype that this kind can't have."""
    kind, dtype = public_kind(item.kind), item.tensor.dtype
    if kind.endswith("codes"):
        expected: tuple[torch.dtype, ...] = (torch.uint8,)
    elif kind.endswith("block_scale"):
        expected = (torch.float8_e4m3fn,)
    elif kind == "topk_ids":
        expected = INTEGERS
    elif "global" in kind:
        expected = (torch.float32,)
    else:
        expected = FLOATS
    if dtype not in expected:
        raise UsageError(
            f"{item.where}: {kind} is {str(dtype).removeprefix('torch.')}",
            f"it must be {' or '.join(str(d).removeprefix('torch.') for d in expected)}",
        )
