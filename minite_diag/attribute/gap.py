"""How far an engine's log-probabilities are from a baseline's, over some sequences.

Knows numpy only. Reductions in float64. Invariant: a position that only one side has a
log-probability for is never counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from minite_diag.capture.live import Scored

Key = tuple[str, str, str]
"""(mode, source, probe)."""
Vector = npt.NDArray[np.float64]


def stored_logprobs(tokens: pd.DataFrame) -> dict[Key, dict[int, float]]:
    """Log-probabilities of a trace's `tokens` table by sequence and position."""
    known = tokens.dropna(subset=["logprob"])
    return {
        (str(mode), str(source), str(probe)): dict(
            zip(group["position"].tolist(), group["logprob"].tolist(), strict=True)
        )
        for (mode, source, probe), group in known.groupby(["mode", "source", "probe"], sort=False)
    }


def live_logprobs(scored: Iterable[Scored]) -> dict[Key, dict[int, float]]:
    """Log-probabilities of a job by sequence and position."""
    return {
        item.key: {i: value for i, value in enumerate(item.logprobs) if value is not None}
        for item in scored
    }


def paired(
    baseline: Mapping[Key, Mapping[int, float]], target: Mapping[Key, Mapping[int, float]]
) -> dict[Key, tuple[list[int], Vector, Vector]]:
    """(positions, baseline's, target's) of every sequence that both have."""
    found = {}
    for key in target:
        positions = sorted(set(baseline.get(key, {})) & set(target[key]))
        if positions:
            found[key] = (
                positions,
                np.array([baseline[key][p] for p in positions], dtype=np.float64),
                np.array([target[key][p] for p in positions], dtype=np.float64),
            )
    return found


def gap(
    baseline: Mapping[Key, Mapping[int, float]],
    target: Mapping[Key, Mapping[int, float]],
    prompt_lengths: Mapping[str, int],
) -> dict[str, Any]:
    """Mean, p99 and largest |difference|, the number of equal tokens, and k3.

    k3 = mean(exp(r) - r - 1) with r = baseline - target, an estimate of KL(target || baseline)
    (Schulman), only over tokens that the target drew: sampled sequences past their prompt.
    """
    pairs = paired(baseline, target)
    if not pairs:
        return {"tokens": 0, "mean_abs": None, "p99_abs": None, "max_abs": None, "k3": None}
    r = np.concatenate([x - y for _, x, y in pairs.values()])
    drawn = [
        (x - y)[np.array(positions) >= prompt_lengths[key[2]]]
        for key, (positions, x, y) in pairs.items()
        if key[0] == "sample"
    ]
    on_policy = np.concatenate(drawn) if drawn else np.zeros(0)
    size = np.abs(r)
    return {
        "mean_abs": float(size.mean()),
        "p99_abs": float(np.quantile(size, 0.99)),
        "max_abs": float(size.max()),
        "equal": int((size == 0.0).sum()),
        "tokens": len(r),
        "k3": float((np.expm1(on_policy) - on_policy).mean()) if len(on_policy) else None,
    }


def closed(before: dict[str, Any], after: dict[str, Any], metric: str = "mean_abs") -> float | None:
    """The share of the gap that closed: 1 - after / before; None where there was none."""
    if not before.get(metric) or after.get(metric) is None:
        return None
    return 1.0 - float(after[metric]) / float(before[metric])
