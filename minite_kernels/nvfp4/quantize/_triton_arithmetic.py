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


@triton.jit
def flush(x, FLUSH: tl.constexpr):
    """Subnormal FP32 numbers become zero of their sign where the recipe's engine does so."""
    out = x
    if FLUSH:
        out = tl.where(tl.abs(x) < 1.1754943508222875e-38, x * 0.0, x)
    return out


@triton.jit
def mul(a, b, FLUSH: tl.constexpr):
    """A * b, rounded once."""
    return flush(flush(a, FLUSH) * flush(b, FLUSH), FLUSH)


@triton.jit
def div(a, b, FLUSH: tl.constexpr):
    """A / b, IEEE, rounded once."""
    return flush(tl.div_rn(flush(a, FLUSH), flush(b, FLUSH)), FLUSH)


@triton.jit
def rcp(x, APPROX: tl.constexpr, FLUSH: tl.constexpr):
    """IEEE 1/x, or the GPU's approximate reciprocal, which flushes by itself."""
    if APPROX:
        out = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = flush(tl.div_rn(1.0, flush(x, FLUSH)), FLUSH)
    return out


@triton.jit
def statistic(x, STATISTIC: tl.constexpr):
    """Round a statistic to the dtype in which the recipe's observer works."""
    out = x
    if STATISTIC == "bfloat16":
        out = x.to(tl.bfloat16).to(tl.float32)
    elif STATISTIC == "float16":
        out = x.to(tl.float16).to(tl.float32)
    return out


@triton.jit
def global_scale(amax, GLOBAL: tl.constexpr):
    """(A, S, g) of FP32 amax, guarded; ``GLOBAL`` is what ``global_constants`` returns."""
    Q: tl.constexpr = GLOBAL[0]
    INVERSE_Q: tl.constexpr = GLOBAL[1]
    FORMULA: tl.constexpr = GLOBAL[2]
    GUARD: tl.constexpr = GLOBAL[3]
    APPROX: tl.constexpr = GLOBAL[4]
    FLUSH: tl.constexpr = GLOBAL[5]
    STATISTIC: tl.constexpr = GLOBAL[6]
    TINY: tl.constexpr = GLOBAL[7]
    one = tl.where(amax == amax, 1.0, 1.0)
    if GUARD == "tiny":
        amax = tl.where(amax < TINY, TINY, amax)
    if FORMULA == "S = Q/A; g = 1/S":
        encode = div(one * Q, amax, FLUSH)
        decode = div(one, encode, FLUSH)
    elif FORMULA == "S = (1/A)*Q; g = 1/S":
        inverse = statistic(div(one, amax, FLUSH), STATISTIC)
        encode = statistic(mul(inverse, one * Q, FLUSH), STATISTIC)
        decode = div(one, encode, FLUSH)
    elif FORMULA == "g = A/Q; S = 1/g":
        decode = div(amax, one * Q, FLUSH)
        encode = div(one, decode, FLUSH)
    elif FORMULA == "g = A*(1/Q); S = 1/g":
        decode = mul(amax, one * INVERSE_Q, FLUSH)
        encode = div(one, decode, FLUSH)
    elif FORMULA == "g = A*(1/Q); S = rcp(g)":
        decode = mul(amax, one * INVERSE_Q, FLUSH)
        encode = rcp(decode, APPROX, FLUSH)
        # Behind a zero that ptxas does not know: it takes rcp.approx(rcp.approx(g)) for g.
        encode = (encode.to(tl.int32, bitcast=True) ^ tl.program_id(2)).to(tl.float32, bitcast=True)
    elif FORMULA == "g = (A*(1/448))*c6; S = 1/g":
        decode = mul(mul(amax, one * INVERSE_448, FLUSH), one * C6, FLUSH)
        encode = div(one, decode, FLUSH)
    elif FORMULA == "S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S":
        encode = div(one * Q, amax, FLUSH)
        power = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usable = (encode >= 1.1754943508222875e-38) & (encode <= FLOAT32_MAX)
        encode = tl.where(usable, power, encode)
        decode = div(one, encode, FLUSH)
    else:
        tl.static_assert(FORMULA == "S = 1; g = 1")
        encode = one
        decode = one
    guarded = encode
    if GUARD == "te" or GUARD == "cap":
        guarded = tl.where(guarded > FLOAT32_MAX, FLOAT32_MAX, guarded)
    if GUARD == "te":
        guarded = tl.where((amax == 0) | (guarded == 0), 1.0, guarded)
    if GUARD == "tiny":
        guarded = tl.where(tl.abs(guarded) <= FLOAT32_MAX, guarded, 1.0)
    if GUARD != "none":
        decode = tl.where(guarded == encode, decode, div(one, guarded, FLUSH))
    if FORMULA == "S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S":
        amax = tl.where(amax > 0, div(one * Q, guarded, FLUSH), amax)
    return amax, guarded, decode


@triton.jit
def block_scale(
    b, S, g, FORMULA: tl.constexpr, APPROX: tl.constexpr, FLUSH: tl.constexpr, STAT: tl.constexpr
):
    """Block scale before its E4M3 cast."""
    six = tl.where(b == b, 6.0, 6.0)
    c6 = tl.where(b == b, C6, C6)
    if FORMULA == "b*(S*c6)":
        out = mul(b, mul(S, c6, FLUSH), FLUSH)
    elif FORMULA == "S*(b*c6)" or FORMULA == "S*(b*rcp(6))":
        out = mul(S, mul(b, c6, FLUSH), FLUSH)
    elif FORMULA == "(S*b)*rcp(6)":
        out = mul(mul(S, b, FLUSH), c6, FLUSH)
    elif FORMULA == "(S*b)/6":
        out = div(mul(S, b, FLUSH), six, FLUSH)
    elif FORMULA == "(b/6)*S":
        out = mul(statistic(div(b, six, FLUSH), STAT), S, FLUSH)
    elif FORMULA == "(b*c6)*S":
        out = mul(statistic(mul(b, c6, FLUSH), STAT), S, FLUSH)
    elif FORMULA == "(b/6)/g":
        out = div(div(b, six, FLUSH), g, FLUSH)
    elif FORMULA == "(b*c6)/g":
        out = div(mul(b, c6, FLUSH), g, FLUSH)
    elif FORMULA == "b/(6*g)":
        out = div(b, mul(g, six, FLUSH), FLUSH)
    elif FORMULA == "(b*c6)*rcp(g)":
        out = mul(mul(b, c6, FLUSH), rcp(g, APPROX, FLUSH), FLUSH)
    else:
        tl.static_assert(FORMULA == "b/6")
        out = div(b, six, FLUSH)
    return out


@triton.jit
def factor(s, b, S, g, FORMULA: tl.constexpr, APPROX: tl.constexpr, FLUSH: tl.constexpr):
    """What multiplies x, before guards."""
    one = tl.where(s == s, 1.0, 1.0)
    if FORMULA == "x * rcp(s*rcp(S))":
        out = rcp(mul(s, rcp(S, APPROX, FLUSH), FLUSH), APPROX, FLUSH)
    elif FORMULA == "x * (S/s)":
        out = div(S, s, FLUSH)
    elif FORMULA == "x * (rcp(s)*S)":
        out = mul(rcp(s, APPROX, FLUSH), S, FLUSH)
    elif FORMULA == "x * ((1/g)/s)":
        out = div(div(one, g, FLUSH), s, FLUSH)
    elif FORMULA == "x * rcp(s*g)":
        out = rcp(mul(s, g, FLUSH), APPROX, FLUSH)
    elif FORMULA == "x * (6*rcp(b))":
        out = mul(rcp(b, APPROX, FLUSH), one * 6.0, FLUSH)
    else:
        tl.static_assert(FORMULA == "x * (1/s)")
        out = div(one, s, FLUSH)
    return out


@triton.jit
def quotient(x, s, S, g, FORMULA: tl.constexpr, FLUSH: tl.constexpr):
    """Scaled x of recipes that divide each element."""
    if FORMULA == "x / (s*g)":
        out = div(x, mul(s, g, FLUSH), FLUSH)
    elif FORMULA == "x / (s/S)":
        out = div(x, div(s, S, FLUSH), FLUSH)
    else:
        tl.static_assert(FORMULA == "(x*S)/s")
        out = div(mul(x, S, FLUSH), s, FLUSH)
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
    """Round FP32 y stochastically to the E2M1 grid with random bytes.

    A byte added below the grid's mantissa bit, then cut off: the carry reaches the next binade, whose
    step is twice as large and is not passed. Numbers below 1, whose step is 0.5 too, are raised by 1.
    """
    magnitude = tl.abs(y)
    raised = tl.where(magnitude < 1.0, 1.0, 0.0)
    dithered = (magnitude + raised).to(tl.int32, bitcast=True) + (random.to(tl.int32) << 14)
    floored = (dithered & -4194304).to(tl.float32, bitcast=True) - raised
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (tl.minimum(floored, 6.0).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """FP32 value of an int32 whose low four bits are a code."""
    magnitude = code & 7
    bits = (0x3F000000 + (magnitude << 22)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude == 0, 0.0, tl.where(magnitude == 1, 0.5, bits))
    sign = (code & 8) << 28
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
