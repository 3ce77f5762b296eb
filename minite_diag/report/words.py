"""Sentences about a run's summary, shared by the terminal and the HTML report.

Knows the summary object only. Invariant: each sentence holds only what the summary states.
"""

from __future__ import annotations

from typing import Any


def number(value: Any) -> str:
    """A measured number, four significant digits; exact zero is `0`, nothing is a dash."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.4g}"


def name_of(engine: dict[str, Any]) -> str:
    """`te-ref 0.1 (cpu, bfloat16)`: what really ran."""
    label = engine.get("label") or engine["engine"]
    details = ", ".join(str(engine[k]) for k in ("device", "dtype") if engine.get(k))
    version = f" {engine['version']}" if engine.get("version") else ""
    return f"{label}{version}" + (f" ({details})" if details else "")


def headline(summary: dict[str, Any]) -> str:
    """The verdict in one sentence."""
    failed = [e for e in summary["engines"] if e["status"] not in ("ok", "truncated")]
    if failed:
        return "could not measure: " + "; ".join(
            f"{e['id']}: {(e['error'] or {}).get('message', e['status'])}" for e in failed
        )
    gate = summary.get("gate")
    if gate:
        return f"{gate['verdict']} (profile {gate['profile']}): {'; '.join(gate['reasons'])}"
    strange = [c for p in summary["pairs"] if not p["comparable"] for c in p["causes"][:1]]
    if strange:
        return f"not comparable: {strange[0]['text']}"
    return "measured" if summary["pairs"] else "nothing was compared"


def gap(pair: dict[str, Any]) -> str:
    """The log-probability gap of one pair."""
    modes = pair["logprob"]
    parts = []
    for mode in ("sample", "score"):
        found = modes.get(mode)
        if found and found["tokens"]:
            parts.append(
                f"{mode}: mean |dlogp| {number(found['mean_abs'])}, max {number(found['max_abs'])} "
                f"over {found['tokens']} tokens ({found['equal']} bitwise equal)"
            )
    return "; ".join(parts) or "no common log-probabilities"


def divergence(pair: dict[str, Any]) -> str:
    """Where the bits first differ, and whether what went in was equal."""
    first = pair["first_divergence"]
    if first is None:
        if not pair["sites"]["compared"]:
            return "no site was compared"
        return f"none: all {pair['sites']['compared']} compared tensors are bitwise equal"
    said = {True: "equal", False: "already different", None: "not seen"}
    text = (
        f"{first['site']}:{first['kind']} (token {first['position']} of {first['probe']}; "
        f"its input is {said[first['input_equal']]}, "
        f"its weights are {_weights(first['weights_equal'])})"
    )
    if first["skipped_before"]:
        text += f"; {first['skipped_before']} earlier sites could not be compared"
    return text


def _weights(equal: bool | None) -> str:
    return {True: "equal", False: "different", None: "not compared"}[equal]


def evidence(engine: dict[str, Any]) -> str:
    """Ops by who computed them, such as `native: norm, rope; modelled: linear`."""
    groups: dict[str, list[str]] = {}
    for item in engine["evidence"]:
        groups.setdefault(item["status"], []).append(item["op"])
    parts = [f"{status}: {', '.join(dict.fromkeys(ops))}" for status, ops in groups.items()]
    return "; ".join(parts) or "-"


def rung_cells(rung: dict[str, Any]) -> list[str]:
    """Gap of both modes, share closed, equal tensors, time and memory against the first run."""
    modes, sites = rung["logprob"] or {}, rung["sites"]
    gaps = [number((modes.get(mode) or {}).get("mean_abs")) for mode in ("sample", "score")]
    closed = rung["closed"]["sample"] if modes.get("sample") else rung["closed"]["score"]
    times = [p["time_ratio"] for p in rung["price"]]
    memory = [p["peak_rss_ratio"] for p in rung["price"]]
    return [
        *gaps,
        "-" if closed is None else f"{closed:.1%}",
        f"{sites['bitwise_equal']}/{sites['compared']}" if sites else "-",
        _ratios(times),
        _ratios(memory),
    ]


def _ratios(values: list[float | None]) -> str:
    return "/".join("-" if value is None else f"{value:.2f}" for value in values)


def last_native(ladder: list[dict[str, Any]]) -> str:
    """The last rung that puts no op of ours into the engines, and what the end of the ladder is."""
    settings = [rung for rung in ladder if not rung["kernels"]]
    gap = (settings[-1]["logprob"] or {}).get("score") or {}
    end = ladder[-1]
    equal = end["sites"] and end["sites"]["compared"] == end["sites"]["bitwise_equal"]
    reached = "bitwise equal at every compared tensor" if equal else "not bitwise equal"
    return (
        f"settings only, no op of ours: {settings[-1]['rung']} "
        f"(score |dlogp| {number(gap.get('mean_abs'))}); end: {end['rung']}, {reached}"
    )
