"""Gradients through aligned ops: the forward's bits are ours, the backward is the op's own.

The common ops compute without autograd where they are exact sums or Triton kernels. Knows autograd;
no model. Invariant: without a gradient to take, nothing but the op runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Op = Callable[..., torch.Tensor]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ours: Op, same_in_torch: Op, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.same_in_torch = same_in_torch
        ctx.save_for_backward(*inputs)
        return ours(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [
            saved.detach().requires_grad_(needed)
            for saved, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.same_in_torch(*inputs)
        sources = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(out, sources, gradients[0].to(out.dtype)))
        return (None, None, *(next(found) if needed else None for needed in wanted))


def with_gradient(ours: Op, same_in_torch: Op, *inputs: torch.Tensor) -> torch.Tensor:
    """`ours(*inputs)`, with the gradient of `same_in_torch(*inputs)`, the op in torch's functions.

    The backward computes the op once more from its inputs, which are what is kept for it.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return ours(*inputs)
    out: torch.Tensor = _WithGradient.apply(ours, same_in_torch, *inputs)
    return out
