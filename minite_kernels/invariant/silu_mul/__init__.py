"""SwiGLU's gate: silu(gate) * up, from one [.., 2I] tensor (gate first, then up).

Promise: elementwise, so invariant; ``ref`` and ``triton`` give the same bits, because silu is a
fixed sequence of FP32 operations (``invariant.elementary``). Differentiable.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select

__all__ = ["silu_mul"]

Rounding = Literal["once", "twice"]


def silu_mul(gate_up: Tensor, *, rounding: Rounding = "twice", impl: Impl = "auto") -> Tensor:
    """Compute silu(gate) * up in FP32: [.., 2I] -> [.., I], same dtype.

    ``"twice"`` rounds silu(gate) to the dtype before the product (Hugging Face, vLLM's unfused op);
    ``"once"`` does not (kernels that fuse it with quantization). Raises ValueError on an odd width.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up must be equally wide, got {gate_up.shape[-1]} columns")
    out: Tensor = _SiluMul.apply(gate_up, rounding, impl)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, rounding: Rounding, impl: Impl) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.impl = impl
        module = select("silu_mul", __name__, impl, gate_up.device)
        out: Tensor = module.silu_mul(gate_up, rounding == "twice")
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        module = select("silu_mul_backward", __name__, ctx.impl, gate_up.device)
        out: Tensor = module.silu_mul_backward(gradients[0], gate_up)
        return out, None, None
