"""``PreparedOperand``: a quantized weight with the layouts that implementations made of it.

Each implementation reads weights in a layout of its own (decoded, tiled); making it costs more than
one multiplication. Invariant: a layout is a pure rearrangement or exact decoding of ``q``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minite_kernels.nvfp4.tensor import Nvfp4Tensor


class PreparedOperand:
    """An operand for many multiplications: ``q`` and, made on first use, its layouts."""

    def __init__(self, q: Nvfp4Tensor) -> None:
        self.q = q
        self._layouts: dict[str, Tensor] = {}

    def layout(self, name: str, make: Callable[[Nvfp4Tensor], Tensor]) -> Tensor:
        """Return the named layout of ``q``, making and keeping it if this is the first use."""
        if name not in self._layouts:
            self._layouts[name] = make(self.q)
        return self._layouts[name]


def prepare(q: Nvfp4Tensor | PreparedOperand) -> PreparedOperand:
    """Wrap an operand for reuse; ``gemm`` takes the result in place of ``q``, with the same bits."""
    return q if isinstance(q, PreparedOperand) else PreparedOperand(q)
