"""Triton kernels of the peers."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.nvfp4.quantize._triton_arithmetic import decode_e2m1, round_e2m1
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


@triton.jit
def _fake_quantize_kernel(x_ptr, out_ptr, encode_ptr, K, BLOCKS: tl.constexpr):
    encode = tl.load(encode_ptr)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    offset = tl.program_id(0).to(tl.int64) * K + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block * 16 < K)[:, None]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    scale = encode * (tl.max(tl.abs(x), 1) * 0.16666667)
    scale = tl.minimum(scale, 448.0).to(tl.float8e4nv).to(tl.float32)
    y = x * tl.where(scale == 0.0, 0.0, encode / scale)[:, None]
    value = round_e2m1(y, True, False, 7) * (scale / encode)[:, None]
    tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(q_ptr, s_ptr, g_ptr, out_ptr, K, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block * 16 < K
    scale = tl.load(s_ptr + row * (K // 16) + block, mask=inside, other=0.0).to(tl.float32)
    scale = (scale * tl.load(g_ptr))[:, None]
    byte = row * (K // 2) + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    code = tl.load(q_ptr + byte, mask=inside[:, None], other=0).to(tl.int32)
    value = tl.interleave(decode_e2m1(code & 15) * scale, decode_e2m1(code >> 4) * scale)
    offset = row * K + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["M"])
def _invariant_matmul_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        group = tile // (GROUP * column_tiles)
        height = min(row_tiles - group * GROUP, GROUP)
        inside = tile % (GROUP * column_tiles)
        rm = (group * GROUP + inside % height) * BM + tl.arange(0, BM)
        rn = (inside // height) * BN + tl.arange(0, BN)
        am = tl.max_contiguous(tl.multiple_of(tl.where(rm < M, rm, 0), BM), BM)
        bn = tl.max_contiguous(tl.multiple_of(tl.where(rn < N, rn, 0), BN), BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            rk = k * BK + tl.arange(0, BK)
            a = tl.load(a_ptr + am[:, None] * K + rk[None, :], mask=rk[None, :] < K, other=0.0)
            b = tl.load(b_ptr + bn[None, :] * K + rk[:, None], mask=rk[:, None] < K, other=0.0)
            acc = tl.dot(a, b, acc)
        mask = (rm[:, None] < M) & (rn[None, :] < N)
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + rm[:, None].to(tl.int64) * N + rn[None, :], out, mask=mask)


def fake_quantize(x: Tensor, encode: Tensor) -> Tensor:
    """Quantize and dequantize x [M, K], scales folded in and rounded to x's dtype."""
    m, k = x.shape
    out = torch.empty_like(x)
    blocks = min(64, triton.next_power_of_2(k // 16))
    grid = (m, triton.cdiv(k // 16, blocks))
    _fake_quantize_kernel[grid](x, out, encode, k, BLOCKS=blocks)
    return out


def dequantize_weight(w: Nvfp4Tensor) -> Tensor:
    """BF16 weight [N, K] with its scales folded in."""
    n, k = w.shape
    out = torch.empty(n, k, dtype=torch.bfloat16, device=w.device)
    blocks = min(64, triton.next_power_of_2(k // 16))
    grid = (n, triton.cdiv(k // 16, blocks))
    _dequantize_kernel[grid](
        w.codes, w.block_scale, w.global_decode_scale, out, k, BLOCKS=blocks, num_warps=2
    )
    return out


def invariant_matmul(a: Tensor, b: Tensor) -> Tensor:
    """BF16 a [M, K] times b [N, K] transposed, one tile shape for every M."""
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    tiles = triton.cdiv(m, 128) * triton.cdiv(n, 128)
    _invariant_matmul_kernel[(min(programs, tiles),)](
        a,
        b,
        out,
        m,
        n,
        k,
        BM=128,
        BN=128,
        BK=64,
        GROUP=8,
        PROGRAMS=programs,
        num_warps=8,
        num_stages=3,
    )
    return out
