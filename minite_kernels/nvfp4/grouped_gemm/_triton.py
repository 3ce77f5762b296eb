"""Triton grouped GEMM: the dense kernels of ``gemm._triton`` on tiles listed by expert."""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minite_kernels.nvfp4.gemm import _triton as dense
from minite_kernels.nvfp4.gemm import configs
from minite_kernels.nvfp4.gemm._epilogue import Epilogue
from minite_kernels.nvfp4.grouped_gemm.operand import ExpertOperands
from minite_kernels.nvfp4.quantize import _triton as quantizer
from minite_kernels.nvfp4.quantize._triton import unfused
from minite_kernels.nvfp4.recipe import OperandRecipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

_blocks = quantizer._blocks
_larger = quantizer._larger
_load_piece = quantizer._load_piece
_max_magnitude = quantizer._max_magnitude
_row_amax = quantizer._row_amax


@dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """Row tiles by expert: int32 ``expert`` (-1 for padding) and first ``row``; device resident."""

    expert: Tensor
    row: Tensor


@triton.jit
def _tiles_kernel(
    offsets_ptr, expert_ptr, row_ptr, E, T, BM: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr
):
    """List each expert's row tiles, experts ascending, then padding."""
    e = tl.arange(0, EP)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0)
    stop = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    count = tl.where(e < E, (stop - start + BM - 1) // BM, 0)
    end = tl.cumsum(count, 0)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    before = (end[None, :] <= t[:, None]) & (e < E)[None, :]
    expert = tl.sum(before.to(tl.int32), 1)
    mine = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(mine, (start - (end - count) * BM)[None, :], 0), 1)
    listed = (expert < E) & (t < T)
    tl.store(expert_ptr + t, tl.where(listed, expert, -1).to(tl.int32), mask=t < T)
    row = tl.where(listed, first + t * BM, 0)
    tl.store(row_ptr + t, row.to(tl.int32), mask=t < T)


def tiles(offsets: Tensor, rows: int, tile_rows: int) -> Tiles:
    """Tiles of ``tile_rows`` for R rows; their number depends on R and E alone, so nothing syncs."""
    experts = offsets.numel() - 1
    count = rows // tile_rows + min(experts, rows)
    out = torch.empty(2, count, dtype=torch.int32, device=offsets.device)
    _tiles_kernel[(triton.cdiv(count, 64),)](
        offsets,
        out[0],
        out[1],
        experts,
        count,
        BM=tile_rows,
        EP=triton.next_power_of_2(experts),
        BT=64,
    )
    return Tiles(out[0], out[1])


@triton.jit
def _row_amax_kernel(x_ptr, out_ptr, K, stride, NAN_SPREADS: tl.constexpr, BK: tl.constexpr):
    """Amax of one row."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    inside = rows >= 0
    x, b = _blocks(_load_piece(x_ptr, rows, inside, 0, K, stride, BK), 1, BK, NAN_SPREADS)
    amax = _row_amax(x, b, 0, K, True, NAN_SPREADS, BK)
    for column in range(BK, K, BK):
        x = _load_piece(x_ptr, rows, inside, column, K, stride, BK)
        x, b = _blocks(x, 1, BK, NAN_SPREADS)
        amax = _larger(amax, _row_amax(x, b, column, K, True, NAN_SPREADS, BK), NAN_SPREADS)
    tl.store(out_ptr + rows, amax)


@triton.jit
def _expert_amax_kernel(
    part_ptr, offsets_ptr, out_ptr, NAN_SPREADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Amax of one expert's rows from those of its rows; 0 without rows."""
    expert = tl.program_id(0)
    first = tl.load(offsets_ptr + expert).to(tl.int32)
    last = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    largest = tl.zeros((BLOCK,), tl.float32)
    known = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        part = tl.load(part_ptr + i, mask=i < last, other=0.0)
        largest = _larger(largest, part, NAN_SPREADS)
        known = tl.maximum(known, ((part == part) & (i < last)).to(tl.int32))
    amax = _max_magnitude(largest, 0, NAN_SPREADS)
    nothing_known = (tl.max(known, 0) == 0) & (last > first)
    tl.store(out_ptr + expert, tl.where(nothing_known, float("nan"), amax))


@triton.jit
def _combine_kernel(
    y_ptr, place_ptr, weight_ptr, out_ptr, N, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One token's slots, weighted and added in slot order."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(place_ptr + t * SLOTS + slot)
        weight = tl.load(weight_ptr + t * SLOTS + slot).to(tl.float32)
        term = tl.load(y_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32) * weight
        total = term if slot == 0 else total + term
    tl.store(out_ptr + t * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _combine_backward_kernel(
    dout_ptr,
    y_ptr,
    place_ptr,
    weight_ptr,
    dy_ptr,
    dweight_ptr,
    N,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot of one token: its rows of dY and its weight's gradient."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(place_ptr + slot)
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dout = tl.load(dout_ptr + (slot // SLOTS) * N + n, mask=n < N, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += dout * y
        tl.store(dy_ptr + row * N + n, (dout * weight).to(dy_ptr.dtype.element_ty), mask=n < N)
    tl.store(dweight_ptr + slot, tl.sum(total, 0))


@triton.jit
def _gather_kernel(x_ptr, order_ptr, out_ptr, K, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """One routed row, a piece of its columns."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order_ptr + row)
    inside = (k < K) & (slot >= 0)
    x = tl.load(x_ptr + (slot // SLOTS) * K + k, mask=inside, other=0.0)
    tl.store(out_ptr + row * K + k, x, mask=k < K)


def amax_per_expert(x_RK: Tensor, offsets: Tensor, operand: OperandRecipe) -> Tensor:
    """FP32 [E]: two launches, nothing waits for the device."""
    rows, k = x_RK.shape
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    part = torch.zeros(max(1, rows), dtype=torch.float32, device=x_RK.device)
    out = torch.empty(offsets.numel() - 1, dtype=torch.float32, device=x_RK.device)
    spreads = operand.nan_amax == "propagate"
    if rows:
        columns = min(2048, max(16, triton.next_power_of_2(k)))
        _row_amax_kernel[(rows,)](x_RK, part, k, x_RK.stride(0), NAN_SPREADS=spreads, BK=columns)
    _expert_amax_kernel[(out.numel(),)](part, offsets, out, NAN_SPREADS=spreads, BLOCK=256)
    return out


def gather(x_TK: Tensor, order: Tensor, slots: int) -> Tensor:
    """[R, K]: the token of each routed row, zeros where order is -1."""
    k = x_TK.shape[1]
    out = torch.empty(order.numel(), k, dtype=x_TK.dtype, device=x_TK.device)
    if out.numel():
        block = min(2048, triton.next_power_of_2(k))
        grid = (order.numel(), triton.cdiv(k, block))
        _gather_kernel[grid](x_TK.contiguous(), order, out, k, SLOTS=slots, BLOCK=block)
    return out


def combine(y_RN: Tensor, place: Tensor, weights_TS: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[T, N]: weighted sum in slot order, one read of y."""
    tokens, slots = weights_TS.shape
    n = y_RN.shape[1]
    out = torch.empty(tokens, n, dtype=out_dtype, device=y_RN.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(n))
        _combine_kernel[(tokens, triton.cdiv(n, block))](
            y_RN.contiguous(),
            place,
            weights_TS.contiguous(),
            out,
            n,
            SLOTS=slots,
            BLOCK=block,
            **unfused(),
        )
    return out


def combine_backward(
    dout_TN: Tensor, y_RN: Tensor, place: Tensor, weights_TS: Tensor
) -> tuple[Tensor, Tensor]:
    """(dY [R, N] in y's dtype, zeros in padding rows; dweights [T, S])."""
    n = y_RN.shape[1]
    dy = torch.zeros_like(y_RN)
    dweights = torch.empty_like(weights_TS, memory_format=torch.contiguous_format)
    if place.numel():
        _combine_backward_kernel[(place.numel(),)](
            dout_TN.contiguous(),
            y_RN.contiguous(),
            place,
            weights_TS.contiguous(),
            dy,
            dweights,
            n,
            SLOTS=weights_TS.shape[1],
            BLOCK=min(1024, triton.next_power_of_2(n)),
            **unfused(),
        )
    return dy, dweights


def grouped_gemm(
    a: Nvfp4Tensor,
    b: ExpertOperands,
    offsets: Tensor,
    out_dtype: torch.dtype,
    rows: Tensor | None,
) -> Tensor:
    """[R, N]: routed rows times their experts' b; ``rows`` [R] names the row of a, if not r itself."""
    return multiply(dense.decode_values(a), a, b, offsets, out_dtype, rows)


def reads_packed(routed: int, b: ExpertOperands) -> bool:
    """Whether so few rows an expert are multiplied that packed weights are read, not decoded ones."""
    few = routed / len(b) <= configs.GROUPED_DECODE_ROWS
    return few and configs.slice_columns(b.first.shape[1]) is not None


def multiply(
    values: Tensor,
    a: Nvfp4Tensor,
    b: ExpertOperands,
    offsets: Tensor,
    out_dtype: torch.dtype,
    rows: Tensor | None,
    *,
    overlap: bool = False,
) -> Tensor:
    """[R, N] from a decoded in FP16; ``a`` gives the statistics of its rows.

    ``overlap`` as in ``gemm._triton.multiply``; offsets and rows were there before that launch.
    """
    n = b.first.shape[0]
    routed = values.shape[0] if rows is None else rows.shape[0]
    out = torch.empty(routed, n, dtype=out_dtype, device=values.device)
    if routed == 0:
        return out
    epilogue = Epilogue(a, b.first, out_dtype)
    name = dense.STATISTICS[epilogue.recipe.alpha]
    statistic = b.stacked(name, lambda q: getattr(q, name))
    arguments = dense.epilogue_arguments(epilogue, statistic)
    if reads_packed(routed, b):
        config = configs.grouped_packed_config(routed / len(b), b.first.shape[1])
        launch_packed(values, b, offsets, rows, out, arguments, config, overlap)
    else:
        _launch_decoded(values, b, offsets, rows, out, arguments)
    return out


def launch_packed(
    values: Tensor,
    b: ExpertOperands,
    offsets: Tensor,
    rows: Tensor | None,
    out: Tensor,
    arguments: dict[str, Any],
    config: configs.PackedConfig,
    overlap: bool = False,
) -> None:
    """Run the grouped packed kernel into ``out``; it lists its own tiles, R and E bound them."""
    words = b.stacked("packed_words", dense.packed_words)
    scales = b.stacked("packed_scales", dense.packed_scales)
    n, k = b.first.shape
    routed, experts = out.shape[0], len(b)
    listed = routed // config.rows + min(experts, routed)
    dense._packed_kernel[(triton.cdiv(n, config.columns), listed)](
        values,
        words,
        scales,
        out,
        row_ptr=offsets if rows is None else rows,
        offsets_ptr=offsets,
        M=routed,
        N=n,
        K=k,
        E=experts,
        stride_am=values.stride(0),
        BK=words.shape[-1] * 4,
        EP=triton.next_power_of_2(experts),
        GROUPED=True,
        GATHER=rows is not None,
        **dense.packed_constants(config, overlap),
        **arguments,
        **unfused(),
    )


def _launch_decoded(
    values: Tensor,
    b: ExpertOperands,
    offsets: Tensor,
    rows: Tensor | None,
    out: Tensor,
    arguments: dict[str, Any],
) -> None:
    config = configs.grouped_decoded_config(out.element_size() > 2)
    if rows is not None:
        values = gather(values, rows, 1)
        if arguments["A_PER_ROW"]:
            arguments = arguments | {"a_statistic_ptr": arguments["a_statistic_ptr"][rows]}
    listed = tiles(offsets, out.shape[0], config.rows)
    n, k = b.first.shape[0], values.shape[1]
    count = listed.expert.numel() * triton.cdiv(n, config.columns)
    device = values.device
    decoded = b.stacked("decoded_fp16", dense.decode_values).flatten(0, 1)
    dense._decoded_kernel[(min(dense.programs(device), count),)](
        TensorDescriptor.from_tensor(values, [config.rows, config.k]),
        TensorDescriptor.from_tensor(decoded, [config.columns, config.k]),
        out,
        tile_expert_ptr=listed.expert,
        tile_row_ptr=listed.row,
        offsets_ptr=offsets,
        tiles=count,
        M=out.shape[0],
        N=n,
        K=k,
        GROUPED=True,
        **dense.decoded_constants(config, device),
        **arguments,
        **unfused(),
    )
