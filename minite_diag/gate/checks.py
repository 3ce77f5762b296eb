"""One limit against what was measured -> one check: estimate, interval, verdict, reason.

Knows numpy only. Invariant: pass and fail are given on the bound of the interval, never on the
estimate; what the engines' own noise could explain is no failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from minite_diag.gate.evidence import Floors, SiteValues, Tokens, floor_of
from minite_diag.gate.limits import METRICS, Limit
from minite_diag.gate.statistics import (
    HEAVY_TAIL,
    MIN_SEQUENCES,
    TAIL_LIMIT,
    TRIM,
    Clusters,
    Floats,
    mean_interval,
    quantile_interval,
    share_of_largest,
    tail_index,
    tokens_needed,
    trimmed_mean,
)

RESOLUTION: Final = 1e-4
"""What the power note asks for: a difference of this size ought to be seen."""
OUTLIERS: Final = 3
"""Largest tokens that are named."""

TOKEN_VALUES: Final[dict[str, Callable[[Floats], Floats]]] = {
    "mean_abs": np.abs,
    "k3_kl": lambda r: np.expm1(r) - r,
    "mult_prob_error": lambda r: np.expm1(np.abs(r)),
}
_QUANTILES: Final = {"median_abs": 0.5, "p99_abs": 0.99, "trimmed_abs": TRIM}

Estimate = dict[str, Any]


def token_check(limit: Limit, tokens: Tokens, floors: Floors) -> Estimate:
    """Judge one metric of tokens."""
    found: Estimate = {"tokens": len(tokens), "sequences": len(tokens.names)}
    found |= estimate_tokens(limit.metric, tokens)
    found |= _judge(limit, found, floor_of(limit.metric, floors.repeat), floors.repeat)
    beyond = floor_of(limit.metric, floors.any_leg)
    if found["verdict"] == "pass" and beyond > max(limit.value, found["estimate"]):
        assert floors.any_leg is not None
        found |= {"verdict": "inconclusive", "reason": _depends(beyond, floors.any_leg)}
    return found


def estimate_tokens(metric: str, tokens: Tokens) -> Estimate:
    """Estimate and interval of a metric of tokens; an interval of None where there is none."""
    size = np.abs(tokens.r)
    enough = len(tokens.names) >= MIN_SEQUENCES
    if metric in TOKEN_VALUES:
        clusters = Clusters.of(TOKEN_VALUES[metric](tokens.r), tokens.sequence)
        best = METRICS[metric].best
        low, high = mean_interval(clusters) if enough else (None, None)
        return {
            "estimate": best + clusters.mean,
            "standard_error": clusters.standard_error(),
            "low": None if low is None else best + low,
            "high": None if high is None else best + high,
        }
    if metric == "max_abs":
        # What was not seen may be larger: the maximum is of these tokens, without an interval.
        largest = float(size.max())
        return {"estimate": largest, "low": largest, "high": largest}
    trimmed = metric == "trimmed_abs"
    share = _QUANTILES[metric]
    estimate = trimmed_mean(size) if trimmed else float(np.quantile(size, share))
    low, high = quantile_interval(size, tokens.sequence, share, trimmed) if enough else (None, None)
    return {"estimate": estimate, "low": low, "high": high}


def site_check(limit: Limit, found: SiteValues) -> Estimate:
    """Judge one metric of sites by the site with the worst mean over its sequences."""
    if not len(found.values):
        reason = f"none of {found.skipped} matching tensors could be compared"
        return {"tokens": 0, "sequences": 0, "verdict": "inconclusive", "reason": reason}
    metric = METRICS[limit.metric]
    worse = metric.best - found.values if metric.falls else found.values - metric.best
    means = np.bincount(found.site, weights=worse) / np.bincount(found.site)
    worst = int(means.argmax())
    name = found.names[worst]
    own = found.site == worst
    _, sequence = np.unique(found.sequence[own], return_inverse=True)
    clusters = Clusters.of(worse[own], sequence.astype(np.int64))
    result: Estimate = {"tokens": 0, "sequences": len(clusters.sums), "worst": name}
    result |= {"sites": len(found.names), "skipped": found.skipped}
    result["standard_error"] = clusters.standard_error()
    sign = -1.0 if metric.falls else 1.0
    ends: list[float | None] = [None, None]
    if len(clusters.sums) >= MIN_SEQUENCES:
        ends = [metric.best + sign * end for end in mean_interval(clusters)]
        ends = ends[::-1] if metric.falls else ends
    elif name.rpartition(":")[2].startswith("weight"):
        # Weights are the same in every sequence: there is nothing to sample.
        ends = [metric.best + sign * clusters.mean] * 2
    result |= {"estimate": metric.best + sign * clusters.mean, "low": ends[0], "high": ends[1]}
    result |= _judge(limit, result, 0.0, None)
    if found.skipped and result["verdict"] == "pass":
        result["reason"] = f"{found.skipped} matching tensors could not be compared"
    return result


def _judge(
    limit: Limit, found: Estimate, floor: float, leg: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Verdict and reason; `floor` is the engines' own noise in the metric's units."""
    metric = METRICS[limit.metric]
    if limit.value == metric.best:
        return _exact(found, metric.best, floor, leg)
    if found["low"] is None:
        reason = f"{found['sequences']} sequences have no interval: at least {MIN_SEQUENCES}"
        return {"verdict": "inconclusive", "reason": reason}
    low, high, edge = found["low"], found["high"], limit.value
    warn = edge if limit.warn is None else limit.warn
    if metric.falls:
        low, high, edge, warn = -high, -low, -edge, -warn
    if high <= edge:
        return {"verdict": "pass", "reason": ""}
    if floor and edge < floor and found["estimate"] <= floor:
        return {"verdict": "inconclusive", "reason": _below_floor(floor, leg)}
    if low > (max(warn, floor) if floor else warn):
        return {"verdict": "fail", "reason": ""}
    if low > warn:
        return {"verdict": "inconclusive", "reason": _near_floor(floor, leg)}
    if edge < low and high <= warn:
        return {"verdict": "inconclusive", "reason": "in the warning band"}
    return {"verdict": "inconclusive", "reason": _spans(found, limit)}


def _exact(
    found: Estimate, best: float, floor: float, leg: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Bitwise equality needs no interval: one different token decides."""
    if found["estimate"] == best:
        return {"verdict": "pass", "reason": ""}
    if floor and found["estimate"] <= floor:
        return {"verdict": "inconclusive", "reason": _below_floor(floor, leg)}
    return {"verdict": "fail", "reason": ""}


def _below_floor(floor: float, leg: Mapping[str, Any] | None) -> str:
    assert leg is not None
    return (
        f"below the noise floor {floor:.3g}: {leg['engine']} differs as much from itself "
        f"({leg['leg']})"
    )


def _depends(size: float, leg: Mapping[str, Any]) -> str:
    return (
        f"holds for this batch only: {leg['engine']} differs from itself by {size:.3g} "
        f"({leg['leg']}), more than the limit"
    )


def _near_floor(floor: float, leg: Mapping[str, Any] | None) -> str:
    assert leg is not None
    return (
        f"the interval reaches down to the noise floor {floor:.3g}: {leg['engine']} against itself "
        f"({leg['leg']})"
    )


def _spans(found: Estimate, limit: Limit) -> str:
    """Why the interval doesn't decide, and what would."""
    text = f"the interval {found['low']:.3g}..{found['high']:.3g} spans the limit"
    ends = [limit.value] if limit.warn is None else [limit.value, limit.warn]
    margin = min(abs(found["estimate"] - end) for end in ends)
    error = found.get("standard_error")
    if error is None or not margin:
        return text
    ratio = (1.96 * error / margin) ** 2
    if ratio <= 1.0:
        return f"{text}: {found['sequences']} sequences are few"
    if found["tokens"]:
        return f"{text}; about {ratio * found['tokens']:.3g} tokens decide"
    return f"{text}; about {math.ceil(ratio * found['sequences'])} sequences decide"


def describe_tokens(tokens: Tokens) -> dict[str, Any]:
    """Robust numbers, tail and power of one pair and mode, for people."""
    size = np.abs(tokens.r)
    k3 = np.expm1(tokens.r) - tokens.r
    index = tail_index(tokens.r)
    return {
        "mode": tokens.mode,
        "tokens": len(tokens),
        "sequences": len(tokens.names),
        "mean_abs": float(size.mean()),
        "median_abs": float(np.median(size)),
        "trimmed_abs": trimmed_mean(size),
        "p99_abs": float(np.quantile(size, 0.99)),
        "max_abs": float(size.max()),
        "k3_kl": float(k3.mean()),
        "tail_index": index,
        "tail": _tail_text(size, k3, index),
        "outliers": _outliers(tokens, size),
        "power": _power(tokens),
    }


def _tail_text(size: Floats, k3: Floats, index: float | None) -> str:
    """Outliers or rounding, in words."""
    if not size.any():
        return "no difference"
    count, share = share_of_largest(k3, 0.01)
    largest = f"{count} of {len(size)} tokens make up {share:.0%} of the KL"
    if index is None:
        return f"outliers, not rounding: 95 % of the tokens are equal, {largest}"
    if index > TAIL_LIMIT:
        return f"outliers, not rounding: KL is {index:.3g} times sigma^2/2, {largest}"
    name = "heavier tails than rounding" if index > HEAVY_TAIL else "rounding-like"
    return f"{name}: KL is {index:.2g} times sigma^2/2"


def _outliers(tokens: Tokens, size: Floats) -> list[dict[str, Any]]:
    top = np.argsort(-size, kind="stable")[:OUTLIERS]
    return [
        {
            "probe": tokens.names[tokens.sequence[i]],
            "position": int(tokens.position[i]),
            "token_id": int(tokens.token_id[i]),
            "difference": float(tokens.r[i]),
        }
        for i in top
        if size[i] > 0.0
    ]


def _power(tokens: Tokens) -> dict[str, Any]:
    """The half width that this run has, and the tokens that RESOLUTION needs."""
    if len(tokens.names) < MIN_SEQUENCES or not tokens.r.any():
        return {"resolution": RESOLUTION, "half_width": None, "tokens": None, "text": ""}
    clusters = Clusters.of(np.abs(tokens.r), tokens.sequence)
    half = 1.96 * clusters.standard_error()
    needed = tokens_needed(clusters, RESOLUTION)
    text = (
        f"this run sees +-{half:.2g} of mean_abs; needs {needed:.3g} tokens to see {RESOLUTION:g}"
    )
    return {"resolution": RESOLUTION, "half_width": half, "tokens": needed, "text": text}
