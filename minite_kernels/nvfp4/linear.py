"""``Nvfp4Linear`` and ``Nvfp4Experts``: autograd modules that train as Transformer Engine does.

Composes quantizers and GEMMs; contains no arithmetic of its own. Each of the three GEMMs of a
layer quantizes both operands along its own contraction:

    forward  Y  = X  W^T    X along K (activation), W along K (weight)
    dgrad    dX = dY W      dY along N (gradient),  W^T along N (weight; a 16x16 tile transposes)
    wgrad    dW = dY^T X    dY^T and X^T along T, both after the RHT if the recipe has it

``backward`` says what the gradients are of: ``recipe`` quantizes as above; ``high_precision`` uses
the original X and W in FP32; ``dequantized`` uses the forward's quantized X and W, dequantized.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minite_kernels.dispatch import Impl
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4.format import BLOCK_SIZE
from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.grouped_gemm import combine, gather, grouped_gemm, quantize_grouped, route
from minite_kernels.nvfp4.hadamard import random_hadamard_transform
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.recipe import Recipe, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

Backward = Literal["recipe", "high_precision", "dequantized"]


@dataclass(frozen=True)
class LinearOptions:
    """What one layer's multiplications share. ``generator`` seeds stochastic rounding."""

    recipe: Recipe
    backward: Backward = "recipe"
    impl: Impl = "auto"
    generator: torch.Generator | None = None


def wgrad_operand(
    x_TK: Tensor, options: LinearOptions, role: Literal["activation", "gradient"]
) -> Nvfp4Tensor:
    """Quantize x [T, K] along tokens for the weight gradient: an ``Nvfp4Tensor`` [K, T']."""
    transposed = x_TK.t().contiguous()
    transposed = nn.functional.pad(transposed, (0, -transposed.shape[1] % BLOCK_SIZE))
    if options.recipe.rht_wgrad:
        transposed = random_hadamard_transform(transposed)
    operand = options.recipe.operand(role)
    amax = None
    if operand.amax_scope == "static":
        amax = transposed.abs().amax().to(torch.float32)
    return quantize(
        transposed,
        options.recipe,
        role=role,
        amax=amax,
        impl=options.impl,
        generator=options.generator,
    )


def data_gradient(dy_TN: Tensor, w_NK: Tensor, options: LinearOptions) -> Tensor:
    """Compute dX [T, K] = dY W in the dtype of dY, both operands quantized along N."""
    dy = quantize(
        dy_TN, options.recipe, role="gradient", impl=options.impl, generator=options.generator
    )
    w = quantize(w_NK.t().contiguous(), options.recipe, role="weight", impl=options.impl)
    return gemm(dy, w, out_dtype=dy_TN.dtype, impl=options.impl)


def weight_gradient(dy_TN: Tensor, x_TK: Tensor, options: LinearOptions) -> Tensor:
    """Compute dW [N, K] = dY^T X in FP32, both operands quantized along tokens."""
    dy = wgrad_operand(dy_TN, options, "gradient")
    x = wgrad_operand(x_TK, options, "activation")
    return gemm(dy, x, out_dtype=torch.float32, impl=options.impl)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        w_NK: Tensor,
        bias: Tensor | None,
        input_amax: Tensor | None,
        options: LinearOptions,
    ) -> Tensor:
        x = quantize(x_TK, options.recipe, amax=input_amax, impl=options.impl)
        w = quantize(w_NK, options.recipe, role="weight", impl=options.impl)
        ctx.options = options
        ctx.has_bias = bias is not None
        ctx.save_for_backward(*_kept(x_TK, w_NK, x, w, options))
        return gemm(x, w, out_dtype=x_TK.dtype, bias=bias, impl=options.impl)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dw = _backward(dy, x, w, ctx.options, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        db = dy.to(torch.float32).sum(0).to(dy.dtype) if ctx.has_bias else None
        return dx, dw, db, None, None


def _kept(
    x_TK: Tensor, w_NK: Tensor, x: Nvfp4Tensor, w: Nvfp4Tensor, options: LinearOptions
) -> tuple[Tensor, Tensor]:
    """The X and W of which the backward takes gradients."""
    if options.backward == "dequantized":
        return dequantize(x, x_TK.dtype), dequantize(w, w_NK.dtype)
    return x_TK, w_NK


def _backward(
    dy: Tensor, x: Tensor, w: Tensor, options: LinearOptions, want_dx: bool, want_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX in the dtype of x and dW in the dtype of w, or None where not wanted."""
    dx = dw = None
    if options.backward == "recipe":
        if want_dx:
            dx = data_gradient(dy, w, options)
        if want_dw:
            dw = weight_gradient(dy, x, options).to(w.dtype)
        return dx, dw
    if want_dx:
        dx = torch.mm(dy.to(torch.float32), w.to(torch.float32)).to(x.dtype)
    if want_dw:
        dw = torch.mm(dy.to(torch.float32).t(), x.to(torch.float32)).to(w.dtype)
    return dx, dw


class Nvfp4Linear(nn.Module):
    """Linear layer [.., K] -> [.., N] whose three GEMMs are W4A4 under a recipe.

    ``input_amax`` (FP32 [], a buffer) is the static activation amax that serving recipes need.
    """

    input_amax: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: Recipe | str,
        *,
        bias: bool = False,
        backward: Backward = "recipe",
        impl: Impl = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(nn.init.normal_(weight, std=in_features**-0.5))
        zeros = torch.zeros(out_features, dtype=dtype, device=device)
        self.bias = nn.Parameter(zeros) if bias else None
        self.register_buffer("input_amax", None)
        self.options = LinearOptions(get_recipe(recipe), backward, impl, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: the leading dims are flattened to tokens, which share an amax per recipe."""
        x_TK = x.reshape(-1, x.shape[-1])
        out: Tensor = _Linear.apply(x_TK, self.weight, self.bias, self.input_amax, self.options)
        return out.reshape(*x.shape[:-1], -1)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RK: Tensor,
        w_ENK: Tensor,
        offsets: Tensor,
        input_amax: Tensor | None,
        options: LinearOptions,
    ) -> Tensor:
        x = quantize_grouped(x_RK, offsets, options.recipe, amax=input_amax, impl=options.impl)
        w = [quantize(w_NK, options.recipe, role="weight", impl=options.impl) for w_NK in w_ENK]
        ctx.options = options
        if options.backward == "dequantized":
            x_RK = dequantize(x, x_RK.dtype)
            w_ENK = torch.stack([dequantize(q, w_ENK.dtype) for q in w])
        ctx.save_for_backward(x_RK, w_ENK, offsets)
        return grouped_gemm(x, w, offsets, out_dtype=x_RK.dtype, impl=options.impl)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        bounds = offsets.tolist()
        for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if stop > start:
                rows = slice(start, stop)
                part_dx, part_dw = _backward(
                    dy[rows],
                    x[rows],
                    w[expert],
                    ctx.options,
                    ctx.needs_input_grad[0],
                    ctx.needs_input_grad[1],
                )
                if part_dx is not None:
                    dx[rows] = part_dx
                if part_dw is not None:
                    dw[expert] = part_dw
        return (
            dx if ctx.needs_input_grad[0] else None,
            dw if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


class Nvfp4Experts(nn.Module):
    """SwiGLU experts in W4A4: w13 [E, 2I, H] (gate, then up), w2 [E, H, I]; amax per expert.

    ``input_amax`` and ``intermediate_amax`` (FP32 [E], buffers) are for static recipes.
    """

    input_amax: Tensor | None
    intermediate_amax: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        recipe: Recipe | str,
        *,
        backward: Backward = "recipe",
        impl: Impl = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        w13 = torch.empty(
            num_experts, 2 * intermediate_size, hidden_size, dtype=dtype, device=device
        )
        w2 = torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype, device=device)
        self.w13 = nn.Parameter(nn.init.normal_(w13, std=hidden_size**-0.5))
        self.w2 = nn.Parameter(nn.init.normal_(w2, std=intermediate_size**-0.5))
        self.register_buffer("input_amax", None)
        self.register_buffer("intermediate_amax", None)
        self.options = LinearOptions(get_recipe(recipe), backward, impl, generator)

    def forward(self, x_TH: Tensor, topk_ids_TS: Tensor, topk_weights_TS: Tensor) -> Tensor:
        """Run each token's experts and sum them in slot order with the router's weights: [T, H]."""
        routing = route(topk_ids_TS, self.w13.shape[0])
        x = gather(x_TH, routing)
        gate_up: Tensor = _GroupedLinear.apply(
            x, self.w13, routing.offsets, self.input_amax, self.options
        )
        hidden = silu_mul(gate_up, impl=self.options.impl)
        y: Tensor = _GroupedLinear.apply(
            hidden, self.w2, routing.offsets, self.intermediate_amax, self.options
        )
        return combine(y, routing, topk_weights_TS)
