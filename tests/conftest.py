"""Synthetic traces: what an engine would have written, tensor by tensor."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minite_diag.canonical.names import SequenceKey
from minite_diag.trace.store import Row, Trace, TraceWriter


class TraceBuilder:
    """Writes one trace; `parts` maps a native module to its parts, as a layout does."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.id = folder.name
        self.parts: dict[str, list[dict[str, Any]]] = {}
        self.invisible: dict[str, str] = {}
        self.writer = TraceWriter(folder, **options)
        self.calls = 0
        self.order = 0

    def fuse(self, native: str, *parts: tuple[str, int, int], expert: int | None = None) -> None:
        self.parts.setdefault(native, []).extend(
            {"fqn": fqn, "start": start, "stop": stop, "expert": expert}
            for fqn, start, stop in parts
        )

    def call(self, positions: Sequence[int], probe: str = "p", mode: str = "score") -> None:
        self.batch([(probe, position) for position in positions], mode)

    def batch(self, rows: Sequence[tuple[str, int]], mode: str = "score") -> None:
        """One forward pass over rows of several probes."""
        source = "sampler" if mode == "sample" else ""
        self.writer.call(self.calls, [Row(mode, source, p, i, "prefill") for p, i in rows])
        self.calls += 1
        self.order = 0

    def tensor(
        self, native: str, kind: str, tensor: torch.Tensor, routed: Sequence[int] | None = None
    ) -> None:
        rows = "call" if tensor.dim() == 0 else "tokens" if routed is None else "routed"
        self.writer.tensor(
            native,
            kind,
            tensor,
            call=self.calls - 1,
            order=self.order,
            rows=rows,
            row_index=None if routed is None else torch.tensor(routed, dtype=torch.int64),
        )
        self.order += 1

    def static(self, native: str, kind: str, tensor: torch.Tensor) -> None:
        self.writer.tensor(native, kind, tensor, call=-1, order=-1, rows="static")

    def manifest(self, status: str = "ok") -> None:
        self.writer.manifest(
            {
                "engine": {"id": self.id, "role": "sampler", "engine": "toy"},
                "status": status,
                "layout": {"parts": self.parts, "block_scale_layout": "linear"},
                "invisible": self.invisible,
            }
        )

    def done(self) -> Trace:
        self.manifest()
        self.writer.close()
        return Trace(self.writer.folder)


@pytest.fixture
def new_trace(tmp_path: Path) -> Callable[..., TraceBuilder]:
    """`new_trace("learner")` starts a trace under traces/learner."""
    return lambda name, **options: TraceBuilder(tmp_path / "traces" / name, **options)


@pytest.fixture
def score() -> SequenceKey:
    """The sequence that `TraceBuilder.call` writes by default."""
    return SequenceKey("score", "", "p")
