"""W4A4 GEMM: two NVFP4 operands, FP32 accumulation, the recipe's epilogue, one output cast.

E2M1 code times E4M3 scale is exact in BF16, so this is the block-scaled tensor-core GEMM of the
engine, minus the freedom in its summation order. Global scales enter in the FP32 epilogue only:
folded into an operand they would round every element. Shapes: a [M, K], b [N, K], out [M, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, beyond_device, select
from minite_kernels.nvfp4.gemm import _ref
from minite_kernels.nvfp4.gemm._epilogue import Epilogue, add_bias
from minite_kernels.nvfp4.gemm.operand import PreparedOperand, prepare, stored_operand
from minite_kernels.nvfp4.quantize import decoded_values, dequantize, quantize
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

#: The Triton GEMMs read operands through TMA.
HOPPER = 9
#: Why recipes whose engine multiplies dequantized operands have no Triton GEMM: its bits are those
#: of the engine's own BF16 matmul, which is torch's.
DEQUANTIZED = "dequantized operands are multiplied by torch"
OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)

__all__ = ["PreparedOperand", "accumulate", "gemm", "linear", "prepare", "stored_operand"]


def gemm(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor | PreparedOperand,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed, as the recipe's engine does: [M, N] ``out_dtype``.

    ``alpha`` (FP32 [], [M, 1] or [1, N]) replaces the recipe's epilogue factor; ``bias`` [N] is
    added where the recipe says. Promise for block-scaled recipes: a row's bits depend on that row
    and b alone, not on M or the threads; and they are the bits of any FP32 accumulation wherever
    the exact sum fits 24 bits, so ``ref`` and ``triton`` agree there. A recipe whose engine
    multiplies dequantized operands gets that engine's own matmul and no such promise.
    Raises ValueError if K or the GEMM arithmetic of the two operands differ.
    """
    prepared = prepare(b)
    _check(a, prepared.q, out_dtype)
    if a.recipe.gemm.operands == "dequantized":
        return _dequantized(a, prepared.q, out_dtype, alpha, bias)
    epilogue = Epilogue(a, prepared.q, out_dtype, alpha, bias)
    limits = {"triton": beyond_device(a.device, HOPPER)}
    module = select("gemm", __name__, impl, a.device, limits)
    out: Tensor = module.gemm(a, prepared, epilogue)
    return out


def linear(
    x_MK: Tensor,
    w: Nvfp4Tensor | PreparedOperand,
    *,
    amax: Tensor | None = None,
    global_encode_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Quantize x [M, K] under w's recipe and multiply by w [N, K]: [M, N], by default in x's dtype.

    Promise: the bits of ``gemm(quantize(x, recipe), w)``; ``triton`` keeps x's codes decoded between
    its two kernels instead of packing them, and refuses recipes that multiply dequantized operands.
    ``amax`` or ``global_encode_scale`` as in ``quantize``.
    """
    prepared = prepare(w)
    recipe, dtype = prepared.q.recipe, out_dtype or x_MK.dtype
    limits = {"triton": beyond_device(x_MK.device, HOPPER)}
    if recipe.gemm.operands == "dequantized":
        limits["triton"] = DEQUANTIZED
    module = select("linear", __name__, impl, x_MK.device, limits)
    if module is _ref:
        q = quantize(x_MK, recipe, amax=amax, global_encode_scale=global_encode_scale, impl="ref")
        return gemm(q, prepared, out_dtype=dtype, bias=bias, impl="ref")
    values, a = decoded_values(x_MK, recipe, amax=amax, global_encode_scale=global_encode_scale)
    epilogue = Epilogue(a, prepared.q, dtype, bias=bias)
    out: Tensor = module.multiply(values, prepared, epilogue, overlap=True)
    return out


def accumulate(a: Nvfp4Tensor, b: Nvfp4Tensor | PreparedOperand) -> Tensor:
    """Sum of (q_a*s_a)(q_b*s_b) over k without global scales: FP32 [M, N], exact, rounded once."""
    return _ref.accumulate(_ref.decode(a), prepare(b).layout("decoded_fp64", _ref.decode))


def _dequantized(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    out_dtype: torch.dtype,
    alpha: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    if alpha is not None:
        raise ValueError(f"recipe {a.recipe.name!r} multiplies dequantized operands: no alpha")
    out = torch.matmul(dequantize(a, out_dtype), dequantize(b, out_dtype).t())
    return add_bias(Epilogue(a, b, out_dtype, bias=bias), out)


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
