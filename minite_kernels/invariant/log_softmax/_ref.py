"""Reference log-softmax with the library's own exp and log."""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.invariant.elementary import log, softmax_parts


def log_softmax(logits_TV: Tensor) -> Tensor:
    """FP32 [T, V]."""
    x = logits_TV.to(torch.float32)
    _, total = softmax_parts(x)
    return (x - x.amax(-1, keepdim=True)) - log(total)
