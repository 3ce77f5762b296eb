"""What a run has to report, one by one: engines that failed, checks of the gate, causes.

Knows the summary object. Invariant: SARIF, GitHub and Markdown report from this one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minite_diag.attribute.causes import CAUSES, page
from minite_diag.gate.limits import METRICS
from minite_diag.report import words


@dataclass(frozen=True)
class Issue:
    """`rule` is a cause code, `gate-METRIC` or `engine`; `level` is error, warning or note."""

    rule: str
    title: str
    level: str
    text: str
    where: str
    learner: str = ""
    sampler: str = ""
    waived: str = ""


def issues_of(summary: dict[str, Any]) -> list[Issue]:
    """Every issue of a run, the worst first."""
    gate = summary.get("gate") or {}
    found = [
        *_engines(summary),
        *(_check(check) for check in gate.get("checks", []) if check["verdict"] != "pass"),
        *_expired(gate),
        *_causes(summary, set(gate.get("waived_causes", []))),
    ]
    return sorted(found, key=lambda issue: ("error", "warning", "note").index(issue.level))


def rule_help(rule: str) -> tuple[str, str]:
    """(title, help as Markdown) of a rule."""
    if rule in CAUSES:
        return CAUSES[rule].title, page(rule)
    if rule == "engine":
        return "an engine could not be measured", (
            "The engine failed, so nothing is said about the gap. Its log is in the run directory; "
            "`minite-diag compare --resume RUN` captures only what is missing.\n"
        )
    if rule == "gate-waiver":
        return "a waiver expired", "Renew it with a new `expires`, or remove it.\n"
    metric = METRICS[rule.removeprefix("gate-")]
    return f"gate: {metric.title}", (
        f"`{metric.name}` is past its limit on the bound of a 95 % interval over sequences. "
        "`minite-diag gate RUN` shows the interval; `minite-diag explain` the causes.\n"
    )


def _engines(summary: dict[str, Any]) -> list[Issue]:
    return [
        Issue(
            "engine",
            f"{engine['id']} was not measured",
            "error",
            (engine["error"] or {}).get("message", engine["status"]),
            engine["id"],
        )
        for engine in summary["engines"]
        if engine["status"] not in ("ok", "truncated")
    ]


def _check(check: dict[str, Any]) -> Issue:
    waived = check["waived"]
    level = {"fail": "error"}.get(check["verdict"], "warning")
    text = words.check(check)
    return Issue(
        f"gate-{check['metric']}",
        f"gate {check['verdict']}: {check['metric']}",
        "note" if waived else level,
        text,
        check["worst"] or check["mode"],
        check["learner"],
        check["sampler"],
        f"{waived['reason']} (until {waived['expires']})" if waived else "",
    )


def _expired(gate: dict[str, Any]) -> list[Issue]:
    return [
        Issue(
            "gate-waiver",
            f"waiver of {waiver['name']} expired",
            "error",
            f"expired on {waiver['expires']} ({waiver['reason']}): renew or remove it",
            waiver["name"],
        )
        for waiver in gate.get("waivers", [])
        if waiver["state"] == "expired"
    ]


def _causes(summary: dict[str, Any], waived: set[str]) -> list[Issue]:
    return [
        Issue(
            cause["code"],
            cause["title"],
            _level(cause, waived),
            f"{cause['text']}{words.worth(cause)} "
            f"({cause['strength']}; rests on {cause['basis']} arithmetic)",
            cause["where"],
            pair["learner"]["id"],
            pair["sampler"]["id"],
            "waived" if cause["code"] in waived else "",
        )
        for pair in summary["pairs"]
        for cause in pair["causes"] or []
    ]


def _level(cause: dict[str, Any], waived: set[str]) -> str:
    """A hint, what is within the engines' noise, and what is waived, are notes."""
    weak = cause["strength"] == "hint" or cause.get("below_noise") or cause["code"] in waived
    return "note" if weak else "warning"


def fix_lines(cause: dict[str, Any], run: str) -> list[str]:
    """What to type against a cause in this run's engines, as plain text."""
    return [
        f"{fix['engine']} {fix['versions']}".strip().removeprefix("any")
        + f"{': ' if fix['engine'] != 'any' else ''}{fix['line'].replace('RUN', run)}"
        + (f" ({fix['note']})" if fix["note"] else "")
        for fix in cause.get("fixes") or []
    ]
