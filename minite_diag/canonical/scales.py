"""One direction and one layout for scales: decode, linear, E2M1 zero without a sign.

Knows torch and the NVFP4 layout functions of minite_kernels. Invariant: after these functions
two engines that hold the same numbers hold the same bytes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from minite_diag.site import KINDS

ENCODE_KINDS: Final = {
    "weight_global_encode_scale": "weight_global_decode_scale",
    "act_global_encode_scale": "act_global_decode_scale",
}
"""Native kinds that hold the reciprocal of the public kind."""


def public_kind(kind: str) -> str:
    """The site kind of a native kind; raises KeyError for one that nobody declared."""
    if kind in KINDS:
        return kind
    return ENCODE_KINDS[kind]


def to_decode(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Turn an encode scale (2688/amax, FP32) into its decode scale by one FP32 division."""
    return tensor.float().reciprocal() if kind in ENCODE_KINDS else tensor


def unsigned_zero(codes: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 codes (uint8) with 0x8 (-0.0) turned into 0x0 in both nibbles."""
    packed = codes.numpy()
    low = ((packed & 0x0F) == 0x08).view(np.uint8) << 3
    high = ((packed & 0xF0) == 0x80).view(np.uint8) << 7
    return torch.from_numpy(packed ^ low ^ high)


def zero_blocks(codes: torch.Tensor) -> torch.Tensor | None:
    """Packed codes uint8 [..., K/2], zeros unsigned -> bool [..., K/16]: all 16 codes are zero.

    None where K is no multiple of 16.
    """
    if codes.dim() == 0 or codes.shape[-1] % 8:
        return None
    return torch.from_numpy(codes.contiguous().numpy().view(np.uint64) == 0)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes uint8 [..., K/2] -> one code per element uint8 [..., K], low nibble first."""
    return torch.stack((codes & 0x0F, codes >> 4), -1).flatten(-2)


def power_of_two_shift(ratio: float) -> int | None:
    """The exponent k if `ratio` is exactly 2**k, else None."""
    if ratio <= 0.0 or ratio != ratio or ratio == float("inf"):
        return None
    mantissa, exponent = torch.frexp(torch.tensor(ratio, dtype=torch.float64))
    return int(exponent) - 1 if float(mantissa) == 0.5 else None
