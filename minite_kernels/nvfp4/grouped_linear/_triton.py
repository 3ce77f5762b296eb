"""Triton path of the three GEMMs: values decoded in FP16 as they are quantized, nothing transposed.

Every operand is quantized once into exact FP16 values in its own memory layout: along columns for
forward and dgrad, along rows (16 tokens a block, RHT fused) for wgrad. The GEMMs then read whatever
order they contract through TMA, k ascending in one FP32 accumulator. A 16x16-tiled weight is
quantized once for forward and dgrad, because its transpose has the same codes.
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

from minite_kernels.nvfp4.gemm import _triton as dense
from minite_kernels.nvfp4.gemm import configs
from minite_kernels.nvfp4.grouped_gemm._triton import tiles
from minite_kernels.nvfp4.grouped_linear import ALIGNMENT, Options
from minite_kernels.nvfp4.hadamard import hadamard_matrix
from minite_kernels.nvfp4.quantize import _ref as quantize_ref
from minite_kernels.nvfp4.quantize import _triton as quantizer
from minite_kernels.nvfp4.quantize import configs as quantize_configs
from minite_kernels.nvfp4.quantize._ref import GlobalScale
from minite_kernels.nvfp4.recipe import GemmRecipe, OperandRecipe

Weight = tuple[Tensor, GlobalScale]

_max_magnitude = quantizer._max_magnitude
_quantize_blocks = quantizer._quantize_blocks
_random_bytes = quantizer._random_bytes
_finish = dense._finish
_store_tile = dense._store_tile


@triton.jit
def _row_amax_kernel(
    x_ptr, out_ptr, R, C, NAN_SPREADS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Largest |x| of BR rows, all columns."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    largest = tl.zeros((BR, BC), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        mask = (rows < R)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + rows[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if NAN_SPREADS:
            x = tl.where(x != x, float("inf"), x)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(out_ptr + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def _expert_amax_kernel(part_ptr, offsets_ptr, out_ptr, PER: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce the partial maxima of one expert's rows; PER rows a partial."""
    expert = tl.program_id(0)
    first = (tl.load(offsets_ptr + expert) // PER).to(tl.int32)
    last = (tl.load(offsets_ptr + expert + 1) // PER).to(tl.int32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(part_ptr + i, mask=i < last, other=0.0))
    tl.store(out_ptr + expert, tl.max(largest, 0))


@triton.jit
def _load_columns(x_ptr, h_ptr, row, c, C, RHT: tl.constexpr):
    """16 rows from ``row`` on of columns c as [BC, 16] FP32, after the RHT along rows if asked.

    Transposed before the product, not after it: a tensor core's result keeps four elements of a
    row in one thread and two of a column, and a block's scale is worked out by each of its threads.
    """
    rows = (row + tl.arange(0, 16)).to(tl.int64)
    x = tl.load(x_ptr + rows[:, None] * C + c[None, :], mask=(c < C)[None, :], other=0.0)
    columns = tl.trans(x)
    if RHT:
        i = tl.arange(0, 16)
        h = tl.load(h_ptr + i[:, None] * 16 + i[None, :])
        value = tl.dot(columns, h).to(x.dtype).to(tl.float32)
    else:
        value = columns.to(tl.float32)
    return value


@triton.jit
def _along_rows_amax_kernel(
    x_ptr, h_ptr, out_ptr, C, NAN_SPREADS: tl.constexpr, RHT: tl.constexpr, BC: tl.constexpr
):
    """Largest |transformed x| of 16 rows, all columns."""
    largest = tl.zeros((BC, 16), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        value = tl.abs(_load_columns(x_ptr, h_ptr, tl.program_id(0) * 16, c, C, RHT))
        if NAN_SPREADS:
            value = tl.where(value != value, float("inf"), value)
        largest = tl.maximum(largest, value)
    tl.store(out_ptr + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def _column_amax_kernel(
    x_ptr, h_ptr, offsets_ptr, out_ptr, C, NAN_SPREADS: tl.constexpr, RHT: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Largest |transformed x| of each column over one expert's rows: [E, C]."""
    expert = tl.program_id(0)
    first = tl.load(offsets_ptr + expert).to(tl.int32)
    last = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    largest = tl.zeros((BC, 16), tl.float32)
    for row in range(first, last, 16):
        value = tl.abs(_load_columns(x_ptr, h_ptr, row, c, C, RHT))
        if NAN_SPREADS:
            value = tl.where(value != value, float("inf"), value)
        largest = tl.maximum(largest, value)
    tl.store(out_ptr + expert * C + c, tl.max(largest, 1), mask=c < C)


@triton.jit
def _along_rows_kernel(
    x_ptr,
    h_ptr,
    out_ptr,
    amax_ptr,
    encode_ptr,
    decode_ptr,
    expert_ptr,
    seed_ptr,
    C,
    PER_COLUMN: tl.constexpr,
    NAN_SPREADS: tl.constexpr,
    RHT: tl.constexpr,
    BC: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Quantize 16 rows x BC columns along the rows: values q*s in FP16, in x's own layout."""
    rows = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    columns = _load_columns(x_ptr, h_ptr, tl.program_id(0) * 16, c, C, RHT)
    b = _max_magnitude(columns, 1, NAN_SPREADS)
    expert = tl.load(expert_ptr + tl.program_id(0))
    if PER_COLUMN:
        at = expert * C + c
        A = tl.load(amax_ptr + at, mask=c < C, other=1.0)
        S = tl.load(encode_ptr + at, mask=c < C, other=1.0)
        g = tl.load(decode_ptr + at, mask=c < C, other=1.0)
    else:
        at = expert + tl.arange(0, 1)
        A = tl.load(amax_ptr + at)
        S = tl.load(encode_ptr + at)
        g = tl.load(decode_ptr + at)
    random = columns
    if RECIPE[16]:
        random = _random_bytes(tl.load(seed_ptr), tl.program_id(0) * C + c)
    rounded, s = _quantize_blocks(columns, b, A, S, g, random, True, RECIPE)
    out = tl.trans(rounded * s[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * C + c[None, :], out, mask=(c < C)[None, :])


@triton.jit
def _zero_tail_kernel(out_ptr, offsets_ptr, E, C, BC: tl.constexpr):
    """Zero 16 rows if they belong to no expert."""
    first = tl.program_id(0).to(tl.int64) * 16
    if first < tl.load(offsets_ptr + E):
        return
    rows = first + tl.arange(0, 16)
    zeros = tl.zeros((16, BC), out_ptr.dtype.element_ty)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        tl.store(out_ptr + rows[:, None] * C + c[None, :], zeros, mask=(c < C)[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _rows_gemm_kernel(
    a_desc,
    b_desc,
    out_ptr,
    a_statistic_ptr,
    b_statistic_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    offsets_ptr,
    tiles,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    A_PER_ROW: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """out[R, N] of a [R, K] and b [E*N, K] or, ``B_BY_ROWS``, [E*K, N]; experts' rows tiled."""
    column_tiles = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        group = tile // (GROUP * column_tiles)
        height = min(tiles // column_tiles - group * GROUP, GROUP)
        inside = tile % (GROUP * column_tiles)
        row_tile = group * GROUP + inside % height
        start = (inside // height) * BN
        listed = tl.load(tile_expert_ptr + row_tile)
        expert = tl.maximum(listed, 0)
        first = tl.load(tile_row_ptr + row_tile)
        last = tl.where(listed < 0, 0, tl.load(offsets_ptr + expert + 1).to(tl.int32))
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([first, k * BK])
            if B_BY_ROWS:
                b = b_desc.load([expert * K + k * BK, start])
            else:
                b = tl.trans(b_desc.load([expert * N + start, k * BK]))
            acc = tl.dot(a, b, acc)
        a_statistic = tl.load(a_statistic_ptr + expert)
        if A_PER_ROW:
            rm = first + tl.arange(0, BM)
            a_statistic = tl.load(a_statistic_ptr + rm, mask=rm < last, other=0.0)[:, None]
        b_statistic = tl.load(b_statistic_ptr + expert)
        out = _finish(
            acc, a_statistic, b_statistic, a_statistic, EPILOGUE, out_ptr.dtype.element_ty
        )
        _store_tile(out_ptr, out, first, last, start, N, BM, BN, SPLIT)


@triton.jit(do_not_specialize=["tiles"])
def _weight_gradient_kernel(
    a_desc,
    b_desc,
    out_ptr,
    a_statistic_ptr,
    b_statistic_ptr,
    offsets_ptr,
    tiles,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPLIT: tl.constexpr,
    A_PER_ROW: tl.constexpr,
    B_PER_COLUMN: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """out[E, N, K] of a [R, N] and b [R, K], contracted over each expert's rows, ascending."""
    row_tiles = tl.cdiv(N, BM)
    column_tiles = tl.cdiv(K, BN)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS):
        expert = tile // (row_tiles * column_tiles)
        inside = tile % (row_tiles * column_tiles)
        n = (inside % row_tiles) * BM
        k = (inside // row_tiles) * BN
        first = tl.load(offsets_ptr + expert).to(tl.int32)
        last = tl.load(offsets_ptr + expert + 1).to(tl.int32)
        acc = tl.zeros((BM, BN), tl.float32)
        for row in range(first, last, BK):
            a = a_desc.load([row, n])
            b = b_desc.load([row, k])
            acc = tl.dot(tl.trans(a), b, acc)
        if A_PER_ROW:
            rn = n + tl.arange(0, BM)
            a_statistic = tl.load(a_statistic_ptr + expert * N + rn, mask=rn < N, other=0.0)[
                :, None
            ]
        else:
            a_statistic = tl.load(a_statistic_ptr + expert)
        if B_PER_COLUMN:
            rk = k + tl.arange(0, BN)
            b_statistic = tl.load(b_statistic_ptr + expert * K + rk, mask=rk < K, other=0.0)[
                None, :
            ]
        else:
            b_statistic = tl.load(b_statistic_ptr + expert)
        out = _finish(
            acc, a_statistic, b_statistic, a_statistic, EPILOGUE, out_ptr.dtype.element_ty
        )
        _store_tile(out_ptr + expert.to(tl.int64) * N * K, out, n, N, k, K, BM, BN, SPLIT)


def prepare_weight(w_ENK: Tensor, options: Options) -> Weight:
    """Quantize all experts' weights along K: FP16 values [E*N, K] and global scales [E]."""
    return weight_values(w_ENK, options)


def forward(
    x_RK: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    options: Options,
    input_amax: Tensor | None,
    out_dtype: torch.dtype,
    prepared: Weight | None,
) -> Tensor:
    """[R, N]: each expert's rows times its weight."""
    x, x_scale = rows_values(x_RK, offsets, options, options.recipe.activation, input_amax)
    w, w_scale = prepared or weight_values(w_ENK, options)
    operand = options.recipe.activation
    per_row = operand.amax_scope == "token" and input_amax is None
    return _rows_gemm(
        x, x_scale, w, w_scale, offsets, options, operand, out_dtype, per_row, b_by_rows=False
    )


def data_gradient(
    dy_RN: Tensor, w_ENK: Tensor, offsets: Tensor, options: Options, prepared: Weight | None
) -> Tensor:
    """[R, K]: dY W, both quantized along N."""
    dy, dy_scale = rows_values(dy_RN, offsets, options, options.recipe.gradient)
    two_dimensional = options.recipe.weight.tile[0] > 1
    if two_dimensional:
        w, w_scale = prepared or weight_values(w_ENK, options)
    else:
        w, w_scale = weight_values(w_ENK.transpose(1, 2).contiguous(), options)
    return _rows_gemm(
        dy,
        dy_scale,
        w,
        w_scale,
        offsets,
        options,
        options.recipe.gradient,
        dy_RN.dtype,
        options.recipe.gradient.amax_scope == "token",
        b_by_rows=two_dimensional,
    )


def weight_gradient(
    dy_RN: Tensor, x_RK: Tensor, offsets: Tensor, options: Options, out_dtype: torch.dtype
) -> Tensor:
    """[E, N, K]: dY^T X, both quantized along rows."""
    dy, dy_scale = along_rows_values(dy_RN, offsets, options, options.recipe.gradient)
    x, x_scale = along_rows_values(x_RK, offsets, options, options.recipe.activation)
    experts, n, k = offsets.numel() - 1, dy_RN.shape[1], x_RK.shape[1]
    out = torch.empty(experts, n, k, dtype=out_dtype, device=dy_RN.device)
    config = configs.decoded_config(out.element_size() > 2)
    count = experts * triton.cdiv(n, config.rows) * triton.cdiv(k, config.columns)
    programs = dense.programs(out.device)
    _weight_gradient_kernel[(min(programs, count),)](
        TensorDescriptor.from_tensor(dy, [config.k, config.rows]),
        TensorDescriptor.from_tensor(x, [config.k, config.columns]),
        out,
        _statistic(dy_scale, options.recipe.gemm),
        _statistic(x_scale, options.recipe.gemm),
        offsets,
        tiles=count,
        N=n,
        K=k,
        BM=config.rows,
        BN=config.columns,
        BK=config.k,
        PROGRAMS=programs,
        SPLIT=config.split_store,
        A_PER_ROW=dy_scale.amax.ndim == 2,
        B_PER_COLUMN=x_scale.amax.ndim == 2,
        EPILOGUE=_epilogue(options, options.recipe.gradient, options.recipe.activation),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **quantizer.unfused(),
    )
    return out


def rows_values(
    x_RK: Tensor,
    offsets: Tensor,
    options: Options,
    operand: OperandRecipe,
    amax: Tensor | None = None,
) -> tuple[Tensor, GlobalScale]:
    """FP16 values of x quantized along columns, and the global scales: [E] or, per token, [R].

    ``amax`` FP32 [E] stands in for that of the rows.
    """
    x_RK = x_RK.contiguous()
    if amax is not None:
        experts = offsets.numel() - 1
        amax = amax.reshape(-1).expand(experts).contiguous()
        scale = quantize_ref.global_scale_of_amax(operand, amax, x_RK.dtype)
    elif operand.amax_scope == "token":
        return quantizer.quantize_token_values(operand, x_RK, options.generator)
    elif operand.amax_scope == "static":
        raise ValueError(f"recipe {options.recipe.name!r} has a static scale: pass input_amax=")
    else:
        scale = _expert_scale(x_RK, offsets, operand, rht=None)
    rows = x_RK.shape[0]
    by_row = _of_rows(scale, offsets, rows)
    return quantizer.quantize_values(operand, x_RK, by_row, options.generator), scale


def weight_values(w_ENK: Tensor, options: Options) -> tuple[Tensor, GlobalScale]:
    """FP16 values [E*N, K] of all experts' weights, and their global scales [E]."""
    experts, n, k = w_ENK.shape
    flat = w_ENK.contiguous().view(experts * n, k)
    offsets = torch.arange(experts + 1, device=w_ENK.device) * n
    operand = options.recipe.weight
    scale = _expert_scale(flat, offsets, operand, rht=None)
    by_row = GlobalScale(*(t.repeat_interleave(n) for t in _three(scale)))
    return quantizer.quantize_values(operand, flat, by_row), scale


def along_rows_values(
    x_RC: Tensor, offsets: Tensor, options: Options, operand: OperandRecipe
) -> tuple[Tensor, GlobalScale]:
    """FP16 values of x quantized along rows, in x's own layout, and the experts' scales.

    They are [E] or, where the recipe takes an amax a token, one for each column of x: [E, C].
    """
    x_RC = x_RC.contiguous()
    rows, columns = x_RC.shape
    rht = hadamard_matrix(x_RC.device).to(x_RC.dtype) if options.recipe.rht_wgrad else None
    per_column = operand.amax_scope == "token"
    if per_column:
        scale = _column_scale(x_RC, offsets, operand, rht)
    else:
        scale = _expert_scale(x_RC, offsets, operand, rht=rht, along_rows=True)
    block = torch.arange(rows // 16, device=x_RC.device) * 16
    expert = torch.searchsorted(offsets, block, right=True) - 1
    expert = expert.clamp_(max=offsets.numel() - 2).to(torch.int32)
    out = torch.empty(rows, columns, dtype=torch.float16, device=x_RC.device)
    grid = (rows // 16, triton.cdiv(columns, quantize_configs.ALONG_TOKENS_COLUMNS))
    _along_rows_kernel[grid](
        x_RC,
        x_RC if rht is None else rht,
        out,
        scale.amax,
        scale.encode,
        scale.decode,
        expert,
        quantizer._seed(operand, x_RC, options.generator),
        columns,
        PER_COLUMN=per_column,
        NAN_SPREADS=operand.nan_amax == "propagate",
        RHT=rht is not None,
        BC=quantize_configs.ALONG_TOKENS_COLUMNS,
        RECIPE=quantizer.recipe_constants(operand, x_RC.dtype),
        num_warps=quantize_configs.ALONG_TOKENS_NUM_WARPS,
        **quantizer.unfused(),
    )
    return out, scale


def _expert_scale(
    x_RC: Tensor,
    offsets: Tensor,
    operand: OperandRecipe,
    *,
    rht: Tensor | None,
    along_rows: bool = False,
) -> GlobalScale:
    """Global scales [E] of the experts' rows (multiples of 16), transformed first if asked."""
    rows, columns = x_RC.shape
    part = torch.empty(rows // 16, dtype=torch.float32, device=x_RC.device)
    amax = torch.empty(offsets.numel() - 1, dtype=torch.float32, device=x_RC.device)
    spreads = operand.nan_amax == "propagate"
    if along_rows:
        _along_rows_amax_kernel[(rows // 16,)](
            x_RC,
            x_RC if rht is None else rht,
            part,
            columns,
            NAN_SPREADS=spreads,
            RHT=rht is not None,
            BC=quantize_configs.ALONG_TOKENS_COLUMNS,
        )
    else:
        _row_amax_kernel[(rows // 16,)](
            x_RC, part, rows, columns, NAN_SPREADS=spreads, BR=16, BC=256
        )
    _expert_amax_kernel[(amax.numel(),)](part, offsets, amax, PER=16, BLOCK=256)
    return quantize_ref.global_scale_of_amax(operand, amax, x_RC.dtype)


def _column_scale(
    x_RC: Tensor, offsets: Tensor, operand: OperandRecipe, rht: Tensor | None
) -> GlobalScale:
    """Global scales [E, C] of each column over its expert's rows (multiples of 16)."""
    experts, columns = offsets.numel() - 1, x_RC.shape[1]
    amax = torch.empty(experts, columns, dtype=torch.float32, device=x_RC.device)
    _column_amax_kernel[(experts, triton.cdiv(columns, 128))](
        x_RC,
        x_RC if rht is None else rht,
        offsets,
        amax,
        columns,
        NAN_SPREADS=operand.nan_amax == "propagate",
        RHT=rht is not None,
        BC=128,
    )
    return quantize_ref.global_scale_of_amax(operand, amax, x_RC.dtype)


def _three(scale: GlobalScale) -> tuple[Tensor, Tensor, Tensor]:
    return scale.amax, scale.encode, scale.decode


def _of_rows(scale: GlobalScale, offsets: Tensor, rows: int) -> GlobalScale:
    """Scales [R] of each row's expert; padding rows take the last expert's."""
    row = torch.arange(rows, device=offsets.device)
    expert = (torch.searchsorted(offsets, row, right=True) - 1).clamp_(max=offsets.numel() - 2)
    return GlobalScale(*(t[expert] for t in _three(scale)))


def _statistic(scale: GlobalScale, recipe: GemmRecipe) -> Tensor:
    names = {
        "amax": scale.amax,
        "global_encode_scale": scale.encode,
        "global_decode_scale": scale.decode,
    }
    return names[dense.STATISTICS[recipe.alpha]]


def _epilogue(options: Options, a: OperandRecipe, b: OperandRecipe) -> tuple[Any, ...]:
    factor = 36.0 * a.e4m3_max * b.e4m3_max
    inverse = float(torch.div(torch.ones(()), torch.tensor(factor)))
    recipe = options.recipe.gemm
    return str(recipe.alpha), factor, inverse, recipe.output == "twice", "none"


def _rows_gemm(
    a_RK: Tensor,
    a_scale: GlobalScale,
    b: Tensor,
    b_scale: GlobalScale,
    offsets: Tensor,
    options: Options,
    operand: OperandRecipe,
    out_dtype: torch.dtype,
    per_row: bool,
    *,
    b_by_rows: bool,
) -> Tensor:
    """[R, N] with b [E*N, K] or, by rows, [E*K, N]; rows of no expert are zero."""
    rows, k = a_RK.shape
    experts = offsets.numel() - 1
    n = b.shape[1] if b_by_rows else b.shape[0] // experts
    choose = configs.grouped_decoded_config if experts > 1 else configs.decoded_config
    config = choose(out_dtype == torch.float32)
    out = torch.empty(rows, n, dtype=out_dtype, device=a_RK.device)
    _zero_tail_kernel[(rows // 16,)](out, offsets, experts, n, BC=256)
    listed = tiles(offsets, rows, config.rows)
    count = listed.expert.numel() * triton.cdiv(n, config.columns)
    programs = dense.programs(out.device)
    block = [config.k, config.columns] if b_by_rows else [config.columns, config.k]
    _rows_gemm_kernel[(min(programs, count),)](
        TensorDescriptor.from_tensor(a_RK, [config.rows, config.k]),
        TensorDescriptor.from_tensor(b, block),
        out,
        _statistic(a_scale, options.recipe.gemm),
        _statistic(b_scale, options.recipe.gemm),
        listed.expert,
        listed.row,
        offsets,
        tiles=count,
        N=n,
        K=k,
        BM=config.rows,
        BN=config.columns,
        BK=config.k,
        PROGRAMS=programs,
        GROUP=configs.GROUP_ROWS,
        A_PER_ROW=per_row,
        B_BY_ROWS=b_by_rows,
        SPLIT=config.split_store,
        EPILOGUE=_epilogue(options, operand, options.recipe.weight),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **quantizer.unfused(),
    )
    return out


__all__ = ["ALIGNMENT", "data_gradient", "forward", "weight_gradient"]
