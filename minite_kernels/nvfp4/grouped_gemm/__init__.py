"""Mixture of experts in W4A4: route tokens to experts, multiply each expert's rows, combine.

Shapes: T tokens, S slots a token (top-k), R = T*S routed rows sorted by expert, E experts, [N, K]
weights. Invariant: a row's bits depend on its token and its experts alone, not on which other
tokens an expert got, except through a per-expert amax that the recipe asks for; and a token's
slots are summed in slot order, whatever the routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, beyond_device, select
from minite_kernels.nvfp4.gemm import DEQUANTIZED, HOPPER
from minite_kernels.nvfp4.gemm.operand import PreparedOperand
from minite_kernels.nvfp4.grouped_gemm.operand import ExpertOperands
from minite_kernels.nvfp4.quantize import decoded_values, quantize
from minite_kernels.nvfp4.recipe import Recipe, Role, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

__all__ = [
    "ExpertOperands",
    "Routing",
    "combine",
    "combine_slots",
    "experts_linear",
    "gather",
    "grouped_gemm",
    "quantize_grouped",
    "route",
]


@dataclass(frozen=True, eq=False, slots=True)
class Routing:
    """Tokens' slots sorted by expert, stably.

    ``order`` int64 [R] holds flat slots t*S + s, -1 for a padding row; ``place`` int64 [T*S] the
    row of each flat slot; ``offsets`` int64 [E + 1]: expert e owns rows offsets[e]:offsets[e + 1].
    """

    order: Tensor
    place: Tensor
    offsets: Tensor
    slots: int

    @property
    def num_experts(self) -> int:
        """Number of experts, with or without tokens."""
        return self.offsets.numel() - 1


def route(topk_ids_TS: Tensor, num_experts: int, *, align: int = 1) -> Routing:
    """Sort slots by expert, keeping token order within an expert; ids are integers [T, S].

    With ``align`` every expert's rows start at a multiple of it and padding rows fill up; R then
    depends on T, S and E alone, so that nothing waits for the device. Raises ValueError (on CUDA:
    a device assertion) for an id outside of [0, num_experts).
    """
    flat = topk_ids_TS.reshape(-1).to(torch.int64)
    _check_ids(flat, num_experts)
    sorted_slots = torch.argsort(flat, stable=True)
    # Not bincount: it waits for the device to learn its own size.
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + align - 1) // align * align
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    if align == 1:
        place = torch.empty_like(sorted_slots)
        place[sorted_slots] = torch.arange(flat.numel(), device=flat.device)
        return Routing(sorted_slots, place, offsets, topk_ids_TS.shape[1])
    rows = flat.numel() + num_experts * (align - 1)
    rows = -(-rows // align) * align
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    expert = flat[sorted_slots]
    row = offsets[expert] + torch.arange(flat.numel(), device=flat.device) - start[expert]
    order = torch.full((rows,), -1, dtype=torch.int64, device=flat.device)
    order[row] = sorted_slots
    place = torch.empty_like(sorted_slots)
    place[sorted_slots] = row
    return Routing(order, place, offsets, topk_ids_TS.shape[1])


def _check_ids(flat: Tensor, num_experts: int) -> None:
    if flat.is_cuda:
        torch._assert_async(((flat >= 0) & (flat < num_experts)).all())
    elif flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(
            f"expert ids must be in [0, {num_experts}), got {flat.min()}..{flat.max()}"
        )


def gather(x_TK: Tensor, routing: Routing, *, impl: Impl = "auto") -> Tensor:
    """Rows of x in routed order, zeros in padding rows: [R, K]. Differentiable, in slot order."""
    out: Tensor = _Gather.apply(x_TK, routing, impl)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, routing: Routing, impl: Impl) -> Tensor:
        ctx.routing, ctx.impl = routing, impl
        module = select("gather", __name__, impl, x_TK.device)
        out: Tensor = module.gather(x_TK, routing.order, routing.slots)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        routing = ctx.routing
        ones = torch.ones(
            routing.place.numel() // routing.slots, routing.slots, device=routing.place.device
        )
        return combine(gradients[0], routing, ones, impl=ctx.impl), None, None


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
        rows = amax_per_expert(x_RK, offsets, recipe, role, impl=impl) if amax is None else amax
        amax = rows[expert_of_row(offsets, x_RK.shape[0])]
    if amax is not None and amax.numel() == 1:
        amax = amax.reshape(())
    return quantize(x_RK, recipe, role=role, amax=amax, impl=impl, generator=generator)


def amax_per_expert(
    x_RK: Tensor, offsets: Tensor, recipe: Recipe | str, role: Role, *, impl: Impl = "auto"
) -> Tensor:
    """FP32 [E]: amax of each expert's rows, 0 for an expert without tokens."""
    module = select("amax_per_expert", __name__, impl, x_RK.device)
    out: Tensor = module.amax_per_expert(x_RK, offsets, get_recipe(recipe).operand(role))
    return out


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
    dequantized = a.recipe.gemm.operands == "dequantized"
    limits = {"triton": DEQUANTIZED if dequantized else beyond_device(a.device, HOPPER)}
    module = select("grouped_gemm", __name__, impl, a.device, limits)
    out: Tensor = module.grouped_gemm(a, experts, offsets, out_dtype, rows)
    return out


def experts_linear(
    x_MK: Tensor,
    b: ExpertOperands,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Quantize x per token and multiply routed rows by their experts: [R, N], by default x's dtype.

    ``rows`` as in ``grouped_gemm``. Promise: the bits of ``grouped_gemm(quantize(x), b, ...)``. For
    recipes with one amax an expert, route first and use ``quantize_grouped``: ValueError here.
    """
    recipe, dtype = b.first.recipe, out_dtype or x_MK.dtype
    if recipe.activation.amax_scope != "token":
        raise ValueError(f"recipe {recipe.name!r} scales activations by expert: quantize_grouped")
    limits = {"triton": beyond_device(x_MK.device, HOPPER)}
    module = select("experts_linear", __name__, impl, x_MK.device, limits)
    if module.__name__.endswith("_ref"):
        q = quantize(x_MK, recipe, impl="ref")
        return grouped_gemm(q, b, offsets, rows=rows, out_dtype=dtype, impl="ref")
    values, a = decoded_values(x_MK, recipe)
    out: Tensor = module.multiply(values, a, b, offsets, dtype, rows, overlap=True)
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
    out: Tensor = _Combine.apply(y_RN, topk_weights_TS, routing, out_dtype or y_RN.dtype, impl)
    return out


def combine_slots(y_TSN: Tensor, topk_weights_TS: Tensor | None = None) -> Tensor:
    """Sum of each token's slots that are already in place: FP32 [T, N] in ``combine``'s order.

    ``y_TSN`` is [T, S, N]; without ``topk_weights_TS`` the slots are weighted already. Promise: the
    bits of ``combine`` before its final cast, on every device; the sum is torch's elementwise ops.
    """
    y = y_TSN.to(torch.float32)
    if topk_weights_TS is not None:
        y = y * topk_weights_TS.to(torch.float32)[..., None]
    total = y[:, 0]
    for slot in range(1, y.shape[1]):
        total = total + y[:, slot]
    return total


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_RN: Tensor, weights_TS: Tensor, routing: Routing, dtype: torch.dtype, impl: Impl
    ) -> Tensor:
        ctx.routing, ctx.impl = routing, impl
        ctx.save_for_backward(y_RN, weights_TS)
        module = select("combine", __name__, impl, y_RN.device)
        out: Tensor = module.combine(y_RN, routing.place, weights_TS, dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_RN, weights_TS = ctx.saved_tensors
        module = select("combine", __name__, ctx.impl, y_RN.device)
        dy, dweights = module.combine_backward(gradients[0], y_RN, ctx.routing.place, weights_TS)
        return dy, dweights, None, None, None
