"""What each cause is worth in this run: nats of the gap, and whether the engines' noise hides it.

Reads the live half's object; no torch, no engine. An op class's share is measured, and every cause
inside of that op gets it, because nothing finer was measured. Invariant: no number is derived from
a stored difference; without the live half a cause has no effect and is never called noise.
"""

from __future__ import annotations

from typing import Any, Final

from minite_diag.attribute.causes import CAUSES, OPS, SPLIT_SUM

SAME_CONDITIONS: Final = ("observer", "repeat")
"""Legs whose two runs differ in nothing that a user would change: their worst is the noise."""

_OPERANDS: Final = {
    "weight": "weights",
    "activation": "activation rule",
    "GEMM": "gemm rule",
}
"""Where a rule was found -> what was swapped to measure it."""

_OPS_BY_CODE: Final = {code: op for op, code in OPS.items()}


def add_effects(pair: dict[str, Any], live: dict[str, Any]) -> None:
    """Give each finding of `pair` its `effect` and `below_noise`, and add the legs' findings.

    `effect` is a list of {"op", "closed", "nats"}; `pair["noise"]` is the floor in nats.
    """
    ends = (pair["baseline"], pair["target"])
    legs = [leg for leg in live["legs"] if leg["engine"] in ends]
    pair["noise"] = noise_floor(legs)
    causal = next((c for c in live["causal"] if (c["baseline"], c["target"]) == ends), None)
    routing = next((r for r in live["routing"] if (r["baseline"], r["target"]) == ends), None)
    pair["findings"] = [f for f in pair["findings"] if not f["code"].startswith("MD50")]
    pair["findings"] += [_leg_finding(leg) for leg in legs if leg["code"]]
    gap = causal["gap"]["mean_abs"] if causal else None
    for finding in pair["findings"]:
        finding["effect"] = _effect(finding, causal, routing)
        finding["below_noise"] = _is_noise(finding, gap, pair["noise"])


def noise_floor(legs: list[dict[str, Any]]) -> float | None:
    """The worst mean |difference| of an engine with itself; None if no such leg was measured."""
    found = [
        float(leg["mean_abs"])
        for leg in legs
        if leg["leg"] in SAME_CONDITIONS and leg["status"] == "measured"
    ]
    return max(found, default=None)


def _leg_finding(leg: dict[str, Any]) -> dict[str, Any]:
    differ = leg["tokens"] - leg["equal"]
    return {
        "code": leg["code"],
        "title": CAUSES[leg["code"]].title,
        "where": leg["engine"],
        "text": f"{leg['engine']}, {leg['note']}: {differ} of {leg['tokens']} log-probabilities "
        f"differ, by {leg['mean_abs']:.3g} on average and {leg['max_abs']:.3g} at most",
        "strength": "measured",
        "basis": "native",
        "evidence": leg,
    }


def _effect(
    finding: dict[str, Any], causal: dict[str, Any] | None, routing: dict[str, Any] | None
) -> list[dict[str, Any]]:
    code = finding["code"]
    if code.startswith("MD50"):
        evidence = finding["evidence"]
        return [{"op": f"leg {evidence['leg']}", "closed": None, "nats": evidence["mean_abs"]}]
    if code == "MD601":
        if routing is None:
            return []
        return [{"op": "routing", "closed": routing["closed"], "nats": routing["nats"]}]
    if causal is None or not causal["gap"]["mean_abs"]:
        return []
    shares = _shares(finding, causal)
    return [
        {
            "op": share["name"],
            "closed": share["closed"],
            "nats": share["closed"] * causal["gap"]["mean_abs"],
        }
        for share in shares
        if share["closed"] is not None
    ]


def _shares(finding: dict[str, Any], causal: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the operand that a rule is about where operands were swapped, else of the op classes."""
    operand = next((v for k, v in _OPERANDS.items() if finding["where"].startswith(k)), None)
    if finding["code"].startswith("MD1") and operand is not None:
        found = [share for share in causal["operands"] if share["name"] == operand]
        if found:
            return found
    return [share for share in causal["ops"] if share["name"] in _ops(finding)]


def _ops(finding: dict[str, Any]) -> tuple[str, ...]:
    """The op classes in which a cause acts."""
    code, where = finding["code"], finding["where"]
    if code in _OPS_BY_CODE:
        return (_OPS_BY_CODE[code],)
    if code.startswith("MD1") or code == SPLIT_SUM:
        return ("linear", "experts")
    if code.startswith("MD3"):
        return ("lm_head",) if where == "lm_head" else ("linear", "experts", "embedding")
    return ()


def _is_noise(finding: dict[str, Any], gap: float | None, floor: float | None) -> bool:
    if not floor or finding["code"].startswith(("MD4", "MD50")):
        return False
    nats = [abs(effect["nats"]) for effect in finding["effect"]]
    if nats:
        return max(nats) <= floor
    return gap is not None and gap <= floor
