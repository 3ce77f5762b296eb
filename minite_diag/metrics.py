"""Numbers that say how two tensors differ.

Knows torch and numpy; no file, no engine. Invariant: reductions are in float64, bits are compared
as bytes, and equal tensors give exactly 1.0, 0.0 and infinity.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch

CHUNK_ELEMENTS: Final = 1 << 22
"""Elements turned into float64 at a time: bounds the memory of a comparison."""

_BITS: Final = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers of the same width."""
    return tensor.contiguous().view(_BITS[tensor.dtype]) if tensor.is_floating_point() else tensor


def narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype with the coarser grid; of BF16 and FP16 the BF16 one."""
    if a == b:
        return a
    digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
    return a if digits.get(a, 0) <= digits.get(b, 0) else b


def is_bitwise_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are equal."""
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(as_bits(x), as_bits(y))


def compare_values(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """Metrics of floating-point tensors of one shape: `x` is the baseline.

    Where the dtypes differ, bits and ULPs are compared after rounding both to the narrower one.
    Columns are those of the `comparison` table.
    """
    dtype = narrower(x.dtype, y.dtype)
    x_bits, y_bits = as_bits(x.to(dtype)), as_bits(y.to(dtype))
    same = x_bits == y_bits
    result: dict[str, Any] = {"elements": x.numel()}
    if x.dtype == y.dtype and bool(same.all()):
        return result | _equal(x)
    result["bitwise_fraction"] = float(same.double().mean())
    result["first_row"] = _first_row(~same)
    result |= _differences(x, y)
    result |= _ulps(x_bits[~same], y_bits[~same], x.numel())
    return result


def _equal(x: torch.Tensor) -> dict[str, Any]:
    nonfinite = int((~torch.isfinite(x.float())).sum()) if x.is_floating_point() else 0
    return {
        "bitwise_fraction": 1.0,
        "max_abs_diff": 0.0,
        "mean_abs_diff": 0.0,
        "rel_l2": 0.0,
        "rel_diff": 0.0,
        "cosine": 1.0,
        "sqnr_db": math.inf,
        "ulp_p50": 0.0,
        "ulp_p99": 0.0,
        "ulp_max": 0.0,
        "nonfinite": nonfinite,
        "first_row": None,
    }


def _first_row(different: torch.Tensor) -> int | None:
    if different.dim() == 0:
        return 0 if bool(different) else None
    rows = different.reshape(different.shape[0], -1).any(1).nonzero()
    return int(rows[0]) if len(rows) else None


def _differences(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    sums = np.zeros(4)
    largest, total, nonfinite = 0.0, 0.0, 0
    flat_x, flat_y = x.reshape(-1), y.reshape(-1)
    for a, b in zip(flat_x.split(CHUNK_ELEMENTS), flat_y.split(CHUNK_ELEMENTS), strict=True):
        p, q = a.double(), b.double()
        finite = torch.isfinite(p) & torch.isfinite(q)
        bad = int((~finite).sum())
        if bad:
            nonfinite += bad
            p, q = p[finite], q[finite]
        if not p.numel():
            continue
        d = q - p
        sums += [float(p @ p), float(q @ q), float(p @ q), float(d @ d)]
        d = d.abs()
        largest = max(largest, float(d.max()))
        total += float(d.sum())
    xx, yy, xy, dd = (float(s) for s in sums)
    return {
        "max_abs_diff": largest,
        "mean_abs_diff": total / max(1, x.numel() - nonfinite),
        "rel_l2": math.sqrt(dd / xx) if xx else (0.0 if not dd else math.inf),
        "rel_diff": 1.0 - 2.0 * xy / (xx + yy) if xx + yy else 0.0,
        "cosine": xy / math.sqrt(xx * yy) if xx and yy else (1.0 if xx == yy else 0.0),
        "sqnr_db": 10.0 * math.log10(xx / dd) if dd and xx else (math.inf if not dd else -math.inf),
        "nonfinite": nonfinite,
    }


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """Float bits as integers that are in the order of the floats (both zeros at 0)."""
    value = bits.to(torch.int64)
    lowest = {torch.int16: -(1 << 15), torch.int32: -(1 << 31)}.get(bits.dtype)
    if lowest is None:
        return value
    return torch.where(value < 0, lowest - value, value)


def _ulps(x_bits: torch.Tensor, y_bits: torch.Tensor, elements: int) -> dict[str, Any]:
    """Percentiles over all elements; equal ones count as 0."""
    if x_bits.dtype not in (torch.int16, torch.int32):
        return {}
    distance = (ordered(x_bits) - ordered(y_bits)).abs().numpy()
    distance = np.sort(distance)
    equal = elements - len(distance)

    def percentile(share: float) -> float:
        index = math.ceil(share * elements) - 1 - equal
        return float(distance[index]) if index >= 0 else 0.0

    return {
        "ulp_p50": percentile(0.50),
        "ulp_p99": percentile(0.99),
        "ulp_max": float(distance[-1]) if len(distance) else 0.0,
    }


def compare_codes(
    x: torch.Tensor, y: torch.Tensor, counted: torch.Tensor | None = None
) -> dict[str, Any]:
    """Mismatch rate of E2M1 codes (uint8, one per element, zeros unsigned) or of scale bytes.

    `counted` (bool, same shape) masks what has no meaning, such as the scale of a zero block.
    """
    same = x == y
    if counted is not None:
        same = same | ~counted
    elements = int(counted.sum()) if counted is not None else x.numel()
    different = int((~same).sum())
    return {
        "elements": elements,
        "bitwise_fraction": 1.0 - different / max(1, elements),
        "mismatch_rate": different / max(1, elements),
        "first_row": _first_row(~same),
    }


def compare_expert_sets(x_TK: torch.Tensor, y_TK: torch.Tensor) -> dict[str, Any]:
    """Routing: `agreement` is the share of tokens with the same set, bitwise_fraction in order."""
    same_set = (x_TK.sort(-1).values == y_TK.sort(-1).values).all(-1)
    return {
        "elements": x_TK.numel(),
        "bitwise_fraction": float((x_TK == y_TK).double().mean()),
        "agreement": float(same_set.double().mean()),
        "first_row": _first_row(~same_set),
    }


def full_kl(logits_x_TV: torch.Tensor, logits_y_TV: torch.Tensor) -> list[float]:
    """KL(x || y) per row over the vocabulary, float64, from logits [T, V]."""
    result: list[float] = []
    rows = max(1, CHUNK_ELEMENTS // logits_x_TV.shape[1])
    for x, y in zip(logits_x_TV.split(rows), logits_y_TV.split(rows), strict=True):
        if is_bitwise_equal(x, y):
            result += [0.0] * len(x)
            continue
        log_p, log_q = x.double().log_softmax(-1), y.double().log_softmax(-1)
        result += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
    return result
