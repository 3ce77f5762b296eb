"""Triton product: one pinned tile, one FP32 accumulator, k ascending, no split."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.invariant.launch import unfused
from minite_kernels.invariant.matmul import configs
from minite_kernels.invariant.matmul.operand import PreparedWeight


@triton.jit(do_not_specialize=["T"])
def _matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    T,
    N,
    K,
    stride_xt,
    stride_wn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IEEE: tl.constexpr,
):
    """out[T, N] = x[T, K] w[N, K]^T."""
    column_tiles = tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * column_tiles)
    height = min(tl.cdiv(T, BM) - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * column_tiles)
    rt = (group * GROUP + inside % height) * BM + tl.arange(0, BM)
    rn = (inside // height) * BN + tl.arange(0, BN)
    t = tl.where(rt < T, rt, 0).to(tl.int64)
    n = tl.where(rn < N, rn, 0).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + t[:, None] * stride_xt + k[None, :], mask=(k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + n[:, None] * stride_wn + k[None, :], mask=(k < K)[None, :], other=0.0)
        if IEEE:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    pointer = out_ptr + rt[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(pointer, acc.to(out_ptr.dtype.element_ty), mask=(rt < T)[:, None] & (rn < N)[None, :])


def matmul(
    x_TK: Tensor, weight: PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[T, N]; operands of different dtypes are multiplied in FP32."""
    w = weight.w
    if x_TK.dtype != w.dtype:
        x_TK, w = x_TK.to(torch.float32), weight.layout("float32", lambda v: v.to(torch.float32))
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    w = w if w.stride(1) == 1 else weight.layout("contiguous", lambda v: v.contiguous())
    (tokens, k), n = x_TK.shape, w.shape[0]
    out = torch.empty(tokens, n, dtype=out_dtype, device=x_TK.device)
    config = configs.config(x_TK.dtype)
    grid = (triton.cdiv(tokens, config.rows) * triton.cdiv(n, config.columns),)
    if tokens:
        _matmul_kernel[grid](
            x_TK,
            w,
            x_TK if bias is None else bias.contiguous(),
            out,
            tokens,
            n,
            k,
            x_TK.stride(0),
            w.stride(0),
            BM=config.rows,
            BN=config.columns,
            BK=config.k,
            GROUP=configs.GROUP_ROWS,
            HAS_BIAS=bias is not None,
            IEEE=x_TK.dtype == torch.float32,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **unfused(),
        )
    return out
