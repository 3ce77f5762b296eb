"""What the gate judges, read from a stored run: tokens, sites, noise floors.

Knows Arrow columns and numpy: no pandas, no torch. Invariant: only the columns that a limit needs are
read, so that judging again costs less than a second.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from minite_diag.attribute.effects import SAME_CONDITIONS
from minite_diag.errors import UsageError
from minite_diag.gate.columns import Bools, Labels, booleans, floats, integers
from minite_diag.gate.limits import suggestion
from minite_diag.gate.statistics import Floats, Ints
from minite_diag.plan import Plan
from minite_diag.site import KINDS
from minite_diag.trace.schema import COMPARISON, LOGPROBS, read_table

Pair = tuple[str, str]
_TOKEN_LABELS: Final = ("baseline", "target", "mode", "source", "probe")
_TOKEN_COLUMNS: Final = [
    *_TOKEN_LABELS,
    *("position", "token_id", "generated", "baseline_logprob", "target_logprob"),
]


@dataclass(frozen=True)
class Tokens:
    """Log-probability differences r = learner - sampler of one pair and mode, with their place."""

    mode: str
    r: Floats
    sequence: Ints
    names: list[str]
    position: Ints
    token_id: Ints

    def __len__(self) -> int:
        return len(self.r)


class TokenTable:
    """The columns of `logprobs.parquet` that the gate needs."""

    def __init__(self, run: Path) -> None:
        table = read_table(
            run / "logprobs.parquet", LOGPROBS, columns=_TOKEN_COLUMNS, dictionary=_TOKEN_LABELS
        )
        self._labels = {name: Labels(table[name]) for name in _TOKEN_LABELS}
        self._generated = booleans(table["generated"])
        self._position = integers(table["position"])
        self._token_id = integers(table["token_id"])
        self._r = floats(table["baseline_logprob"]) - floats(table["target_logprob"])

    def select(self, pair: Pair) -> dict[str, Tokens]:
        """`sample` (only what the sampler generated) and `score` of a pair, where it has tokens."""
        learner, sampler = pair
        is_in = self._labels
        own = is_in["baseline"].equals(learner) & is_in["target"].equals(sampler)
        own &= ~np.isnan(self._r)
        drawn = is_in["mode"].equals("sample") & is_in["source"].equals(sampler)
        rows = {
            "sample": own & drawn & self._generated,
            "score": own & is_in["mode"].equals("score"),
        }
        return {mode: self._tokens(mode, chosen) for mode, chosen in rows.items() if chosen.any()}

    def _tokens(self, mode: str, chosen: Bools) -> Tokens:
        probe = self._labels["probe"]
        present, sequence = np.unique(probe.codes[chosen], return_inverse=True)
        return Tokens(
            mode,
            self._r[chosen],
            sequence.astype(np.int64),
            [probe.names[code] for code in present],
            self._position[chosen],
            self._token_id[chosen],
        )


@dataclass(frozen=True)
class SiteValues:
    """A metric of the sites that a glob names: a row for each compared site and sequence.

    `site` indexes `names` (FQN:KIND); `skipped` counts rows that could not be compared.
    """

    names: list[str]
    site: Ints
    values: Floats
    sequence: Ints
    skipped: int


class SiteTable:
    """`comparison.parquet` of a run, read when the first limit on sites asks for it."""

    def __init__(self, run: Path, metrics: Iterable[str]) -> None:
        self._file = run / "comparison.parquet"
        self._metrics = sorted(set(metrics))
        self._labels: dict[str, Labels] = {}
        self._values: dict[str, Floats] = {}

    def _read(self) -> None:
        if self._labels:
            return
        keys = ["baseline", "target", "probe", "fqn", "kind", "status"]
        table = read_table(self._file, COMPARISON, columns=[*keys, *self._metrics], dictionary=keys)
        self._labels = {key: Labels(table[key]) for key in keys}
        self._values = {name: floats(table[name]) for name in self._metrics}

    def select(self, pair: Pair, metric: str, glob: str) -> SiteValues:
        """Rows of a pair whose site matches; raises UsageError where the glob names no site."""
        self._read()
        fqn, kind, probe = (self._labels[key] for key in ("fqn", "kind", "probe"))
        fqn_glob, colon, kind_glob = glob.partition(":")
        named = fqn.isin([name for name in fqn.names if fnmatch.fnmatchcase(name, fqn_glob)])
        if colon:
            named &= kind.isin([n for n in kind.names if fnmatch.fnmatchcase(n, kind_glob)])
        if not named.any():
            near = _near_site(glob, fqn.names, kind.names)
            raise UsageError(f"no site of the run matches {glob!r}", near)
        here = named & self._labels["baseline"].equals(pair[0])
        here &= self._labels["target"].equals(pair[1])
        values = self._values[metric]
        compared = here & self._labels["status"].equals("compared") & ~np.isnan(values)
        sites = fqn.codes[compared].astype(np.int64) * len(kind.names) + kind.codes[compared]
        present, site = np.unique(sites, return_inverse=True)
        return SiteValues(
            [
                f"{fqn.names[s // len(kind.names)]}:{kind.names[s % len(kind.names)]}"
                for s in present
            ],
            site.astype(np.int64),
            values[compared],
            probe.codes[compared].astype(np.int64),
            int((here & self._labels["status"].equals("skipped")).sum()),
        )


def check_site_globs(run: Path, plan: Plan) -> None:
    """Raise UsageError for a glob of the plan's `--sites` that matched no captured tensor."""
    globs = [glob for glob in plan.capture.sites if glob not in ("*", "*:*")]
    if not globs or ("score" not in plan.modes and not plan.capture.sample_tensors):
        return
    keys = ["fqn", "kind"]
    table = read_table(run / "comparison.parquet", COMPARISON, columns=keys, dictionary=keys)
    fqn, kind = Labels(table["fqn"]), Labels(table["kind"])
    for glob in globs:
        fqn_glob, colon, kind_glob = glob.partition(":")
        named = fqn.isin(fnmatch.filter(fqn.names, fqn_glob))
        if colon:
            named &= kind.isin(fnmatch.filter(kind.names, kind_glob))
        if not named.any():
            known = [*plan.quantized, *fqn.names]
            raise UsageError(
                f"--sites {glob!r} matched no tensor of any engine",
                _near_site(glob, known, [*KINDS]),
            )


def _near_site(glob: str, names: list[str], kinds: list[str]) -> str:
    """A module or kind of the run that the glob may have meant."""
    fqn, colon, kind = glob.partition(":")
    if colon and any(fnmatch.fnmatchcase(name, fqn) for name in names):
        return f"no such kind: {suggestion(kind, sorted(kinds))}"
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    for part in fqn.split("."):
        near = difflib.get_close_matches(part, parts, n=1)
        if part not in parts and near:
            return f"did you mean {glob.replace(part, near[0])!r}?"
    return f"a module of the run is {next(iter(names), '-')!r}"


@dataclass(frozen=True)
class Floors:
    """What the engines of a pair differ from themselves: a leg each, None where none was run.

    `repeat` is the worst leg under the same conditions: noise. `any_leg` is the worst of all, other
    batches and chunks among them: what production does to the numbers.
    """

    repeat: Mapping[str, Any] | None = None
    any_leg: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, legs: Iterable[Mapping[str, Any]]) -> Floors:
        """The worst of the measured legs."""
        measured = [leg for leg in legs if leg["status"] == "measured"]
        same = [leg for leg in measured if leg["leg"] in SAME_CONDITIONS]
        return cls(_worst(same), _worst(measured))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        keys = ("engine", "leg", "mean_abs", "max_abs")
        return {
            name: leg and {key: leg[key] for key in keys}
            for name, leg in (("repeat", self.repeat), ("any_leg", self.any_leg))
        }


def _worst(legs: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return max(legs, key=lambda leg: float(leg["mean_abs"]), default=None)


def floor_of(metric: str, leg: Mapping[str, Any] | None) -> float:
    """What a leg comes to in units of a token metric; 0 without one.

    Legs keep mean_abs and max_abs; KL and mult_prob_error follow from mean_abs for a normal r,
    with sigma = mean_abs sqrt(pi / 2).
    """
    if leg is None or not leg["mean_abs"]:
        return 0.0
    mean_abs = float(leg["mean_abs"])
    sigma = mean_abs * math.sqrt(math.pi / 2)
    if metric == "k3_kl":
        return sigma * sigma / 2
    if metric == "mult_prob_error":
        # E exp|z sigma| of a standard normal z
        return math.exp(sigma * sigma / 2) * (1 + math.erf(sigma / math.sqrt(2)))
    if metric in ("max_abs", "p99_abs"):
        return float(leg["max_abs"])
    return mean_abs
