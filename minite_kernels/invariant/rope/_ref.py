"""Reference rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x_THD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, round_each: bool) -> Tensor:
    """[T, H, D], rotated in FP32."""
    rotated = 2 * cos.shape[1]
    x, rest = x_THD[..., :rotated], x_THD[..., rotated:]
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
    first, second = first.to(torch.float32), second.to(torch.float32)

    def rounded(value: Tensor) -> Tensor:
        return value.to(x_THD.dtype).to(torch.float32) if round_each else value

    cos, sin = rounded(cos)[:, None, :], rounded(sin)[:, None, :]
    left = rounded(first * cos) - rounded(second * sin)
    right = rounded(second * cos) + rounded(first * sin)
    left, right = left.to(x_THD.dtype), right.to(x_THD.dtype)
    out = (
        torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)
    )
    return torch.cat((out, rest), -1)
