"""Reading what the attribute stage wrote, without torch: for the summary, the report and the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

ATTRIBUTION_JSON: Final = "attribution.json"


def read_attribution(run: Path) -> dict[str, Any] | None:
    """The object that `attribute` wrote, or None if it did not run."""
    try:
        found: dict[str, Any] = json.loads((run / ATTRIBUTION_JSON).read_text(encoding="utf-8"))
    except OSError:
        return None
    return found
