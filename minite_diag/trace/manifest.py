"""Reading manifests without torch: for the report, the gate and the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minite_diag.plan import Plan


def read_manifests(run: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Manifest by engine id; an engine that left none gets status `missing`."""
    found: dict[str, dict[str, Any]] = {}
    for spec in plan.engines:
        file = run / "traces" / spec.id / "manifest.json"
        try:
            found[spec.id] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found[spec.id] = {
                "engine": spec.__dict__,
                "status": "missing",
                "error": {
                    "kind": "Missing",
                    "message": f"{spec.id} was not captured",
                    "hint": f"minite-diag compare --resume {run}",
                },
            }
    return found
