"""``Nvfp4Tensor``: one quantized operand, as plain tensors plus the recipe that made it.

A record, not a tensor subclass; it computes nothing. Invariant: ``codes`` and ``block_scale`` are
in linear layout whatever the recipe's tile; a 16x16 tile has its scale in each of its 16 rows.
Shapes: M rows, K columns (the contraction), B = ceil(K/16) blocks a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minite_kernels.nvfp4.recipe import OperandRecipe, Recipe, Role


@dataclass(frozen=True, eq=False, slots=True)
class Nvfp4Tensor:
    """A quantized [M, K] operand. ``amax`` and the global scales are [] or, per token, [M].

    ``codes`` uint8 [M, K/2], first element in the low nibble; ``block_scale`` float8_e4m3fn [M, B];
    ``amax``, ``global_encode_scale`` (2688/amax) and ``global_decode_scale`` float32.
    """

    codes: Tensor
    block_scale: Tensor
    amax: Tensor
    global_encode_scale: Tensor
    global_decode_scale: Tensor
    shape: tuple[int, int]
    recipe: Recipe
    role: Role

    @property
    def operand(self) -> OperandRecipe:
        """The arithmetic that made this tensor."""
        return self.recipe.operand(self.role)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def rows(self, index: Tensor | slice) -> Nvfp4Tensor:
        """Select rows, in order, without requantizing; per-token scales follow their rows."""
        codes = self.codes[index]
        token = self.amax.ndim == 1
        return Nvfp4Tensor(
            codes=codes,
            block_scale=self.block_scale.view(torch.uint8)[index].view(torch.float8_e4m3fn),
            amax=self.amax[index] if token else self.amax,
            global_encode_scale=self.global_encode_scale[index]
            if token
            else self.global_encode_scale,
            global_decode_scale=self.global_decode_scale[index]
            if token
            else self.global_decode_scale,
            shape=(codes.shape[0], self.shape[1]),
            recipe=self.recipe,
            role=self.role,
        )
