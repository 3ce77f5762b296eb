"""``Nvfp4Linear`` and ``Nvfp4Experts``: autograd modules that train as Transformer Engine does.

Composes ``grouped_linear``, routing and activation; contains no arithmetic of its own. ``backward``
says what the gradients are of: ``recipe`` quantizes all three GEMMs; ``high_precision`` takes them
from the original X and W in their own dtype; ``dequantized`` from the forward's quantized X and W.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minite_kernels.dispatch import Impl
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4 import grouped_linear
from minite_kernels.nvfp4.grouped_gemm import combine, gather, route
from minite_kernels.nvfp4.grouped_linear import ALIGNMENT, Options
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.recipe import Recipe, get_recipe

Backward = Literal["recipe", "high_precision", "dequantized"]


@dataclass(frozen=True)
class LinearOptions:
    """What one layer's multiplications share. ``generator`` seeds stochastic rounding."""

    recipe: Recipe
    backward: Backward = "recipe"
    impl: Impl = "auto"
    generator: torch.Generator | None = None

    @property
    def gemms(self) -> Options:
        """The options of the three GEMMs."""
        return Options(self.recipe, self.impl, self.generator)

    def alignment(self, device: torch.device) -> int:
        """Row alignment of experts: that of the Triton path on CUDA, none in torch."""
        return ALIGNMENT if device.type == "cuda" and self.impl != "ref" else 1


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RK: Tensor,
        w_ENK: Tensor,
        offsets: Tensor,
        input_amax: Tensor | None,
        options: LinearOptions,
        out_dtype: torch.dtype,
    ) -> Tensor:
        ctx.options = options
        ctx.aligned = options.alignment(x_RK.device) > 1
        # Kept for dgrad: 2 bytes a weight until backward, one pass over the weights saved.
        ctx.prepared = grouped_linear.prepare_weight(
            x_RK, w_ENK, options.gemms, aligned=ctx.aligned
        )
        out = grouped_linear.forward(
            x_RK,
            w_ENK,
            offsets,
            options.gemms,
            input_amax=input_amax,
            out_dtype=out_dtype,
            prepared=ctx.prepared,
            aligned=ctx.aligned,
        )
        if options.backward == "dequantized":
            x_RK, w_ENK = _dequantized(x_RK, w_ENK, offsets, input_amax, options)
        ctx.save_for_backward(x_RK, w_ENK, offsets)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offsets = ctx.saved_tensors
        dy = gradients[0].to(x.dtype).contiguous()
        if ctx.options.backward == "recipe":
            dx, dw = _quantized_gradient(ctx, dy, x, w, offsets)
        else:
            dx, dw = _plain_gradient(dy, x, w, offsets, ctx.needs_input_grad)
        ctx.prepared = None
        return dx, dw, None, None, None, None


def grouped_linear_function(
    x_RK: Tensor,
    w_ENK: Tensor,
    offsets: Tensor,
    options: LinearOptions,
    *,
    input_amax: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Differentiable grouped linear [R, K] -> [R, N]; a dense layer is one expert.

    On CUDA the offsets must be multiples of ``ALIGNMENT``, as ``route(align=)`` makes them.
    """
    dtype = out_dtype or x_RK.dtype
    out: Tensor = _GroupedLinear.apply(x_RK, w_ENK, offsets, input_amax, options, dtype)
    return out


def _quantized_gradient(
    ctx: Any, dy: Tensor, x: Tensor, w: Tensor, offsets: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX and dW under the recipe, None where not wanted."""
    dx = dw = None
    gemms = ctx.options.gemms
    if ctx.needs_input_grad[0]:
        dx = grouped_linear.data_gradient(
            dy, w, offsets, gemms, prepared=ctx.prepared, aligned=ctx.aligned
        )
    if ctx.needs_input_grad[1]:
        dw = grouped_linear.weight_gradient(
            dy, x, offsets, gemms, out_dtype=w.dtype, aligned=ctx.aligned
        )
    return dx, dw


def _plain_gradient(
    dy: Tensor, x: Tensor, w: Tensor, offsets: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX and dW of unquantized GEMMs in FP32, one expert at a time."""
    dx = torch.zeros_like(x) if wanted[0] else None
    dw = torch.zeros_like(w) if wanted[1] else None
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        rows = dy[start:stop].to(torch.float32)
        if dx is not None:
            dx[start:stop] = torch.mm(rows, w[expert].to(torch.float32)).to(x.dtype)
        if dw is not None:
            dw[expert] = torch.mm(rows.t(), x[start:stop].to(torch.float32)).to(w.dtype)
    return dx, dw


def _dequantized(
    x: Tensor, w: Tensor, offsets: Tensor, input_amax: Tensor | None, options: LinearOptions
) -> tuple[Tensor, Tensor]:
    """X and W as the forward's GEMM saw them, with their global scales, in their own dtypes."""
    recipe, impl = options.recipe, options.impl
    x_out = torch.zeros_like(x)
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        amax = None if input_amax is None else input_amax.reshape(-1)[expert]
        if stop > start:
            q = quantize(x[start:stop], recipe, amax=amax, impl=impl)
            x_out[start:stop] = dequantize(q, x.dtype)
    experts = [dequantize(quantize(e, recipe, role="weight", impl=impl), w.dtype) for e in w]
    return x_out, torch.stack(experts)


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
        tokens = x_TK.shape[0]
        align = self.options.alignment(x.device)
        x_TK = nn.functional.pad(x_TK, (0, 0, 0, -tokens % align))
        offsets = torch.tensor([0, x_TK.shape[0]], device=x.device)
        epilogue_bias = self.bias is not None and self.options.recipe.gemm.bias == "epilogue"
        out = grouped_linear_function(
            x_TK,
            self.weight[None],
            offsets,
            self.options,
            input_amax=self.input_amax,
            out_dtype=torch.float32 if epilogue_bias else x.dtype,
        )
        if self.bias is not None:
            out = (out + self.bias.to(out.dtype)).to(x.dtype)
        return out[:tokens].reshape(*x.shape[:-1], -1)


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
        shape13 = (num_experts, 2 * intermediate_size, hidden_size)
        shape2 = (num_experts, hidden_size, intermediate_size)
        w13, w2 = (torch.empty(shape, dtype=dtype, device=device) for shape in (shape13, shape2))
        self.w13 = nn.Parameter(nn.init.normal_(w13, std=hidden_size**-0.5))
        self.w2 = nn.Parameter(nn.init.normal_(w2, std=intermediate_size**-0.5))
        self.register_buffer("input_amax", None)
        self.register_buffer("intermediate_amax", None)
        self.options = LinearOptions(get_recipe(recipe), backward, impl, generator)

    def forward(self, x_TH: Tensor, topk_ids_TS: Tensor, topk_weights_TS: Tensor) -> Tensor:
        """Run each token's experts and sum them in slot order with the router's weights: [T, H]."""
        options = self.options
        align = options.alignment(x_TH.device)
        routing = route(topk_ids_TS, self.w13.shape[0], align=align)
        x = gather(x_TH, routing, impl=options.impl)
        gate_up = grouped_linear_function(
            x, self.w13, routing.offsets, options, input_amax=self.input_amax
        )
        hidden = silu_mul(gate_up, impl=options.impl)
        y = grouped_linear_function(
            hidden, self.w2, routing.offsets, options, input_amax=self.intermediate_amax
        )
        return combine(y, routing, topk_weights_TS, impl=options.impl)
