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

from minite_kernels.dispatch import is_interpreted
from minite_kernels.nvfp4.format import E2M1_MAX
from minite_kernels.nvfp4.quantize import _ref, configs
from minite_kernels.nvfp4.quantize import _triton_arithmetic as arithmetic
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
def _quantize_blocks(
    x,
    b,
    S,
    g,
    random,
    VALUES: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """X [.., B, 16] FP32 with block amax b, S, g [.., B] -> (codes int32 or values, s8 E4M3).

    ``RECIPE`` is what ``recipe_constants`` returns.
    """
    BLOCK_SCALE: tl.constexpr = RECIPE[0]
    ELEMENT_SCALE: tl.constexpr = RECIPE[1]
    DIVIDES: tl.constexpr = RECIPE[2]
    APPROX: tl.constexpr = RECIPE[3]
    UNROUNDED: tl.constexpr = RECIPE[4]
    CAP: tl.constexpr = RECIPE[5]
    NARROW: tl.constexpr = RECIPE[6]
    ZERO_GUARD: tl.constexpr = RECIPE[7]
    ZERO_GUARD_VALUE: tl.constexpr = RECIPE[8]
    FLOOR: tl.constexpr = RECIPE[9]
    ZERO_BLOCK: tl.constexpr = RECIPE[10]
    ZERO_BLOCK_AFTER: tl.constexpr = RECIPE[11]
    NAN_TO_MAX: tl.constexpr = RECIPE[12]
    TIES_EVEN: tl.constexpr = RECIPE[13]
    KEEP_SIGN: tl.constexpr = RECIPE[14]
    NAN_CODE: tl.constexpr = RECIPE[15]
    STOCHASTIC: tl.constexpr = RECIPE[16]
    t = _block_scale(b, S, g, BLOCK_SCALE, APPROX)
    if ZERO_BLOCK is not None and not ZERO_BLOCK_AFTER:
        t = tl.where(t == 0, ZERO_BLOCK, t)
    if NAN_TO_MAX:
        t = tl.where(t < _FLOAT32_MAX, t, _FLOAT32_MAX)
    if FLOOR > 0:
        t = tl.where(t < FLOOR, FLOOR, t)
    t = tl.where(t > 448.0, 448.0, t)
    s8 = t.to(tl.float8e4nv)
    s = t if UNROUNDED else s8.to(tl.float32)
    # As bits: compiled as a comparison of FP16 pairs, s == 0 was wrong on an H200 for FP32 x.
    s_is_zero = (s.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0
    if ZERO_BLOCK is not None and ZERO_BLOCK_AFTER:
        s = tl.where(s_is_zero, ZERO_BLOCK, s)
        s8 = s.to(tl.float8e4nv)
    if DIVIDES:
        rank_s = tl.expand_dims(s, -1)
        y = _quotient(x, rank_s, tl.expand_dims(S, -1), tl.expand_dims(g, -1), ELEMENT_SCALE)
    else:
        f = _factor(s, b, S, g, ELEMENT_SCALE, APPROX)
        if ZERO_GUARD == "s":
            f = tl.where(s_is_zero, ZERO_GUARD_VALUE, f)
        elif ZERO_GUARD == "b":
            f = tl.where(b == 0, ZERO_GUARD_VALUE, f)
        elif ZERO_GUARD == "product":
            f = tl.where(s * arithmetic.rcp(S, APPROX) == 0, ZERO_GUARD_VALUE, f)
        if CAP:
            if NARROW:
                f = tl.where(f > _BFLOAT16_MAX, _BFLOAT16_MAX, f)
            else:
                f = tl.where(f > _FLOAT32_MAX, _FLOAT32_MAX, f)
        if NARROW:
            f = f.to(tl.bfloat16).to(tl.float32)
        y = x * tl.expand_dims(f, -1)
    if STOCHASTIC:
        y = _dither_e2m1(y, random)
    if VALUES:
        code = _round_e2m1(y, TIES_EVEN, KEEP_SIGN, NAN_CODE)
    else:
        code = _encode_e2m1(y, TIES_EVEN, KEEP_SIGN, NAN_CODE)
    return code, s8


@triton.jit
def _store(
    code,
    s8,
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
    """Store a tile [BM, BK] as packed codes and scales, or as decoded values q*s."""
    if VALUES:
        value = code * tl.expand_dims(s8.to(tl.float32), -1)
        value = tl.reshape(value, (BM, BK)).to(q_ptr.dtype.element_ty)
        k = column + tl.arange(0, BK)
        mask = row_mask[:, None] & (k < K)[None, :]
        tl.store(q_ptr + rows[:, None].to(tl.int64) * K + k[None, :], value, mask=mask)
    else:
        low, high = tl.split(tl.reshape(code, (BM, BK // 2, 2)))
        p = column // 2 + tl.arange(0, BK // 2)
        mask = row_mask[:, None] & (p < K // 2)[None, :]
        packed = ((low & 15) | (high << 4)).to(tl.uint8)
        tl.store(q_ptr + rows[:, None].to(tl.int64) * (K // 2) + p[None, :], packed, mask=mask)
        n = column // 16 + tl.arange(0, BK // 16)
        mask = row_mask[:, None] & (n < K // 16)[None, :]
        scales = tl.reshape(s8, (BM, BK // 16))
        tl.store(s_ptr + rows[:, None].to(tl.int64) * (K // 16) + n[None, :], scales, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
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
    TILE_2D: tl.constexpr,
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
    if PER_ROW:
        S = tl.load(encode_ptr + rows, mask=row_mask, other=1.0)[:, None]
        g = tl.load(decode_ptr + rows, mask=row_mask, other=1.0)[:, None]
    else:
        S = tl.load(encode_ptr)
        g = tl.load(decode_ptr)
    blocks = tl.reshape(x, (BM, BK // 16, 16))
    b = _max_magnitude(blocks, 2, NAN_SPREADS)
    if TILE_2D:
        tile = _max_magnitude(tl.reshape(b, (BM // 16, 16, BK // 16)), 1, NAN_SPREADS)
        b = tl.reshape(tl.broadcast_to(tile[:, None, :], (BM // 16, 16, BK // 16)), (BM, BK // 16))
    S = tl.broadcast_to(S, (BM, BK // 16))
    g = tl.broadcast_to(g, (BM, BK // 16))
    random = blocks
    if RECIPE[16]:
        number = rows[:, None] * (K // 16) + column // 16 + tl.arange(0, BK // 16)[None, :]
        random = _random_bytes(tl.load(seed_ptr), number)
    code, s8 = _quantize_blocks(blocks, b, S, g, random, VALUES, RECIPE)
    _store(code, s8, q_ptr, s_ptr, rows, row_mask, column, K, BM, BK, VALUES)


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
    KP: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    Q: tl.constexpr,
    INVERSE_Q: tl.constexpr,
    GLOBAL_SCALE: tl.constexpr,
    GUARD: tl.constexpr,
    APPROX: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Whole rows: each token's amax, global scales, block scales and codes from one read."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, KP)
    row_mask = rows < M
    offset = rows[:, None].to(tl.int64) * stride_m + k[None, :]
    x = tl.load(x_ptr + offset, mask=row_mask[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    blocks = tl.reshape(x, (BM, KP // 16, 16))
    b = _max_magnitude(blocks, 2, NAN_SPREADS)
    amax = _max_magnitude(b, 1, NAN_SPREADS)
    amax, S, g = _global_scale(amax, Q, INVERSE_Q, GLOBAL_SCALE, GUARD, APPROX)
    tl.store(amax_ptr + rows, amax, mask=row_mask)
    tl.store(encode_ptr + rows, S, mask=row_mask)
    tl.store(decode_ptr + rows, g, mask=row_mask)
    S = tl.broadcast_to(S[:, None], (BM, KP // 16))
    g = tl.broadcast_to(g[:, None], (BM, KP // 16))
    random = blocks
    if RECIPE[16]:
        number = rows[:, None] * (K // 16) + tl.arange(0, KP // 16)[None, :]
        random = _random_bytes(tl.load(seed_ptr), number)
    code, s8 = _quantize_blocks(blocks, b, S, g, random, VALUES, RECIPE)
    _store(code, s8, q_ptr, s_ptr, rows, row_mask, 0, K, BM, KP, VALUES)


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
    Q: tl.constexpr,
    INVERSE_Q: tl.constexpr,
    GLOBAL_SCALE: tl.constexpr,
    GUARD: tl.constexpr,
    APPROX: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
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
    amax, S, g = _global_scale(
        _max_magnitude(largest, 0, NAN_SPREADS), Q, INVERSE_Q, GLOBAL_SCALE, GUARD, APPROX
    )
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
    if x_MK.shape[1] > configs.TOKEN_MAX_COLUMNS:
        scale = _ref.scale_of(operand, x_MK)
        return *quantize_rows(operand, x_MK, scale, generator), scale
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
    out = torch.empty(3, dtype=torch.float32, device=x.device)
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
    _global_scale_kernel[(1,)](
        partial, out, parts, NAN_SPREADS=spreads, BLOCK=1024, **_global_constants(operand)
    )
    return GlobalScale(out[0], out[1], out[2])


def _outputs(x_MK: Tensor, *, values: bool) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    if values:
        out = torch.empty(m, k, dtype=torch.float16, device=x_MK.device)
        return out, out
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=x_MK.device)
    return codes, torch.empty(m, k // 16, dtype=torch.float8_e4m3fn, device=x_MK.device)


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
        TILE_2D=operand.tile[0] > 1,
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
    padded = max(16, triton.next_power_of_2(k))
    tile = max(1, min(16, configs.TOKEN_ELEMENTS // padded))
    if m:
        _quantize_token_kernel[(triton.cdiv(m, tile),)](
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
            BM=tile,
            KP=padded,
            NAN_SPREADS=operand.nan_amax == "propagate",
            RECIPE=recipe_constants(operand, x_MK.dtype),
            num_warps=configs.TOKEN_NUM_WARPS if padded <= 4096 else 8,
            **_global_constants(operand),
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


def _global_constants(operand: OperandRecipe) -> dict[str, Any]:
    q = E2M1_MAX * operand.e4m3_max
    return {
        "Q": q,
        "INVERSE_Q": float(torch.div(torch.ones(()), torch.tensor(q))),
        "GLOBAL_SCALE": operand.global_scale,
        "GUARD": operand.global_guard,
        "APPROX": operand.reciprocal == "rcp_approx",
    }


def recipe_constants(operand: OperandRecipe, dtype: torch.dtype) -> tuple[Any, ...]:
    """The recipe as compile-time constants, in the order of ``_quantize_blocks``."""
    narrow = operand.element_scale_dtype == "bfloat16_if_input" and dtype == torch.bfloat16
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
    )


def unfused() -> dict[str, Any]:
    """Compile option that forbids fused multiply-add; the interpreter has no such option."""
    return {} if is_interpreted() else {"enable_fp_fusion": False}
