"""Compile options that the invariant kernels share."""

from __future__ import annotations

from typing import Any

from minite_kernels.dispatch import is_interpreted


def unfused() -> dict[str, Any]:
    """Forbid fused multiply-add, which rounds once where the reference rounds twice."""
    return {} if is_interpreted() else {"enable_fp_fusion": False}
