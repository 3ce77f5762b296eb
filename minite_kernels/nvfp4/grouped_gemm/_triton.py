"""Triton grouped GEMM: the dense kernels of ``gemm._triton`` on tiles listed by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minite_kernels.nvfp4.gemm import _triton as dense
from minite_kernels.nvfp4.gemm import configs
from minite_kernels.nvfp4.gemm._epilogue import Epilogue
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.quantize._triton import unfused
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


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


class ExpertWeights:
    """All experts' layouts stacked for one launch; [E, ...] of each dense layout."""

    def __init__(self, b: Sequence[PreparedOperand]) -> None:
        self.first = b[0].q
        self._operands = list(b)
        self._layouts: dict[str, Tensor] = {}

    def statistic(self, name: str) -> Tensor:
        """FP32 [E] of one of the operands' global statistics."""
        return self._stacked(name, lambda operand: getattr(operand.q, name))

    def packed(self) -> tuple[Tensor, Tensor]:
        """Words and scales, [E, K/BK, N, ..]."""
        words = self._stacked("words", lambda operand: dense.packed_words(operand.q))
        return words, self._stacked("scales", lambda operand: dense.packed_scales(operand.q))

    def decoded(self) -> Tensor:
        """q*s in FP16 [E*N, K]."""
        stacked = self._stacked("decoded", lambda operand: dense.decode_values(operand.q))
        return stacked.flatten(0, 1)

    def _stacked(self, name: str, make) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        if name not in self._layouts:
            self._layouts[name] = torch.stack([make(operand) for operand in self._operands])
        return self._layouts[name]


def grouped_gemm(
    a: Nvfp4Tensor,
    b: Sequence[PreparedOperand] | ExpertWeights,
    offsets: Tensor,
    out_dtype: torch.dtype,
    rows: Tensor | None = None,
) -> Tensor:
    """[R, N]: routed rows times their experts' b; ``rows`` [R] names the row of a, if not r itself."""
    weights = b if isinstance(b, ExpertWeights) else ExpertWeights(b)
    routed = a.shape[0] if rows is None else rows.shape[0]
    return multiply(dense.decode_values(a), a, weights, offsets, out_dtype, routed, rows)


def multiply(
    values: Tensor,
    a: Nvfp4Tensor,
    weights: ExpertWeights,
    offsets: Tensor,
    out_dtype: torch.dtype,
    routed: int,
    rows: Tensor | None,
) -> Tensor:
    """[R, N] from a decoded in FP16; ``a`` gives the statistics of its rows."""
    n, k = weights.first.shape
    out = torch.empty(routed, n, dtype=out_dtype, device=values.device)
    if routed == 0:
        return out
    epilogue = Epilogue(a, weights.first, out_dtype)
    statistic = weights.statistic(dense.STATISTICS[epilogue.recipe.alpha])
    arguments = dense.epilogue_arguments(epilogue, statistic)
    per_expert = routed / (offsets.numel() - 1)
    if per_expert <= configs.GROUPED_DECODE_ROWS and configs.slice_columns(k) is not None:
        _launch_packed(values, weights, offsets, rows, out, arguments, per_expert)
    else:
        _launch_decoded(values, weights, offsets, rows, out, arguments)
    return out


def _launch_packed(values, weights, offsets, rows, out, arguments, per_expert) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    config = configs.packed_config(16 if per_expert <= 16 else 64)
    listed = tiles(offsets, out.shape[0], config.rows)
    words, scales = weights.packed()
    n, k = weights.first.shape
    dense._packed_kernel[(triton.cdiv(n, config.columns), listed.expert.numel())](
        values,
        words,
        scales,
        out,
        row_ptr=offsets if rows is None else rows,
        tile_expert_ptr=listed.expert,
        tile_row_ptr=listed.row,
        offsets_ptr=offsets,
        M=out.shape[0],
        N=n,
        K=k,
        stride_am=values.stride(0),
        BK=words.shape[-1] * 4,
        GROUPED=True,
        GATHER=rows is not None,
        **dense.packed_constants(config),
        **arguments,
        **unfused(),
    )


def _launch_decoded(values, weights, offsets, rows, out, arguments) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    config = configs.GROUPED_DECODED
    if rows is not None:
        values = values[rows]
        if arguments["A_PER_ROW"]:
            arguments = arguments | {"a_statistic_ptr": arguments["a_statistic_ptr"][rows]}
    listed = tiles(offsets, out.shape[0], config.rows)
    n, k = weights.first.shape
    count = listed.expert.numel() * triton.cdiv(n, config.columns)
    device = values.device
    dense._decoded_kernel[(min(dense.programs(device), count),)](
        TensorDescriptor.from_tensor(values, [config.rows, config.k]),
        TensorDescriptor.from_tensor(weights.decoded(), [config.columns, config.k]),
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
