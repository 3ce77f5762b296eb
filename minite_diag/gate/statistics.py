"""Intervals and robust numbers of clustered, heavy-tailed, non-negative values.

Knows numpy only. Invariant: sequences, not tokens, are resampled, because tokens of one sequence
are not independent; one seed gives one result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

RESAMPLES: Final = 2000
QUANTILE_RESAMPLES: Final = 400
CONFIDENCE: Final = 0.95
MIN_SEQUENCES: Final = 4
"""Below this many sequences a studentized bootstrap has no useful bound."""
TRIM: Final = 0.95
HALF_NORMAL_TRIMMED: Final = 0.7168
"""Mean of |z| below its own 95th percentile, z standard normal: sqrt(2/pi)(1-exp(-q^2/2))/0.95."""
HEAVY_TAIL: Final = 3.0
TAIL_LIMIT: Final = 10.0
"""KL so many times sigma^2/2 is outliers: a Laplace distribution gives 1.4, Student t(3) about 2."""

_ROUNDING: Final = 1e-12
"""Relative standard error of sequences that are equal but for the rounding of their sums."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Clusters:
    """Sums and sizes of the sequences of one list of values."""

    sums: Floats
    sizes: Floats

    @classmethod
    def of(cls, values: Floats, sequence: Ints) -> Clusters:
        """`sequence` gives the index of each value's sequence, from 0 without gaps."""
        sizes = np.bincount(sequence).astype(np.float64)
        sums = np.bincount(sequence, weights=values)
        return cls(sums.astype(np.float64), sizes)

    @property
    def mean(self) -> float:
        """Mean over all values."""
        return float(self.sums.sum() / self.sizes.sum())

    def standard_error(self) -> float:
        """Of the mean, linearized as a ratio of sums over sequences."""
        return float(_standard_error(self.sums, self.sizes, np.array(self.mean)))


def _standard_error(sums: Floats, sizes: Floats, mean: Floats) -> Floats:
    """Over the last dim; `mean` lacks that dim."""
    count = sums.shape[-1]
    residual = sums - mean[..., None] * sizes
    spread = (residual * residual).sum(-1) * (count / max(1, count - 1))
    return np.asarray(np.sqrt(spread) / sizes.sum(-1), dtype=np.float64)


def mean_interval(clusters: Clusters, seed: int = 0) -> tuple[float, float]:
    """Two-sided bootstrap interval of a non-negative mean: the wider of two at each end.

    The percentile interval alone covers 56 to 80 % instead of 97.5 % at its upper end for KL of a
    few sequences; a studentized one on the log scale repairs most of that (Davison and Hinkley
    1997, chapter 5), and is too sure of its lower end where one sequence makes most of the mean.
    """
    mean, error = clusters.mean, clusters.standard_error()
    if error <= _ROUNDING * mean:
        return mean, mean
    count = len(clusters.sums)
    drawn = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    sums, sizes = clusters.sums[drawn], clusters.sizes[drawn]
    means = sums.sum(1) / sizes.sum(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = _spread(_standard_error(sums, sizes, means), means)
        pivots = (np.log(means) - math.log(mean)) * means / errors
    down, up = _studentized(0.0, error / mean, pivots)
    return min(float(low), _scaled(mean, down)), max(float(high), _scaled(mean, up))


def difference_interval(before: Clusters, after: Clusters, seed: int = 0) -> tuple[float, float]:
    """Studentized bootstrap interval of mean(after) - mean(before), each resampled by itself."""
    change = after.mean - before.mean
    error = math.hypot(before.standard_error(), after.standard_error())
    if error == 0.0:
        return change, change
    generator = np.random.default_rng(seed)
    means, errors = [], []
    for clusters in (before, after):
        count = len(clusters.sums)
        drawn = generator.integers(0, count, size=(RESAMPLES, count))
        sums, sizes = clusters.sums[drawn], clusters.sizes[drawn]
        means.append(sums.sum(1) / sizes.sum(1))
        errors.append(_standard_error(sums, sizes, means[-1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        together = _spread(np.hypot(errors[0], errors[1]), means[0] + means[1])
        pivots = (means[1] - means[0] - change) / together
    return _studentized(change, error, pivots)


def paired_interval(change: Clusters, seed: int = 0) -> tuple[float, float]:
    """Studentized bootstrap interval of the mean of differences that may have either sign."""
    mean, error = change.mean, change.standard_error()
    if error == 0.0:
        return mean, mean
    count = len(change.sums)
    drawn = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    sums, sizes = change.sums[drawn], change.sizes[drawn]
    means = sums.sum(1) / sizes.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = (means - mean) / _spread(_standard_error(sums, sizes, means), means)
    return _studentized(mean, error, pivots)


def _spread(error: Floats, mean: Floats) -> Floats:
    """NaN where only rounding is left: equal sequences give no pivot, and are not rare for few."""
    return np.where(error > _ROUNDING * np.abs(mean), error, np.nan)


def _studentized(center: float, error: float, pivots: Floats) -> tuple[float, float]:
    pivots = pivots[np.isfinite(pivots)]
    if not len(pivots):
        return -math.inf, math.inf
    low, high = np.quantile(pivots, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return center - float(high) * error, center - float(low) * error


def _scaled(mean: float, exponent: float) -> float:
    """Mean times exp(exponent)."""
    return mean * math.exp(exponent) if exponent < 700 else math.inf


def quantile_interval(
    values: Floats, sequence: Ints, quantile: float, trimmed: bool = False, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a quantile, or of the mean below it (`trimmed`)."""
    order = np.argsort(values, kind="stable")
    ranked, owner = values[order], sequence[order]
    count = int(sequence.max()) + 1
    generator = np.random.default_rng(seed)
    found = np.empty(QUANTILE_RESAMPLES)
    for i in range(QUANTILE_RESAMPLES):
        times = np.bincount(generator.integers(0, count, count), minlength=count)[owner]
        ends = np.cumsum(times)
        last = int(np.searchsorted(ends, math.ceil(quantile * ends[-1])))
        last = min(last, len(ranked) - 1)
        if trimmed:
            found[i] = (ranked[: last + 1] * times[: last + 1]).sum() / ends[last]
        else:
            found[i] = ranked[last]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def trimmed_mean(values: Floats) -> float:
    """Mean of the values up to the 95th percentile (miles: p95-trimmed)."""
    kept = np.sort(values)[: max(1, math.ceil(TRIM * len(values)))]
    return float(kept.mean())


def tail_index(r: Floats) -> float | None:
    """KL over what rounding of this size would give: k3 / (sigma^2 / 2).

    r = learner - sampler log-probability [tokens]. sigma comes from the trimmed mean of |r| as if r
    were normal, so outliers do not raise it. About 1 for rounding; None where 95 % of r are zero.
    """
    sigma = trimmed_mean(np.abs(r)) / HALF_NORMAL_TRIMMED
    return float((np.expm1(r) - r).mean() / (sigma * sigma / 2)) if sigma else None


def share_of_largest(values: Floats, part: float) -> tuple[int, float]:
    """How many values are the largest `part` of them (at least one), and their share of the sum."""
    count = max(1, math.floor(part * len(values)))
    total = float(values.sum())
    top = float(np.sort(values)[-count:].sum())
    return count, top / total if total else 0.0


def tokens_needed(clusters: Clusters, resolution: float) -> int:
    """Tokens for a 95 % half width of `resolution`, sequences being as they are here."""
    half = 1.96 * clusters.standard_error()
    tokens = float(clusters.sizes.sum())
    return max(1, math.ceil(tokens * (half / resolution) ** 2))
