"""Root-mean-square norm of each row, with the residual add that engines fuse into it.

Promise: the bits of a row depend on that row alone; ``ref`` and ``triton`` give the same bits (the
sum of squares is taken in FP64 and rounded to FP32 once: an order can show only where that sum lies
within FP64's error of a tie).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from minite_kernels.dispatch import Impl, select

__all__ = ["add_rms_norm", "rms_norm"]

WeightRounding = Literal["twice", "once"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_rounding: WeightRounding = "twice",
    impl: Impl = "auto",
) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dim, in FP32: same shape and dtype as x.

    ``"twice"`` rounds the normalized value to x's dtype before the weight, as Hugging Face and
    vLLM do; ``"once"`` rounds the product only.
    """
    module = select("rms_norm", __name__, impl, x.device)
    flat = x.reshape(-1, x.shape[-1])
    out, _ = module.rms_norm(flat, weight, eps, None, False, weight_rounding == "twice")
    return out.reshape(x.shape)  # type: ignore[no-any-return]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    normalize: Literal["rounded", "float32"] = "rounded",
    weight_rounding: WeightRounding = "twice",
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Add, then norm: (normed, x + residual), both in x's dtype.

    ``normalize="rounded"`` norms the stored sum, as Hugging Face does; ``"float32"`` norms the sum
    before it is rounded for storage, as vLLM's fused kernel does: the two split an engine pair.
    """
    module = select("rms_norm", __name__, impl, x.device)
    flat, other = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
    out, total = module.rms_norm(
        flat, weight, eps, other, normalize == "float32", weight_rounding == "twice"
    )
    return out.reshape(x.shape), total.reshape(x.shape)
