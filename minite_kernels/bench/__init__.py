"""Every kernel on this machine's device against named peers, measured in one run.

Knows what to time and against what; prints nothing and has no command line. Invariant: a row is a
measurement of this run, or names the reason why there is none; ratios are of rows of one case.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from minite_kernels.bench import bounds, dense, moe, quantizer, update
from minite_kernels.bench.row import Row

__all__ = ["BENCHMARKS", "run_benchmarks"]

#: Name -> function that yields the rows of one benchmark on a device.
BENCHMARKS: Final[dict[str, Callable[[torch.device], Iterable[Row]]]] = {
    "quantizer": quantizer.run,
    "dense": dense.run,
    "moe": moe.run,
    "bounds": bounds.run,
    "update": update.run,
}


def run_benchmarks(
    device: str | torch.device, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Run the named benchmarks (all by default) and return their rows as plain dicts.

    Keys: benchmark, case, implementation, warm_us, cold_us, floor_us (the larger of bytes over
    bandwidth and operations over rate; None off a known GPU), of_floor (floor over warm time),
    tokens, tokens_per_s, speedup and speedup_cold (warm or cold time of each peer of the case over
    this one's, by peer), error. Raises ValueError for an unknown name.
    """
    wanted = list(BENCHMARKS) if names is None else list(names)
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        raise ValueError(f"unknown benchmarks {unknown}; one of {', '.join(BENCHMARKS)}")
    target = torch.device(device)
    rows: list[Row] = []
    for name in wanted:
        try:
            rows.extend(BENCHMARKS[name](target))
        except Exception:  # noqa: BLE001
            rows.append(Row(name, "all", "all", error=traceback.format_exc(limit=-3)))
    return [row.as_dict(rows) for row in rows]
