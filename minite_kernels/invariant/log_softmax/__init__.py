"""Log-softmax over the last dim in FP32, whole rows or the chosen tokens only.

Promise: a row's bits depend on that row alone; ``ref`` and ``triton`` give the same bits up to
the FP64 sum's order (see ``rms_norm``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select

__all__ = ["log_softmax", "token_logprobs"]


def log_softmax(logits: Tensor, *, impl: Impl = "auto") -> Tensor:
    """(x - max) - log(sum(exp(x - max))) over the last dim: FP32, same shape."""
    module = select("log_softmax", __name__, impl, logits.device)
    flat = logits.reshape(-1, logits.shape[-1])
    out: Tensor = module.log_softmax(flat)
    return out.reshape(logits.shape)


def token_logprobs(logits_TV: Tensor, token_ids_T: Tensor, *, impl: Impl = "auto") -> Tensor:
    """FP32 [T]: log-probability of one token id a row; the bits of ``log_softmax`` gathered."""
    out = log_softmax(logits_TV, impl=impl)
    return torch.gather(out, 1, token_ids_T.to(torch.int64)[:, None])[:, 0]
