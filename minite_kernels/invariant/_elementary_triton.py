"""``exp`` and ``log`` of ``elementary`` as Triton functions: the same operations in the same order."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x in FP32; compile with ``enable_fp_fusion=False``."""
    clamped = tl.minimum(tl.maximum(x, -104.0), 88.72283)
    n = (clamped * 1.44269504088896341 + 12582912.0) - 12582912.0
    r = (clamped - n * 0.693359375) - n * -2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * (r * r) + r) + 1.0
    whole = n.to(tl.int32)
    half = whole >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    y = (y * low) * high
    y = tl.where(x < -104.0, 0.0, y)
    y = tl.where(x > 88.72283, float("inf"), y)
    return tl.where(x != x, x, y)


@triton.jit
def log(x):
    """ln(x) in FP32 of positive normal x; compile with ``enable_fp_fusion=False``."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.707106781186547524
    exponent = tl.where(small, exponent - 1.0, exponent)
    m = tl.where(small, (m + m) - 1.0, m - 1.0)
    z = m * m
    y = m * 7.0376836292e-2 + -1.1514610310e-1
    y = y * m + 1.1676998740e-1
    y = y * m + -1.2420140846e-1
    y = y * m + 1.4249322787e-1
    y = y * m + -1.6668057665e-1
    y = y * m + 2.0000714765e-1
    y = y * m + -2.4999993993e-1
    y = y * m + 3.3333331174e-1
    y = (y * m) * z
    y = (y + exponent * -2.12194440e-4) - z * 0.5
    return (m + y) + exponent * 0.693359375
