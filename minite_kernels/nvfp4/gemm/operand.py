"""``PreparedOperand``: a quantized weight with the layouts that implementations made of it.

Each implementation reads weights in a layout of its own (decoded, tiled); making it costs more than
one multiplication. Invariant: a layout is a pure rearrangement or exact decoding of ``q``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minite_kernels.nvfp4.format import E2M1_MAX, E4M3_MAX
from minite_kernels.nvfp4.recipe import Recipe
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


def stored_operand(
    codes_NK: Tensor, block_scale: Tensor, decode_scale: Tensor, recipe: Recipe
) -> PreparedOperand:
    """Codes uint8 [N, K/2] of a checkpoint as a GEMM operand, nothing requantized.

    ``block_scale`` E4M3 [N, K/16], ``decode_scale`` FP32 of one element.
    """
    decode = decode_scale.detach().float().reshape(())
    return prepare(
        Nvfp4Tensor(
            codes=codes_NK.detach(),
            block_scale=block_scale.detach(),
            amax=decode * (E2M1_MAX * E4M3_MAX),
            global_encode_scale=decode.reciprocal(),
            global_decode_scale=decode,
            shape=(codes_NK.shape[0], codes_NK.shape[1] * 2),
            recipe=recipe,
            role="weight",
        )
    )
