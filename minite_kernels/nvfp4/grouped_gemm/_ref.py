"""Reference grouped GEMM and combine: one dense reference GEMM an expert, sums slot by slot."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.grouped_gemm import combine_slots
from minite_kernels.nvfp4.grouped_gemm.operand import ExpertOperands
from minite_kernels.nvfp4.quantize._ref import max_magnitude
from minite_kernels.nvfp4.recipe import OperandRecipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


def grouped_gemm(
    a: Nvfp4Tensor,
    b: ExpertOperands,
    offsets: Tensor,
    out_dtype: torch.dtype,
    rows: Tensor | None,
) -> Tensor:
    """[R, N]: rows offsets[e]:offsets[e + 1] of a (or of a's rows ``rows``) times b[e]."""
    routed = a if rows is None else a.rows(rows)
    out = torch.empty(routed.shape[0], b.first.shape[0], dtype=out_dtype, device=a.device)
    bounds = offsets.tolist()
    if bounds[-1] != routed.shape[0]:
        raise ValueError(f"offsets end at {bounds[-1]} but there are {routed.shape[0]} rows")
    for operand, (start, stop) in zip(b, itertools.pairwise(bounds), strict=True):
        if stop > start:
            part = routed.rows(slice(start, stop))
            out[start:stop] = gemm(part, operand, out_dtype=out_dtype, impl="ref")
    return out


def amax_per_expert(x_RK: Tensor, offsets: Tensor, operand: OperandRecipe) -> Tensor:
    """FP32 [E]: one reduction an expert."""
    spans = itertools.pairwise(offsets.tolist())
    maxima = [max_magnitude(operand, x_RK[start:stop], (0, 1)) for start, stop in spans]
    return torch.stack(maxima)


def gather(x_TK: Tensor, order: Tensor, slots: int) -> Tensor:
    """[R, K]: the token of each routed row, zeros where order is -1."""
    rows = x_TK[order.clamp(min=0) // slots]
    return torch.where((order >= 0)[:, None], rows, torch.zeros_like(rows))


def combine(y_RN: Tensor, place: Tensor, weights_TS: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[T, N]: weighted sum in slot order."""
    by_slot = y_RN[place].view(*weights_TS.shape, y_RN.shape[1])
    return combine_slots(by_slot, weights_TS).to(out_dtype)


def combine_backward(
    dout_TN: Tensor, y_RN: Tensor, place: Tensor, weights_TS: Tensor
) -> tuple[Tensor, Tensor]:
    """(dY [R, N] in y's dtype, zeros in padding rows; dweights [T, S])."""
    tokens, slots = weights_TS.shape
    dout = dout_TN.to(torch.float32)
    scaled = dout[:, None, :] * weights_TS.to(torch.float32)[:, :, None]
    dy = torch.zeros_like(y_RN)
    dy[place] = scaled.view(tokens * slots, -1).to(y_RN.dtype)
    by_slot = y_RN[place].view(tokens, slots, -1).to(torch.float32)
    return dy, (by_slot * dout[:, None, :]).sum(-1).to(weights_TS.dtype)
