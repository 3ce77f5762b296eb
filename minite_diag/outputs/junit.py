"""JUnit XML: one suite for each pair of engines, one case for each thing that was judged.

Knows the summary object. Invariant: `inconclusive` is an error, never `skipped`, because viewers
show a skipped case as green.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any, Final

from minite_diag.report import words

_ILLEGAL: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 can't hold, not even escaped."""


def to_junit(summary: dict[str, Any]) -> str:
    """A `testsuites` document."""
    root = ET.Element("testsuites", name=_legal(f"minite-diag {summary['model']['name']}"))
    _add_engines(root, summary)
    for pair in summary["pairs"]:
        _add_pair(root, summary, pair)
    for suite in root:
        cases = suite.findall("testcase")
        for name in ("failure", "error", "skipped"):
            count = sum(case.find(name) is not None for case in cases)
            suite.set({"failure": "failures", "error": "errors"}.get(name, name), str(count))
        suite.set("tests", str(len(cases)))
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _suite(root: ET.Element, name: str) -> ET.Element:
    return ET.SubElement(root, "testsuite", name=_legal(name))


def _case(
    suite: ET.Element, name: str, bad: tuple[str, str, str] | None = None, said: str = ""
) -> None:
    """A case; `bad` is (failure or error, type, message)."""
    case = ET.SubElement(suite, "testcase", name=_legal(name), classname=suite.get("name", ""))
    if bad is not None:
        element = ET.SubElement(case, bad[0], type=bad[1], message=_legal(bad[2]))
        element.text = _legal(said or bad[2])
    elif said:
        ET.SubElement(case, "system-out").text = _legal(said)


def _add_engines(root: ET.Element, summary: dict[str, Any]) -> None:
    suite = _suite(root, "engines")
    for engine in summary["engines"]:
        failed = engine["status"] not in ("ok", "truncated")
        error = engine["error"] or {}
        message = error.get("message", engine["status"])
        bad = ("error", "error", message) if failed else None
        _case(suite, f"{engine['id']} ran", bad, words.evidence(engine))


def _add_pair(root: ET.Element, summary: dict[str, Any], pair: dict[str, Any]) -> None:
    ends = (pair["learner"]["id"], pair["sampler"]["id"])
    suite = _suite(root, f"{ends[0]} vs {ends[1]}")
    causes = "\n".join(f"{cause['code']} {cause['text']}" for cause in pair["causes"] or [])
    strange = None
    if not pair["comparable"]:
        strange = ("error", "inconclusive", f"not comparable: {pair['causes'][0]['text']}")
    _case(suite, "comparable", strange, causes)
    gate = summary.get("gate")
    if gate is None:
        _case(suite, "measured", None, words.gap(pair))
        return
    for check in gate["checks"]:
        if (check["learner"], check["sampler"]) == ends:
            _add_check(suite, check)
    for waiver in gate["waivers"]:
        if waiver["state"] == "expired":
            text = f"expired on {waiver['expires']} ({waiver['reason']}): renew or remove it"
            _case(suite, f"waiver of {waiver['name']}", ("failure", "expired", text))


def _add_check(suite: ET.Element, check: dict[str, Any]) -> None:
    place = check["site"] or check["mode"]
    name = " ".join(part for part in (check["rule"], place, check["metric"]) if part)
    sentence = words.check(check)
    if check["waived"]:
        _case(suite, name, None, f"waived ({check['waived']['reason']}): {sentence}")
    elif check["verdict"] == "fail":
        _case(suite, name, ("failure", "fail", sentence))
    elif check["verdict"] == "inconclusive":
        _case(suite, name, ("error", "inconclusive", sentence))
    else:
        _case(suite, name, None, sentence)


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
