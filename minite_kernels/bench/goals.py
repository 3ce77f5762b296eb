"""The goals of this library on one H200, as data, and how far a run's rows are from them.

A goal is a ratio of two rows of one run, or a share of a row's floor. Invariant: nothing here is
measured; a goal whose rows are missing says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

W4A4 = "ours W4A4, quantizer included"
BF16 = "BF16, torch matmul"
GROUPED = "BF16, torch._grouped_mm"
GATHERED = "BF16, gather and torch._grouped_mm"
INVARIANT = "BF16, batch-invariant"
EMULATED = "NVFP4 emulation, batch-invariant"
MARLIN = "vLLM Marlin W4A16"

CHAIN = (
    "bounds: a launch, then one product after the other along K in one accumulator (splitting K "
    "would change bits against prefill where sums are not exact)"
)
PREFILL = (
    "the GEMM alone is at cuBLAS' speed (same tensor cores, 16-bit operands: Hopper has no W4A4 "
    "unit); the quantizer comes on top"
)
DECODING = (
    "bounds: reading the weights and decoding them each take this long by themselves, on the same "
    "issue slots"
)
UPDATE = (
    "the GEMMs take no longer than BF16's; quantizing both operands of three GEMMs comes on top, "
    "and on Hopper nothing is won back"
)


@dataclass(frozen=True, slots=True)
class Goal:
    """``ours`` at least ``at_least`` times as fast as ``peer``, or that share of its floor."""

    benchmark: str
    case: str
    ours: str
    peer: str
    at_least: float
    bound: str


def _both(benchmark: str, cases: Sequence[str], *rest: Any) -> list[Goal]:
    return [Goal(benchmark, case, *rest) for case in cases]


FLOOR: Final = "the byte floor"
DECODE_CASES = ("qkv M=1", "qkv M=16", "o M=1", "o M=16")
PREFILL_CASES = ("qkv M=4096", "qkv M=16384", "o M=4096", "o M=16384")
UPDATE_CASE = "Qwen3-30B-A3B block, 16384 tokens"
GOALS: Final = (
    *_both("dense", DECODE_CASES, W4A4, BF16, 2.0, CHAIN),
    *_both("dense", DECODE_CASES, W4A4, MARLIN, 1.0, CHAIN),
    *_both("dense", PREFILL_CASES, W4A4, BF16, 1.0, PREFILL),
    *_both("dense", DECODE_CASES, W4A4, EMULATED, 5.0, CHAIN),
    *_both("dense", PREFILL_CASES, W4A4, INVARIANT, 1.5, PREFILL),
    *_both("moe", ("w13 1 tokens", "w2 1 tokens"), W4A4, GROUPED, 3.0, CHAIN),
    *_both("moe", ("w13 16 tokens", "w2 16 tokens"), W4A4, GROUPED, 3.0, DECODING),
    *_both("moe", ("w13 16 tokens", "w2 16 tokens"), W4A4, FLOOR, 0.85, DECODING),
    Goal("moe", "w13 16384 tokens", W4A4, GATHERED, 1.1, PREFILL),
    Goal("moe", "w2 16384 tokens", W4A4, GROUPED, 1.1, PREFILL),
    *_both(
        "quantizer",
        ("16384x2048", "131072x768"),
        "ours, amax a token",
        "copy",
        1.0,
        "issue slots: 25 instructions an element, beside a copy's 3.6 bytes",
    ),
    Goal("update", UPDATE_CASE, "ours W4A4 (te)", "BF16", 0.9, UPDATE),
    Goal("update", UPDATE_CASE, "ours W4A4 (te)", "NVFP4 emulation, torch", 3.0, UPDATE),
)


def judge(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each goal of the benchmarks in ``records``: ratio (and cold), goal, met, missed_by, bound."""
    rows = {(r["benchmark"], r["case"], r["implementation"]): r for r in records}
    ran = {r["benchmark"] for r in records}
    for goal in GOALS:
        if goal.benchmark not in ran:
            continue
        row = rows.get((goal.benchmark, goal.case, goal.ours), {})
        warm = row.get("of_floor") if goal.peer == FLOOR else _ratio(row, "speedup", goal.peer)
        yield {
            "benchmark": goal.benchmark,
            "case": goal.case,
            "against": goal.peer,
            "ratio": warm,
            "ratio_cold": _ratio(row, "speedup_cold", goal.peer),
            "goal": goal.at_least,
            "met": None if warm is None else warm >= goal.at_least,
            "missed_by": None if warm is None or warm >= goal.at_least else goal.at_least - warm,
            "bound": goal.bound,
        }


def _ratio(row: dict[str, Any], field: str, peer: str) -> float | None:
    value = (row.get(field) or {}).get(peer)
    return None if value is None else float(value)
