"""Numbers that say how two lists of log-probabilities of the same tokens differ.

Knows numpy only, so that the summary and the gate run without torch. Reductions are in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def logprob_summary(
    learner: npt.ArrayLike, sampler: npt.ArrayLike, *, on_policy: bool
) -> dict[str, Any]:
    """How two lists of log-probabilities of the same tokens differ.

    With r = learner - sampler: `mean_abs` (slime, miles: train_rollout_logprob_abs_diff),
    `mult_prob_error` = mean exp|r| (NeMo-RL). Only where the sampler drew the tokens at
    temperature 1 (`on_policy`): `k1_kl` = mean(-r) and `k3_kl` = mean(exp(r) - r - 1), estimates
    of KL(sampler || learner) (Schulman), and `chi2` = mean(exp(2r)) - 1.
    """
    r = np.asarray(learner, dtype=np.float64) - np.asarray(sampler, dtype=np.float64)
    tokens = len(r)
    if not tokens:
        return {"tokens": 0}
    size = np.abs(r)
    summary: dict[str, Any] = {
        "tokens": tokens,
        "equal": int((size == 0.0).sum()),
        "mean_abs": float(size.mean()),
        "median_abs": float(np.median(size)),
        "p99_abs": float(np.quantile(size, 0.99)),
        "max_abs": float(size.max()),
        "mult_prob_error": float(np.exp(size).mean()),
    }
    if on_policy:
        summary["k1_kl"] = float(-r.mean())
        summary["k3_kl"] = float((np.expm1(r) - r).mean())
        summary["chi2"] = float(np.expm1(2.0 * r).mean())
    return summary
