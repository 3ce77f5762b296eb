"""W4A4 GEMM: two NVFP4 operands, FP32 accumulation, the recipe's epilogue, one output cast.

E2M1 code times E4M3 scale is exact in BF16, so this is the block-scaled tensor-core GEMM of the
engine, minus the freedom in its summation order. Global scales enter in the FP32 epilogue only:
folded into an operand they would round every element. Shapes: a [M, K], b [N, K], out [M, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm import _ref
from minite_kernels.nvfp4.gemm._alpha import ALPHAS
from minite_kernels.nvfp4.quantize import dequantize
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

Impl = Literal["auto", "ref", "triton", "native"]
OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)

__all__ = ["PreparedOperand", "accumulate", "gemm", "prepare"]


@dataclass(frozen=True, eq=False, slots=True)
class PreparedOperand:
    """An operand decoded once for many multiplications; ``values`` is q*s in FP64, [N, K]."""

    q: Nvfp4Tensor
    values: Tensor


def prepare(q: Nvfp4Tensor) -> PreparedOperand:
    """Decode an operand ahead of time; ``gemm`` takes the result in place of ``q``, same bits."""
    return PreparedOperand(q, _ref.decode(q))


def gemm(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor | PreparedOperand,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alpha: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed, as the recipe's engine does: [M, N] ``out_dtype``.

    ``alpha`` (FP32 [], [M, 1] or [1, N]) replaces the recipe's epilogue factor. Promise for
    block-scaled recipes: a row's bits depend on that row and b alone, not on M or the threads; and
    they are the bits of any FP32 accumulation wherever the exact sum fits 24 bits. A recipe whose
    engine multiplies dequantized operands gets that engine's own matmul and no such promise.
    Raises ValueError if K or the GEMM arithmetic of the two operands differ.
    """
    b_q = b.q if isinstance(b, PreparedOperand) else b
    _check(a, b_q, out_dtype)
    if impl not in ("auto", "ref"):
        raise ValueError(f"gemm has no impl {impl!r} here; one of auto, ref")
    if a.recipe.gemm.operands == "dequantized":
        if alpha is not None:
            raise ValueError(f"recipe {a.recipe.name!r} multiplies dequantized operands: no alpha")
        return torch.matmul(dequantize(a, out_dtype), dequantize(b_q, out_dtype).t())
    accumulator = accumulate(a, b)
    factors = (alpha,) if alpha is not None else ALPHAS[a.recipe.gemm.alpha](a, b_q)
    return epilogue(accumulator, factors, out_dtype, twice=a.recipe.gemm.output == "twice")


def accumulate(a: Nvfp4Tensor, b: Nvfp4Tensor | PreparedOperand) -> Tensor:
    """Sum of (q_a*s_a)(q_b*s_b) over k without global scales: FP32 [M, N], rounded once."""
    values = b.values if isinstance(b, PreparedOperand) else _ref.decode(b)
    return _ref.accumulate(_ref.decode(a), values)


def epilogue(
    accumulator: Tensor, factors: tuple[Tensor, ...], out_dtype: torch.dtype, *, twice: bool = False
) -> Tensor:
    """Multiply by each factor in FP32, in order, and cast; ``twice`` casts before as well."""
    out = accumulator.to(out_dtype).to(torch.float32) if twice else accumulator
    for factor in factors:
        out = out * factor
    return out.to(out_dtype)


def _check(a: Nvfp4Tensor, b: Nvfp4Tensor, out_dtype: torch.dtype) -> None:
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"K differs: a is {a.shape}, b is {b.shape}; both must be K-major")
    if a.recipe.gemm != b.recipe.gemm:
        raise ValueError(
            f"recipes {a.recipe.name!r} and {b.recipe.name!r} multiply differently; "
            "quantize both operands under one recipe"
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be one of {OUT_DTYPES}, got {out_dtype}")
