"""Times device work: CUDA graph replays on a GPU, wall clock on a CPU; warm and cold caches.

Knows no kernel. Invariant: a figure is the median over replays of the time a call, with warm-up
and compilation outside; cold rotates over copies whose bytes exceed the last-level cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
#: Replays before timing: an idle GPU's clocks take tens of milliseconds to rise.
RAISE_CLOCKS_S = 0.05


def median_us(calls: Sequence[Call], device: torch.device, budget_ms: float = 8.0) -> float:
    """Median microseconds a call, ``calls`` run in rotation (one: warm; many copies: cold)."""
    if device.type == "cuda":
        return _graph_median_us(calls, budget_ms)
    return _wall_median_us(calls, budget_ms)


def _wall_median_us(calls: Sequence[Call], budget_ms: float) -> float:
    calls[0]()
    times: list[float] = []
    deadline = time.perf_counter() + budget_ms * 5e-3
    while len(times) < 5 or (time.perf_counter() < deadline and len(times) < 200):
        start = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _graph_median_us(calls: Sequence[Call], budget_ms: float) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    estimate_ms = max(begin.elapsed_time(end) / len(calls), 1e-3)
    rounds = max(1, min(160, int(budget_ms / estimate_ms)) // len(calls))
    count = rounds * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    times: list[float] = []
    raised = time.perf_counter() + RAISE_CLOCKS_S
    while time.perf_counter() < raised:
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(7):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)
