"""Looks at one engine from inside its interpreter: `python -m minite_diag.doctor.probe ENGINE`.

Imports that engine only, and prints one JSON line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from minite_diag.capture.environment import bit_changing_environment, installed_versions
from minite_diag.engines.registry import load_engine_class
from minite_diag.errors import MiniteDiagError


def probe(name: str) -> dict[str, Any]:
    """What the doctor says of one engine; variables are those that the user set."""
    record: dict[str, Any] = {
        "status": "ok",
        "versions": installed_versions(),
        "variables": bit_changing_environment(),
        "problems": [],
    }
    try:
        found = load_engine_class(name).diagnose()
    except MiniteDiagError as error:
        problem = {"text": error.message, "fix": error.hint}
        return record | {"status": "missing", "problems": [problem]}
    problems = [{"text": text, "fix": fix} for text, fix in found.problems]
    return record | {
        "status": "problem" if problems else "ok",
        "label": found.label,
        "version": found.version,
        "device": found.device,
        "kernels": [dataclasses.asdict(item) for item in found.kernels],
        "problems": problems,
    }


def main() -> None:
    """Entry point; libraries print to stdout, so the answer goes to a copy of it."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(probe(sys.argv[1])), file=pipe, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
