"""Waivers: failures that a project accepts for a while, with a reason and an end.

Knows settings and dates. Invariant: an expired waiver fails the gate, whatever was measured; a
waiver that lacks a reason or an end is an error.

    [[tool.minite-diag.waivers]]
    metric = "mean_abs"                 # and/or site = "GLOB[:KIND]", cause = "MD101"
    reason = "per-tensor scale until the next upgrade"
    expires = 2027-03-01
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minite_diag.attribute.causes import get_cause
from minite_diag.errors import UsageError
from minite_diag.gate.limits import get_metric, suggestion
from minite_diag.site import matches

_KEYS: Final = ("metric", "site", "cause", "reason", "expires")


@dataclass(frozen=True)
class Waiver:
    """All of `metric`, `site` and `cause` that are given must fit; "" fits anything."""

    reason: str
    expires: dt.date
    metric: str = ""
    site: str = ""
    cause: str = ""

    @property
    def name(self) -> str:
        """What it waives, as `metric mean_abs, cause MD101`."""
        parts = (("metric", self.metric), ("site", self.site), ("cause", self.cause))
        return ", ".join(f"{key} {value}" for key, value in parts if value)

    def fits_check(self, check: Mapping[str, Any], causes: Iterable[Mapping[str, Any]]) -> bool:
        """Whether it covers a failed check; one of a cause needs that cause to be found."""
        if not self.metric and not self.site:
            return False
        if self.metric and check["metric"] != self.metric:
            return False
        if self.site and not _is_at(str(check["worst"] or ""), self.site):
            return False
        return not self.cause or any(cause["code"] == self.cause for cause in causes)

    def fits_cause(self, cause: Mapping[str, Any]) -> bool:
        """Whether it covers a cause that was found."""
        if self.cause != cause["code"] or self.metric:
            return False
        return not self.site or _is_at(str(cause["where"]), self.site)

    def as_dict(self, state: str) -> dict[str, Any]:
        """For JSON; `state` is used, unused or expired."""
        return {
            "name": self.name,
            "metric": self.metric,
            "site": self.site,
            "cause": self.cause,
            "reason": self.reason,
            "expires": self.expires.isoformat(),
            "state": state,
        }


def _is_at(place: str, glob: str) -> bool:
    """Whether a site, or a place that is no site, matches the glob."""
    fqn, colon, kind = place.rpartition(":")
    return matches(fqn, kind, [glob]) if colon else matches(place, "", [glob])


def read_waivers(items: Any, file: object) -> list[Waiver]:
    """Waivers of a settings file; raises UsageError with the file and number of a bad one."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise UsageError(
            f"{file}: waivers are tables", "write them as [[tool.minite-diag.waivers]]"
        )
    return [_waiver(item, f"{file}: waiver {number}") for number, item in enumerate(items, 1)]


def _waiver(item: Any, where: str) -> Waiver:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where} is no table", "write it as [[tool.minite-diag.waivers]]")
    for key in item:
        if key not in _KEYS:
            raise UsageError(f"{where}: unknown key {key!r}", suggestion(str(key), _KEYS))
    if not str(item.get("reason", "")).strip():
        raise UsageError(f"{where} has no reason", 'add reason = "why this is accepted"')
    if not any(item.get(key) for key in ("metric", "site", "cause")):
        raise UsageError(f"{where} waives nothing", "add metric, site or cause")
    metric = get_metric(str(item["metric"])).name if item.get("metric") else ""
    cause = get_cause(str(item["cause"])).code if item.get("cause") else ""
    return Waiver(str(item["reason"]), _date(item, where), metric, str(item.get("site", "")), cause)


def _date(item: Mapping[str, Any], where: str) -> dt.date:
    value = item.get("expires")
    if isinstance(value, dt.datetime):
        return value.date()
    if isinstance(value, dt.date):
        return value
    try:
        return dt.date.fromisoformat(str(value))
    except ValueError as error:
        said = "has no end" if value is None else f"ends at {value!r}, which is no date"
        raise UsageError(f"{where} {said}", "add expires = 2027-03-01") from error
