"""``PreparedWeight``: a weight with the layouts that implementations derived from it.

Invariant: a layout is of the weight's present bytes. A refit writes weights in place, through
``.data`` too, which no version counter sees; so the bytes themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PreparedWeight:
    """A weight [N, K] for many products; each layout is made on first use and kept."""

    def __init__(self, w: Tensor) -> None:
        self.w = w
        self._made_of: Tensor | None = None
        self._layouts: dict[str, Any] = {}

    def layout(self, name: str, make: Callable[[Tensor], Any]) -> Any:
        """Return the named layout of ``w``, making it on first use and after ``w`` was written."""
        if self._made_of is None or not torch.equal(self._made_of, self.w):
            self._made_of = self.w.detach().clone()
            self._layouts = {}
        if name not in self._layouts:
            self._layouts[name] = make(self.w)
        return self._layouts[name]
