"""From hooks to the trace: chooses sites, numbers calls, keeps the execution order.

Knows torch and the trace; no engine. Invariant: a site that a hook promised and that never
fired is reported (`silent`), so that a missing hook can't look like agreement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minite_diag.engines.base import Layout
from minite_diag.errors import EngineError
from minite_diag.plan import CaptureSpec
from minite_diag.site import matches
from minite_diag.trace.store import DiskBudgetExceeded, Row, TraceWriter


class Recorder:
    """What engines write to. `layout` maps native names so that site globs can select them."""

    def __init__(self, writer: TraceWriter, spec: CaptureSpec, layout: Layout) -> None:
        self.writer = writer
        self.spec = spec
        self.layout = layout
        self.active = False
        self.truncated = False
        self.calls = 0
        self._rows: list[Row] = []
        self._kept: torch.Tensor | None = None
        self._order = 0
        self._promised: set[tuple[str, str]] = set()
        self._fired: set[tuple[str, str]] = set()
        self._wanted: dict[tuple[str, str], bool] = {}

    def wants(self, native: str, kind: str) -> bool:
        """Whether any checkpoint module inside `native` is selected by the plan's globs."""
        key = (native, kind)
        if key not in self._wanted:
            parts = self.layout.parts.get(native)
            names = [part.fqn for part in parts] if parts else [native]
            public = kind.replace("_encode_scale", "_decode_scale")
            self._wanted[key] = any(matches(n, public, self.spec.sites) for n in names)
        return self._wanted[key]

    def promise(self, native: str, kind: str) -> None:
        """Declare that a hook will record this site in every run."""
        if self.wants(native, kind):
            self._promised.add((native, kind))

    @property
    def silent(self) -> list[str]:
        """Promised sites that never fired, as `native:kind`."""
        return sorted(f"{n}:{k}" for n, k in self._promised - self._fired)

    def begin_call(self, rows: Sequence[Row]) -> None:
        """Start a forward pass whose flat token batch is `rows`."""
        if not self.active:
            return
        self._rows = list(rows)
        self._order = 0
        limit = self.spec.tokens
        self._kept = None
        if limit is not None and any(row.position >= limit for row in rows):
            kept = [i for i, row in enumerate(rows) if row.position < limit]
            self._kept = torch.tensor(kept, dtype=torch.int64)
        self.writer.call(self.calls, self._rows)
        self.calls += 1

    def static(self, native: str, kind: str, tensor: torch.Tensor) -> None:
        """Record a tensor that doesn't depend on tokens (weights, their codes and scales)."""
        if self.wants(native, kind):
            self._write(native, kind, tensor, call=-1, order=-1, rows="static")

    def tensor(
        self,
        native: str,
        kind: str,
        tensor: torch.Tensor,
        row_index: torch.Tensor | None = None,
        *,
        per_call: bool = False,
    ) -> None:
        """Record a tensor of the current call.

        Dim 0 is the call's rows, or the rows that `row_index` (int [R]) names, or nothing of the
        kind if `per_call` (a per-tensor scale).
        """
        if not self.active:
            return
        order = self._order
        self._order += 1
        self._fired.add((native, kind))
        if not self.wants(native, kind):
            return
        expected = len(self._rows) if row_index is None else len(row_index)
        if not per_call and tensor.shape[0] != expected:
            raise EngineError(
                f"{native}:{kind} has {tensor.shape[0]} rows, the call has {expected} tokens there",
                "the engine's hook takes the wrong tensor: report it",
            )
        rows = "call" if per_call else "tokens" if row_index is None else "routed"
        if not per_call and self._kept is not None:
            tensor, row_index = self._limit(tensor, row_index)
        self._write(
            native,
            kind,
            tensor,
            call=self.calls - 1,
            order=order,
            rows=rows,
            row_index=row_index,
        )

    def _limit(
        self, tensor: torch.Tensor, row_index: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._kept is not None
        if row_index is None:
            return tensor[self._kept.to(tensor.device)], self._kept
        mask = torch.isin(row_index.cpu().to(torch.int64), self._kept)
        return tensor[mask.to(tensor.device)], row_index.cpu()[mask]

    def _write(
        self,
        native: str,
        kind: str,
        tensor: torch.Tensor,
        *,
        call: int,
        order: int,
        rows: str,
        row_index: torch.Tensor | None = None,
    ) -> None:
        if self.truncated:
            return
        try:
            self.writer.tensor(
                native, kind, tensor, call=call, order=order, rows=rows, row_index=row_index
            )
        except DiskBudgetExceeded:
            self.truncated = True
