"""`bench kernels`: minite_kernels' own benchmarks as rows of this package's table.

Measures nothing itself. Invariant: a case that failed is a row without a value that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minite_diag.bench.measurement import Measurement
from minite_diag.errors import UsageError


def bench_kernels(
    device: str | None, names: Sequence[str] | None, say: Callable[[str], None]
) -> list[Measurement]:
    """Run the named benchmarks; times are in microseconds, ratios are peer time / own time."""
    import torch

    from minite_kernels.bench import run_benchmarks

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    say(f"kernels on {device}")
    try:
        found = run_benchmarks(device, names)
    except ValueError as error:
        raise UsageError(str(error), "minite-diag bench kernels --help") from error
    return [row for record in found for row in _rows(record)]


def _rows(record: dict[str, Any]) -> Iterator[Measurement]:
    name = f"{record['benchmark']} {record['case']}: {record['implementation']}"
    if record["error"]:
        yield Measurement(name, None, "us", detail=str(record["error"]).strip().splitlines()[-1])
        return
    parts = [f"cold {record['cold_us']:.1f} us"] if record["cold_us"] else []
    if record["of_floor"]:
        parts.append(f"{record['of_floor']:.0%} of the floor {record['floor_us']:.1f} us")
    detail = ", ".join(parts)
    speedups = record["speedup"] or {}
    if not speedups:
        yield Measurement(name, record["warm_us"], "us", detail=detail)
    for peer, ratio in speedups.items():
        yield Measurement(name, record["warm_us"], "us", peer, ratio, detail)
