"""Two stored runs -> what changed between them: before and after an upgrade.

Knows the summary, stored tables and the gate's statistics; no torch. Invariant: a change is called
better or worse only where its interval excludes zero, and what only one run has is listed, not
dropped.

The change object::

    schema       1
    before, after  {run, verdict, model, dtype, quantize}
    notes        what makes the runs hard to compare, and what only one of them has
    pairs        [{learner, sampler, metrics, causes: {new, gone, kept} or null, sites, first_divergence}]
      metrics    [{mode, metric, before, after, change, low, high, paired, verdict}]
      sites      [{site, metric, before, after}]: those that changed most
    environment  [{engine, key, before, after}]
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from minite_diag.gate.checks import TOKEN_VALUES
from minite_diag.gate.evidence import Tokens, TokenTable
from minite_diag.gate.limits import METRICS
from minite_diag.gate.statistics import (
    MIN_SEQUENCES,
    Clusters,
    Floats,
    difference_interval,
    paired_interval,
)
from minite_diag.plan import read_plan
from minite_diag.stored_summary import read_summary
from minite_diag.trace.manifest import read_manifests
from minite_diag.trace.schema import COMPARISON, read_table

CHANGE_SCHEMA: Final = 1
MAX_SITES: Final = 10
LEGS: Final = "MD50"
"""How the codes of legs start."""
_SITE_METRICS: Final = ("rel_l2", "mismatch_rate", "agreement", "bitwise_fraction")
_OF_ONE_RUN: Final = ("environment *_IDENT", "environment *_BUFFER_NAME")
"""Names that an engine draws anew for each process."""

Json = dict[str, Any]


def compare_runs(before: Path, after: Path) -> Json:
    """What changed from one run to another; raises TraceError if one can't be read."""
    summaries = read_summary(before), read_summary(after)
    tables = TokenTable(before), TokenTable(after)
    pairs = [_by_ends(summary) for summary in summaries]
    common = [ends for ends in pairs[0] if ends in pairs[1]]
    sites = [_site_means(run) for run in (before, after)]
    return {
        "schema": CHANGE_SCHEMA,
        "before": _brief(summaries[0]),
        "after": _brief(summaries[1]),
        "notes": _notes(summaries, pairs),
        "pairs": [
            {
                "learner": ends[0],
                "sampler": ends[1],
                "metrics": list(_metrics(tables[0].select(ends), tables[1].select(ends))),
                "causes": _causes(pairs[0][ends], pairs[1][ends]),
                "first_divergence": [_first(pairs[side][ends]) for side in (0, 1)],
                "sites": _sites(sites[0], sites[1], ends),
            }
            for ends in common
        ],
        "environment": list(_environment(before, after)),
    }


def _by_ends(summary: Json) -> dict[tuple[str, str], Json]:
    return {(pair["learner"]["id"], pair["sampler"]["id"]): pair for pair in summary["pairs"]}


def _brief(summary: Json) -> Json:
    return {
        "run": summary["run"],
        "verdict": summary["verdict"],
        "model": summary["model"]["name"],
        "dtype": summary["dtype"],
        "quantize": summary["quantize"]["pattern"],
    }


def _notes(summaries: tuple[Json, Json], pairs: list[dict[tuple[str, str], Json]]) -> list[str]:
    notes = []
    for key, (old, new) in _differing(_brief(summaries[0]), _brief(summaries[1])):
        if key in ("model", "dtype", "quantize"):
            notes.append(f"the runs are of another {key}: {old}, then {new}")
    for side, name in ((0, "before"), (1, "after")):
        missing = [ends for ends in pairs[side] if ends not in pairs[1 - side]]
        notes += [f"only {name}: {learner} vs {sampler}" for learner, sampler in missing]
        if summaries[side]["verdict"] in ("error", "inconclusive"):
            notes.append(f"the run {name} is {summaries[side]['verdict']}")
    return notes


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            yield key, (old.get(key), new.get(key))


def _metrics(before: dict[str, Tokens], after: dict[str, Tokens]) -> Iterator[Json]:
    for mode in ("sample", "score"):
        if mode not in before or mode not in after:
            continue
        for metric in TOKEN_VALUES:
            if METRICS[metric].on_policy and mode != "sample":
                continue
            yield {
                "mode": mode,
                "metric": metric,
                **_change(metric, before[mode], after[mode]),
            }


def _change(metric: str, before: Tokens, after: Tokens) -> Json:
    best = METRICS[metric].best
    old, new = (TOKEN_VALUES[metric](tokens.r) for tokens in (before, after))
    row: Json = {"before": best + float(old.mean()), "after": best + float(new.mean())}
    row |= {"change": float(new.mean() - old.mean()), "low": None, "high": None}
    row["tokens"] = [len(old), len(new)]
    row["paired"] = _same_tokens(before, after)
    row["verdict"] = "no change seen"
    if not before.r.any() and not after.r.any():
        return row
    if min(len(before.names), len(after.names)) < MIN_SEQUENCES:
        row["verdict"] = f"fewer than {MIN_SEQUENCES} sequences"
        return row
    low, high = _interval(row["paired"], (before, old), (after, new))
    row |= {"low": low, "high": high}
    if low > 0.0:
        row["verdict"] = "worse"
    elif high < 0.0:
        row["verdict"] = "better"
    return row


def _interval(
    paired: bool, before: tuple[Tokens, Floats], after: tuple[Tokens, Floats]
) -> tuple[float, float]:
    if not paired:
        old, new = (Clusters.of(values, tokens.sequence) for tokens, values in (before, after))
        return difference_interval(old, new)
    difference = after[1][_order(after[0])] - before[1][_order(before[0])]
    return paired_interval(Clusters.of(difference, before[0].sequence[_order(before[0])]))


def _order(tokens: Tokens) -> Any:
    names = np.array(tokens.names)[tokens.sequence]
    return np.lexsort((tokens.position, names))


def _same_tokens(before: Tokens, after: Tokens) -> bool:
    if len(before) != len(after) or sorted(before.names) != sorted(after.names):
        return False
    mine, theirs = _order(before), _order(after)
    names = [np.array(t.names)[t.sequence] for t in (before, after)]
    return bool(
        np.array_equal(names[0][mine], names[1][theirs])
        and np.array_equal(before.position[mine], after.position[theirs])
        and np.array_equal(before.token_id[mine], after.token_id[theirs])
    )


def _causes(before: Json, after: Json) -> Json | None:
    """Causes by what became of them; None where one run was not attributed.

    What only the live half can find (a leg of an engine against itself) is left out where one run
    has no live half: not looked for is not gone.
    """
    if before["causes"] is None or after["causes"] is None:
        return None
    live = before["live"] is not None and after["live"] is not None
    old, new = (
        {
            (cause["code"], cause["where"]): cause
            for cause in pair["causes"]
            if live or not cause["code"].startswith(LEGS)
        }
        for pair in (before, after)
    )
    return {
        "new": [_cause(cause) for key, cause in new.items() if key not in old],
        "gone": [_cause(cause) for key, cause in old.items() if key not in new],
        "kept": [_cause(cause) for key, cause in new.items() if key in old],
    }


def _cause(cause: Json) -> Json:
    return {key: cause[key] for key in ("code", "title", "where", "text")}


def _first(pair: Json) -> str | None:
    first = pair["first_divergence"]
    return None if first is None else f"{first['site']}:{first['kind']}"


def _site_means(run: Path) -> pd.DataFrame:
    """Mean of each metric over the sequences, for each pair and site."""
    keys = ["baseline", "target", "fqn", "kind"]
    columns = [*keys, "status", *_SITE_METRICS]
    rows = read_table(run / "comparison.parquet", COMPARISON, columns=columns).to_pandas()
    compared = rows[rows["status"] == "compared"]
    return compared.groupby(keys)[list(_SITE_METRICS)].mean()


def _sites(before: pd.DataFrame, after: pd.DataFrame, ends: tuple[str, str]) -> list[Json]:
    """The sites whose own metric changed most; each kind has one, global scales have none."""
    both = before.join(after, lsuffix="_before", rsuffix="_after", how="inner")
    kinds = both.index.get_level_values("kind")
    both = both[~kinds.str.endswith("global_decode_scale")]
    both = both[
        (both.index.get_level_values("baseline") == ends[0])
        & (both.index.get_level_values("target") == ends[1])
    ]
    found = []
    for (_, _, fqn, kind), row in both.iterrows():
        for metric in _SITE_METRICS:
            old, new = row[f"{metric}_before"], row[f"{metric}_after"]
            if np.isfinite(old) and np.isfinite(new):
                found.append((abs(new - old), f"{fqn}:{kind}", metric, float(old), float(new)))
                break
    found.sort(key=lambda item: (-item[0], item[1]))
    return [
        {"site": site, "metric": metric, "before": old, "after": new}
        for size, site, metric, old, new in found[:MAX_SITES]
        if size > 0.0
    ]


def _environment(before: Path, after: Path) -> Iterator[Json]:
    """What the engines' manifests say differently: versions, machine, settings, environment."""
    old, new = (read_manifests(run, read_plan(run)) for run in (before, after))
    for engine in [name for name in old if name in new]:
        facts = facts_of(old[engine]), facts_of(new[engine])
        for key, (was, now) in _differing(*facts):
            if any(fnmatch.fnmatchcase(key, glob) for glob in _OF_ONE_RUN):
                continue
            yield {"engine": engine, "key": key, "before": was, "after": now}


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine's manifest says about itself, flat: name -> value."""
    flat: dict[str, Any] = {
        key: manifest.get(key) for key in ("label", "version", "device", "dtype", "status")
    }
    flat["checkpoint"] = Path(str(manifest["engine"].get("checkpoint", ""))).name
    flat |= {f"option {k}": v for k, v in (manifest["engine"].get("options") or {}).items()}
    for group in ("versions", "machine", "environment", "settings"):
        flat |= {f"{group} {k}": _text(v) for k, v in (manifest.get(group) or {}).items()}
    for item in manifest.get("evidence", []):
        flat[f"op {item['op']}"] = f"{item['status']}: {item['impl']}"
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
