"""Reference quantizer in torch: any recipe, CPU and GPU, vectorized over blocks.

Evaluates a recipe; decides nothing. Invariant: bits depend on x, the recipe and the global scale
only; rows are processed in cache-sized chunks, and no reduction crosses a chunk except max.
Shape letters: M rows, K columns, B = ceil(K/16) blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minite_kernels.nvfp4.format import (
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    FLOAT32_MAX,
    decode_e2m1,
    encode_e2m1,
    encode_e2m1_stochastic,
    to_e4m3,
)
from minite_kernels.nvfp4.layout import pack_codes
from minite_kernels.nvfp4.quantize._arithmetic import (
    BLOCK_SCALES,
    DEQUANTIZE,
    FACTORS,
    GLOBAL_SCALES,
    QUOTIENTS,
    Fp32,
    guard_global,
)
from minite_kernels.nvfp4.recipe import FourOverSix, OperandRecipe

#: Elements a chunk: its FP32 intermediates stay in a core's L2 cache.
_CHUNK_ELEMENTS = 1 << 17
_MAGNITUDE_BITS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}


@dataclass(frozen=True, eq=False, slots=True)
class GlobalScale:
    """FP32 amax, encode and decode scale, each [] or [M]."""

    amax: Tensor
    encode: Tensor
    decode: Tensor

    def per_row(self, rows: slice) -> GlobalScale:
        """The scales of some rows, shaped to broadcast over [M, B]."""
        if self.amax.ndim == 0:
            return self
        amax, encode, decode = (t[rows, None] for t in (self.amax, self.encode, self.decode))
        return GlobalScale(amax, encode, decode)


def global_scale_of_amax(operand: OperandRecipe, amax: Tensor, dtype: torch.dtype) -> GlobalScale:
    """Global scales of FP32 ``amax`` ([] or [M]); ``dtype`` is that of the quantized tensor."""
    fp = Fp32(operand, dtype)
    q = E2M1_MAX * operand.e4m3_max
    if operand.global_guard == "tiny":
        tiny = torch.finfo(fp.statistics_dtype).tiny
        amax = torch.where(amax < tiny, tiny, amax)
    encode, decode = GLOBAL_SCALES[operand.global_scale](fp, amax, q)
    guarded = guard_global(operand.global_guard, amax, encode)
    if operand.global_guard != "none":
        decode = torch.where(guarded == encode, decode, fp.div(1.0, guarded))
    if operand.global_scale.endswith("A := Q/S"):
        amax = torch.where(amax > 0, fp.div(q, guarded), amax)
    return GlobalScale(amax, guarded, decode)


def amax_of(operand: OperandRecipe, x_MK: Tensor) -> Tensor:
    """FP32 amax over the recipe's scope: [] or, per token, [M]."""
    return max_magnitude(operand, x_MK, 1 if operand.amax_scope == "token" else (0, 1))


def scale_of(operand: OperandRecipe, x_MK: Tensor) -> GlobalScale:
    """Global scales of x over the recipe's scope: [] or, per token, [M]."""
    return global_scale_of_amax(operand, amax_of(operand, x_MK), x_MK.dtype)


def tensor_scale(operand: OperandRecipe, x_MK: Tensor) -> GlobalScale:
    """Global scales [] of the whole of x."""
    return scale_of(operand, x_MK)


def quantize_tokens(
    operand: OperandRecipe, x_MK: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, GlobalScale]:
    """Codes, block scales and the per-token global scales [M] of x [M, K]."""
    scale = scale_of(operand, x_MK)
    return *quantize_rows(operand, x_MK, scale, generator), scale


def block_amax(operand: OperandRecipe, x_MB16: Tensor) -> Tensor:
    """Largest |x| of each block, FP32 [M, B]; a 16x16 tile's is repeated in its 16 rows."""
    amax_MB = max_magnitude(operand, x_MB16, dim=-1)
    if operand.tile[0] == 1:
        return amax_MB
    m, b = amax_MB.shape
    tiles = max_magnitude(operand, amax_MB.view(m // BLOCK_SIZE, BLOCK_SIZE, b), dim=1)
    return tiles.repeat_interleave(BLOCK_SIZE, dim=0)


def max_magnitude(operand: OperandRecipe, x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Max of |x| over ``dim`` as FP32, NaN spread or dropped as the recipe says; 0 if empty."""
    if x.numel() == 0:
        return x.sum(dim).to(torch.float32)
    # Magnitudes of IEEE numbers order as integers, NaN on top; integers reduce three times faster.
    integer, mask = _MAGNITUDE_BITS[x.dtype]
    largest = (x.view(integer) & mask).amax(dim).view(x.dtype).to(torch.float32)
    if operand.nan_amax == "propagate" or not bool(largest.isnan().any()):
        return largest
    magnitude = x.abs()
    known = magnitude.isnan().logical_not()
    dropped = torch.where(known, magnitude, 0).amax(dim).to(torch.float32)
    return torch.where(known.any(dim), dropped, largest)


def block_scale(
    operand: OperandRecipe, b: Tensor, scale: GlobalScale, dtype: torch.dtype
) -> Tensor:
    """Block scale before its cast to E4M3: FP32 [M, B]; ``dtype`` is that of x."""
    fp = Fp32(operand, dtype)
    t = BLOCK_SCALES[operand.block_scale](fp, b, scale.encode, scale.decode)
    if operand.zero_block_scale is not None and operand.zero_block_scale_when == "before_cast":
        t = torch.where(t == 0, operand.zero_block_scale, t)
    return t


def cast_block_scale(operand: OperandRecipe, t: Tensor) -> Tensor:
    """Cast FP32 block scales to E4M3 with the recipe's floor, NaN rule and zero replacement."""
    if operand.nan_block_scale == "max":
        t = torch.where(t < FLOAT32_MAX, t, FLOAT32_MAX)
    if operand.block_scale_floor:
        t = t.clamp(min=operand.block_scale_floor)
    s8 = to_e4m3(t)
    if operand.zero_block_scale is not None and operand.zero_block_scale_when == "after_cast":
        s = s8.to(torch.float32)
        s8 = torch.where(s == 0, operand.zero_block_scale, s).to(torch.float8_e4m3fn)
    return s8


def scale_elements(
    operand: OperandRecipe, x_MB16: Tensor, s: Tensor, b: Tensor, scale: GlobalScale
) -> Tensor:
    """FP32 elements on the E2M1 range, before rounding: [M, B, 16] from x of the same shape."""
    fp = Fp32(operand)
    x = x_MB16.to(torch.float32)
    if operand.element_scale in QUOTIENTS:
        encode, decode = scale.encode[..., None], scale.decode[..., None]
        return QUOTIENTS[operand.element_scale](fp, x, s[..., None], encode, decode)
    return fp.mul(x, element_factor(operand, fp, s, b, scale, x_MB16.dtype)[..., None])


def element_factor(
    operand: OperandRecipe,
    fp: Fp32,
    s: Tensor,
    b: Tensor,
    scale: GlobalScale,
    dtype: torch.dtype,
) -> Tensor:
    """Factor of each block's elements, guarded, capped and rounded: FP32 [M, B]."""
    factor = FACTORS[operand.element_scale](fp, s, b, scale.encode, scale.decode)
    if operand.zero_guard != "none":
        zero = _guarded_zero(operand, fp, s, b, scale)
        factor = torch.where(zero == 0, operand.zero_guard_value, factor)
    narrow = operand.element_scale_dtype == "bfloat16_if_input" and dtype == torch.bfloat16
    if operand.element_scale_cap:
        largest = torch.finfo(torch.bfloat16).max if narrow else FLOAT32_MAX
        factor = torch.where(factor > largest, largest, factor)
    return factor.to(torch.bfloat16).to(torch.float32) if narrow else factor


def _guarded_zero(
    operand: OperandRecipe, fp: Fp32, s: Tensor, b: Tensor, scale: GlobalScale
) -> Tensor:
    match operand.zero_guard:
        case "s":
            return s
        case "b":
            return b
        case _:
            return fp.mul(s, fp.rcp(scale.encode))


def round_elements(operand: OperandRecipe, y: Tensor, generator: torch.Generator | None) -> Tensor:
    """E2M1 codes (uint8, one a byte) of scaled FP32 elements, RNE or stochastic."""
    if operand.rounding == "stochastic":
        bits = torch.randint(
            0, 256, y.shape, dtype=torch.uint8, device=y.device, generator=generator
        )
        return encode_e2m1_stochastic(y, bits)
    return encode_e2m1(
        y, negative_zero=operand.negative_zero, nan_code=operand.nan_code, ties=operand.ties
    )


def quantize_blocks(
    operand: OperandRecipe,
    x_MB16: Tensor,
    scale: GlobalScale,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [M, B, 16] and block scales E4M3 [M, B] of blocks [M, B, 16]."""
    b = block_amax(operand, x_MB16)
    t = block_scale(operand, b, scale, x_MB16.dtype)
    if operand.four_over_six is not None:
        return _four_over_six(operand, operand.four_over_six, x_MB16, t, b, scale)
    s8 = cast_block_scale(operand, t)
    s = t.clamp(max=E4M3_MAX) if operand.element_scale_unrounded else s8.to(torch.float32)
    y = scale_elements(operand, x_MB16, s, b, scale)
    return round_elements(operand, y, generator), s8


def _four_over_six(
    operand: OperandRecipe,
    rule: FourOverSix,
    x_MB16: Tensor,
    t: Tensor,
    b: Tensor,
    scale: GlobalScale,
) -> tuple[Tensor, Tensor]:
    """Quantize with the block amax at 4 (scale * 1.5) and at 6; keep 4 where its error is less."""
    codes, scales, errors = [], [], []
    for stretch in (1.5, 1.0):
        s8 = cast_block_scale(operand, t * stretch)
        s = s8.to(torch.float32)
        code = round_elements(operand, scale_elements(operand, x_MB16, s, b, scale), None)
        codes.append(code)
        scales.append(s8)
        errors.append(_block_error(operand, rule, x_MB16.to(torch.float32), code, s, scale))
    four = errors[0] < errors[1]
    s8 = torch.where(four, scales[0].view(torch.uint8), scales[1].view(torch.uint8))
    return torch.where(four[..., None], codes[0], codes[1]), s8.view(torch.float8_e4m3fn)


def _block_error(
    operand: OperandRecipe,
    rule: FourOverSix,
    x: Tensor,
    code: Tensor,
    s: Tensor,
    scale: GlobalScale,
) -> Tensor:
    """Summed error of each block [M, B]: 16 elements in order, then a 16x16 tile's rows as a tree."""
    value = decode_e2m1(code) * s[..., None]
    amax, encode, decode = (t[..., None] for t in (scale.amax, scale.encode, scale.decode))
    match rule.domain:
        case "((q*s)*A)/Q - x":
            q = torch.full((), E2M1_MAX * operand.e4m3_max, device=x.device)
            difference = torch.div(value * amax, q) - x
        case "(q*s)*g - x":
            difference = value * decode - x
        case _:
            difference = value - x * encode
    terms = difference * difference if rule.error == "mse" else difference.abs()
    total = torch.zeros_like(s)
    for element in range(BLOCK_SIZE):
        total = total + terms[..., element]
    if operand.tile[0] == 1:
        return total
    rows = total.view(-1, BLOCK_SIZE, total.shape[1])
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows.expand(-1, BLOCK_SIZE, -1).reshape(total.shape)


def quantize_rows(
    operand: OperandRecipe,
    x_MK: Tensor,
    scale: GlobalScale,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [M, K/2] and block scales E4M3 [M, ceil(K/16)] of x [M, K].

    Ragged ends are padded with zeros, which changes no amax, and the padding's codes are dropped.
    """
    m, k = x_MK.shape
    pad_rows, pad_columns = -m % operand.tile[0], -k % BLOCK_SIZE
    x = torch.nn.functional.pad(x_MK, (0, pad_columns, 0, pad_rows))
    x_MB16 = x.reshape(x.shape[0], x.shape[1] // BLOCK_SIZE, BLOCK_SIZE)
    parts = [
        quantize_blocks(operand, x_MB16[rows], _rows_of(scale, rows, m), generator)
        for rows in _row_chunks(x_MB16, operand.tile[0])
    ]
    codes = torch.cat([code for code, _ in parts]).flatten(1)[:m, :k]
    scales = torch.cat([s8.view(torch.uint8) for _, s8 in parts])[:m]
    return pack_codes(codes), scales.view(torch.float8_e4m3fn)


def _rows_of(scale: GlobalScale, rows: slice, m: int) -> GlobalScale:
    if scale.amax.ndim == 1 and scale.amax.shape[0] != m:
        raise ValueError(f"per-token scales are [{scale.amax.shape[0]}] but x has {m} rows")
    return scale.per_row(rows)


def _row_chunks(x_MB16: Tensor, multiple: int) -> list[slice]:
    """Slices of rows: everything at once on a GPU, cache-sized on a CPU."""
    m = x_MB16.shape[0]
    if x_MB16.is_cuda or m == 0:
        return [slice(0, m)]
    rows = max(1, _CHUNK_ELEMENTS // max(1, x_MB16[0].numel()))
    rows = max(multiple, rows // multiple * multiple)
    return [slice(start, min(m, start + rows)) for start in range(0, m, rows)]


def dequantize_factor(operand: OperandRecipe, s: Tensor, scale: GlobalScale) -> Tensor:
    """Factor of each block's decoded codes: FP32 [M, B] from FP32 block scales [M, B]."""
    row = scale.per_row(slice(None))
    q = E2M1_MAX * operand.e4m3_max
    fp = Fp32(operand)
    factor = DEQUANTIZE[operand.dequantize](fp, s, row.amax, row.encode, row.decode, q)
    return factor.expand(s.shape)
