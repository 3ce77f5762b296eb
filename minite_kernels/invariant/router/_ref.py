"""Reference router: softmax with the library's exp, stable descending sort."""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.invariant.elementary import softmax_parts


def route_logits(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(weights [T, S], ids [T, S])."""
    numerator, total = softmax_parts(logits_TE.to(torch.float32))
    probability, order = torch.sort(
        torch.div(numerator, total), dim=-1, descending=True, stable=True
    )
    weights, ids = probability[:, :top_k], order[:, :top_k]
    if renormalize:
        chosen = weights[:, 0]
        for slot in range(1, top_k):
            chosen = chosen + weights[:, slot]
        weights = torch.div(weights, chosen[:, None])
    return weights.contiguous(), ids.contiguous()
