"""The peers: what a user would run instead, written plainly; none of it is the product.

``emulate_*`` follow the operations of vLLM's NVFP4 emulation; ``invariant_matmul`` the persistent
BF16 matmul of batch_invariant_ops (one 128x128 tile for every M).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


def emulate_torch(x: Tensor, encode: Tensor, w: Nvfp4Tensor) -> Tensor:
    """Torch emulation: fake-quantize x, dequantize w at every call, BF16 matmul."""
    q = quantize(x, "vllm-emulation", global_encode_scale=encode, impl="ref")
    return torch.matmul(dequantize(q, x.dtype), dequantize(w, x.dtype).t())


def emulate_invariant(x: Tensor, encode: Tensor, w: Nvfp4Tensor) -> Tensor:
    """Fused emulation kernels, then the batch-invariant BF16 matmul."""
    from minite_kernels.bench import _peers_triton as kernels

    fake: Tensor = kernels.fake_quantize(x, encode)
    weight: Tensor = kernels.dequantize_weight(w)
    out: Tensor = kernels.invariant_matmul(fake, weight)
    return out


def invariant_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Batch-invariant BF16 matmul: x [M, K], w [N, K]."""
    from minite_kernels.bench import _peers_triton as kernels

    out: Tensor = kernels.invariant_matmul(x, w)
    return out


def grouped_mm(x: Tensor, w_ENK: Tensor, ends: Tensor) -> Tensor:
    """Torch's grouped BF16 GEMM; ``ends`` int32 [E]."""
    grouped: Any = torch._grouped_mm
    out: Tensor = grouped(x, w_ENK.transpose(1, 2), offs=ends)
    return out
