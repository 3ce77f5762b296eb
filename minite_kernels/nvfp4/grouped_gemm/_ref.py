"""Reference grouped GEMM: one dense reference GEMM for each expert that has rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


def grouped_gemm(
    a: Nvfp4Tensor, b: Sequence[PreparedOperand], offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """[R, N]: rows offsets[e]:offsets[e + 1] of a times b[e]."""
    out = torch.empty(a.shape[0], b[0].q.shape[0], dtype=out_dtype, device=a.device)
    bounds = offsets.tolist()
    for operand, (start, stop) in zip(b, itertools.pairwise(bounds), strict=True):
        if stop > start:
            rows = a.rows(slice(start, stop))
            out[start:stop] = gemm(rows, operand, out_dtype=out_dtype, impl="ref")
    return out
