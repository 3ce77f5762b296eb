"""The 16-point random Hadamard transform that Transformer Engine applies to wgrad operands.

Knows one fixed sign vector; no recipe. Invariant: the transform is orthogonal, so the product of
two transformed operands is, in exact arithmetic, the product of the operands.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

from minite_kernels.nvfp4.format import BLOCK_SIZE

#: Transformer Engine's fixed signs, ``get_wgrad_sign_vector``.
SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.cache
def hadamard_matrix(device: torch.device | None = None) -> Tensor:
    """Return diag(signs) @ H16 / 4, Sylvester order: FP64 [16, 16], entries +-0.25."""
    h = torch.ones(1, 1, dtype=torch.float64, device=device)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return torch.tensor(SIGNS, dtype=torch.float64, device=device)[:, None] * h * 0.25


def random_hadamard_transform(x_MK: Tensor) -> Tensor:
    """Transform each 16 columns of x [M, K] (K % 16 == 0): same dtype, rounded once from FP32.

    Sums in FP64 and rounds to FP32 first, which equals an FP32 sum of the 16 products except where
    that sum would round; a tensor core's order is not specified there. Raises ValueError on K.
    """
    if x_MK.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"the transform takes K % 16 == 0, got K={x_MK.shape[-1]}; pad with zeros")
    blocks = x_MK.reshape(-1, BLOCK_SIZE).to(torch.float64)
    out = (blocks @ hadamard_matrix(x_MK.device)).to(torch.float32)
    return out.to(x_MK.dtype).reshape(x_MK.shape)
