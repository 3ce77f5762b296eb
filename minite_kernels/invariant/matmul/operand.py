"""``PreparedWeight``: a weight with the layouts that implementations derived from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class PreparedWeight:
    """A weight [N, K] for many products; each layout is made on first use and kept."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self._layouts: dict[str, Any] = {}

    def layout(self, name: str, make: Callable[[Tensor], Any]) -> Any:
        """Return the named layout of ``w``, making it if this is the first use."""
        if name not in self._layouts:
            self._layouts[name] = make(self.w)
        return self._layouts[name]
