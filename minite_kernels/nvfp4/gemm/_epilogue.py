"""What happens to the FP32 accumulator: factors, bias, casts, in the recipe's order.

Invariant: every multiplication and addition is one FP32 rounding; nothing is fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm._alpha import ALPHAS
from minite_kernels.nvfp4.recipe import GemmRecipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Epilogue:
    """The recipe's epilogue for operands a and b; ``alpha``, if given, replaces its factors.

    ``alpha`` is FP32 [], [M, 1] or [1, N]; ``bias`` is [N].
    """

    a: Nvfp4Tensor
    b: Nvfp4Tensor
    out_dtype: torch.dtype
    alpha: Tensor | None = None
    bias: Tensor | None = None

    @property
    def recipe(self) -> GemmRecipe:
        """The arithmetic of the multiplication."""
        return self.a.recipe.gemm

    def factors(self) -> tuple[Tensor, ...]:
        """FP32 factors, broadcastable to [M, N], to be multiplied in order."""
        if self.alpha is not None:
            return (self.alpha,)
        return ALPHAS[self.recipe.alpha](self.a, self.b)


def apply(epilogue: Epilogue, accumulator: Tensor) -> Tensor:
    """[M, N] ``out_dtype`` from the FP32 accumulator [M, N]."""
    out = accumulator
    if epilogue.recipe.output == "twice":
        out = out.to(epilogue.out_dtype).to(torch.float32)
    for factor in epilogue.factors():
        out = out * factor
    return add_bias(epilogue, out)


def add_bias(epilogue: Epilogue, out: Tensor) -> Tensor:
    """Add the bias before or after the output cast, and cast."""
    if epilogue.bias is None:
        return out.to(epilogue.out_dtype)
    if epilogue.recipe.bias == "epilogue":
        return (out + epilogue.bias.to(torch.float32)).to(epilogue.out_dtype)
    return out.to(epilogue.out_dtype) + epilogue.bias.to(epilogue.out_dtype)
