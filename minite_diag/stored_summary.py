"""The summary of a run, kept beside it in `summary.json`, so that gates and outputs start at once.

Knows files and hashes; no torch, and no pandas while the kept one is valid. Invariant: a kept
summary is used only if every file that it was made from has the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from minite_diag import __version__

SUMMARY_FILE: Final = "summary.json"
_MADE_BY: Final = (
    "summary.py",
    "logprobs.py",
    "attribute/first_divergence.py",
    "attribute/fixes.py",
)
"""Our own files whose change makes another summary of the same run."""
_MADE_FROM: Final = ("plan.json", "comparison.parquet", "logprobs.parquet", "attribution.json")


def read_summary(run: Path) -> dict[str, Any]:
    """The summary object of a run: the kept one, or made anew and kept.

    Raises TraceError if the run can't be read. A run in a read-only folder is not an error.
    """
    made_from = _digests(run)
    kept = _kept(run)
    if kept is not None and kept["made_from"] == made_from:
        return _moved(kept["summary"], run)
    from minite_diag.summary import summarize

    summary = summarize(run)
    record = {"made_from": made_from, "summary": summary}
    partial = run / f"{SUMMARY_FILE}.partial"
    try:
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(run / SUMMARY_FILE)
    except OSError:
        pass
    return summary


def _kept(run: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(record, dict) and {"made_from", "summary"} <= record.keys()
    return record if whole else None


def _digests(run: Path) -> dict[str, str]:
    files = [run / name for name in _MADE_FROM]
    files += sorted(run.glob("traces/*/manifest.json"))
    found = {"version": __version__}
    found |= {name: _digest(Path(__file__).parent / name) for name in _MADE_BY}
    for file in files:
        try:
            found[str(file.relative_to(run))] = _digest(file)
        except OSError:
            found[str(file.relative_to(run))] = "missing"
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _moved(summary: dict[str, Any], run: Path) -> dict[str, Any]:
    """The summary with the paths of where the run lies now."""
    old, new = summary["run"], str(run)
    if old == new:
        return summary
    files = {name: path.replace(old, new, 1) for name, path in summary["files"].items()}
    return {**summary, "run": new, "files": files, "next": summary["next"].replace(old, new, 1)}
