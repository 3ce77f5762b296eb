"""One measurement, and how it is taken: warm and cold times, floor, or the error instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from minite_kernels.bench.timing import median_us

#: Device name -> (bytes a second, 16-bit tensor operations a second): measured copy and matmul.
RATES: Final = {"NVIDIA H200": (4.3e12, 790e12)}


@dataclass(slots=True)
class Row:
    """A case's implementation with its times in microseconds."""

    benchmark: str
    case: str
    implementation: str
    warm_us: float | None = None
    cold_us: float | None = None
    floor_us: float | None = None
    #: Tokens of one call, where that is what a user counts.
    tokens: int | None = None
    error: str | None = None

    def as_dict(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Fields, share of the floor, tokens a second, and speedup over each peer of the case."""
        peers = [
            r
            for r in rows
            if (r.benchmark, r.case) == (self.benchmark, self.case) and r is not self
        ]
        speedup = {
            r.implementation: r.warm_us / self.warm_us
            for r in peers
            if r.warm_us is not None and self.warm_us
        }
        cold = {
            r.implementation: r.cold_us / self.cold_us
            for r in peers
            if r.cold_us is not None and self.cold_us
        }
        of_floor = self.floor_us / self.warm_us if self.floor_us and self.warm_us else None
        rate = self.tokens / self.warm_us * 1e6 if self.tokens and self.warm_us else None
        shares = {"of_floor": of_floor, "tokens_per_s": rate}
        return asdict(self) | shares | {"speedup": speedup, "speedup_cold": cold}


def measure(
    benchmark: str,
    case: str,
    implementation: str,
    calls: Callable[[], Sequence[Callable[[], object]]],
    device: torch.device,
    *,
    floor_us: float | None = None,
    cold: bool = True,
) -> Row:
    """Time ``calls()``: the first alone (warm) and all in rotation (cold); errors become the row's."""
    row = Row(benchmark, case, implementation, floor_us=floor_us)
    try:
        made = calls()
        row.warm_us = median_us(made[:1], device)
        if cold and len(made) > 1:
            row.cold_us = median_us(made, device)
    except ModuleNotFoundError as error:
        row.error = f"not installed: {error.name}"
    except Exception as error:  # noqa: BLE001
        row.error = f"{type(error).__name__}: {error}"[:300]
    return row


def floor_us(device: torch.device, bytes_moved: float, operations: float = 0.0) -> float | None:
    """Least time for these bytes and 16-bit tensor operations; None on an unknown device."""
    if device.type != "cuda":
        return None
    rates = RATES.get(torch.cuda.get_device_name(device))
    if rates is None:
        return None
    return max(bytes_moved / rates[0], operations / rates[1]) * 1e6
