"""Native W4A4 GEMM for Blackwell: block-scaled tensor cores read codes and scales as they are.

``tl.dot_scaled`` on E2M1 with E4M3 scales compiles to ``tcgen05.mma ... kind::mxf4nvf4`` on
compute capability 10. Compiled and checked for its instructions, not run: no such device was at
hand, and no bits are promised against other architectures.
"""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.nvfp4.gemm import _triton as hopper
from minite_kernels.nvfp4.gemm import configs
from minite_kernels.nvfp4.gemm._epilogue import Epilogue
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.quantize._triton import unfused
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

_tile_of = hopper._tile_of
_finish = hopper._finish


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """Tile of the block-scaled kernel."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int


CONFIG: Final = NativeConfig(rows=128, columns=128, k=128, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["M"])
def _native_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    out_ptr,
    a_statistic_ptr,
    b_statistic_ptr,
    bias_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    A_PER_ROW: tl.constexpr,
    B_PER_COLUMN: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """out[M, N] of packed a [M, K/2] and b [N, K/2] with E4M3 scales; k ascending."""
    row_tile, column_tile = _tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = row_tile * BM + tl.arange(0, BM)
    rn = column_tile * BN + tl.arange(0, BN)
    m = tl.where(rm < M, rm, 0).to(tl.int64)
    n = tl.where(rn < N, rn, 0).to(tl.int64)
    p = tl.arange(0, BK // 2)
    s = tl.arange(0, BK // 16)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inside = k // 2 + p < K // 2
        blocks = k // 16 + s < K // 16
        a = tl.load(
            a_ptr + m[:, None] * (K // 2) + k // 2 + p[None, :], mask=inside[None, :], other=0
        )
        b = tl.load(
            b_ptr + n[None, :] * (K // 2) + k // 2 + p[:, None], mask=inside[:, None], other=0
        )
        a_scale = tl.load(
            a_scale_ptr + m[:, None] * (K // 16) + k // 16 + s[None, :],
            mask=blocks[None, :],
            other=0.0,
        )
        b_scale = tl.load(
            b_scale_ptr + n[:, None] * (K // 16) + k // 16 + s[None, :],
            mask=blocks[None, :],
            other=0.0,
        )
        acc = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
    a_statistic = tl.load(a_statistic_ptr)
    if A_PER_ROW:
        a_statistic = tl.load(a_statistic_ptr + rm, mask=rm < M, other=0.0)[:, None]
    b_statistic = tl.load(b_statistic_ptr)
    if B_PER_COLUMN:
        b_statistic = tl.load(b_statistic_ptr + rn, mask=rn < N, other=0.0)[None, :]
    bias = a_statistic
    if EPILOGUE[4] != "none":
        bias = tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    out = _finish(acc, a_statistic, b_statistic, bias, EPILOGUE, out_ptr.dtype.element_ty)
    pointer = out_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(pointer, out, mask=(rm < M)[:, None] & (rn < N)[None, :])


def gemm(a: Nvfp4Tensor, b: PreparedOperand, epilogue: Epilogue) -> Tensor:
    """[M, N] from a [M, K] and b [N, K], K % 16 == 0."""
    (m, k), n = a.shape, b.q.shape[0]
    if k % 16:
        raise ValueError(f"the native GEMM takes K % 16 == 0, got {k}; use impl='ref'")
    out = torch.empty(m, n, dtype=epilogue.out_dtype, device=a.device)
    grid = (triton.cdiv(m, CONFIG.rows) * triton.cdiv(n, CONFIG.columns),)
    if out.numel():
        _native_kernel[grid](
            a.codes,
            a.block_scale,
            b.q.codes,
            b.q.block_scale,
            out,
            M=m,
            N=n,
            K=k,
            BM=CONFIG.rows,
            BN=CONFIG.columns,
            BK=CONFIG.k,
            GROUP=configs.GROUP_ROWS,
            num_warps=CONFIG.num_warps,
            num_stages=CONFIG.num_stages,
            **hopper.epilogue_arguments(epilogue),
            **unfused(),
        )
    return out
