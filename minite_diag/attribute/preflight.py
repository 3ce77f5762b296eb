"""Are the two sides' log-probabilities comparable at all? Found by fitting, before any verdict.

Temperature, shifted tokens, scaled log-probabilities, top-k or top-p renormalization, logits sent
as log-probabilities: each is fitted to the data, and is a hit only if it explains most of the gap.
Invariant: a hit names the fitted value and the share of the gap that it closes; equal sides and
ordinary rounding give no hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from minite_diag.canonical.names import SequenceKey
from minite_diag.compare import Side
from minite_diag.site import Site

Vector = npt.NDArray[np.float64]

MIN_TOKENS: Final = 8
MIN_CLOSED: Final = 0.7
"""Share of the mean absolute gap that a fitted cause has to close."""
MIN_GAP: Final = 1e-3
MIN_POSITIVE: Final = 0.02
"""Share of log-probabilities above 0 that no rounding explains."""
TEMPERATURES: Final = np.exp(np.linspace(np.log(0.25), np.log(4.0), 41))
FITTED_TOKENS: Final = 64
"""Tokens at even distances that distributions are fitted to: each has a row of the vocabulary."""
TOP_KS: Final = (2, 3, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100)
TOP_PS: Final = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
SHIFTS: Final = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Hit:
    """A semantic difference: its cause code, the fitted value and what it explains."""

    code: str
    value: float | str
    closed: float
    tokens: int
    text: str


def preflight(logprobs: pd.DataFrame, learner: Side, sampler_id: str) -> list[Hit]:
    """Hits of one pair, the one that closes most of the gap first.

    `logprobs` are the pair's rows; the learner's captured logits allow the fits that need the
    whole distribution.
    """
    rows = logprobs[(logprobs["mode"] == "score") | (logprobs["source"] == sampler_id)]
    rows = rows.sort_values(["mode", "source", "probe", "position"], kind="stable")
    if len(rows) < MIN_TOKENS:
        return []
    x = rows["baseline_logprob"].to_numpy(np.float64)
    y = rows["target_logprob"].to_numpy(np.float64)
    share = float((y > 1e-6).mean())
    if share > MIN_POSITIVE:
        text = f"{share:.0%} of the sampler's log-probabilities are above 0: they are logits"
        return [Hit("MD405", share, 1.0, len(y), text)]
    gap = _gap(x, y)
    if gap < MIN_GAP:
        return []
    hits = [*_shift(rows, gap), *_scaled(x, y, gap), *_distribution(rows, learner)]
    return sorted((hit for hit in hits if hit.closed >= MIN_CLOSED), key=lambda hit: -hit.closed)


def other_tokens(learner: Side, sampler: Side) -> list[Hit]:
    """MD406: positions where the two sides scored other tokens; they are in no other figure."""
    where = ["mode", "source", "probe", "position"]
    both = learner.trace.tokens.merge(sampler.trace.tokens, on=where, suffixes=("_x", "_y"))
    different = both[both["token_id_x"] != both["token_id_y"]]
    if not len(different):
        return []
    first = different.sort_values(where, kind="stable").iloc[0]
    share = len(different) / len(both)
    text = (
        f"{share:.1%} of the tokens differ: the first is token {first['position']} of "
        f"{first['probe']} ({first['token_id_x']} in {learner.trace.id}, {first['token_id_y']} in "
        f"{sampler.trace.id})"
    )
    return [Hit("MD406", share, share, len(both), text)]


def _gap(x: Vector, y: Vector) -> float:
    return float(np.abs(x - y).mean())


def _shift(rows: pd.DataFrame, gap: float) -> Iterator[Hit]:
    groups = [g for _, g in rows.groupby(["mode", "source", "probe"], sort=False)]
    for shift in SHIFTS:
        x, y = [], []
        for group in groups:
            a = group["baseline_logprob"].to_numpy(np.float64)
            b = group["target_logprob"].to_numpy(np.float64)
            if len(a) > abs(shift):
                x.append(a[: len(a) - shift] if shift > 0 else a[-shift:])
                y.append(b[shift:] if shift > 0 else b[:shift])
        if x:
            a, b = np.concatenate(x), np.concatenate(y)
            yield Hit(
                "MD402",
                float(shift),
                1.0 - _gap(a, b) / gap,
                len(a),
                f"the sampler's log-probabilities are shifted by {shift} token(s)",
            )


def _scaled(x: Vector, y: Vector, gap: float) -> Iterator[Hit]:
    """The sampler divided log-probabilities, not logits, by a temperature."""
    slope = float(x @ y / (x @ x)) if x @ x else 1.0
    if slope > 0.0 and abs(slope - 1.0) > 0.02:
        yield Hit(
            "MD403",
            1.0 / slope,
            1.0 - _gap(x * slope, y) / gap,
            len(x),
            f"the sampler's log-probabilities are the learner's divided by {1.0 / slope:.3g}",
        )


def _distribution(rows: pd.DataFrame, learner: Side) -> Iterator[Hit]:
    """Fits that need the learner's logits: temperature, top-k and top-p renormalization."""
    if len(rows) > FITTED_TOKENS:
        rows = rows.iloc[np.linspace(0, len(rows) - 1, FITTED_TOKENS).round().astype(int)]
    logits, tokens, y = _with_logits(rows, learner)
    if logits is None or len(tokens) < MIN_TOKENS:
        return
    base = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()
    gap = _gap(base, y)
    if gap < MIN_GAP:
        return

    def at_temperature(value: float) -> Vector:
        return (logits / value).log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()

    best = _refined(
        min(TEMPERATURES, key=lambda t: _gap(at_temperature(float(t)), y)), at_temperature, y
    )
    if abs(float(best) - 1.0) > 0.02:
        yield Hit(
            "MD401",
            float(best),
            1.0 - _gap(at_temperature(float(best)), y) / gap,
            len(y),
            f"the sampler's log-probabilities are those of temperature {best:.3g}",
        )
    ordered = logits.log_softmax(-1).sort(-1, descending=True).values
    for code, name, values, kept in (
        ("MD404", "top-k", TOP_KS, _mass_of_top_k),
        ("MD404", "top-p", TOP_PS, _mass_of_top_p),
    ):
        yield from _renormalized(base, y, gap, ordered, (code, name), values, kept)


def _refined(coarse: float, fit: Callable[[float], Vector], y: Vector) -> float:
    """The best value between the neighbours of a coarse one, by golden-section search."""
    ratio = float(TEMPERATURES[1] / TEMPERATURES[0])
    low, high = coarse / ratio, coarse * ratio
    golden = (5**0.5 - 1) / 2
    for _ in range(20):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if _gap(fit(a), y) < _gap(fit(b), y) else (a, high)
    return (low + high) / 2


def _renormalized(
    base: Vector,
    y: Vector,
    gap: float,
    ordered: torch.Tensor,
    label: tuple[str, str],
    values: tuple[float, ...],
    kept: Callable[[torch.Tensor, float], torch.Tensor],
) -> Iterator[Hit]:
    fits = [(value, base - kept(ordered, value).numpy()) for value in values]
    value, fitted = min(fits, key=lambda fit: _gap(fit[1], y))
    code, name = label
    yield Hit(
        code,
        float(value),
        1.0 - _gap(fitted, y) / gap,
        len(y),
        f"the sampler renormalizes its log-probabilities after {name} = {value:g}",
    )


def _mass_of_top_k(ordered: torch.Tensor, k: float) -> torch.Tensor:
    """Log of the mass of the k most probable tokens, [T]."""
    return ordered[:, : int(k)].logsumexp(-1)


def _mass_of_top_p(ordered: torch.Tensor, p: float) -> torch.Tensor:
    """Log of the mass of the smallest set that reaches p, [T]."""
    probabilities = ordered.exp()
    before = probabilities.cumsum(-1) - probabilities
    return torch.where(before < p, ordered, -torch.inf).logsumexp(-1)


def _with_logits(
    rows: pd.DataFrame, learner: Side
) -> tuple[torch.Tensor | None, torch.Tensor, Vector]:
    """Learner logits [T, V] float64 of the rows that have them, their tokens, the sampler's y."""
    logits, tokens, y = [], [], []
    for (mode, source, probe), group in rows.groupby(["mode", "source", "probe"], sort=False):
        key = SequenceKey(str(mode), str(source), str(probe))
        found = learner.read(key, Site("lm_head", "logits"))
        if found is None or found.positions is None:
            continue
        index = {int(p): i for i, p in enumerate(found.positions)}
        kept = [i for i, p in enumerate(group["position"]) if int(p) - 1 in index]
        chosen = group.iloc[kept]
        where = [index[int(p) - 1] for p in chosen["position"]]
        logits.append(found.tensor[where].double())
        tokens += chosen["token_id"].tolist()
        y += chosen["target_logprob"].tolist()
    if not logits:
        return None, torch.empty(0, dtype=torch.int64), np.empty(0)
    return torch.cat(logits), torch.tensor(tokens), np.asarray(y, dtype=np.float64)
