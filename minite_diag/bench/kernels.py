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
    """Run the named benchmarks; times are in microseconds, ratios are peer time / own time.

    On CUDA the goals of the library follow, each with what it is missed by and what bounds it.
    """
    import torch

    from minite_kernels.bench import run_benchmarks
    from minite_kernels.bench.goals import judge

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    say(f"kernels on {device}")
    try:
        found = run_benchmarks(device, names)
    except ValueError as error:
        raise UsageError(str(error), "minite-diag bench kernels --help") from error
    rows = [row for record in found for row in _rows(record)]
    goals = judge(found) if device.startswith("cuda") else ()
    return [*rows, *map(_goal, goals)]


def _rows(record: dict[str, Any]) -> Iterator[Measurement]:
    name = f"{record['benchmark']} {record['case']}: {record['implementation']}"
    if record["error"]:
        yield Measurement(name, None, "us", detail=str(record["error"]).strip().splitlines()[-1])
        return
    parts = [f"cold {record['cold_us']:.1f} us"] if record["cold_us"] else []
    if record["of_floor"]:
        parts.append(f"{record['of_floor']:.0%} of the floor {record['floor_us']:.1f} us")
    if record["tokens_per_s"]:
        parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    # What is ours against what is not: peers among themselves say nothing about this library.
    ours = record["implementation"].startswith("ours")
    speedups = {p: r for p, r in record["speedup"].items() if ours and not p.startswith("ours")}
    if not speedups:
        yield Measurement(name, record["warm_us"], "us", detail=", ".join(parts))
    for peer, ratio in speedups.items():
        cold = record["speedup_cold"].get(peer)
        detail = ", ".join([*parts, *([f"{cold:.2f}x cold"] if cold else [])])
        yield Measurement(name, record["warm_us"], "us", peer, ratio, detail)


def _goal(goal: dict[str, Any]) -> Measurement:
    name = f"goal {goal['benchmark']} {goal['case']}: {goal['goal']:.2f}x {goal['against']}"
    if goal["ratio"] is None:
        return Measurement(name, None, "x", detail="not measured in this run")
    cold = f"{goal['ratio_cold']:.2f}x cold, " if goal["ratio_cold"] else ""
    verdict = "met" if goal["met"] else f"missed by {goal['missed_by']:.2f}; {goal['bound']}"
    return Measurement(name, goal["ratio"], "x", goal["against"], detail=f"{cold}{verdict}")
