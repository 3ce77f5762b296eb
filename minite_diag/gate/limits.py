"""What a gate asks for: metrics, limits, profiles. Data and parsing only.

Knows no file and no table. Invariant: each metric is non-negative and worse when larger, once its
`best` is taken off; a limit names one metric, and a site glob where the metric is of sites.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from minite_diag.errors import UsageError


@dataclass(frozen=True)
class Metric:
    """`best` is the value of bitwise equality; `falls` where a smaller number is worse."""

    name: str
    of: str
    title: str
    best: float = 0.0
    falls: bool = False
    on_policy: bool = False


METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric("mean_abs", "tokens", "mean |log-probability difference|"),
        Metric("median_abs", "tokens", "median |log-probability difference|"),
        Metric("trimmed_abs", "tokens", "mean |log-probability difference| of the lower 95 %"),
        Metric("p99_abs", "tokens", "99th percentile of |log-probability difference|"),
        Metric("max_abs", "tokens", "largest |log-probability difference|"),
        Metric("k3_kl", "tokens", "KL(sampler || learner), k3 estimate", on_policy=True),
        Metric("mult_prob_error", "tokens", "mean exp|log-probability difference|", best=1.0),
        Metric("bitwise_fraction", "sites", "share of equal elements", best=1.0, falls=True),
        Metric("rel_l2", "sites", "relative L2 difference"),
        Metric("rel_diff", "sites", "1 - 2xy / (x^2 + y^2)"),
        Metric("max_abs_diff", "sites", "largest absolute difference"),
        Metric("mismatch_rate", "sites", "share of differing codes or block scales"),
        Metric("cosine", "sites", "cosine similarity", best=1.0, falls=True),
        Metric("agreement", "sites", "share of tokens with the same experts", best=1.0, falls=True),
    )
}


@dataclass(frozen=True)
class Limit:
    """`value` may not be passed; from it to `warn` a miss is a warning, not a failure.

    `site` is a glob of FQN or FQN:KIND for metrics of sites; empty for metrics of tokens.
    """

    metric: str
    value: float
    warn: float | None = None
    site: str = ""

    @property
    def name(self) -> str:
        """`rel_l2 of *.mlp.*:output`."""
        return f"{self.metric} of {self.site}" if self.site else self.metric


@dataclass(frozen=True)
class Profile:
    """A named set of limits; where they come from is in docs/metrics.md."""

    name: str
    limits: tuple[Limit, ...]


PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("bitwise", (Limit("mean_abs", 0.0),)),
        Profile("bf16-dense", (Limit("mean_abs", 0.012), Limit("k3_kl", 2e-4))),
        Profile("bf16-moe", (Limit("mean_abs", 0.025), Limit("k3_kl", 1e-3))),
        Profile("fp8", (Limit("mean_abs", 0.025), Limit("k3_kl", 1e-3))),
        Profile(
            "nvfp4",
            (
                Limit("mean_abs", 0.048, 0.08),
                Limit("k3_kl", 1.8e-3, 5e-3),
                Limit("mult_prob_error", 1.05, 1.085),
            ),
        ),
    )
}

_LIMIT: Final = re.compile(
    r"(?P<metric>[\w-]+)=(?P<value>[^@.]*(?:\.[^@.]+)?)(?:\.\.(?P<warn>[^@]+))?(?:@(?P<site>.+))?"
)
_FORM: Final = "write it as METRIC=VALUE, METRIC=VALUE..WARN or METRIC=VALUE@SITE-GLOB"


def get_profile(name: str) -> Profile:
    """The profile of that name; raises UsageError with the near matches."""
    if name not in PROFILES:
        raise UsageError(f"no gate profile is called {name!r}", suggestion(name, PROFILES))
    return PROFILES[name]


def get_metric(name: str) -> Metric:
    """The metric of that name; raises UsageError with the near matches."""
    found = METRICS.get(name.replace("-", "_"))
    if found is None:
        raise UsageError(f"no metric is called {name!r}", suggestion(name, METRICS))
    return found


def suggestion(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a near miss, else what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(names)}"


def parse_limit(text: str) -> Limit:
    """`mean_abs=0.02`, `k3_kl=1e-3..5e-3` or `rel_l2=0.05@*.mlp.*:output`; raises UsageError."""
    match = _LIMIT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"limit {text!r} is not understood", _FORM)
    metric = get_metric(match["metric"])
    value = _number(text, match["value"])
    warn = _number(text, match["warn"]) if match["warn"] else None
    if warn is not None and (warn < value) is not metric.falls:
        raise UsageError(f"limit {text!r}: the warning band ends before it starts", _FORM)
    site = match["site"] or ""
    if metric.of == "sites" and not site:
        raise UsageError(f"limit {text!r}: {metric.name} is of sites", f"add a glob: {text}@*")
    if metric.of == "tokens" and site:
        raise UsageError(
            f"limit {text!r}: {metric.name} is of tokens, not of sites",
            f"of sites are: {', '.join(m.name for m in METRICS.values() if m.of == 'sites')}",
        )
    return Limit(metric.name, value, warn, site)


def _number(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError as error:
        raise UsageError(f"limit {text!r}: {number!r} is no number", _FORM) from error
    if not 0.0 <= value < float("inf"):
        raise UsageError(f"limit {text!r}: {number} is out of range", "from 0 up")
    return value


def with_limits(profile: Profile, more: Iterable[Limit]) -> tuple[Limit, ...]:
    """The profile's limits, those of the same metric and site replaced, the others added."""
    limits = {(limit.metric, limit.site): limit for limit in profile.limits}
    limits |= {(limit.metric, limit.site): limit for limit in more}
    return tuple(limits.values())
