"""The ratchet: what a model and a pair of engines reached before, in one JSON file.

Knows JSON and the summary. Invariant: an entry is only ever replaced by one that is not worse, and
the file is written whole or not at all.

The key names the model, the quantization, and each engine with what ran, its version, device and
dtype: after an upgrade the entry of the old version is shown, and judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from minite_diag.errors import UsageError
from minite_diag.gate.limits import METRICS

BASELINE_SCHEMA: Final = 1


def key_of(summary: Mapping[str, Any], pair: Mapping[str, Any], mode: str) -> str:
    """One line that names what was measured."""
    return " | ".join([*_stable_parts(summary, pair, mode), *_versions(pair)])


def _stable_parts(
    summary: Mapping[str, Any], pair: Mapping[str, Any], mode: str
) -> tuple[str, ...]:
    quantize = summary["quantize"]
    return (
        f"{summary['model']['name']} {summary['model']['format']} {summary['dtype']}",
        f"{quantize['pattern']} {quantize['linears']} {summary['export_recipe'] or '-'}",
        mode,
        *(f"{role} {pair[role]['engine']}" for role in ("learner", "sampler")),
    )


def _versions(pair: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        " ".join(str(pair[role][k]) for k in ("label", "version", "device", "dtype"))
        for role in ("learner", "sampler")
    )


def read_baseline(file: Path) -> dict[str, Any]:
    """Entries by key; none if the file does not exist yet. Raises UsageError if it is damaged."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["schema"] != BASELINE_SCHEMA:
            raise UsageError(
                f"{file} has schema {record['schema']}, this version reads {BASELINE_SCHEMA}",
                "move it away and make a new one with --update-baseline",
            )
        return dict(record["entries"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"baseline {file} can't be read: {error}", "correct the file or move it away"
        ) from error


def entry_of(checks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a pair and mode reached: estimate and interval of each judged metric of tokens."""
    return {
        check["metric"]: {key: check[key] for key in ("estimate", "low", "high", "tokens")}
        for check in checks
        if check["estimate"] is not None and not check["site"]
    }


def judge_against(
    entry: Mapping[str, Any], checks: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One check for each metric that the baseline holds.

    Worse is proved where the new interval lies above the old one; without an interval (bitwise
    equality, too few sequences) any larger estimate is worse if the old one was exact.
    """
    found = []
    for check in checks:
        old = entry.get(check["metric"])
        if old is None or check["site"] or check["estimate"] is None:
            continue
        edge = old["estimate"] if old["high"] is None else old["high"]
        exact = old["estimate"] == METRICS[check["metric"]].best
        low = check["estimate"] if exact else check["low"]
        worse = low is not None and low > edge
        found.append(
            {
                **check,
                "limit": edge,
                "warn": None,
                "rule": "baseline",
                "verdict": "fail" if worse else "pass",
                "reason": f"worse than the baseline {old['estimate']:.4g}" if worse else "",
            }
        )
    return found


def nearest(entries: Mapping[str, Any], key: str) -> str | None:
    """An entry that differs in versions or devices only: what an upgrade started from."""
    stable = key.rsplit(" | ", 2)[0]
    return next((k for k in sorted(entries) if k.rsplit(" | ", 2)[0] == stable and k != key), None)


def updated(entries: Mapping[str, Any], key: str, new: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with the better of old and new for each metric of `key`."""
    kept = dict(entries.get(key, {}))
    for metric, value in new.items():
        old = kept.get(metric)
        if old is None or value["estimate"] <= old["estimate"]:
            kept[metric] = value
    return {**entries, key: kept}


def write_baseline(file: Path, entries: Mapping[str, Any]) -> None:
    """Write the file, sorted, atomically."""
    record = {"schema": BASELINE_SCHEMA, "entries": entries}
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}", "give a writable file") from error
