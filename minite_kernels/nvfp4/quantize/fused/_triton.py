"""Triton fused producers: one kernel that makes a row in registers and quantizes it there.

The producer's arithmetic is that of the op's own kernel, the quantizer's that of ``_quantize_piece``;
nothing here is a third version. A row's statistics (the norm's, its amax) need the whole row, so a
program holds it; SiLU-mul under a known scale has none and is cut into pieces.
"""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.invariant._elementary_triton import exp
from minite_kernels.nvfp4.quantize import _triton as quantizer
from minite_kernels.nvfp4.quantize._ref import GlobalScale
from minite_kernels.nvfp4.quantize.fused import NormForm, quantized_dtype
from minite_kernels.nvfp4.recipe import OperandRecipe

_global_scale = quantizer._global_scale
_load_piece = quantizer._load_piece
_load_scales = quantizer._load_scales
_quantize_piece = quantizer._quantize_piece
_blocks = quantizer._blocks
_row_amax = quantizer._row_amax

#: Columns of a piece of SiLU-mul under a known scale.
PIECE = 256
#: Elements of whole rows that a program holds.
ROW_ELEMENTS = 2048


@triton.jit
def _silu_mul(x_ptr, rows, row_mask, column, K, stride_x, ROUND: tl.constexpr, BK: tl.constexpr):
    """Silu(gate) * up of a piece, rounded to x's dtype: FP32 [BM, BK]; zero beyond K."""
    dtype = x_ptr.dtype.element_ty
    gate = _load_piece(x_ptr, rows, row_mask, column, K, stride_x, BK)
    up = _load_piece(x_ptr + K, rows, row_mask, column, K, stride_x, BK)
    silu = tl.div_rn(gate, 1.0 + exp(-gate))
    if ROUND:
        silu = silu.to(dtype).to(tl.float32)
    return (silu * up).to(dtype).to(tl.float32)


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    rows,
    row_mask,
    K,
    stride_x,
    stride_residual,
    eps,
    PRODUCER: tl.constexpr,
    BK: tl.constexpr,
):
    """Norm of whole rows, as the quantizer sees it: FP32 [BM, BK]; stores the sum if there is one."""
    FORM: tl.constexpr = PRODUCER[1]
    HAS_RESIDUAL: tl.constexpr = PRODUCER[2]
    HAS_WEIGHT: tl.constexpr = PRODUCER[3]
    ROUND: tl.constexpr = PRODUCER[4]
    dtype = x_ptr.dtype.element_ty
    k = tl.arange(0, BK)
    total = _load_piece(x_ptr, rows, row_mask, 0, K, stride_x, BK)
    value = total
    if HAS_RESIDUAL:
        total = total + _load_piece(residual_ptr, rows, row_mask, 0, K, stride_residual, BK)
        stored = total.to(dtype)
        offset = rows[:, None].to(tl.int64) * K + k[None, :]
        tl.store(sum_ptr + offset, stored, mask=row_mask[:, None] & (k < K)[None, :])
        value = total if FORM == "float32" else stored.to(tl.float32)
    wide = value.to(tl.float64)
    squares = tl.sum(wide * wide, 1).to(tl.float32)
    mean = tl.div_rn(squares, tl.zeros_like(squares) + K.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    weight = value
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    if FORM == "weight_first":
        if HAS_WEIGHT:
            value = (value * weight).to(dtype).to(tl.float32)
        out = value * inverse
    else:
        out = value * inverse
        if ROUND:
            out = out.to(dtype).to(tl.float32)
        if HAS_WEIGHT:
            out = out * weight
        out = out.to(dtype).to(tl.float32)
    return out


@triton.jit(do_not_specialize=["M"])
def _fused_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    q_ptr,
    s_ptr,
    amax_ptr,
    encode_ptr,
    decode_ptr,
    M,
    K,
    eps,
    stride_x,
    stride_residual,
    PRODUCER: tl.constexpr,
    SCOPE: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    GLOBAL: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Produce rows and quantize them under given scales or the token's own; or only take the amax.

    ``PRODUCER`` is what ``_silu_producer`` or ``_norm_producer`` returns; ``SCOPE`` one of tensor,
    rows (both given), token, amax.
    """
    columns = tl.cdiv(K, BK)
    rows = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % columns) * BK
    row_mask = rows < M
    ROUND: tl.constexpr = PRODUCER[4]
    if PRODUCER[0] == "silu_mul":
        x = _silu_mul(x_ptr, rows, row_mask, column, K, stride_x, ROUND, BK)
    else:
        x = _norm(
            x_ptr, residual_ptr, weight_ptr, sum_ptr, rows, row_mask, K, stride_x,
            stride_residual, eps, PRODUCER, BK,
        )  # fmt: skip
        x = tl.where((column + tl.arange(0, BK) < K)[None, :], x, 0.0)
    x, b = _blocks(x, BM, BK, NAN_SPREADS)
    if SCOPE == "amax":
        tl.store(
            amax_ptr + rows, _row_amax(x, b, column, K, PADDED, NAN_SPREADS, BK), mask=row_mask
        )
    else:
        if SCOPE == "token":
            A, S, g = _global_scale(_row_amax(x, b, column, K, PADDED, NAN_SPREADS, BK), GLOBAL)
            tl.store(amax_ptr + rows, A, mask=row_mask)
            tl.store(encode_ptr + rows, S, mask=row_mask)
            tl.store(decode_ptr + rows, g, mask=row_mask)
            A, S, g = A[:, None], S[:, None], g[:, None]
        else:
            PER_ROW: tl.constexpr = SCOPE == "rows"
            A, S, g = _load_scales(amax_ptr, encode_ptr, decode_ptr, rows, row_mask, PER_ROW, BM)
        _quantize_piece(
            x, b, A, S, g, amax_ptr, q_ptr, s_ptr, rows, row_mask, column, K, BM, BK, NAN_SPREADS,
            False, RECIPE,
        )  # fmt: skip


def silu_mul_quantize(
    operand: OperandRecipe, gate_up: Tensor, scale: GlobalScale | None, round_silu: bool
) -> tuple[Tensor, Tensor, GlobalScale]:
    """Codes, block scales and global scales of silu(gate) * up [T, I]."""
    producer = ("silu_mul", "none", False, False, round_silu)
    width = gate_up.shape[1] // 2
    *out, _ = _quantize(operand, gate_up, None, None, 0.0, scale, producer, width, gate_up.dtype)
    return tuple(out)  # type: ignore[return-value]


def rms_norm_quantize(
    operand: OperandRecipe,
    x_TK: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: GlobalScale | None,
    form: NormForm,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor, GlobalScale, Tensor]:
    """Codes, block scales, global scales of the norm [T, K], and the sum in x's dtype."""
    producer = ("rms_norm", form, residual is not None, weight is not None, round_before_weight)
    dtype = quantized_dtype(x_TK.dtype, form)
    return _quantize(operand, x_TK, residual, weight, eps, scale, producer, x_TK.shape[1], dtype)


def _quantize(
    operand: OperandRecipe,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: GlobalScale | None,
    producer: tuple[Any, ...],
    k: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, GlobalScale, Tensor]:
    """One launch under given scales or an amax a token; an amax of the tensor takes one more."""
    m = x.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = None if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty_like(residual, dtype=x.dtype)
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    s8 = torch.empty(m, triton.cdiv(k, 16), dtype=torch.float8_e4m3fn, device=x.device)
    spreads = operand.nan_amax == "propagate"

    def launch(scope: str, scales: GlobalScale) -> None:
        pieces = producer[0] == "silu_mul" and scope in ("tensor", "rows")
        columns = PIECE if pieces else max(16, triton.next_power_of_2(k))
        rows = max(1, min(16, ROW_ELEMENTS // columns))
        if m and k:
            _fused_kernel[(triton.cdiv(m, rows) * triton.cdiv(k, columns),)](
                x,
                x if residual is None else residual,
                x if weight is None else weight.contiguous(),
                total,
                codes,
                s8,
                scales.amax,
                scales.encode,
                scales.decode,
                m,
                k,
                eps,
                x.stride(0),
                0 if residual is None else residual.stride(0),
                PRODUCER=producer,
                SCOPE=scope,
                PADDED=k % columns != 0,
                BM=rows,
                BK=columns,
                NAN_SPREADS=spreads,
                GLOBAL=quantizer.global_constants(operand, dtype),
                RECIPE=quantizer.recipe_constants(operand, dtype),
                num_warps=4 if columns <= 4096 else 8,
                **quantizer.unfused(),
            )

    if scale is None:
        empty = torch.empty(3, m, dtype=torch.float32, device=x.device)
        own = GlobalScale(empty[0], empty[1], empty[2])
        if operand.amax_scope == "token":
            launch("token", own)
            return codes, s8, own, total
        launch("amax", own)
        scale = quantizer.scale_of_amax(operand, empty[0], dtype)
    launch("rows" if scale.amax.ndim else "tensor", scale)
    return codes, s8, scale, total
