"""Reference: one expert at a time, from the reference quantizer and GEMM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from minite_kernels.nvfp4.format import BLOCK_SIZE
from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.grouped_linear import Options
from minite_kernels.nvfp4.hadamard import random_hadamard_transform
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

Weight = list[Nvfp4Tensor]


def prepare_weight(w_ENK: Tensor, options: Options) -> Weight:
    """Quantize each expert's weight along K."""
    return [_quantize_weight(w_NK, options) for w_NK in w_ENK]


def _quantize_weight(w_NK: Tensor, options: Options) -> Nvfp4Tensor:
    return quantize(w_NK, options.recipe, role="weight", impl="ref")


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
    out = x_RK.new_zeros(x_RK.shape[0], w_ENK.shape[1], dtype=out_dtype)
    for expert, rows in _experts(offsets):
        amax = None if input_amax is None else input_amax.reshape(-1)[expert]
        x = quantize(x_RK[rows], options.recipe, amax=amax, impl="ref")
        w = prepared[expert] if prepared else _quantize_weight(w_ENK[expert], options)
        out[rows] = gemm(x, w, out_dtype=out_dtype, impl="ref")
    return out


def data_gradient(
    dy_RN: Tensor, w_ENK: Tensor, offsets: Tensor, options: Options, prepared: Weight | None
) -> Tensor:
    """[R, K]: dY W, both quantized along N; the prepared weight is quantized along K: no use here."""
    out = dy_RN.new_zeros(dy_RN.shape[0], w_ENK.shape[2])
    for expert, rows in _experts(offsets):
        dy = quantize(
            dy_RN[rows], options.recipe, role="gradient", impl="ref", generator=options.generator
        )
        w = _quantize_weight(w_ENK[expert].t().contiguous(), options)
        out[rows] = gemm(dy, w, out_dtype=dy_RN.dtype, impl="ref")
    return out


def weight_gradient(
    dy_RN: Tensor, x_RK: Tensor, offsets: Tensor, options: Options, out_dtype: torch.dtype
) -> Tensor:
    """[E, N, K]: dY^T X, both quantized along rows."""
    experts = offsets.numel() - 1
    shape = (experts, dy_RN.shape[1], x_RK.shape[1])
    out = torch.zeros(shape, dtype=out_dtype, device=x_RK.device)
    for expert, rows in _experts(offsets):
        dy = along_rows(dy_RN[rows], options, "gradient")
        x = along_rows(x_RK[rows], options, "activation")
        out[expert] = gemm(dy, x, out_dtype=torch.float32, impl="ref").to(out_dtype)
    return out


def along_rows(
    x_RK: Tensor, options: Options, role: Literal["activation", "gradient"]
) -> Nvfp4Tensor:
    """x^T [K, R'] quantized along rows (padded with zeros to whole blocks), RHT first if asked."""
    transposed = x_RK.t().contiguous()
    transposed = pad(transposed, (0, -transposed.shape[1] % BLOCK_SIZE))
    if options.recipe.rht_wgrad:
        transposed = random_hadamard_transform(transposed)
    amax = None
    if options.recipe.operand(role).amax_scope == "static":
        amax = transposed.abs().amax().to(torch.float32)
    return quantize(
        transposed,
        options.recipe,
        role=role,
        amax=amax,
        impl="ref",
        generator=options.generator,
    )


def _experts(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        if stop > start:
            yield expert, slice(start, stop)
