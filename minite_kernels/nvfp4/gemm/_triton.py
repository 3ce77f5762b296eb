"""Triton W4A4 GEMM for Hopper: FP16 tensor cores on exactly decoded operands.

q*s is exact in FP16, so both kernels multiply decoded values; FP32 accumulators, k ascending, no
split. ``packed`` reads 4.5-bit weights and decodes them in registers (few rows: the weight's bytes
are the time); ``decoded`` reads both operands as FP16 through TMA (many rows: the tensor cores are).
Shapes: a [M, K], b [N, K], out [M, N]; G slices of K, E experts (1 in dense GEMMs).
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
from triton.tools.tensor_descriptor import TensorDescriptor

from minite_kernels.dispatch import is_interpreted
from minite_kernels.nvfp4.gemm import configs
from minite_kernels.nvfp4.gemm._epilogue import Epilogue
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.layout import unpack_codes
from minite_kernels.nvfp4.quantize._triton import unfused
from minite_kernels.nvfp4.quantize._triton_arithmetic import decode_e2m1
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

#: Statistic of an operand that each alpha expression reads.
STATISTICS = {
    "((A_a*A_b)*(1/((36*F_a)*F_b)))": "amax",
    "(A_a*A_b)/((36*F_a)*F_b)": "amax",
    "(1/((36*F_a)*F_b)) then (A_a*A_b)": "amax",
    "g_a*g_b": "global_decode_scale",
    "(1/S_a)*(1/S_b)": "global_encode_scale",
    "1/(S_a*S_b)": "global_encode_scale",
    "bf16(g_a*g_b)": "global_decode_scale",
}


@triton.jit
def _decode_kernel(q_ptr, s_ptr, out_ptr, M, K, BM: tl.constexpr, BK: tl.constexpr):
    """Packed codes [M, K/2] and scales [M, B] -> q*s in FP16 [M, 16 * B], B = ceil(K/16)."""
    blocks = tl.cdiv(K, 16)
    columns = tl.cdiv(K, BK)
    rows = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    start = (tl.program_id(0) % columns) * BK
    p = start // 2 + tl.arange(0, BK // 2)
    n = start // 16 + tl.arange(0, BK // 16)
    k = start + tl.arange(0, BK)
    inside = (rows < M)[:, None]
    wide = rows[:, None].to(tl.int64)
    packed = tl.load(
        q_ptr + wide * (K // 2) + p[None, :], mask=inside & (p < K // 2)[None, :], other=0
    ).to(tl.int32)
    s = tl.load(s_ptr + wide * blocks + n[None, :], mask=inside & (n < blocks)[None, :], other=0.0)
    value = tl.join(decode_e2m1(packed & 15), decode_e2m1((packed >> 4) & 15))
    value = tl.reshape(value, (BM, BK // 16, 16)) * s.to(tl.float32)[:, :, None]
    value = tl.reshape(value, (BM, BK)).to(tl.float16)
    mask = inside & (k < blocks * 16)[None, :]
    tl.store(out_ptr + wide * (blocks * 16) + k[None, :], value, mask=mask)


@triton.jit
def _factor(a, b, INVERSE: tl.constexpr, FACTOR: tl.constexpr, ALPHA: tl.constexpr):
    """The recipe's epilogue factor from the two operands' statistics, broadcast."""
    if ALPHA == "alpha":
        out = a
    elif ALPHA == "((A_a*A_b)*(1/((36*F_a)*F_b)))":
        out = (a * b) * INVERSE
    elif ALPHA == "(A_a*A_b)/((36*F_a)*F_b)":
        out = tl.div_rn(a * b, FACTOR)
    elif ALPHA == "(1/((36*F_a)*F_b)) then (A_a*A_b)" or ALPHA == "g_a*g_b":
        out = a * b
    elif ALPHA == "(1/S_a)*(1/S_b)":
        out = tl.div_rn(1.0, a) * tl.div_rn(1.0, b)
    elif ALPHA == "1/(S_a*S_b)":
        out = tl.div_rn(1.0, a * b)
    else:
        tl.static_assert(ALPHA == "bf16(g_a*g_b)")
        out = (a * b).to(tl.bfloat16).to(tl.float32)
    return out


@triton.jit
def _finish(acc, a, b, bias, EPILOGUE: tl.constexpr, DTYPE: tl.constexpr):
    """Factors, bias and casts, each operation rounded: acc in FP32 -> DTYPE."""
    ALPHA: tl.constexpr = EPILOGUE[0]
    FACTOR: tl.constexpr = EPILOGUE[1]
    INVERSE: tl.constexpr = EPILOGUE[2]
    TWICE: tl.constexpr = EPILOGUE[3]
    BIAS: tl.constexpr = EPILOGUE[4]
    if TWICE:
        acc = acc.to(DTYPE).to(tl.float32)
    if ALPHA == "(1/((36*F_a)*F_b)) then (A_a*A_b)":
        acc = acc * INVERSE
    acc = acc * _factor(a, b, INVERSE, FACTOR, ALPHA)
    if BIAS == "epilogue":
        acc = acc + bias
    elif BIAS == "after_cast":
        acc = acc.to(DTYPE).to(tl.float32) + bias
    return acc.to(DTYPE)


@triton.jit
def _codes_to_half(q, s0, s1, s2, s3, ASM: tl.constexpr):
    """Int16 words of four codes and FP16 scales s*2^7 -> four FP16 tensors q*s*2^-7, exact.

    A code shifted to the top of an FP16 is its value times 2^-14. The assembly does two words in
    one register; the portable branch is its twin and runs in the interpreter.
    """
    if ASM:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            shl.b32 a, $4, 4;
            shl.b32 b, $4, 1;
            and.b32 a, a, 0x80808080;
            lop3.b32 a, a, b, 0x0E0E0E0E, 0xF8;
            prmt.b32 c, a, 0, 0x2404;
            mul.rn.f16x2 $0, c, $5;
            and.b32 c, a, 0xFF00FF00;
            mul.rn.f16x2 $2, c, $7;
            shr.b32 b, $4, 3;
            and.b32 a, $4, 0x80808080;
            lop3.b32 a, a, b, 0x0E0E0E0E, 0xF8;
            prmt.b32 c, a, 0, 0x2404;
            mul.rn.f16x2 $1, c, $6;
            and.b32 c, a, 0xFF00FF00;
            mul.rn.f16x2 $3, c, $8;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r",
            [q, s0, s1, s2, s3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        u = q.to(tl.uint16, bitcast=True)
        w0 = (((u << 12) & 0x8000) | ((u << 9) & 0x0E00)).to(tl.float16, bitcast=True) * s0
        w1 = (((u << 8) & 0x8000) | ((u << 5) & 0x0E00)).to(tl.float16, bitcast=True) * s1
        w2 = (((u << 4) & 0x8000) | ((u << 1) & 0x0E00)).to(tl.float16, bitcast=True) * s2
        w3 = ((u & 0x8000) | ((u >> 3) & 0x0E00)).to(tl.float16, bitcast=True) * s3
    return w0, w1, w2, w3


@triton.jit
def _scales_to_half(s32, R: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr):
    """Int32 [R, C] of four E4M3 scales -> four FP16 s*2^7, each repeated over 16 columns.

    A scale's byte shifted left by 7 is s*2^-8 as an FP16; the assembly does two at a time.
    """
    if ASM:
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            mov.b32 c, 0x78007800;
            shl.b32 a, $4, 7;
            shr.b32 b, $4, 1;
            and.b32 a, a, 0x7F807F80;
            and.b32 b, b, 0x7F807F80;
            mul.rn.f16x2 a, a, c;
            mul.rn.f16x2 b, b, c;
            mov.b32 {$0, $2}, a;
            mov.b32 {$1, $3}, b;
            }""",
            "=h,=h,=h,=h,r",
            [s32],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        s0 = ((s32 & 0xFF) << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 32768.0
        s1 = (((s32 >> 8) & 0xFF) << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 32768.0
        s2 = (((s32 >> 16) & 0xFF) << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 32768.0
        s3 = (((s32 >> 24) & 0xFF) << 7).to(tl.uint16).to(tl.float16, bitcast=True) * 32768.0
    return _repeat(s0, R, C), _repeat(s1, R, C), _repeat(s2, R, C), _repeat(s3, R, C)


@triton.jit
def _repeat(s, R: tl.constexpr, C: tl.constexpr):
    """[R, C] -> [R, 16 * C], each column 16 times."""
    return tl.reshape(tl.broadcast_to(s[:, :, None], (R, C, 16)), (R, C * 16))


@triton.jit
def _prefetch(ptr):
    """Ask for the lines of these addresses in L2; touches nothing else."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [ptr],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _expert_tile(offsets_ptr, t, E, BM: tl.constexpr, EP: tl.constexpr):
    """(expert, first row, end of its rows) of row tile t, experts ascending; expert E: no such tile."""
    e = tl.arange(0, EP)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0).to(tl.int32)
    stop = tl.load(offsets_ptr + e + 1, mask=e < E, other=0).to(tl.int32)
    count = (stop - start + BM - 1) // BM
    end = tl.cumsum(count, 0)
    expert = tl.sum(((end <= t) & (e < E)).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (t - (end - count)) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit
def _tile_of(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a program, neighbouring rows first."""
    row_tiles = tl.cdiv(M, BM)
    column_tiles = tl.cdiv(N, BN)
    group = pid // (GROUP * column_tiles)
    height = min(row_tiles - group * GROUP, GROUP)
    inside = pid % (GROUP * column_tiles)
    return group * GROUP + inside % height, inside // height


@triton.jit(do_not_specialize=["M"])
def _packed_kernel(
    a_ptr,
    w_ptr,
    s_ptr,
    out_ptr,
    a_statistic_ptr,
    b_statistic_ptr,
    bias_ptr,
    row_ptr,
    offsets_ptr,
    M,
    N,
    K,
    E,
    stride_am,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EP: tl.constexpr,
    SWAP: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
    GROUPED: tl.constexpr,
    GATHER: tl.constexpr,
    GROUP: tl.constexpr,
    A_PER_ROW: tl.constexpr,
    B_PER_COLUMN: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """out[M, N] of a [*, K] in FP16 and packed w; one tile a program, k ascending.

    With ``OVERLAP`` the kernel that makes a may still be running (programmatic dependent launch):
    until ``gdc_wait`` only weights and what came before that kernel are touched.
    """
    Q: tl.constexpr = BK // 4
    C: tl.constexpr = BK // 64
    if GROUPED:
        column_tile = tl.program_id(0)
        expert, first, last = _expert_tile(offsets_ptr, tl.program_id(1), E, BM, EP)
        if expert >= E:
            return
        w_ptr += expert.to(tl.int64) * N * (K // 4)
        s_ptr += expert.to(tl.int64) * N * (K // 64)
        b_statistic_ptr += expert
    else:
        row_tile, column_tile = _tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
        first = row_tile * BM
        last = M
    rm = first + tl.arange(0, BM)
    rn = column_tile * BN + tl.arange(0, BN)
    inside = rm < last
    within = rn < N
    if GATHER:
        source = tl.load(row_ptr + rm, mask=inside, other=0).to(tl.int32)
    else:
        source = tl.where(inside, rm, first)
    quarter = tl.arange(0, Q)
    ap = a_ptr + source[:, None].to(tl.int64) * stride_am + quarter[None, :]
    column = tl.where(within, rn, 0)
    wp = w_ptr + column[:, None] * Q + quarter[None, :]
    sp = s_ptr + column[:, None] * C + tl.arange(0, C)[None, :]
    acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    if OVERLAP:
        # Many experts' programs would only wait for each other's lines: dense GEMMs alone prefetch.
        if not GROUPED and (column_tile + 1) * BN <= N:
            line = w_ptr + column_tile * BN * Q + tl.arange(0, BN * Q // 64) * 64
            for _ in range(K // BK):
                _prefetch(line)
                line += N * Q
        tl.extra.cuda.gdc_wait()
    for _ in range(K // BK):
        q = tl.load(wp)
        s = tl.load(sp)
        # Masked: rows that are not there would all read one row, and its L2 slice is the bottleneck.
        a0 = tl.load(ap, mask=inside[:, None], other=0.0)
        a1 = tl.load(ap + Q, mask=inside[:, None], other=0.0)
        a2 = tl.load(ap + 2 * Q, mask=inside[:, None], other=0.0)
        a3 = tl.load(ap + 3 * Q, mask=inside[:, None], other=0.0)
        s0, s1, s2, s3 = _scales_to_half(s, BN, C, ASM)
        w0, w1, w2, w3 = _codes_to_half(q, s0, s1, s2, s3, ASM)
        if SWAP:
            acc = tl.dot(w0, tl.trans(a0), acc)
            acc = tl.dot(w1, tl.trans(a1), acc)
            acc = tl.dot(w2, tl.trans(a2), acc)
            acc = tl.dot(w3, tl.trans(a3), acc)
        else:
            acc = tl.dot(a0, tl.trans(w0), acc)
            acc = tl.dot(a1, tl.trans(w1), acc)
            acc = tl.dot(a2, tl.trans(w2), acc)
            acc = tl.dot(a3, tl.trans(w3), acc)
        ap += BK
        wp += N * Q
        sp += N * C
    acc = acc * 128.0
    a = tl.load(a_statistic_ptr)
    if A_PER_ROW:
        a = tl.load(a_statistic_ptr + source, mask=inside, other=0.0)
    b = tl.load(b_statistic_ptr)
    if B_PER_COLUMN:
        b = tl.load(b_statistic_ptr + rn, mask=within, other=0.0)
    bias = a
    HAS_BIAS: tl.constexpr = EPILOGUE[4] != "none"
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rn, mask=within, other=0.0).to(tl.float32)
    wide = rm.to(tl.int64) * N
    if SWAP:
        if A_PER_ROW:
            a = a[None, :]
        if B_PER_COLUMN:
            b = b[:, None]
        if HAS_BIAS:
            bias = bias[:, None]
        out = _finish(acc, a, b, bias, EPILOGUE, out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide[None, :] + rn[:, None], out, mask=inside[None, :] & within[:, None])
    else:
        if A_PER_ROW:
            a = a[:, None]
        if B_PER_COLUMN:
            b = b[None, :]
        if HAS_BIAS:
            bias = bias[None, :]
        out = _finish(acc, a, b, bias, EPILOGUE, out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide[:, None] + rn[None, :], out, mask=inside[:, None] & within[None, :])


@triton.jit
def _store_tile(
    out_ptr, out, first, last, start, N, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr
):
    """Store a tile at row ``first``, column ``start``, of rows below ``last``, whole or in halves."""
    rm = first + tl.arange(0, BM)
    inside = (rm < last)[:, None]
    row = out_ptr + rm[:, None].to(tl.int64) * N
    if SPLIT:
        left, right = tl.split(tl.permute(tl.reshape(out, (BM, 2, BN // 2)), (0, 2, 1)))
        rn = start + tl.arange(0, BN // 2)
        tl.store(row + rn[None, :], left, mask=inside & (rn < N)[None, :])
        rn += BN // 2
        tl.store(row + rn[None, :], right, mask=inside & (rn < N)[None, :])
    else:
        rn = start + tl.arange(0, BN)
        tl.store(row + rn[None, :], out, mask=inside & (rn < N)[None, :])


@triton.jit(do_not_specialize=["M", "tiles"])
def _decoded_kernel(
    a_desc,
    b_desc,
    out_ptr,
    a_statistic_ptr,
    b_statistic_ptr,
    bias_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    offsets_ptr,
    tiles,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    A_PER_ROW: tl.constexpr,
    B_PER_COLUMN: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """out[M, N] of decoded a [M, K] and b [E*N, K] in FP16: persistent, k ascending.

    Tiles of grouped GEMMs whose expert is -1 are padding: they compute expert 0 and store nothing.
    """
    HAS_BIAS: tl.constexpr = EPILOGUE[4] != "none"
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        if GROUPED:
            column_tiles = tl.cdiv(N, BN)
            listed = tl.load(tile_expert_ptr + tile // column_tiles)
            expert = tl.maximum(listed, 0)
            first = tl.load(tile_row_ptr + tile // column_tiles)
            last = tl.where(listed < 0, 0, tl.load(offsets_ptr + expert + 1).to(tl.int32))
            start = (tile % column_tiles) * BN
        else:
            row_tile, column_tile = _tile_of(tile, M, N, BM, BN, GROUP)
            expert = 0
            first = row_tile * BM
            last = M
            start = column_tile * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([first, k * BK])
            b = b_desc.load([expert * N + start, k * BK])
            acc = tl.dot(a, tl.trans(b), acc)
        rm = first + tl.arange(0, BM)
        rn = start + tl.arange(0, BN)
        inside = rm < last
        a_statistic = tl.load(a_statistic_ptr)
        if A_PER_ROW:
            a_statistic = tl.load(a_statistic_ptr + rm, mask=inside, other=0.0)[:, None]
        b_statistic = tl.load(b_statistic_ptr + expert)
        if B_PER_COLUMN:
            b_statistic = tl.load(b_statistic_ptr + rn, mask=rn < N, other=0.0)[None, :]
        bias = a_statistic
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
        out = _finish(acc, a_statistic, b_statistic, bias, EPILOGUE, out_ptr.dtype.element_ty)
        _store_tile(out_ptr, out, first, last, start, N, BM, BN, SPLIT)


def gemm(a: Nvfp4Tensor, b: PreparedOperand, epilogue: Epilogue) -> Tensor:
    """[M, N] from a [M, K] and b [N, K]."""
    return multiply(decode_values(a), b, epilogue)


def multiply(
    a_MK: Tensor, b: PreparedOperand, epilogue: Epilogue, *, overlap: bool = False
) -> Tensor:
    """[M, N] from a decoded in FP16 [M, K]; few rows read packed weights, many decoded ones.

    ``overlap`` says that the last launch on this stream makes a and lets dependents start early.
    """
    m = a_MK.shape[0]
    n, k = b.q.shape
    out = torch.empty(m, n, dtype=epilogue.out_dtype, device=a_MK.device)
    if m == 0 or n == 0:
        return out
    if m <= configs.PACKED_MAX_ROWS and configs.slice_columns(k) is not None:
        words, scales = (
            b.layout("packed_words", packed_words),
            b.layout("packed_scales", packed_scales),
        )
        launch_packed(a_MK, words, scales, out, epilogue, configs.packed_config(m, n), overlap)
    else:
        launch_decoded(
            a_MK,
            b.layout("decoded_fp16", decode_values),
            out,
            epilogue,
            configs.decoded_config(out.element_size() > 2),
        )
    return out


def decode_values(q: Nvfp4Tensor) -> Tensor:
    """q*s in FP16, exact: [M, 16 * ceil(K/16)], zeros beyond K."""
    m, k = q.shape
    out = torch.empty(m, triton.cdiv(k, 16) * 16, dtype=torch.float16, device=q.device)
    if m:
        grid = (triton.cdiv(m, 8) * triton.cdiv(k, 512),)
        _decode_kernel[grid](q.codes, q.block_scale, out, m, k, BM=8, BK=512, num_warps=4)
    return out


def packed_words(q: Nvfp4Tensor) -> Tensor:
    """Codes as int16 [K/BK, N, BK/4]: nibble j of word p is column j*BK/4 + p of the slice.

    A tile of rows in one slice is one contiguous chunk, and its four dot products run over
    contiguous, ascending columns.
    """
    n, k = q.shape
    columns = _slice_columns(k)
    codes = unpack_codes(q.codes).view(n, k // columns, 4, columns // 4).to(torch.int32)
    word = codes[:, :, 0] | (codes[:, :, 1] << 4) | (codes[:, :, 2] << 8) | (codes[:, :, 3] << 12)
    word = torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)
    return word.transpose(0, 1).contiguous()


def packed_scales(q: Nvfp4Tensor) -> Tensor:
    """Block scales as int32 [K/BK, N, BK/64]: byte j belongs to nibble j of ``packed_words``."""
    n, k = q.shape
    columns = _slice_columns(k)
    bytes_ = q.block_scale.view(torch.uint8).view(n, k // columns, 4, columns // 64).to(torch.int32)
    word = (
        bytes_[:, :, 0] | (bytes_[:, :, 1] << 8) | (bytes_[:, :, 2] << 16) | (bytes_[:, :, 3] << 24)
    )
    return word.transpose(0, 1).contiguous()


def _slice_columns(k: int) -> int:
    columns = configs.slice_columns(k)
    assert columns is not None, "the caller checks K before it asks for packed weights"
    return columns


def epilogue_arguments(epilogue: Epilogue, b_statistic: Tensor | None = None) -> dict[str, Any]:
    """Kernel arguments of an epilogue; ``b_statistic`` [E] stands in for b's own in grouped GEMMs."""
    recipe = epilogue.recipe
    bias = "none" if epilogue.bias is None else recipe.bias
    factor = 36.0 * epilogue.a.operand.e4m3_max * epilogue.b.operand.e4m3_max
    inverse = float(torch.div(torch.ones(()), torch.tensor(factor)))
    name = "alpha" if epilogue.alpha is not None else str(recipe.alpha)
    if epilogue.alpha is not None:
        a_statistic, b = epilogue.alpha, epilogue.alpha
        per_row, per_column = epilogue.alpha.numel() > 1, False
    else:
        statistic = STATISTICS[recipe.alpha]
        a_statistic = getattr(epilogue.a, statistic)
        b = getattr(epilogue.b, statistic) if b_statistic is None else b_statistic
        per_row = a_statistic.ndim == 1
        per_column = b_statistic is None and b.ndim == 1
    return {
        "a_statistic_ptr": a_statistic,
        "b_statistic_ptr": b,
        "bias_ptr": a_statistic if epilogue.bias is None else epilogue.bias.contiguous(),
        "A_PER_ROW": per_row,
        "B_PER_COLUMN": per_column,
        "EPILOGUE": (name, factor, inverse, recipe.output == "twice", bias),
    }


def launch_packed(
    a_MK: Tensor,
    words: Tensor,
    scales: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    config: configs.PackedConfig,
    overlap: bool = False,
) -> None:
    """Run the dense packed kernel into ``out`` [M, N]."""
    m, k = a_MK.shape
    n = out.shape[1]
    grid = (triton.cdiv(m, config.rows) * triton.cdiv(n, config.columns),)
    _packed_kernel[grid](
        a_MK,
        words,
        scales,
        out,
        row_ptr=a_MK,
        offsets_ptr=a_MK,
        M=m,
        N=n,
        K=k,
        E=1,
        stride_am=a_MK.stride(0),
        BK=words.shape[-1] * 4,
        EP=1,
        GROUPED=False,
        GATHER=False,
        **packed_constants(config, overlap),
        **epilogue_arguments(epilogue),
        **unfused(),
    )


def packed_constants(config: configs.PackedConfig, overlap: bool) -> dict[str, Any]:
    """Compile-time constants of a packed configuration."""
    overlap = overlap and not is_interpreted()
    return {
        "OVERLAP": overlap,
        **({"launch_pdl": True} if overlap else {}),
        "BM": config.rows,
        "BN": config.columns,
        "SWAP": config.swap,
        "ASM": not is_interpreted(),
        "GROUP": configs.GROUP_ROWS,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def launch_decoded(
    a_MK: Tensor, b_NK: Tensor, out: Tensor, epilogue: Epilogue, config: configs.DecodedConfig
) -> None:
    """Run the dense persistent kernel into ``out`` [M, N]."""
    m, k = a_MK.shape
    n = out.shape[1]
    tiles = triton.cdiv(m, config.rows) * triton.cdiv(n, config.columns)
    _decoded_kernel[(min(programs(a_MK.device), tiles),)](
        TensorDescriptor.from_tensor(a_MK, [config.rows, config.k]),
        TensorDescriptor.from_tensor(b_NK, [config.columns, config.k]),
        out,
        tile_expert_ptr=out,
        tile_row_ptr=out,
        offsets_ptr=out,
        tiles=tiles,
        M=m,
        N=n,
        K=k,
        GROUPED=False,
        **decoded_constants(config, a_MK.device),
        **epilogue_arguments(epilogue),
        **unfused(),
    )


def decoded_constants(config: configs.DecodedConfig, device: torch.device) -> dict[str, Any]:
    """Compile-time constants of a persistent configuration."""
    return {
        "BM": config.rows,
        "BN": config.columns,
        "BK": config.k,
        "PROGRAMS": programs(device),
        "GROUP": configs.GROUP_ROWS,
        "SPLIT": config.split_store,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def programs(device: torch.device) -> int:
    """How many persistent programs fill the device."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
