"""A stored run and what is asked of it -> the gate object.

Knows the summary, stored tables, settings of the gate; no torch, no terminal. Invariant: a run in
which something was not measured never passes, and every waived failure is still listed.

The gate object::

    profile     name; `thresholds` {metric: limit}
    verdict     pass | fail | inconclusive | error; `reasons` in words, `notes` beside them
    checks      [{rule, learner, sampler, mode, metric, site, worst, limit, warn, estimate,
                 standard_error, low, high, tokens, sequences, verdict, reason, waived}]
    statistics  [{learner, sampler, mode, mean_abs, median_abs, trimmed_abs, p99_abs, max_abs,
                 k3_kl, tail_index, tail, outliers, power, noise_floor}]
    waivers     [{name, reason, expires, state: used | unused | expired}]
    waived_causes  codes of causes that a waiver covers
    baseline    {file, key, state: judged | absent | updated, nearest} per pair, or null
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minite_diag.gate.baseline import (
    entry_of,
    judge_against,
    key_of,
    nearest,
    read_baseline,
    updated,
    write_baseline,
)
from minite_diag.gate.checks import describe_tokens, site_check, token_check
from minite_diag.gate.evidence import (
    Floors,
    SiteTable,
    Tokens,
    TokenTable,
)
from minite_diag.gate.limits import METRICS, Limit, get_profile, with_limits
from minite_diag.gate.waivers import Waiver
from minite_diag.report import words

Json = dict[str, Any]


@dataclass(frozen=True)
class GateRequest:
    """What is asked of a run: a profile, more limits, a baseline file, waivers."""

    profile: str
    limits: tuple[Limit, ...] = ()
    baseline: Path | None = None
    update_baseline: bool = False
    waivers: tuple[Waiver, ...] = ()
    today: dt.date = field(default_factory=lambda: dt.datetime.now(dt.UTC).date())


def check_gate(run: Path, summary: Json, request: GateRequest) -> Json:
    """Judge every learner-sampler pair of a run; writes nothing but an updated baseline."""
    limits = with_limits(get_profile(request.profile), request.limits)
    judged = _judge_pairs(run, summary, limits)
    checks = [check for pair in judged for check in pair.checks]
    baseline = _ratchet(request, summary, judged) if request.baseline is not None else None
    if baseline is not None:
        checks += baseline.pop("checks")
    waivers, waived_causes = _waive(request, summary, checks)
    verdict, reasons = _verdict(summary, checks, waivers)
    if baseline is not None and request.update_baseline:
        _update(baseline, request, summary, judged, verdict)
    return {
        "profile": request.profile,
        "thresholds": {limit.name: limit.value for limit in limits},
        "verdict": verdict,
        "reasons": reasons,
        "notes": _notes(summary, judged, baseline, waivers),
        "checks": checks,
        "statistics": [s for pair in judged for s in pair.statistics],
        "waivers": waivers,
        "waived_causes": waived_causes,
        "baseline": baseline,
    }


def with_gate(summary: Json, gate: Json) -> Json:
    """The summary with the gate's verdict as its own."""
    return {**summary, "verdict": gate["verdict"], "gate": gate}


@dataclass(frozen=True)
class _JudgedPair:
    pair: Json
    mode: str
    checks: list[Json]
    statistics: list[Json]
    left_out: list[str]


def _judge_pairs(run: Path, summary: Json, limits: Sequence[Limit]) -> list[_JudgedPair]:
    if not summary["pairs"]:
        return []
    table = TokenTable(run)
    sites = SiteTable(run, (limit.metric for limit in limits if limit.site))
    judged = []
    for pair in summary["pairs"]:
        ends = (pair["learner"]["id"], pair["sampler"]["id"])
        found = table.select(ends)
        floors = Floors.of((pair["live"] or {}).get("legs", []))
        checks = [c for limit in limits if not limit.site for c in _tokens(limit, found, floors)]
        checks += [
            {"mode": "", **site_check(limit, sites.select(ends, limit.metric, limit.site))}
            | _asked(limit)
            for limit in limits
            if limit.site
        ]
        place = {"learner": ends[0], "sampler": ends[1]}
        statistics = [
            {**place, **describe_tokens(tokens), "noise_floor": floors.as_dict()}
            for tokens in found.values()
        ]
        mode = "sample" if "sample" in found else "score"
        complete = [{**_EMPTY, **place, **check} for check in checks]
        told = {check["metric"] for check in complete}
        left_out = [limit.metric for limit in limits if limit.metric not in told]
        judged.append(_JudgedPair(pair, mode, complete, statistics, left_out))
    return judged


_EMPTY: Json = {
    "rule": "limit",
    "worst": None,
    "estimate": None,
    "standard_error": None,
    "low": None,
    "high": None,
    "tokens": 0,
    "sequences": 0,
    "waived": None,
}


def _asked(limit: Limit) -> Json:
    return {
        "metric": limit.metric,
        "site": limit.site or None,
        "limit": limit.value,
        "warn": limit.warn,
    }


def _tokens(limit: Limit, found: dict[str, Tokens], floors: Floors) -> list[Json]:
    """Sampled tokens are what RL sees; without them the scored ones; for equality both."""
    metric = METRICS[limit.metric]
    modes = [mode for mode in ("sample", "score") if mode in found]
    if limit.value != metric.best:
        modes = modes[:1]
    if metric.on_policy:
        # KL(sampler || learner) is estimated from what the sampler drew, and from nothing else.
        modes = [mode for mode in modes if mode == "sample" or limit.value == metric.best]
        if not modes and found:
            return []
    if not modes:
        reason = "no token has both log-probabilities"
        return [{"mode": "", **_asked(limit), "verdict": "inconclusive", "reason": reason}]
    return [
        {"mode": mode, **_asked(limit), **token_check(limit, found[mode], floors)} for mode in modes
    ]


def _ratchet(request: GateRequest, summary: Json, judged: list[_JudgedPair]) -> Json:
    assert request.baseline is not None
    entries = read_baseline(request.baseline)
    checks: list[Json] = []
    pairs = []
    for found in judged:
        key = key_of(summary, found.pair, found.mode)
        entry = entries.get(key)
        if entry is not None:
            checks += judge_against(entry, [c for c in found.checks if c["mode"] == found.mode])
        near = nearest(entries, key) if entry is None else None
        pairs.append(
            {
                "key": key,
                "state": "absent" if entry is None else "judged",
                "nearest": None if near is None else {"key": near, "entry": entries[near]},
            }
        )
    return {"file": str(request.baseline), "pairs": pairs, "checks": checks}


def _update(
    baseline: Json, request: GateRequest, summary: Json, judged: list[_JudgedPair], verdict: str
) -> None:
    """Tighten the file; what was not measured, or can't be compared, leaves it as it is.

    A run that fails its profile may start a baseline: from there on it may not get worse.
    """
    assert request.baseline is not None
    if verdict == "error" or not all(pair["comparable"] for pair in summary["pairs"]):
        return
    entries = read_baseline(request.baseline)
    for found, state in zip(judged, baseline["pairs"], strict=True):
        own = [check for check in found.checks if check["mode"] == found.mode]
        entries = updated(entries, key_of(summary, found.pair, found.mode), entry_of(own))
        state["state"] = "updated"
    write_baseline(request.baseline, entries)


def _waive(request: GateRequest, summary: Json, checks: list[Json]) -> tuple[list[Json], list[str]]:
    """Mark waived checks in place; returns the waivers with their state, and waived causes."""
    causes = {
        (pair["learner"]["id"], pair["sampler"]["id"]): pair["causes"] or []
        for pair in summary["pairs"]
    }
    found = [cause for listed in causes.values() for cause in listed]
    waivers, waived_causes = [], []
    for waiver in request.waivers:
        if waiver.expires < request.today:
            waivers.append(waiver.as_dict("expired"))
            continue
        used = [
            check
            for check in checks
            if check["verdict"] in ("fail", "inconclusive")
            and waiver.fits_check(check, causes[check["learner"], check["sampler"]])
        ]
        codes = sorted({cause["code"] for cause in found if waiver.fits_cause(cause)})
        for check in used:
            check["waived"] = {"reason": waiver.reason, "expires": waiver.expires.isoformat()}
        waived_causes += codes
        waivers.append(waiver.as_dict("used" if used or codes else "unused"))
    return waivers, sorted(set(waived_causes))


def _verdict(summary: Json, checks: list[Json], waivers: list[Json]) -> tuple[str, list[str]]:
    problems = _unmeasured(summary)
    if problems:
        return "error", problems
    expired = [
        f"the waiver of {waiver['name']} ({waiver['reason']}) expired on {waiver['expires']}: "
        "renew or remove it"
        for waiver in waivers
        if waiver["state"] == "expired"
    ]
    strange = [p["causes"][0]["text"] for p in summary["pairs"] if not p["comparable"]]
    if strange and not expired:
        return "inconclusive", [f"not comparable: {text}" for text in strange]
    open_checks = [check for check in checks if check["waived"] is None]
    verdicts = {check["verdict"] for check in open_checks} | ({"fail"} if expired else set())
    if not checks:
        return "inconclusive", ["nothing was compared"]
    worst = next((v for v in ("fail", "inconclusive") if v in verdicts), "pass")
    if worst == "pass" and not open_checks:
        return "pass", ["all failures are waived"]
    return worst, expired + [
        words.check(check) for check in open_checks if check["verdict"] == worst
    ]


def _unmeasured(summary: Json) -> list[str]:
    problems = [
        f"{engine['id']}: {(engine['error'] or {}).get('message', engine['status'])}"
        for engine in summary["engines"]
        if engine["status"] not in ("ok", "truncated")
    ]
    return problems if summary["pairs"] else [*problems, "no pair of engines was compared"]


def _notes(
    summary: Json, judged: list[_JudgedPair], baseline: Json | None, waivers: list[Json]
) -> list[str]:
    notes = [
        f"{engine['id']}: {len(engine['silent_hooks'])} hooks never fired"
        for engine in summary["engines"]
        if engine["silent_hooks"]
    ]
    for pair in judged:
        notes += [
            f"{metric} is not judged: it needs sampled tokens (compare --modes score,sample)"
            for metric in pair.left_out
        ]
        for found in pair.statistics:
            place = f"{found['sampler']} {found['mode']}"
            notes.append(f"{place}: {found['tail']}")
            if found["power"]["text"]:
                notes.append(f"{place}: {found['power']['text']}")
    if any(not (pair["live"] or {}).get("legs") for pair in summary["pairs"]):
        notes.append(
            f"no noise floor: minite-diag attribute {summary['run']} --live measures each engine "
            "against itself"
        )
    notes += [
        f"the waiver of {waiver['name']} matches nothing: remove it"
        for waiver in waivers
        if waiver["state"] == "unused"
    ]
    for pair_state in (baseline or {"pairs": []})["pairs"]:
        if pair_state["state"] == "absent":
            assert baseline is not None
            near = pair_state["nearest"]
            told = f"; nearest: {near['key']} {_entry_text(near['entry'])}" if near else ""
            notes.append(
                f"{baseline['file']} has no entry for {pair_state['key']}: --update-baseline adds "
                f"one{told}"
            )
    return notes


def _entry_text(entry: Json) -> str:
    return ", ".join(f"{metric} {value['estimate']:.4g}" for metric, value in entry.items())
