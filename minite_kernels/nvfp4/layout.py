"""Memory layouts of codes and block scales: nibble packing and the tiled scale layouts.

Moves bytes only; knows no arithmetic and no recipe. Invariant: ``unpack_codes(pack_codes(c)) == c``
and ``unswizzle_scale(swizzle_scale(s, ...), ...) == s``, byte for byte.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ScaleLayout = Literal["128x4", "8x4"]
_ROWS_IN_TILE: dict[str, int] = {"128x4": 128, "8x4": 8}


def pack_codes(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., K] two to a byte, [..., K/2]; element 2j goes to the LOW nibble.

    Raises ValueError if K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of codes: K={codes.shape[-1]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Unpack bytes [..., K/2] into codes [..., K], uint8 in 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def swizzle_scale(scale_MB: Tensor, layout: ScaleLayout = "128x4") -> Tensor:
    """Reorder one-byte block scales [M, B] into the tiled layout that block-scaled MMAs read.

    Rows are padded to 128 (or 8) and columns to 4, with zero bytes; the result is flat. 128x4 puts
    scale (m, b) at byte ((m//128 * B/4 + b//4) * 32 + m%32) * 16 + (m%128)//32 * 4 + b%4; 8x4 at
    ((m//8 * B/4 + b//4) * 8 + m%8) * 4 + b%4 (B the padded one).
    """
    rows = _rows_in_tile(layout)
    m, b = scale_MB.shape
    padded_m, padded_b = _round_up(m, rows), _round_up(b, 4)
    bytes_ = torch.zeros(padded_m, padded_b, dtype=torch.uint8, device=scale_MB.device)
    bytes_[:m, :b] = scale_MB.view(torch.uint8)
    tiles = bytes_.view(padded_m // rows, rows, padded_b // 4, 4)
    if layout == "128x4":
        tiles = tiles.view(padded_m // 128, 4, 32, padded_b // 4, 4).permute(0, 3, 2, 1, 4)
    else:
        tiles = tiles.permute(0, 2, 1, 3)
    return tiles.reshape(-1).view(scale_MB.dtype)


def unswizzle_scale(
    swizzled: Tensor, shape: tuple[int, int], layout: ScaleLayout = "128x4"
) -> Tensor:
    """Undo ``swizzle_scale``: the flat (or any-shaped) tiled bytes back to [M, B] = ``shape``.

    Raises ValueError if the number of bytes does not fit the padded shape.
    """
    rows = _rows_in_tile(layout)
    m, b = shape
    padded_m, padded_b = _round_up(m, rows), _round_up(b, 4)
    if swizzled.numel() != padded_m * padded_b:
        raise ValueError(
            f"{layout} scales of shape {shape} take {padded_m * padded_b} bytes, "
            f"got {swizzled.numel()}"
        )
    bytes_ = swizzled.contiguous().view(torch.uint8).reshape(-1)
    if layout == "128x4":
        tiles = bytes_.view(padded_m // 128, padded_b // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    else:
        tiles = bytes_.view(padded_m // 8, padded_b // 4, 8, 4).permute(0, 2, 1, 3)
    linear = tiles.reshape(padded_m, padded_b)[:m, :b]
    return linear.contiguous().view(swizzled.dtype)


def _rows_in_tile(layout: str) -> int:
    if layout not in _ROWS_IN_TILE:
        raise ValueError(f"unknown scale layout {layout!r}; one of {sorted(_ROWS_IN_TILE)}")
    return _ROWS_IN_TILE[layout]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
