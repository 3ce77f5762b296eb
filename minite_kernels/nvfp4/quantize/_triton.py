"""Triton quantizer: the functions of ``_ref``, one read of x, bit for bit the same bytes.

Shapes: M rows, K columns (K % 16 == 0), B = K/16 blocks. Every program owns whole blocks; nothing
is summed, so no launch choice changes a bit.
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

from minite_kernels.dispatch import beyond_device, is_interpreted
from minite_kernels.nvfp4.format import E2M1_MAX
from minite_kernels.nvfp4.quantize import _triton_arithmetic as arithmetic
from minite_kernels.nvfp4.quantize import configs
from minite_kernels.nvfp4.quantize._arithmetic import QUOTIENTS
from minite_kernels.nvfp4.quantize._ref import GlobalScale
from minite_kernels.nvfp4.recipe import OperandRecipe

_global_scale = arithmetic.global_scale
_block_scale = arithmetic.block_scale
_factor = arithmetic.factor
_quotient = arithmetic.quotient
_encode_e2m1 = arithmetic.encode_e2m1
_round_e2m1 = arithmetic.round_e2m1
_dither_e2m1 = arithmetic.dither_e2m1
_random_bytes = arithmetic.random_bytes
_FLOAT32_MAX = arithmetic.FLOAT32_MAX
_BFLOAT16_MAX = arithmetic.BFLOAT16_MAX


@triton.jit
def _max_magnitude(x, axis: tl.constexpr, NAN_SPREADS: tl.constexpr):
    """Max of |x| over an axis; ``tl.max`` alone drops NaN unless all are NaN."""
    largest = tl.max(tl.abs(x), axis)
    if NAN_SPREADS:
        known = tl.min((x == x).to(tl.int32), axis)
        largest = tl.where(known == 1, largest, float("nan"))
    return largest


@triton.jit
def _round_e4m3(t):
    """FP32 t in [0, 448] or NaN rounded to E4M3, ties to even, in FP32.

    The conversion instructions are not used: ptxas 12.8 merges the packs of neighbouring values and
    then lets a reader of one of them run before it is written (seen in SASS for sm_90; wrong codes
    on an H200 wherever FP32 x leaves a thread several scales). Adding 1.5 * 2^20 binades puts the
    sum where one ulp is the E4M3 step; subnormals share the step of [2^-6, 2^-5).
    """
    binade = tl.maximum(t, 0.015625).to(tl.int32, bitcast=True) & 0x7F800000
    shift = binade.to(tl.float32, bitcast=True) * 1572864.0
    return (t + shift) - shift


@triton.jit
def _encode_e4m3(s):
    """E4M3 of FP32 s on its grid, never negative: 2^-120 s has the byte in its upper bits."""
    bits = (s * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
    byte = tl.where(s == s, bits, 0x7F).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _cast_block_scale(t, RECIPE: tl.constexpr):
    """(s that elements see, whether it is zero, s as stored) of the block scale before its cast."""
    FLOOR: tl.constexpr = RECIPE[9]
    ZERO_BLOCK: tl.constexpr = RECIPE[10]
    ZERO_BLOCK_AFTER: tl.constexpr = RECIPE[11]
    if RECIPE[12]:  # NaN becomes the largest number
        t = tl.where(t < _FLOAT32_MAX, t, _FLOAT32_MAX)
    if FLOOR > 0:
        t = tl.where(t < FLOOR, FLOOR, t)
    t = tl.where(t > 448.0, 448.0, t)
    stored = _round_e4m3(t)
    s = t if RECIPE[4] else stored
    is_zero = s == 0
    if ZERO_BLOCK is not None and ZERO_BLOCK_AFTER:
        s = tl.where(is_zero, ZERO_BLOCK, s)
        stored = s
    return s, is_zero, stored


@triton.jit
def _scale_elements(x, s, s_is_zero, b, S, g, RECIPE: tl.constexpr):
    """X [.., B, 16] on the E2M1 range, before rounding."""
    ELEMENT_SCALE: tl.constexpr = RECIPE[1]
    APPROX: tl.constexpr = RECIPE[3]
    NARROW: tl.constexpr = RECIPE[6]
    ZERO_GUARD: tl.constexpr = RECIPE[7]
    ZERO_GUARD_VALUE: tl.constexpr = RECIPE[8]
    FLUSH: tl.constexpr = RECIPE[17]
    if RECIPE[2]:
        S, g = tl.expand_dims(S, -1), tl.expand_dims(g, -1)
        y = _quotient(x, tl.expand_dims(s, -1), S, g, ELEMENT_SCALE, FLUSH)
    else:
        f = _factor(s, b, S, g, ELEMENT_SCALE, APPROX, FLUSH)
        if ZERO_GUARD == "s":
            f = tl.where(s_is_zero, ZERO_GUARD_VALUE, f)
        elif ZERO_GUARD == "b":
            f = tl.where(b == 0, ZERO_GUARD_VALUE, f)
        elif ZERO_GUARD == "product":
            product = arithmetic.mul(s, arithmetic.rcp(S, APPROX, FLUSH), FLUSH)
            f = tl.where(product == 0, ZERO_GUARD_VALUE, f)
        if RECIPE[5]:
            if NARROW:
                f = tl.where(f > _BFLOAT16_MAX, _BFLOAT16_MAX, f)
            else:
                f = tl.where(f > _FLOAT32_MAX, _FLOAT32_MAX, f)
        if NARROW:
            f = f.to(tl.bfloat16).to(tl.float32)
        y = arithmetic.mul(x, tl.expand_dims(f, -1), FLUSH)
    return y


@triton.jit
def _halves(x, COUNT: tl.constexpr, HALF: tl.constexpr):
    """(even, odd) elements of x [COUNT, 2 * HALF], each [COUNT, HALF]."""
    return tl.split(tl.reshape(x, (COUNT, HALF, 2)))


@triton.jit
def _sum_16(x):
    """Sum of the last 16 elements in ascending order: [.., 16] -> [N], N all that precedes."""
    N: tl.constexpr = x.numel // 16
    even, odd = _halves(x, N, 8)
    e0, e2 = _halves(even, N, 4)
    e1, e3 = _halves(odd, N, 4)
    e04, e48 = _halves(e0, N, 2)
    e15, e59 = _halves(e1, N, 2)
    e26, e6a = _halves(e2, N, 2)
    e37, e7b = _halves(e3, N, 2)
    x0, x8 = tl.split(e04)
    x4, x12 = tl.split(e48)
    x1, x9 = tl.split(e15)
    x5, x13 = tl.split(e59)
    x2, x10 = tl.split(e26)
    x6, x14 = tl.split(e6a)
    x3, x11 = tl.split(e37)
    x7, x15 = tl.split(e7b)
    first = ((((((x0 + x1) + x2) + x3) + x4) + x5) + x6) + x7
    return (((((((first + x8) + x9) + x10) + x11) + x12) + x13) + x14) + x15


@triton.jit
def _fold_rows(x, T: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr):
    """Add the lower to the upper half of the rows: [T, 2 * HALF, B] -> [T, HALF, B]."""
    upper, lower = tl.split(tl.permute(tl.reshape(x, (T, 2, HALF, B)), (0, 2, 3, 1)))
    return upper + lower


@triton.jit
def _block_error(value, x, s, A, S, g, RECIPE: tl.constexpr):
    """Summed error of each block: 16 elements in order, then a 16x16 tile's rows as a tree."""
    ERROR: tl.constexpr = RECIPE[19]
    DOMAIN: tl.constexpr = RECIPE[20]
    Q: tl.constexpr = RECIPE[21]
    value = value * tl.expand_dims(s, -1)
    if DOMAIN == "((q*s)*A)/Q - x":
        product = value * tl.expand_dims(A, -1)
        difference = tl.div_rn(product, tl.where(product == product, Q, Q)) - x
    elif DOMAIN == "(q*s)*g - x":
        difference = value * tl.expand_dims(g, -1) - x
    else:
        difference = value - x * tl.expand_dims(S, -1)
    terms = difference * difference if ERROR == "mse" else tl.abs(difference)
    total = tl.reshape(_sum_16(terms), s.shape)
    if RECIPE[18]:
        T: tl.constexpr = s.shape[0] // 16
        B: tl.constexpr = s.shape[1]
        rows = _fold_rows(tl.reshape(total, (T, 16, B)), T, 8, B)
        rows = _fold_rows(_fold_rows(_fold_rows(rows, T, 4, B), T, 2, B), T, 1, B)
        total = tl.reshape(tl.broadcast_to(rows, (T, 16, B)), s.shape)
    return total


@triton.jit
def _quantize_blocks(x, b, A, S, g, random, VALUES: tl.constexpr, RECIPE: tl.constexpr):
    """X [.., B, 16] FP32 with block amax b, A, S, g [.., B] -> (codes int32 or values, s FP32).

    ``RECIPE`` is what ``recipe_constants`` returns.
    """
    TIES_EVEN: tl.constexpr = RECIPE[13]
    KEEP_SIGN: tl.constexpr = RECIPE[14]
    NAN_CODE: tl.constexpr = RECIPE[15]
    BLOCK_SCALE: tl.constexpr = RECIPE[0]
    APPROX: tl.constexpr = RECIPE[3]
    FLUSH: tl.constexpr = RECIPE[17]
    STATISTIC: tl.constexpr = RECIPE[22]
    ZERO_BLOCK: tl.constexpr = RECIPE[10]
    t = _block_scale(b, S, g, BLOCK_SCALE, APPROX, FLUSH, STATISTIC)
    if ZERO_BLOCK is not None and not RECIPE[11]:
        t = tl.where(t == 0, ZERO_BLOCK, t)
    if RECIPE[19] == "none":
        s, is_zero, stored = _cast_block_scale(t, RECIPE)
        y = _scale_elements(x, s, is_zero, b, S, g, RECIPE)
    else:
        s4, zero4, _ = _cast_block_scale(t * 1.5, RECIPE)
        s6, zero6, _ = _cast_block_scale(t, RECIPE)
        y4 = _scale_elements(x, s4, zero4, b, S, g, RECIPE)
        y6 = _scale_elements(x, s6, zero6, b, S, g, RECIPE)
        value4 = _round_e2m1(y4, TIES_EVEN, KEEP_SIGN, NAN_CODE)
        value6 = _round_e2m1(y6, TIES_EVEN, KEEP_SIGN, NAN_CODE)
        error4 = _block_error(value4, x, s4, A, S, g, RECIPE)
        four = error4 < _block_error(value6, x, s6, A, S, g, RECIPE)
        y = tl.where(tl.expand_dims(four, -1), y4, y6)
        stored = tl.where(four, s4, s6)
    if RECIPE[16]:
        y = _dither_e2m1(y, random)
    if VALUES:
        code = _round_e2m1(y, TIES_EVEN, KEEP_SIGN, NAN_CODE)
    else:
        code = _encode_e2m1(y, TIES_EVEN, KEEP_SIGN, NAN_CODE)
    return code, stored


@triton.jit
def _store(
    code,
    s,
    q_ptr,
    s_ptr,
    rows,
    row_mask,
    column,
    K,
    BM: tl.constexpr,
    BK: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Store a tile [BM, BK] as packed codes and scales, or as decoded values q*s, padded to 16."""
    blocks = tl.cdiv(K, 16)
    if VALUES:
        value = code * tl.expand_dims(s, -1)
        value = tl.reshape(value, (BM, BK)).to(q_ptr.dtype.element_ty)
        k = column + tl.arange(0, BK)
        mask = row_mask[:, None] & (k < blocks * 16)[None, :]
        tl.store(q_ptr + rows[:, None].to(tl.int64) * (blocks * 16) + k[None, :], value, mask=mask)
    else:
        low, high = tl.split(tl.reshape(code, (BM, BK // 2, 2)))
        p = column // 2 + tl.arange(0, BK // 2)
        mask = row_mask[:, None] & (p < K // 2)[None, :]
        packed = ((low & 15) | (high << 4)).to(tl.uint8)
        tl.store(q_ptr + rows[:, None].to(tl.int64) * (K // 2) + p[None, :], packed, mask=mask)
        n = column // 16 + tl.arange(0, BK // 16)
        mask = row_mask[:, None] & (n < blocks)[None, :]
        scales = _encode_e4m3(tl.reshape(s, (BM, BK // 16)))
        tl.store(s_ptr + rows[:, None].to(tl.int64) * blocks + n[None, :], scales, mask=mask)


@triton.jit
def _blocks(x, BM: tl.constexpr, BK: tl.constexpr, NAN_SPREADS: tl.constexpr):
    """X [BM, BK] as blocks [BM, B, 16] and their amax [BM, B]."""
    blocks = tl.reshape(x, (BM, BK // 16, 16))
    return blocks, _max_magnitude(blocks, 2, NAN_SPREADS)


@triton.jit
def _quantize_piece(
    blocks,
    b,
    A,
    S,
    g,
    seed_ptr,
    q_ptr,
    s_ptr,
    rows,
    row_mask,
    column,
    K,
    BM: tl.constexpr,
    BK: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    VALUES: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Quantize and store blocks with amax b, of columns from ``column`` on; A, S, g are [BM, 1]."""
    if RECIPE[18]:
        tile = _max_magnitude(tl.reshape(b, (BM // 16, 16, BK // 16)), 1, NAN_SPREADS)
        b = tl.reshape(tl.broadcast_to(tile[:, None, :], (BM // 16, 16, BK // 16)), (BM, BK // 16))
    random = blocks
    if RECIPE[16]:
        number = rows[:, None] * tl.cdiv(K, 16) + column // 16 + tl.arange(0, BK // 16)[None, :]
        random = _random_bytes(tl.load(seed_ptr), number)
    code, s = _quantize_blocks(blocks, b, A, S, g, random, VALUES, RECIPE)
    _store(code, s, q_ptr, s_ptr, rows, row_mask, column, K, BM, BK, VALUES)


@triton.jit
def _load_scales(
    amax_ptr, encode_ptr, decode_ptr, rows, row_mask, PER_ROW: tl.constexpr, BM: tl.constexpr
):
    """(A, S, g) [BM, 1] of these rows, or of the tensor."""
    if PER_ROW:
        A = tl.load(amax_ptr + rows, mask=row_mask, other=1.0)
        S = tl.load(encode_ptr + rows, mask=row_mask, other=1.0)
        g = tl.load(decode_ptr + rows, mask=row_mask, other=1.0)
    else:
        A = tl.broadcast_to(tl.load(amax_ptr), (BM,))
        S = tl.broadcast_to(tl.load(encode_ptr), (BM,))
        g = tl.broadcast_to(tl.load(decode_ptr), (BM,))
    return A[:, None], S[:, None], g[:, None]


@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    amax_ptr,
    encode_ptr,
    decode_ptr,
    seed_ptr,
    M,
    K,
    stride_m,
    stride_k,
    PER_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """One tile of x with given global scales."""
    columns = tl.cdiv(K, BK)
    rows = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % columns) * BK
    k = column + tl.arange(0, BK)
    row_mask = rows < M
    offset = rows[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k
    x = tl.load(x_ptr + offset, mask=row_mask[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    A, S, g = _load_scales(amax_ptr, encode_ptr, decode_ptr, rows, row_mask, PER_ROW, BM)
    blocks, b = _blocks(x, BM, BK, NAN_SPREADS)
    _quantize_piece(
        blocks, b, A, S, g, seed_ptr, q_ptr, s_ptr, rows, row_mask, column, K, BM, BK, NAN_SPREADS,
        VALUES, RECIPE,
    )  # fmt: skip


@triton.jit
def _load_piece(x_ptr, rows, row_mask, column, K, stride_m, BK: tl.constexpr):
    """X [BM, BK] in FP32 from ``column`` on, zero beyond K."""
    k = column + tl.arange(0, BK)
    offset = rows[:, None].to(tl.int64) * stride_m + k[None, :]
    return tl.load(x_ptr + offset, mask=row_mask[:, None] & (k < K)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _larger(a, b, NAN_SPREADS: tl.constexpr):
    """Elementwise maximum that drops one NaN of two, or keeps it."""
    largest = tl.maximum(a, b)
    if NAN_SPREADS:
        largest = tl.where((a != a) | (b != b), float("nan"), largest)
    return largest


@triton.jit
def _row_amax(
    blocks, b, column, K, PADDED: tl.constexpr, NAN_SPREADS: tl.constexpr, BK: tl.constexpr
):
    """Amax of each row of blocks with amax b; zeros beyond K must not hide that a row is all NaN."""
    largest = _max_magnitude(b, 1, NAN_SPREADS)
    if PADDED and not NAN_SPREADS:
        x = tl.reshape(blocks, (blocks.shape[0], BK))
        inside = (column + tl.arange(0, BK) < K)[None, :]
        known = tl.max(((x == x) & inside).to(tl.int32), 1)
        largest = tl.where(known == 1, largest, float("nan"))
    return largest


@triton.jit(do_not_specialize=["M"])
def _quantize_token_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    amax_ptr,
    encode_ptr,
    decode_ptr,
    seed_ptr,
    M,
    K,
    stride_m,
    VALUES: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PIECES: tl.constexpr,
    PADDED: tl.constexpr,
    LEADS: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    GLOBAL: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Whole rows: each token's amax, global scales, block scales and codes from one read.

    A row is one piece of BK columns or three, held in registers; with ``PIECES`` 0 it is as long as
    it likes, and read again, from the cache, to be quantized. ``LEADS`` lets the next launch start
    before this one ends, if that launch asks for it.
    """
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < M
    x0, b0 = _blocks(_load_piece(x_ptr, rows, row_mask, 0, K, stride_m, BK), BM, BK, NAN_SPREADS)
    amax = _row_amax(x0, b0, 0, K, PADDED, NAN_SPREADS, BK)
    if PIECES == 3:
        x1 = _load_piece(x_ptr, rows, row_mask, BK, K, stride_m, BK)
        x1, b1 = _blocks(x1, BM, BK, NAN_SPREADS)
        x2 = _load_piece(x_ptr, rows, row_mask, 2 * BK, K, stride_m, BK)
        x2, b2 = _blocks(x2, BM, BK, NAN_SPREADS)
        amax = _max_magnitude(
            _larger(_larger(b0, b1, NAN_SPREADS), b2, NAN_SPREADS), 1, NAN_SPREADS
        )
    if PIECES == 0:
        for column in range(BK, K, BK):
            x = _load_piece(x_ptr, rows, row_mask, column, K, stride_m, BK)
            x, b = _blocks(x, BM, BK, NAN_SPREADS)
            amax = _larger(amax, _row_amax(x, b, column, K, PADDED, NAN_SPREADS, BK), NAN_SPREADS)
    amax, S, g = _global_scale(amax, GLOBAL)
    tl.store(amax_ptr + rows, amax, mask=row_mask)
    tl.store(encode_ptr + rows, S, mask=row_mask)
    tl.store(decode_ptr + rows, g, mask=row_mask)
    A, S, g = amax[:, None], S[:, None], g[:, None]
    _quantize_piece(
        x0, b0, A, S, g, seed_ptr, q_ptr, s_ptr, rows, row_mask, 0, K, BM, BK, NAN_SPREADS,
        VALUES, RECIPE,
    )  # fmt: skip
    if PIECES == 3:
        _quantize_piece(
            x1, b1, A, S, g, seed_ptr, q_ptr, s_ptr, rows, row_mask, BK, K, BM, BK, NAN_SPREADS,
            VALUES, RECIPE,
        )  # fmt: skip
        _quantize_piece(
            x2, b2, A, S, g, seed_ptr, q_ptr, s_ptr, rows, row_mask, 2 * BK, K, BM, BK,
            NAN_SPREADS, VALUES, RECIPE,
        )  # fmt: skip
    if PIECES == 0:
        for column in range(BK, K, BK):
            x = _load_piece(x_ptr, rows, row_mask, column, K, stride_m, BK)
            x, b = _blocks(x, BM, BK, NAN_SPREADS)
            _quantize_piece(
                x, b, A, S, g, seed_ptr, q_ptr, s_ptr, rows, row_mask, column, K, BM, BK,
                NAN_SPREADS, VALUES, RECIPE,
            )  # fmt: skip


@triton.jit
def _amax_kernel(
    x_ptr,
    partial_ptr,
    count,
    K,
    stride_m,
    PACKED: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Max of |x| of one chunk of the matrix, ``PACKED`` if its rows follow each other."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset = i
    if not PACKED:
        offset = (i // K) * stride_m + i % K
    x = tl.load(x_ptr + offset, mask=i < count, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(0), _max_magnitude(x, 0, NAN_SPREADS))


@triton.jit
def _global_scale_kernel(
    partial_ptr,
    out_ptr,
    count,
    NAN_SPREADS: tl.constexpr,
    GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce partial maxima and write (A, S, g)."""
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part = tl.load(partial_ptr + i, mask=i < count, other=0.0)
        if NAN_SPREADS:
            largest = tl.where((part > largest) | (part != part), part, largest)
        else:
            largest = tl.maximum(largest, part)
    amax, S, g = _global_scale(_max_magnitude(largest, 0, NAN_SPREADS), GLOBAL)
    tl.store(out_ptr, amax)
    tl.store(out_ptr + 1, S)
    tl.store(out_ptr + 2, g)


def quantize_rows(
    operand: OperandRecipe,
    x_MK: Tensor,
    scale: GlobalScale,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [M, K/2] and block scales E4M3 [M, K/16] of x [M, K]."""
    codes, s8 = _outputs(x_MK, values=False)
    _launch(operand, x_MK, scale, codes, s8, generator, values=False)
    return codes, s8


def quantize_values(
    operand: OperandRecipe,
    x_MK: Tensor,
    scale: GlobalScale,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Decoded q*s in FP16 [M, K], exact: what a GEMM on decoded operands reads."""
    values, unused = _outputs(x_MK, values=True)
    _launch(operand, x_MK, scale, values, unused, generator, values=True)
    return values


def quantize_tokens(
    operand: OperandRecipe, x_MK: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, GlobalScale]:
    """Codes, block scales and the per-token global scales [M], all from one read of x."""
    codes, s8 = _outputs(x_MK, values=False)
    return codes, s8, _launch_tokens(operand, x_MK, codes, s8, generator, values=False)


def quantize_token_values(
    operand: OperandRecipe,
    x_MK: Tensor,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, GlobalScale]:
    """Decoded q*s in FP16 [M, K] and the per-token global scales."""
    values, unused = _outputs(x_MK, values=True)
    return values, _launch_tokens(operand, x_MK, values, unused, generator, values=True)


def tensor_scale(operand: OperandRecipe, x_MK: Tensor) -> GlobalScale:
    """Global scales [] of the whole of x: two launches, no host synchronization."""
    x = x_MK if x_MK.stride(1) == 1 else x_MK.t()  # the maximum does not care for order
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = max(1, triton.cdiv(x.numel(), configs.AMAX_ELEMENTS))
    partial = torch.zeros(parts, dtype=torch.float32, device=x.device)
    spreads = operand.nan_amax == "propagate"
    if x.numel():
        _amax_kernel[(parts,)](
            x,
            partial,
            x.numel(),
            x.shape[1],
            x.stride(0),
            PACKED=x.is_contiguous(),
            NAN_SPREADS=spreads,
            BLOCK=configs.AMAX_ELEMENTS,
        )
    return scale_of_amax(operand, partial, x_MK.dtype)


def scale_of_amax(operand: OperandRecipe, partial: Tensor, dtype: torch.dtype) -> GlobalScale:
    """Global scales [] of a tensor of ``dtype`` from partial maxima, FP32 [P]; one launch."""
    partial = partial if partial.numel() else partial.new_zeros(1)
    out = torch.empty(3, dtype=torch.float32, device=partial.device)
    _global_scale_kernel[(1,)](
        partial,
        out,
        partial.numel(),
        NAN_SPREADS=operand.nan_amax == "propagate",
        GLOBAL=global_constants(operand, dtype),
        BLOCK=1024,
    )
    return GlobalScale(out[0], out[1], out[2])


def _outputs(x_MK: Tensor, *, values: bool) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    blocks = triton.cdiv(k, 16)
    if values:
        out = torch.empty(m, blocks * 16, dtype=torch.float16, device=x_MK.device)
        return out, out
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=x_MK.device)
    return codes, torch.empty(m, blocks, dtype=torch.float8_e4m3fn, device=x_MK.device)


def _launch(
    operand: OperandRecipe,
    x_MK: Tensor,
    scale: GlobalScale,
    q: Tensor,
    s8: Tensor,
    generator: torch.Generator | None,
    *,
    values: bool,
) -> None:
    m, k = x_MK.shape
    if m == 0 or k == 0:
        return
    config = configs.tile_config(x_MK.stride(1) == 1, operand.tile[0] > 1, values)
    grid = (triton.cdiv(m, config.rows) * triton.cdiv(k, config.columns),)
    _quantize_kernel[grid](
        x_MK,
        q,
        s8,
        scale.amax,
        scale.encode,
        scale.decode,
        _seed(operand, x_MK, generator),
        m,
        k,
        x_MK.stride(0),
        x_MK.stride(1),
        PER_ROW=scale.amax.ndim == 1,
        VALUES=values,
        BM=config.rows,
        BK=config.columns,
        NAN_SPREADS=operand.nan_amax == "propagate",
        RECIPE=recipe_constants(operand, x_MK.dtype),
        num_warps=config.num_warps,
        **unfused(),
    )


def _launch_tokens(
    operand: OperandRecipe,
    x_MK: Tensor,
    q: Tensor,
    s8: Tensor,
    generator: torch.Generator | None,
    *,
    values: bool,
) -> GlobalScale:
    m, k = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    scales = torch.empty(3, m, dtype=torch.float32, device=x_MK.device)
    config = configs.token_config(k)
    if m:
        _quantize_token_kernel[(triton.cdiv(m, config.rows),)](
            x_MK,
            q,
            s8,
            scales[0],
            scales[1],
            scales[2],
            _seed(operand, x_MK, generator),
            m,
            k,
            x_MK.stride(0),
            VALUES=values,
            BM=config.rows,
            BK=config.columns,
            PIECES=config.pieces,
            PADDED=k % config.columns != 0,
            LEADS=values and not is_interpreted() and beyond_device(x_MK.device, 9) is None,
            NAN_SPREADS=operand.nan_amax == "propagate",
            GLOBAL=global_constants(operand, x_MK.dtype),
            RECIPE=recipe_constants(operand, x_MK.dtype),
            num_warps=config.num_warps,
            **unfused(),
        )
    return GlobalScale(scales[0], scales[1], scales[2])


def _seed(operand: OperandRecipe, x_MK: Tensor, generator: torch.Generator | None) -> Tensor:
    """Seed of stochastic rounding, drawn from the generator; any tensor where none is drawn."""
    if operand.rounding != "stochastic":
        return x_MK
    device = x_MK.device if generator is None else generator.device
    seed = torch.randint(0, 2**31 - 1, (), dtype=torch.int32, device=device, generator=generator)
    return seed.to(x_MK.device)


def global_constants(operand: OperandRecipe, dtype: torch.dtype) -> tuple[Any, ...]:
    """The global scale's arithmetic as compile-time constants, in the order of ``global_scale``."""
    q = E2M1_MAX * operand.e4m3_max
    input_statistics = operand.statistics_dtype == "input"
    return (
        q,
        float(torch.div(torch.ones(()), torch.tensor(q))),
        operand.global_scale,
        operand.global_guard,
        operand.reciprocal == "rcp_approx",
        operand.flush_subnormals,
        _statistic(operand, dtype),
        torch.finfo(dtype if input_statistics else torch.float32).tiny,
    )


def _statistic(operand: OperandRecipe, dtype: torch.dtype) -> str:
    """Dtype to which statistics are rounded; float32 leaves them."""
    return str(dtype).removeprefix("torch.") if operand.statistics_dtype == "input" else "float32"


def recipe_constants(operand: OperandRecipe, dtype: torch.dtype) -> tuple[Any, ...]:
    """The recipe as compile-time constants, in the order of ``_quantize_blocks``."""
    narrow = operand.element_scale_dtype == "bfloat16_if_input" and dtype == torch.bfloat16
    rule = operand.four_over_six
    return (
        operand.block_scale,
        operand.element_scale,
        operand.element_scale in QUOTIENTS,
        operand.reciprocal == "rcp_approx",
        operand.element_scale_unrounded,
        operand.element_scale_cap,
        narrow,
        operand.zero_guard,
        operand.zero_guard_value,
        operand.block_scale_floor,
        operand.zero_block_scale,
        operand.zero_block_scale_when == "after_cast",
        operand.nan_block_scale == "max",
        operand.ties == "even",
        operand.negative_zero == "keep",
        operand.nan_code,
        operand.rounding == "stochastic",
        operand.flush_subnormals,
        operand.tile[0] > 1,
        "none" if rule is None else rule.error,
        "none" if rule is None else rule.domain,
        E2M1_MAX * operand.e4m3_max,
        _statistic(operand, dtype),
    )


def unfused() -> dict[str, Any]:
    """Compile option that forbids fused multiply-add; the interpreter has no such option."""
    return {} if is_interpreted() else {"enable_fp_fusion": False}
