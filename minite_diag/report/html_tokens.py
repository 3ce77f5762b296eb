"""Tokens for the HTML report: the gap with its interval, by position and phase, by sequence.

Knows the logprobs table and the gate's statistics; no template, no torch. Invariant: figures hold at
most BINS points a series however many tokens there are, and each token is in exactly one series.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from minite_diag.gate.checks import describe_tokens, estimate_tokens
from minite_diag.gate.evidence import Tokens
from minite_diag.gate.statistics import MIN_SEQUENCES
from minite_diag.report import figures, words
from minite_diag.report.tables import (
    Cell,
    Row,
    Table,
    capped,
    columns,
    count,
    number,
    share,
    text,
)
from minite_diag.trace.schema import LOGPROBS, read_table

WHERE: Final = "logprobs.parquet"
BINS: Final = 48
MAX_TOKENS: Final = 60
MAX_SEQUENCES: Final = 200
_LABELS: Final = ("baseline", "target", "mode", "source", "probe", "category", "target_phase")
_COLUMNS: Final = (
    *_LABELS,
    *("position", "token_id", "generated", "baseline_logprob", "target_logprob", "full_kl"),
)
_INTERVALS: Final = ("mean_abs", "median_abs", "trimmed_abs", "p99_abs", "max_abs")
_ON_POLICY: Final = ("k3_kl", "mult_prob_error")
_MEANS: Final = {
    "mean_abs": "mean of |learner - sampler|, nats",
    "median_abs": "half of the tokens are closer than this",
    "trimmed_abs": "mean of the lower 95 %",
    "p99_abs": "99th percentile",
    "max_abs": "largest token",
    "k3_kl": "estimate of KL(sampler || learner)",
    "mult_prob_error": "mean factor between the two probabilities",
}


def read_tokens(run: Path) -> pd.DataFrame:
    """The log-probabilities of a run with `r` = learner - sampler; names dictionary-encoded."""
    table = read_table(run / WHERE, LOGPROBS, columns=list(_COLUMNS), dictionary=_LABELS)
    rows = table.to_pandas()
    rows["r"] = rows["baseline_logprob"] - rows["target_logprob"]
    rows["size"] = rows["r"].abs()
    return rows[rows["r"].notna()]


def gap_of(rows: pd.DataFrame, sampler: str) -> list[dict[str, Any]]:
    """For `sample` and `score`, where there are tokens: the mean gap, its interval, its tail."""
    found = []
    for mode, own in _modes(rows, sampler).items():
        tokens = _tokens(mode, own)
        found.append(
            {
                **describe_tokens(tokens),
                **estimate_tokens("mean_abs", tokens),
                "equal": int((own["r"] == 0.0).sum()),
                "object": tokens,
            }
        )
    return found


def interval_text(gap: Mapping[str, Any]) -> str:
    """`1.29 [1.15, 1.56]`, or why there is no interval."""
    if gap["equal"] == gap["tokens"]:
        return "0, every token bitwise equal:"
    value = words.number(gap["estimate"])
    if gap["low"] is None:
        return f"{value} (no interval below {MIN_SEQUENCES} sequences)"
    return f"{value} [{words.number(gap['low'])}, {words.number(gap['high'])}]"


def numbers_table(gaps: list[dict[str, Any]], key: str) -> Table:
    """Every metric of tokens with its interval, by mode."""
    rows = []
    for gap in gaps:
        names = [*_INTERVALS, *(_ON_POLICY if gap["mode"] == "sample" else ())]
        for name in names:
            found = estimate_tokens(name, gap["object"])
            rows.append(
                Row(
                    [
                        text(gap["mode"]),
                        text(name, code=True),
                        number(found["estimate"]),
                        number(found["low"]),
                        number(found["high"]),
                        text(_MEANS[name]),
                    ]
                )
            )
    return Table(
        f"{key}-numbers",
        "The gap in numbers, 95 % intervals over whole sequences",
        columns("Mode", "Metric", "#Value", "#From", "#To", "What it is"),
        rows,
    )


def tails(gaps: list[dict[str, Any]]) -> list[str]:
    """What the tails and the power of the run say, in words."""
    told = []
    for gap in gaps:
        told.append(f"{gap['mode']}: {gap['tail']}")
        if gap["power"]["text"]:
            told.append(f"{gap['mode']}: {gap['power']['text']}")
    return told


def token_figures(rows: pd.DataFrame, sampler: str, key: str) -> list[dict[str, Any]]:
    """The gap by position and its distribution, prefill and decode apart."""
    series = _series(rows, sampler)
    if not series:
        return []
    return [_by_position(series, f"{key}-position"), _distribution(series, f"{key}-sizes")]


def largest_table(rows: pd.DataFrame, sampler: str, key: str) -> Table:
    """The tokens that differ most."""
    own = pd.concat(list(_modes(rows, sampler).values())) if len(rows) else rows
    found = own[own["size"] > 0].nlargest(MAX_TOKENS, "size", keep="first")
    lines = [
        Row(
            [
                text(row.mode),
                text(row.probe),
                count(row.position),
                count(row.token_id),
                text(row.target_phase),
                number(row.r),
                number(row.baseline_logprob),
                number(row.target_logprob),
                number(row.full_kl),
            ]
        )
        for row in found.itertuples(index=False)
    ]
    differ = int((own["size"] > 0).sum())
    return Table(
        f"{key}-largest",
        "Tokens that differ most",
        columns(
            *("Mode", "Probe", "#Position", "#Token id", "Phase", "#r = learner - sampler"),
            *("#Learner log p", "#Sampler log p", "#Full KL"),
        ),
        lines,
        f"the largest {len(lines)} of {differ} tokens that differ; the rest is in {WHERE}"
        if differ > len(lines)
        else "",
        filters=len(lines) > 12,
    )


def sequence_table(rows: pd.DataFrame, sampler: str, key: str) -> Table:
    """One row a sequence."""
    lines = []
    for mode, own in _modes(rows, sampler).items():
        for probe, tokens in own.groupby("probe", observed=True, sort=False):
            top = tokens.loc[tokens["size"].idxmax()]
            lines.append(
                Row(
                    [
                        text(mode),
                        text(probe),
                        text(top["category"]),
                        count(len(tokens)),
                        count((tokens["r"] == 0.0).sum()),
                        number(tokens["size"].mean()),
                        number(tokens["size"].median()),
                        number(tokens["size"].max()),
                        count(top["position"]),
                    ]
                )
            )
    shown, left_out = capped(lines, MAX_SEQUENCES, WHERE)
    return Table(
        f"{key}-sequences",
        "Sequence by sequence",
        columns(
            *("Mode", "Probe", "Category", "#Tokens", "#Equal", "#Mean |r|", "#Median |r|"),
            *("#Largest |r|", "#At position"),
        ),
        shown,
        left_out,
        filters=len(shown) > 12,
    )


def _modes(rows: pd.DataFrame, sampler: str) -> dict[str, pd.DataFrame]:
    drawn = (rows["mode"] == "sample") & (rows["source"] == sampler) & rows["generated"]
    found = {"sample": rows[drawn], "score": rows[rows["mode"] == "score"]}
    return {mode: own for mode, own in found.items() if len(own)}


def _tokens(mode: str, own: pd.DataFrame) -> Tokens:
    present, sequence = np.unique(own["probe"].astype(str), return_inverse=True)
    return Tokens(
        mode,
        own["r"].to_numpy(np.float64),
        sequence.astype(np.int64),
        [str(name) for name in present],
        own["position"].to_numpy(np.int64),
        own["token_id"].to_numpy(np.int64),
    )


def _series(rows: pd.DataFrame, sampler: str) -> list[tuple[str, pd.DataFrame]]:
    """Given text, the prompts before sampling, and what the sampler decoded."""
    sampled = rows[(rows["mode"] == "sample") & (rows["source"] == sampler)]
    score = rows[rows["mode"] == "score"]
    found = [
        (f"score, {phase}", score[score["target_phase"] == phase])
        for phase in ("prefill", "decode")
    ]
    found += [
        ("sample, prompt (prefill)", sampled[~sampled["generated"].astype(bool)]),
        ("sample, drawn (decode)", sampled[sampled["generated"].astype(bool)]),
    ]
    return [(name, own) for name, own in found if len(own)]


def _by_position(series: list[tuple[str, pd.DataFrame]], key: str) -> dict[str, Any]:
    last = max(int(own["position"].max()) for _, own in series)
    width = max(1, -(-(last + 1) // BINS))
    lines, rows = [], []
    for name, own in series:
        bins = own.groupby(own["position"] // width)["size"].agg(["mean", "median", "max", "size"])
        # A line stops where no token is, instead of crossing the gap.
        means = bins["mean"].reindex(range(int(bins.index[0]), int(bins.index[-1]) + 1))
        lines.append(
            figures.Line(
                name,
                [float(b * width) for b in means.index],
                [None if np.isnan(v) else float(v) for v in means],
            )
        )
        for at, values in bins.iterrows():
            first = int(at) * width
            label = f"{first}" if width == 1 else f"{first}-{first + width - 1}"
            rows.append(
                Row(
                    [
                        text(name),
                        Cell(label, first),
                        count(values["size"]),
                        number(values["mean"]),
                        number(values["median"]),
                        number(values["max"]),
                    ]
                )
            )
    each = "position" if width == 1 else f"{width} positions"
    return {
        "key": key,
        "title": "Gap by position",
        "note": f"Mean of |learner - sampler| over the sequences, a point for each {each}.",
        "svg": figures.line_chart(
            key, lines, x_label="position in the sequence", y_label="mean |r|, nats", log=True
        ),
        "wide": False,
        "table": Table(
            f"{key}-n",
            "Gap by position: the numbers",
            columns("Tokens", "#Position", "#Count", "#Mean |r|", "#Median |r|", "#Largest |r|"),
            rows,
        ),
    }


def _distribution(series: list[tuple[str, pd.DataFrame]], key: str) -> dict[str, Any]:
    sizes = np.concatenate([own["size"].to_numpy() for _, own in series])
    positive = sizes[sizes > 0]
    low = int(np.floor(np.log10(positive.min()))) if len(positive) else -1
    high = int(np.ceil(np.log10(positive.max()))) if len(positive) else 0
    low = max(low, high - 8)
    steps = 2 if high - low <= 6 else 1
    edges = 10.0 ** np.arange(low, high + 0.5 / steps, 1.0 / steps)
    labels = ["0", *(f"<{float(f'{edge:.1g}'):g}" for edge in edges[1:])]
    shares = []
    for name, own in series:
        values = own["size"].to_numpy()
        counts = [int((values == 0).sum())]
        above = np.clip(values[values > 0], edges[0], None)
        counts += np.histogram(above, np.append(edges[:-1], np.inf))[0].tolist()
        shares.append((name, [c / len(values) for c in counts], counts))
    return {
        "key": key,
        "title": "How large the differences are",
        "note": "Share of tokens by |learner - sampler|; 0 is bitwise equal.",
        "svg": figures.histogram(
            key,
            labels,
            [(name, values) for name, values, _ in shares],
            x_label="|r|, nats",
            y_label="share of tokens",
        ),
        "wide": False,
        "table": Table(
            f"{key}-n",
            "How large the differences are: the numbers",
            columns("|r|", *(f"#{name}" for name, _, _ in shares)),
            [
                Row(
                    [
                        text(label),
                        *(Cell(f"{share(v[i]).text} ({c[i]})", v[i]) for _, v, c in shares),
                    ]
                )
                for i, label in enumerate(labels)
            ],
        ),
    }
