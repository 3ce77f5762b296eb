"""SARIF 2.1.0: one rule for each cause code, with the cause's page as its help.

Knows the summary object. Invariant: `partialFingerprints` depend on the rule, the place and the
pair only, so that a viewer can follow a finding from run to run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from minite_diag import __version__
from minite_diag.outputs.issues import Issue, issues_of, rule_help

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_EXIT: Final = {"measured": 0, "pass": 0, "fail": 1, "inconclusive": 3, "error": 3}


def to_sarif(summary: dict[str, Any]) -> str:
    """A SARIF log with one run."""
    issues = issues_of(summary)
    rules = sorted({issue.rule for issue in issues})
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "minite-diag",
                        "version": __version__,
                        "rules": [_rule(rule) for rule in rules],
                    }
                },
                "automationDetails": {"id": f"minite-diag/{summary['model']['name']}/"},
                "invocations": [
                    {
                        "executionSuccessful": summary["verdict"] != "error",
                        "exitCode": _EXIT[summary["verdict"]],
                        "exitCodeDescription": summary["verdict"],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "results": [_result(issue, rules, summary) for issue in issues],
            }
        ],
    }
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def _rule(rule: str) -> dict[str, Any]:
    title, text = rule_help(rule)
    return {
        "id": rule,
        "shortDescription": {"text": title},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": "error" if rule.startswith("gate") else "warning"},
    }


def _result(issue: Issue, rules: list[str], summary: dict[str, Any]) -> dict[str, Any]:
    key = f"{issue.rule}\0{issue.where}\0{issue.learner}\0{issue.sampler}"
    result: dict[str, Any] = {
        "ruleId": issue.rule,
        "ruleIndex": rules.index(issue.rule),
        "level": issue.level,
        "message": {"text": issue.text},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(Path(summary["run"]) / "plan.json")},
                    "region": {"startLine": 1},
                },
                "logicalLocations": [{"fullyQualifiedName": issue.where, "kind": "member"}],
            }
        ],
        "partialFingerprints": {"minite-diag/v1": hashlib.sha256(key.encode()).hexdigest()},
        "properties": {"learner": issue.learner, "sampler": issue.sampler},
    }
    if issue.waived:
        result["suppressions"] = [{"kind": "external", "justification": issue.waived}]
    return result


def _uri(file: Path) -> str:
    """Relative to the working directory where it lies below it, as code scanning wants it."""
    absolute = file.absolute()
    here = Path.cwd()
    if not absolute.is_relative_to(here):
        return absolute.as_uri()
    return absolute.as_uri()[len(here.as_uri()) + 1 :]
