"""Kernels that do one part of a decode GEMM: what no rearrangement of the rest can beat."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from minite_kernels.nvfp4.gemm import _triton as gemm

_codes_to_half = gemm._codes_to_half
_scales_to_half = gemm._scales_to_half


@triton.jit
def empty_kernel(out_ptr):
    """Nothing but a launch."""
    if tl.program_id(0) < 0:
        tl.store(out_ptr, 0.0)


@triton.jit
def chain_kernel(a_ptr, w_ptr, out_ptr, K, BM: tl.constexpr, BN: tl.constexpr):
    """The accumulator's chain of products along K, ascending: one slice, no decoding."""
    k = tl.arange(0, 64)
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    a = tl.load(a_ptr + m[None, :] * 64 + k[:, None])
    w = tl.load(w_ptr + n[:, None] * 64 + k[None, :])
    acc = tl.zeros((BN, BM), tl.float32)
    for _ in range(K // 64):
        acc = tl.dot(w, a, acc)
    tl.store(out_ptr + n[:, None] * BM + m[None, :], acc)


@triton.jit
def stream_kernel(w_ptr, s_ptr, out_ptr, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """Read the packed words and scales of one tile along K, as the GEMM's grid does, and no more."""
    Q: tl.constexpr = BK // 4
    C: tl.constexpr = BK // 64
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    wp = w_ptr + expert * N * (K // 4) + n[:, None] * Q + tl.arange(0, Q)[None, :]
    sp = s_ptr + expert * N * (K // 64) + n[:, None] * C + tl.arange(0, C)[None, :]
    words = tl.zeros((BN, Q), tl.int16)
    scales = tl.zeros((BN, C), tl.int32)
    for _ in tl.range(0, K // BK, num_stages=4):
        words ^= tl.load(wp)
        scales ^= tl.load(sp)
        wp += N * Q
        sp += N * C
    total = tl.xor_sum(words.to(tl.int32), 1) ^ tl.xor_sum(scales, 1)
    tl.store(out_ptr + expert * N + n, total)


@triton.jit
def decode_kernel(
    w_ptr, s_ptr, out_ptr, N, K, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr
):
    """Decode as many codes as one tile has along K, from registers: no loads, no products.

    The scales are made once, so this is less than what the GEMM does.
    """
    Q: tl.constexpr = BK // 4
    C: tl.constexpr = BK // 64
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    q = tl.load(w_ptr + n[:, None] * Q + tl.arange(0, Q)[None, :])
    s = tl.load(s_ptr + n[:, None] * C + tl.arange(0, C)[None, :])
    key = tl.load(w_ptr)
    total = tl.zeros((BN, Q), tl.float16)
    s0, s1, s2, s3 = _scales_to_half(s, BN, C, ASM)
    for _ in range(K // BK):
        w0, w1, w2, w3 = _codes_to_half(q, s0, s1, s2, s3, ASM)
        total += (w0 + w1) + (w2 + w3)
        q ^= key
    tl.store(out_ptr + expert * N + n, tl.sum(total.to(tl.float32), 1))
