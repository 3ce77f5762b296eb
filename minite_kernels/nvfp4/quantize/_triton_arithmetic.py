"""The recipes' FP32 expressions as Triton functions: the twins of ``_arithmetic``.

Compiled with ``enable_fp_fusion=False``: a fused multiply-add would change codes. ``tl.div_rn`` is
IEEE division; Triton's ``/`` is not. Invariant: the same names, the same operations, in order.
"""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

#: fp32(1/448).
INVERSE_448 = tl.constexpr(0.002232142956927418708801269531250)
C6 = tl.constexpr(0.16666667163372039794921875)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def rcp(x, APPROX: tl.constexpr):
    """IEEE 1/x, or the GPU's approximate reciprocal."""
    if APPROX:
        out = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = tl.div_rn(1.0, x)
    return out


@triton.jit
def global_scale(
    amax,
    Q: tl.constexpr,
    INVERSE_Q: tl.constexpr,
    FORMULA: tl.constexpr,
    GUARD: tl.constexpr,
    APPROX: tl.constexpr,
):
    """(A, S, g) of FP32 amax, guarded."""
    if GUARD == "tiny":
        amax = tl.maximum(amax, 1.1754943508222875e-38)
    if FORMULA == "S = Q/A; g = 1/S":
        encode = tl.div_rn(Q, amax)
        decode = tl.div_rn(1.0, encode)
    elif FORMULA == "S = (1/A)*Q; g = 1/S":
        encode = tl.div_rn(1.0, amax) * Q
        decode = tl.div_rn(1.0, encode)
    elif FORMULA == "g = A/Q; S = 1/g":
        decode = tl.div_rn(amax, Q)
        encode = tl.div_rn(1.0, decode)
    elif FORMULA == "g = A*(1/Q); S = 1/g":
        decode = amax * INVERSE_Q
        encode = tl.div_rn(1.0, decode)
    elif FORMULA == "g = A*(1/Q); S = rcp(g)":
        decode = amax * INVERSE_Q
        encode = rcp(decode, APPROX)
    elif FORMULA == "g = (A*(1/448))*c6; S = 1/g":
        decode = (amax * INVERSE_448) * C6
        encode = tl.div_rn(1.0, decode)
    elif FORMULA == "S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S":
        encode = tl.div_rn(Q, amax)
        power = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usable = (encode >= 1.1754943508222875e-38) & (encode <= FLOAT32_MAX)
        encode = tl.where(usable, power, encode)
        decode = tl.div_rn(1.0, encode)
    else:
        tl.static_assert(FORMULA == "S = 1; g = 1")
        encode = tl.where(amax == amax, 1.0, 1.0)
        decode = encode
    guarded = encode
    if GUARD == "te" or GUARD == "cap":
        guarded = tl.where(guarded > FLOAT32_MAX, FLOAT32_MAX, guarded)
    if GUARD == "te":
        guarded = tl.where((amax == 0) | (guarded == 0), 1.0, guarded)
    if GUARD == "tiny":
        guarded = tl.where(tl.abs(guarded) <= FLOAT32_MAX, guarded, 1.0)
    if GUARD != "none":
        decode = tl.where(guarded == encode, decode, tl.div_rn(1.0, guarded))
    if FORMULA == "S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S":
        amax = tl.where(amax > 0, tl.div_rn(Q, guarded), amax)
    return amax, guarded, decode


@triton.jit
def block_scale(b, S, g, FORMULA: tl.constexpr, APPROX: tl.constexpr):
    """Block scale before its E4M3 cast."""
    if FORMULA == "b*(S*c6)":
        out = b * (S * C6)
    elif FORMULA == "S*(b*c6)" or FORMULA == "S*(b*rcp(6))":
        out = S * (b * C6)
    elif FORMULA == "(S*b)*rcp(6)":
        out = (S * b) * C6
    elif FORMULA == "(S*b)/6":
        out = tl.div_rn(S * b, 6.0)
    elif FORMULA == "(b/6)*S":
        out = tl.div_rn(b, 6.0) * S
    elif FORMULA == "(b*c6)*S":
        out = (b * C6) * S
    elif FORMULA == "(b/6)/g":
        out = tl.div_rn(tl.div_rn(b, 6.0), g)
    elif FORMULA == "(b*c6)/g":
        out = tl.div_rn(b * C6, g)
    elif FORMULA == "b/(6*g)":
        out = tl.div_rn(b, 6.0 * g)
    elif FORMULA == "(b*c6)*rcp(g)":
        out = (b * C6) * rcp(g, APPROX)
    else:
        tl.static_assert(FORMULA == "b/6")
        out = tl.div_rn(b, 6.0)
    return out


@triton.jit
def factor(s, b, S, g, FORMULA: tl.constexpr, APPROX: tl.constexpr):
    """What multiplies x, before guards."""
    if FORMULA == "x * rcp(s*rcp(S))":
        out = rcp(s * rcp(S, APPROX), APPROX)
    elif FORMULA == "x * (S/s)":
        out = tl.div_rn(S, s)
    elif FORMULA == "x * (rcp(s)*S)":
        out = rcp(s, APPROX) * S
    elif FORMULA == "x * ((1/g)/s)":
        out = tl.div_rn(tl.div_rn(1.0, g), s)
    elif FORMULA == "x * rcp(s*g)":
        out = rcp(s * g, APPROX)
    elif FORMULA == "x * (6*rcp(b))":
        out = rcp(b, APPROX) * 6.0
    else:
        tl.static_assert(FORMULA == "x * (1/s)")
        out = tl.div_rn(1.0, s)
    return out


@triton.jit
def quotient(x, s, S, g, FORMULA: tl.constexpr):
    """Scaled x of recipes that divide each element."""
    if FORMULA == "x / (s*g)":
        out = tl.div_rn(x, s * g)
    elif FORMULA == "x / (s/S)":
        out = tl.div_rn(x, tl.div_rn(s, S))
    else:
        tl.static_assert(FORMULA == "(x*S)/s")
        out = tl.div_rn(x * S, s)
    return out


@triton.jit
def encode_e2m1(y, TIES_EVEN: tl.constexpr, KEEP_SIGN: tl.constexpr, NAN_CODE: tl.constexpr):
    """Int32 whose low byte is the code 0..15 of FP32 y; the bits above it are junk.

    Adding (1.5 * 2^22 + 1) binades leaves the step count plus 2 in the low bits; twice the biased
    exponent is 254 plus twice the exponent; 2 + 254 = 0 in a byte.
    """
    magnitude = tl.minimum(tl.abs(y), 6.0)
    if TIES_EVEN:
        binade = tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
        total = binade.to(tl.float32, bitcast=True) * 6291457.0 + magnitude
        code = total.to(tl.int32, bitcast=True) + (binade >> 22)
    else:
        code = (magnitude > 0.25).to(tl.int32) + (magnitude > 0.75).to(tl.int32)
        code += (magnitude > 1.25).to(tl.int32) + (magnitude > 1.75).to(tl.int32)
        code += (magnitude > 2.5).to(tl.int32) + (magnitude > 3.5).to(tl.int32)
        code += (magnitude > 5.0).to(tl.int32)
    if KEEP_SIGN:
        code -= 8 * (y.to(tl.int32, bitcast=True) >> 31)
    else:
        code += tl.where(y < 0, 8, 0)
    return tl.where(y != y, NAN_CODE, code)


@triton.jit
def round_e2m1(y, TIES_EVEN: tl.constexpr, KEEP_SIGN: tl.constexpr, NAN_CODE: tl.constexpr):
    """FP32 y rounded to the E2M1 grid: the value of ``encode_e2m1``'s code, with fewer steps."""
    tl.static_assert(NAN_CODE == 7 or NAN_CODE == 0)
    if TIES_EVEN:
        magnitude = tl.minimum(tl.abs(y), 6.0)
        binade = tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
        shift = binade.to(tl.float32, bitcast=True) * 6291456.0
        value = (shift + magnitude) - shift
        if KEEP_SIGN:
            sign = y.to(tl.int32, bitcast=True) & -2147483648
            value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        else:
            value = tl.where(y < 0, -value, value)
        value = tl.where(y != y, 6.0, value) if NAN_CODE == 7 else tl.where(y != y, 0.0, value)
    else:
        value = decode_e2m1(encode_e2m1(y, TIES_EVEN, KEEP_SIGN, NAN_CODE))
    return value


@triton.jit
def random_bytes(seed, block):
    """Bytes [.., 16] in int32 for each block number [..]: one Philox call gives all 16."""
    r0, r1, r2, r3 = tl.randint4x(seed, block)
    j = tl.arange(0, 16)
    for _ in tl.static_range(len(block.shape)):
        j = tl.expand_dims(j, 0)
    first = tl.where(j < 4, tl.expand_dims(r0, -1), tl.expand_dims(r1, -1))
    second = tl.where(j < 12, tl.expand_dims(r2, -1), tl.expand_dims(r3, -1))
    return (tl.where(j < 8, first, second) >> ((j & 3) * 8)) & 255


@triton.jit
def dither_e2m1(y, random):
    """Round FP32 y stochastically to the E2M1 grid with random bytes."""
    magnitude = tl.abs(y)
    step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    dithered = magnitude + random.to(tl.float32) * (step * 0.00390625)
    step = tl.where(dithered < 2.0, 0.5, tl.where(dithered < 4.0, 1.0, 2.0))
    inverse = tl.where(dithered < 2.0, 2.0, tl.where(dithered < 4.0, 1.0, 0.5))
    floored = tl.minimum(tl.floor(dithered * inverse) * step, 6.0)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (floored.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """FP32 value of an int32 whose low four bits are a code."""
    magnitude = code & 7
    bits = (0x3F000000 + (magnitude << 22)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude == 0, 0.0, tl.where(magnitude == 1, 0.5, bits))
    sign = (code & 8) << 28
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
