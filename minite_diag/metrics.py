"""Numbers that say how two tensors differ.

Knows torch and numpy; no file, no engine. Invariant: reductions are in float64, bits are compared
as bytes, and equal tensors give exactly 1.0, 0.0 and infinity.

Tensors are read once, in chunks that stay in the processor's cache: a pair of BF16 tensors costs a
few nanoseconds per element and no memory that grows with it. One thread: the steps of a chunk are
so short that a second thread would wait for the first one's interpreter lock (measured: slower).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

CHUNK_ELEMENTS: Final = 1 << 15
"""Elements turned into float64 at a time: bounds the memory of a comparison. Torch doesn't wake
its threads for so few."""
DOT_ELEMENTS: Final = 1 << 13
"""OpenBLAS wakes its threads for longer dot products, which costs more than it saves here."""

_BITS: Final = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
}

Array = np.ndarray[Any, Any]


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
    return x.dtype == y.dtype and x.shape == y.shape and _has_equal_bytes(x, y)


def _bytes(tensor: torch.Tensor) -> Array:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _has_equal_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bytes of two tensors of one size; stops at the first chunk that differs."""
    a, b = _bytes(x), _bytes(y)
    step = 8 * CHUNK_ELEMENTS
    whole = len(a) - len(a) % 8
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        if not np.array_equal(a[start:stop].view(np.uint64), b[start:stop].view(np.uint64)):
            return False
    return np.array_equal(a[whole:], b[whole:])


def compare_values(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """Metrics of tensors of one shape, floating-point or integer: `x` is the baseline.

    Where the dtypes differ, bits and ULPs are compared after rounding both to the narrower one.
    Columns are those of the `comparison` table.
    """
    # NaN and infinity are counted, not warned about.
    with np.errstate(invalid="ignore", over="ignore"):
        if x.dtype == y.dtype and _has_equal_bytes(x, y):
            return {"elements": x.numel()} | _equal(x)
        found = _Pass(x, y).run()
    elements = x.numel()
    row_size = max(1, elements // max(1, x.shape[0])) if x.dim() else 1
    return {
        "elements": elements,
        "bitwise_fraction": (elements - found.different) / elements if elements else 1.0,
        "first_row": None if found.first < 0 else found.first // row_size,
        **_differences(found, elements),
        **_ulps(found, elements),
    }


def _equal(x: torch.Tensor) -> dict[str, Any]:
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
        "nonfinite": _count_nonfinite(x),
        "first_row": None,
    }


def _count_nonfinite(x: torch.Tensor) -> int:
    if not x.is_floating_point():
        return 0
    flat = x.contiguous().reshape(-1)

    def count(chunk: int) -> int:
        values = flat[chunk * CHUNK_ELEMENTS : (chunk + 1) * CHUNK_ELEMENTS]
        wide = values.double().numpy()
        # A sum of squares in float64 is finite if all values of a narrower dtype are.
        if math.isfinite(_dot(wide, wide)):
            return 0
        return int(np.count_nonzero(~np.isfinite(wide)))

    return sum(map(count, range(-(-flat.numel() // CHUNK_ELEMENTS))))


@dataclass
class _Sums:
    """What one chunk (or all of them) adds up to; `first` is -1 where no bits differ."""

    different: int = 0
    first: int = -1
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    dd: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0
    ulps: Array | None = None
    """int64: elements by ULP distance; unsigned: the distance of each element."""

    def add(self, other: _Sums) -> None:
        self.different += other.different
        self.first = other.first if self.first < 0 else self.first
        self.xx += other.xx
        self.yy += other.yy
        self.xy += other.xy
        self.dd += other.dd
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        self.nonfinite += other.nonfinite


class _Pass:
    """One pass over two tensors of one shape."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x.contiguous().reshape(-1), y.contiguous().reshape(-1)
        self.dtype = narrower(x.dtype, y.dtype)
        self.bits = _BITS.get(self.dtype)
        self.chunks = -(-len(self.x) // CHUNK_ELEMENTS)
        self.distances = self._room()

    def _room(self) -> Array | None:
        """Where all ULP distances go; 16-bit ones of many chunks are counted instead."""
        if self.bits == torch.int32:
            return np.zeros(len(self.x), np.uint32)
        if self.bits == torch.int16 and self.chunks == 1:
            return np.zeros(len(self.x), np.uint16)
        return None

    def run(self) -> _Sums:
        """The sums over all chunks, added in the order of the chunks."""
        result = _Sums(ulps=self.distances)
        if self.bits == torch.int16 and self.distances is None:
            result.ulps = np.zeros(1 << 16, np.int64)
        for part in map(self._chunk, range(self.chunks)):
            result.add(part)
            if part.ulps is not None:
                assert result.ulps is not None
                result.ulps[: len(part.ulps)] += part.ulps
        return result

    def _chunk(self, number: int) -> _Sums:
        start = number * CHUNK_ELEMENTS
        x, y = self.x[start : start + CHUNK_ELEMENTS], self.y[start : start + CHUNK_ELEMENTS]
        sums = _Sums()
        a, b = self._integers(x), self._integers(y)
        differs = a != b
        sums.different = int(np.count_nonzero(differs))
        if sums.different:
            sums.first = start + int(differs.argmax())
        if self.bits in (torch.int16, torch.int32):
            self._ulps(a, b, start, sums)
        _add_values(sums, x.double().numpy(), y.double().numpy())
        return sums

    def _integers(self, values: torch.Tensor) -> Array:
        values = values.to(self.dtype)
        return (values.view(self.bits) if self.bits else values).numpy()

    def _ulps(self, a: Array, b: Array, start: int, sums: _Sums) -> None:
        wide = np.int32 if self.bits == torch.int16 else np.int64
        distance = _ordered(a, wide)
        distance -= _ordered(b, wide)
        np.abs(distance, out=distance)
        if self.distances is None:
            sums.ulps = np.bincount(distance)
        else:
            self.distances[start : start + len(a)] = distance


def _add_values(sums: _Sums, p: Array, q: Array) -> None:
    _add_products(sums, p, q)
    if not (math.isfinite(sums.xx) and math.isfinite(sums.yy)):
        finite = np.isfinite(p) & np.isfinite(q)
        sums.nonfinite = len(p) - int(np.count_nonzero(finite))
        p, q = p[finite], q[finite]
        _add_products(sums, p, q)
    if not len(p):
        return
    d = np.subtract(q, p)
    sums.dd = _dot(d, d)
    np.abs(d, out=d)
    sums.largest = float(d.max())
    sums.total = float(d.sum())


def _add_products(sums: _Sums, p: Array, q: Array) -> None:
    sums.xx, sums.yy, sums.xy = _dot(p, p), _dot(q, q), _dot(p, q)


def _dot(a: Array, b: Array) -> float:
    """Sum of products; NaN or infinite where an element is."""
    if len(a) <= DOT_ELEMENTS:
        return float(a @ b)
    starts = range(0, len(a), DOT_ELEMENTS)
    return sum(float(a[i : i + DOT_ELEMENTS] @ b[i : i + DOT_ELEMENTS]) for i in starts)


def _differences(sums: _Sums, elements: int) -> dict[str, Any]:
    xx, yy, xy, dd = sums.xx, sums.yy, sums.xy, sums.dd
    return {
        "max_abs_diff": sums.largest,
        "mean_abs_diff": sums.total / max(1, elements - sums.nonfinite),
        "rel_l2": math.sqrt(dd / xx) if xx else (0.0 if not dd else math.inf),
        "rel_diff": 1.0 - 2.0 * xy / (xx + yy) if xx + yy else 0.0,
        "cosine": xy / math.sqrt(xx * yy) if xx and yy else (1.0 if xx == yy else 0.0),
        "sqnr_db": 10.0 * math.log10(xx / dd) if dd and xx else (math.inf if not dd else -math.inf),
        "nonfinite": sums.nonfinite,
    }


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """Float bits as integers that are in the order of the floats (both zeros at 0)."""
    if bits.dtype not in (torch.int16, torch.int32):
        return bits.to(torch.int64)
    return torch.from_numpy(_ordered(bits.numpy(), np.int64))


def _ordered(bits: Array, wide: type[np.signedinteger[Any]]) -> Array:
    value = bits.astype(wide)
    sign = value >> (8 * bits.dtype.itemsize - 1)  # 0 or -1
    value &= np.iinfo(bits.dtype).max
    value ^= sign
    value -= sign
    return value


def _ulps(sums: _Sums, elements: int) -> dict[str, Any]:
    """Percentiles over all elements; equal ones count as 0."""
    if sums.ulps is None:
        return {}
    ranks = [max(0, math.ceil(share * elements) - 1) for share in (0.50, 0.99)] + [elements - 1]
    if sums.ulps.dtype != np.int64:
        values = _select(sums.ulps, ranks)
    else:
        ends = np.cumsum(sums.ulps)
        values = np.searchsorted(ends, ranks, side="right").tolist()
    return dict(zip(("ulp_p50", "ulp_p99", "ulp_max"), map(float, values), strict=True))


def _select(values: Array, ranks: list[int]) -> list[int]:
    """The values at these ranks of the sorted array, by counting its high and low 16 bits."""
    if len(values) <= CHUNK_ELEMENTS:
        return [int(value) for value in np.partition(values, ranks)[ranks]]
    high = _histogram(values, lambda chunk: chunk >> 16)
    ends = np.cumsum(high)
    found: dict[int, Array] = {}
    result = []
    for rank in ranks:
        bucket = int(np.searchsorted(ends, rank, side="right"))
        if bucket not in found:
            low = _histogram(
                values,
                lambda chunk, b=bucket: chunk[chunk >> 16 == b] & 0xFFFF,  # type: ignore[misc]
            )
            found[bucket] = np.cumsum(low) + (int(ends[bucket - 1]) if bucket else 0)
        within = int(np.searchsorted(found[bucket], rank, side="right"))
        result.append(bucket << 16 | within)
    return result


def _histogram(values: Array, of: Callable[[Array], Array]) -> Array:
    counts = np.zeros(1 << 16, np.int64)
    for start in range(0, len(values), CHUNK_ELEMENTS):
        part = np.bincount(of(values[start : start + CHUNK_ELEMENTS]).astype(np.intp))
        counts[: len(part)] += part
    return counts


def compare_codes(
    x: torch.Tensor, y: torch.Tensor, counted: torch.Tensor | None = None
) -> dict[str, Any]:
    """Mismatch rate of E2M1 codes (uint8, one per element, zeros unsigned) or of scale bytes.

    `counted` (bool, same shape) masks what has no meaning, such as the scale of a zero block.
    """
    elements = x.numel() if counted is None else int(np.count_nonzero(counted.numpy()))
    if x.dtype == y.dtype and _has_equal_bytes(x, y):
        return _mismatches(elements, 0, None)
    differs = (x != y).numpy()
    if counted is not None:
        differs &= counted.numpy()
    return _mismatches(elements, int(np.count_nonzero(differs)), _first_row(differs))


def compare_packed_codes(
    x: torch.Tensor, y: torch.Tensor, zero_blocks: torch.Tensor | None = None
) -> dict[str, Any]:
    """Mismatch rate of packed E2M1 codes (uint8, two per byte, zeros unsigned, one shape).

    `zero_blocks` (bool, one per 16 codes) are not counted: they decode to zero whatever they hold.
    """
    elements = 2 * x.numel()
    if zero_blocks is not None:
        elements -= 16 * int(np.count_nonzero(zero_blocks.numpy()))
    if _has_equal_bytes(x, y):
        return _mismatches(elements, 0, None)
    differs = x.numpy() ^ y.numpy()
    if zero_blocks is not None:
        differs.reshape(-1, 8)[zero_blocks.numpy().reshape(-1)] = 0
    different = int(np.count_nonzero(differs & 0x0F)) + int(np.count_nonzero(differs & 0xF0))
    return _mismatches(elements, different, _first_row(differs != 0))


def _mismatches(elements: int, different: int, first_row: int | None) -> dict[str, Any]:
    return {
        "elements": elements,
        "bitwise_fraction": 1.0 - different / max(1, elements),
        "mismatch_rate": different / max(1, elements),
        "first_row": first_row,
    }


def _first_row(differs: Array) -> int | None:
    """Row (dim 0) of the first true element, or None."""
    flat = differs.reshape(-1)
    first = int(flat.argmax()) if flat.size else 0
    if not flat.size or not flat[first]:
        return None
    return first // (flat.size // len(differs)) if differs.ndim else 0


def compare_expert_sets(x_TK: torch.Tensor, y_TK: torch.Tensor) -> dict[str, Any]:
    """Routing: `agreement` is the share of tokens with the same set, bitwise_fraction in order."""
    same_set = (x_TK.sort(-1).values == y_TK.sort(-1).values).all(-1)
    return {
        "elements": x_TK.numel(),
        "bitwise_fraction": float((x_TK == y_TK).double().mean()),
        "agreement": float(same_set.double().mean()),
        "first_row": _first_row(~same_set.numpy()),
    }


def full_kl(logits_x_TV: torch.Tensor, logits_y_TV: torch.Tensor) -> list[float]:
    """KL(x || y) per row over the vocabulary, float64, from logits [T, V]."""

    def of_row(row: int) -> float:
        x, y = logits_x_TV[row], logits_y_TV[row]
        return 0.0 if is_bitwise_equal(x, y) else _kl(x, y)

    return [of_row(row) for row in range(len(logits_x_TV))]


def _kl(x_V: torch.Tensor, y_V: torch.Tensor) -> float:
    x, y = _wide(x_V), _wide(y_V)
    top_x, top_y = x.max(), y.max()
    difference = x - y
    p = np.exp(np.subtract(x, top_x, out=x), out=x)
    q = np.exp(np.subtract(y, top_y, out=y), out=y)
    mass_p, mass_q = float(p.sum()), float(q.sum())
    log_ratio = math.log(mass_q / mass_p) + float(top_y) - float(top_x)
    return _dot(p, difference) / mass_p + log_ratio


def _wide(values: torch.Tensor) -> Array:
    """A float64 copy, made in chunks: torch would wake its threads for more."""
    result = np.empty(len(values))
    out = torch.from_numpy(result)
    for start in range(0, len(values), CHUNK_ELEMENTS):
        out[start : start + CHUNK_ELEMENTS] = values[start : start + CHUNK_ELEMENTS]
    return result
