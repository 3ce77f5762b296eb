"""``rcp.approx.ftz.f32``: the GPU's approximate reciprocal, on any device, to the bit or not at all.

Must not approximate the approximation. On CUDA the instruction itself runs. Elsewhere the result
is the correctly rounded reciprocal plus a correction of -1, 0 or +1 ulp that was measured on an
H200 for all 2^23 mantissas (it is the same for every exponent), and stored in
``rcp_approx_sm90.xz``. Invariant: at 6.0 and at the eight E4M3 mantissas the correction is 0.
"""

from __future__ import annotations

import functools
import importlib.resources
import lzma

import torch
from torch import Tensor

from minite_kernels.nvfp4.format import FLOAT32_SMALLEST_NORMAL

_TABLE = "rcp_approx_sm90.xz"
_MANTISSA_MASK = 0x007FFFFF
#: Mantissas that are multiples of 2^20 are those of the E4M3 numbers (and of 6.0): exact.
_E4M3_MANTISSA_MASK = 0x000FFFFF


def flush(x: Tensor) -> Tensor:
    """Replace subnormal FP32 numbers by zero of the same sign, as ``.ftz`` does."""
    return torch.where(x.abs() < FLOAT32_SMALLEST_NORMAL, x * 0.0, x)


def rcp_approx(x: Tensor) -> Tensor:
    """``rcp.approx.ftz.f32`` of every FP32 element: same shape; subnormals in and out become 0.

    Raises RuntimeError off CUDA for a mantissa whose correction has not been measured.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"rcp_approx takes float32, got {x.dtype}")
    if x.is_cuda:
        from minite_kernels.nvfp4._reciprocal_triton import rcp_approx_device

        on_device: Tensor = rcp_approx_device(x)
        return on_device
    x = flush(x)
    exact = torch.reciprocal(x)
    mantissa = x.view(torch.int32) & _MANTISSA_MASK
    if bool(((mantissa & _E4M3_MANTISSA_MASK) == 0).all()):
        return flush(exact)
    correction = correction_ulps()[mantissa].to(torch.int32)
    correction = torch.where(exact.isfinite() & (exact != 0), correction, 0)
    return flush((exact.view(torch.int32) + correction).view(torch.float32))


@functools.cache
def correction_ulps() -> Tensor:
    """int8 [2^23]: ulps between ``rcp.approx`` and the rounded reciprocal, by mantissa of x."""
    resource = importlib.resources.files(__package__).joinpath(_TABLE)
    if not resource.is_file():
        raise RuntimeError(
            f"rcp.approx needs {_TABLE} for mantissas other than E4M3's; run on CUDA, pass a "
            "power-of-two global scale, or use a recipe with reciprocal='div'"
        )
    return unpack_corrections(lzma.decompress(resource.read_bytes()))


def pack_corrections(correction: Tensor) -> bytes:
    """Pack int8 corrections in {-1, 0, 1} five to a byte (base 3), compressed."""
    digits = torch.nn.functional.pad(correction + 1, (0, -correction.numel() % 5)).view(-1, 5)
    weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32)
    packed = (digits.to(torch.int32) * weights).sum(1).to(torch.uint8)
    return lzma.compress(packed.numpy().tobytes(), preset=9)


def unpack_corrections(packed: bytes, count: int = 1 << 23) -> Tensor:
    """Undo ``pack_corrections`` after decompression: int8 [count]."""
    bytes_ = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(torch.int32)
    weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32)
    digits = torch.div(bytes_[:, None], weights, rounding_mode="floor") % 3
    return digits.reshape(-1)[:count].to(torch.int8) - 1
