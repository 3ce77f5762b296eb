"""Reference grouped GEMM and combine: one dense reference GEMM an expert, sums slot by slot."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.grouped_gemm.operand import ExpertOperands
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


def gather(x_TK: Tensor, order: Tensor, slots: int) -> Tensor:
    """[R, K]: the token of each routed row, zeros where order is -1."""
    rows = x_TK[order.clamp(min=0) // slots]
    return torch.where((order >= 0)[:, None], rows, torch.zeros_like(rows))


def combine(y_RN: Tensor, place: Tensor, weights_TS: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[T, N]: weighted sum in slot order."""
    tokens, slots = weights_TS.shape
    by_slot = y_RN[place].view(tokens, slots, y_RN.shape[1])
    weights = weights_TS.to(torch.float32)
    total = by_slot[:, 0].to(torch.float32) * weights[:, :1]
    for slot in range(1, slots):
        total = total + by_slot[:, slot].to(torch.float32) * weights[:, slot : slot + 1]
    return total.to(out_dtype)


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
