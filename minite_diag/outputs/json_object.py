"""The summary object as JSON; its keys are described in minite_diag/summary.py."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(summary: dict[str, Any]) -> str:
    """Strict JSON: NaN and infinity, which it lacks, become null."""
    return json.dumps(_strict(summary), indent=1, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
