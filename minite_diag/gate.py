"""The gate: thresholds on a stored run -> pass, fail, inconclusive or error.

Reads Parquet and numpy only: no torch. Invariant: a verdict is given on the confidence bound of a
bootstrap that resamples whole sequences, because tokens of one sequence are not independent; a run
in which something was not measured never passes.

Profiles follow what practitioners use (NeMo-RL, slime, miles, prime-rl, verl): mean absolute
log-probability difference and the k3 estimate of KL(sampler || learner).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from minite_diag.errors import UsageError
from minite_diag.trace.schema import LOGPROBS, read_table

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
MIN_SEQUENCES: Final = 2


@dataclass(frozen=True)
class Profile:
    """Upper limits; up to `warn_*` a miss is `inconclusive` with a warning, above it a fail."""

    name: str
    mean_abs: float
    k3_kl: float
    warn_mean_abs: float | None = None
    warn_k3_kl: float | None = None


PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("bitwise", 0.0, 0.0),
        Profile("bf16-dense", 0.012, 2e-4),
        Profile("bf16-moe", 0.025, 1e-3),
        Profile("fp8", 0.025, 1e-3),
        Profile("nvfp4", 0.048, 1.8e-3, 0.08, 5e-3),
    )
}


def get_profile(name: str) -> Profile:
    """The profile of that name; raises UsageError with the near matches."""
    if name not in PROFILES:
        near = difflib.get_close_matches(name, PROFILES, n=1)
        raise UsageError(
            f"no gate profile is called {name!r}",
            f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(PROFILES)}",
        )
    return PROFILES[name]


def check_gate(
    run: Path, summary: dict[str, Any], profile: str, overrides: dict[str, float]
) -> dict[str, Any]:
    """Judge every learner-sampler pair of a run.

    Returns {"profile", "thresholds", "verdict", "reasons", "checks"}; `checks` has one entry for
    each pair, mode and metric with its estimate and interval.
    """
    limits = replace(get_profile(profile), **overrides)  # type: ignore[arg-type]
    problems = _unmeasured(summary)
    rows = read_table(run / "logprobs.parquet", LOGPROBS).to_pandas()
    checks = [
        check
        for pair in summary["pairs"]
        for check in _check_pair(rows, pair["learner"]["id"], pair["sampler"]["id"], limits)
    ]
    verdict, reasons = _verdict(checks, problems)
    return {
        "profile": limits.name,
        "thresholds": {"mean_abs": limits.mean_abs, "k3_kl": limits.k3_kl},
        "verdict": verdict,
        "reasons": reasons,
        "checks": checks,
    }


def with_gate(summary: dict[str, Any], gate: dict[str, Any]) -> dict[str, Any]:
    """The summary with the gate's verdict as its own."""
    return {**summary, "verdict": gate["verdict"], "gate": gate}


def _unmeasured(summary: dict[str, Any]) -> list[str]:
    problems = [
        f"{engine['id']}: {(engine['error'] or {}).get('message', engine['status'])}"
        for engine in summary["engines"]
        if engine["status"] not in ("ok", "truncated")
    ]
    if not summary["pairs"]:
        problems.append("no pair of engines was compared")
    return problems


def _check_pair(
    rows: pd.DataFrame, learner: str, sampler: str, limits: Profile
) -> list[dict[str, Any]]:
    rows = rows[(rows["baseline"] == learner) & (rows["target"] == sampler)]
    sample = rows[(rows["mode"] == "sample") & (rows["source"] == sampler) & rows["generated"]]
    mode, rows = ("sample", sample) if len(sample) else ("score", rows[rows["mode"] == "score"])
    r = (rows["baseline_logprob"] - rows["target_logprob"]).to_numpy(np.float64)
    groups = (rows["source"] + "\0" + rows["probe"]).to_numpy()
    metrics = [("mean_abs", np.abs(r), limits.mean_abs, limits.warn_mean_abs)]
    if mode == "sample" or limits.k3_kl == 0.0:
        metrics.append(("k3_kl", np.expm1(r) - r, limits.k3_kl, limits.warn_k3_kl))
    return [
        {
            "learner": learner,
            "sampler": sampler,
            "mode": mode,
            "metric": name,
            **_judge(values, groups, limit, warn),
        }
        for name, values, limit, warn in metrics
    ]


def _judge(
    values: npt.NDArray[np.float64], groups: npt.NDArray[Any], limit: float, warn: float | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"limit": limit, "tokens": len(values)}
    sequences = len(np.unique(groups))
    if not len(values):
        return {**found, "verdict": "inconclusive", "reason": "no token has both log-probabilities"}
    estimate = float(values.mean())
    low, high = bootstrap_interval(values, groups)
    found |= {"estimate": estimate, "low": low, "high": high, "sequences": sequences}
    if limit == 0.0:
        exact = not np.any(values)
        return {**found, "verdict": "pass" if exact else "fail", "reason": ""}
    if sequences < MIN_SEQUENCES:
        return {**found, "verdict": "inconclusive", "reason": "one sequence has no interval"}
    if high <= limit:
        return {**found, "verdict": "pass", "reason": ""}
    if low > (warn if warn is not None else limit):
        return {**found, "verdict": "fail", "reason": ""}
    return {**found, "verdict": "inconclusive", "reason": _why_inconclusive(found, limit, warn)}


def _why_inconclusive(found: dict[str, Any], limit: float, warn: float | None) -> str:
    if warn is not None and found["low"] > limit and found["high"] <= warn:
        return "in the warning band"
    width = (found["high"] - found["low"]) / 2
    margin = abs(found["estimate"] - limit)
    needed = int(np.ceil(found["tokens"] * (width / margin) ** 2)) if margin else 0
    return f"the interval {found['low']:.3g}..{found['high']:.3g} spans the limit" + (
        f"; about {needed} tokens would decide" if needed else ""
    )


def bootstrap_interval(
    values: npt.NDArray[np.float64], groups: npt.NDArray[Any], seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean, resampling whole groups (sequences)."""
    _, index = np.unique(groups, return_inverse=True)
    sums = np.bincount(index, weights=values)
    counts = np.bincount(index).astype(np.float64)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _verdict(checks: list[dict[str, Any]], problems: list[str]) -> tuple[str, list[str]]:
    if problems:
        return "error", problems
    verdicts = {check["verdict"] for check in checks}
    worst = next((v for v in ("fail", "inconclusive", "pass") if v in verdicts), "inconclusive")
    shown = [check for check in checks if check["verdict"] == worst]
    return worst, [_sentence(check) for check in shown] or ["nothing was compared"]


def _sentence(check: dict[str, Any]) -> str:
    if "estimate" not in check:
        return f"{check['sampler']} {check['mode']} {check['metric']}: {check['reason']}"
    text = (
        f"{check['sampler']} {check['mode']} {check['metric']} {check['estimate']:.4g} "
        f"[{check['low']:.3g}, {check['high']:.3g}] against {check['limit']:.4g}"
    )
    return f"{text}: {check['reason']}" if check["reason"] else text
