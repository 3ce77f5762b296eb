"""Mixture of experts in W4A4: route tokens to experts, multiply each expert's rows, combine.

Shapes: T tokens, S slots a token (top-k), R = T*S routed rows sorted by expert, E experts, [N, K]
weights. Invariant: a row's bits depend on its token and its experts alone, not on which other
tokens an expert got, except through a per-expert amax that the recipe asks for; and a token's
slots are summed in slot order, whatever the routing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.grouped_gemm.operand import ExpertOperands
from minite_kernels.nvfp4.quantize import amax_of, quantize
from minite_kernels.nvfp4.recipe import Recipe, Role, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

__all__ = [
    "ExpertOperands",
    "Routing",
    "combine",
    "gather",
    "grouped_gemm",
    "quantize_grouped",
    "route",
]


@dataclass(frozen=True, eq=False, slots=True)
class Routing:
    """Tokens' slots sorted by expert, stably.

    ``order`` int64 [R] holds flat slots t*S + s; ``offsets`` int64 [E + 1]: expert e owns rows
    offsets[e]:offsets[e + 1].
    """

    order: Tensor
    offsets: Tensor
    slots: int

    @property
    def num_experts(self) -> int:
        """Number of experts, with or without tokens."""
        return self.offsets.numel() - 1


def route(topk_ids_TS: Tensor, num_experts: int) -> Routing:
    """Sort slots by expert, keeping token order within an expert; ids are integers [T, S].

    Raises ValueError for an id outside of [0, num_experts).
    """
    flat = topk_ids_TS.reshape(-1).to(torch.int64)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(
            f"expert ids must be in [0, {num_experts}), got {flat.min()}..{flat.max()}"
        )
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Routing(order=order, offsets=offsets, slots=topk_ids_TS.shape[1])


def gather(x_TK: Tensor, routing: Routing) -> Tensor:
    """Rows of x in routed order: [R, K]."""
    return x_TK[routing.order // routing.slots]


def quantize_grouped(
    x_RK: Tensor,
    offsets: Tensor,
    recipe: Recipe | str,
    *,
    role: Role = "activation",
    amax: Tensor | None = None,
    impl: Impl = "auto",
    generator: torch.Generator | None = None,
) -> Nvfp4Tensor:
    """Quantize routed rows [R, K], each expert's on their own, as TE does: amax [R] in the result.

    The amax is each row's own for per-token recipes and otherwise that of its expert's rows;
    ``amax`` FP32 [E] gives it for static recipes. A 16x16 tile must not straddle experts, so such
    recipes are refused for grouped activations.
    """
    recipe = get_recipe(recipe)
    operand = recipe.operand(role)
    if operand.tile[0] > 1:
        raise ValueError(
            f"recipe {recipe.name!r} tiles {role} rows 16x16; routed rows have no tiles"
        )
    if operand.amax_scope != "token":
        if amax is None and operand.amax_scope == "static":
            raise ValueError(f"recipe {recipe.name!r} has static scales: pass amax=, one an expert")
        rows = amax_per_expert(x_RK, offsets, recipe, role) if amax is None else amax
        amax = rows[expert_of_row(offsets, x_RK.shape[0])]
    if amax is not None and amax.numel() == 1:
        amax = amax.reshape(())
    return quantize(x_RK, recipe, role=role, amax=amax, impl=impl, generator=generator)


def amax_per_expert(x_RK: Tensor, offsets: Tensor, recipe: Recipe, role: Role) -> Tensor:
    """FP32 [E]: amax of each expert's rows, 0 for an expert without tokens."""
    bounds = offsets.tolist()
    spans = itertools.pairwise(bounds)
    tensor_scope = [amax_of(x_RK[start:stop], recipe, role=role) for start, stop in spans]
    return torch.stack(tensor_scope)


def expert_of_row(offsets: Tensor, rows: int) -> Tensor:
    """int64 [R]: the expert that owns each routed row."""
    row = torch.arange(rows, device=offsets.device)
    return torch.searchsorted(offsets, row, right=True) - 1


def grouped_gemm(
    a: Nvfp4Tensor,
    b: Sequence[Nvfp4Tensor | PreparedOperand] | ExpertOperands,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply each expert's rows of a [R, K] by its b[e] [N, K]: [R, N], rows as in a.

    With ``rows`` (int64 [R]) routed row r is a's row rows[r]: tokens quantized once (a per-token
    recipe) need no gathered copy. ``b`` may be ``ExpertOperands``, which keep their layouts.

    Promise: the bits of ``gemm`` of that expert's rows alone, for any split of rows over experts.
    Raises ValueError if the number of operands does not fit ``offsets``.
    """
    if offsets.numel() != len(b) + 1:
        raise ValueError(f"{len(b)} experts need {len(b) + 1} offsets, got {offsets.numel()}")
    experts = b if isinstance(b, ExpertOperands) else ExpertOperands(b)
    module = select("grouped_gemm", __name__, impl, a.device)
    out: Tensor = module.grouped_gemm(a, experts, offsets, out_dtype, rows)
    return out


def combine(
    y_RN: Tensor,
    routing: Routing,
    topk_weights_TS: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Weighted sum of each token's expert outputs: [T, N], FP32 in slot order, one final cast.

    Promise: out[t] = ((w0*y0 + w1*y1) + w2*y2) + ... with each operation rounded to FP32,
    independent of the experts' order and of other tokens.
    """
    needs_grad = torch.is_grad_enabled() and (y_RN.requires_grad or topk_weights_TS.requires_grad)
    limits = {"triton": "it has no backward" if needs_grad else None}
    module = select("combine", __name__, impl, y_RN.device, limits)
    out: Tensor = module.combine(y_RN, routing.order, topk_weights_TS, out_dtype or y_RN.dtype)
    return out
