"""NVFP4 linears and experts inside vLLM on CPU, with the arithmetic of a GPU engine (`modelled`).

vLLM's loader, scale fusion, alpha and everything between the linears stay vLLM's own; the
quantizer and the GEMM are minite_kernels' model of the engine that a recipe names. Invariant: the
codes that the trace shows are those that this module multiplied.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from minite_diag.engines.vllm_plugin import nvfp4_cpu
from minite_diag.engines.vllm_plugin.nvfp4_cpu import ExpertWeights
from minite_kernels.nvfp4.gemm import PreparedOperand, gemm, stored_operand
from minite_kernels.nvfp4.grouped_gemm import ExpertOperands, experts_linear
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import Recipe, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

MODELLED_RECIPES: Final = (
    "vllm-cuda",
    "vllm-cuda-ct",
    "vllm-torch-mm",
    "flashinfer-fast",
    "flashinfer-exact",
)
"""Recipes with a static activation scale and a block-scaled GEMM."""

ALIGNED_RECIPES: Final = ("pow2-row-scaled", "te-row-scaled")
"""Recipes that take each token's own amax; the checkpoint's static scale is not used."""


def register_linears(recipe: str) -> str:
    """Put a recipe into vLLM's NVFP4 linears, on any device; returns the kernel's name."""
    kernel = linear_kernel_class(get_recipe(recipe))
    nvfp4_cpu.register_linear(kernel)
    return kernel.__qualname__


def register_experts(recipe: str) -> None:
    """Put a recipe into vLLM's NVFP4 experts (its EMULATION backend), on any device."""
    nvfp4_cpu.register_experts(ModelledExperts(get_recipe(recipe)))


def quantize_activation(
    x_TK: torch.Tensor, recipe: Recipe, global_encode_scale: torch.Tensor
) -> Nvfp4Tensor:
    """The one place where activations are quantized; observers wrap it."""
    if recipe.activation.amax_scope == "token":
        return quantize(x_TK, recipe)
    return quantize(x_TK, recipe, global_encode_scale=global_encode_scale)


def linear_kernel_class(recipe: Recipe) -> type:
    """A vLLM NVFP4 linear kernel with that arithmetic."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel

    class ModelledNvFp4LinearKernel(NvFp4LinearKernel):
        """Quantize and multiply as the recipe's engine does; alpha is the one vLLM computed."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            """Decode the weight once; the parameters stay as loaded."""
            layer.minite_weight = stored_operand(
                layer.weight, layer.weight_scale, layer.weight_global_scale, recipe
            )

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            x_TK = x.reshape(-1, x.shape[-1])
            quantized = quantize_activation(x_TK, recipe, layer.input_global_scale_inv.data)
            alpha = None
            if recipe.activation.amax_scope == "static":
                alpha = (layer.input_global_scale * layer.weight_global_scale).data
            out = gemm(quantized, layer.minite_weight, out_dtype=x.dtype, alpha=alpha, bias=bias)
            return out.reshape(*x.shape[:-1], -1)

    kernel = ModelledNvFp4LinearKernel
    kernel.recipe = recipe  # type: ignore[attr-defined]
    kernel.__module__, kernel.__qualname__ = __name__, "ModelledNvFp4LinearKernel"
    return kernel


class ModelledExperts:
    """Experts' arithmetic; one activation scale for all experts, as FlashInfer's backends have."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.each_token_alone = recipe.activation.amax_scope == "token"
        self._weights: dict[int, PreparedOperand] = {}
        self._grouped: dict[int, ExpertOperands] = {}

    def forget(self) -> None:
        """Drop what was made of weights that are being loaded anew, at the same addresses."""
        self._weights.clear()
        self._grouped.clear()

    def quantize(self, x_TK: torch.Tensor, encode_scale: torch.Tensor) -> Nvfp4Tensor:
        """As the linears."""
        return quantize_activation(x_TK, self.recipe, encode_scale)

    def rows(self, operand: Nvfp4Tensor, rows_R: torch.Tensor) -> Nvfp4Tensor:
        """Rows without requantizing."""
        return operand.rows(rows_R)

    def matmul(
        self, operand: Nvfp4Tensor, experts: ExpertWeights, fused: str, expert: int
    ) -> torch.Tensor:
        """Rounded to the activation dtype, as the engines' GEMMs store it."""
        alpha = None
        if self.recipe.activation.amax_scope == "static":
            decode = experts.decode_scale(fused)[expert]
            alpha = experts.act_encode_scale(fused).reciprocal() * decode
        weight = self._weight(experts, fused, expert)
        return gemm(operand, weight, out_dtype=experts.dtype, alpha=alpha)

    def _weight(self, experts: ExpertWeights, fused: str, expert: int) -> PreparedOperand:
        codes = experts.codes[fused][expert]
        address = codes.data_ptr()
        if address not in self._weights:
            self._weights[address] = stored_operand(
                codes,
                experts.block_scale(fused)[expert],
                experts.decode_scale(fused)[expert],
                self.recipe,
            )
        return self._weights[address]

    def multiply_grouped(
        self, x_MK: torch.Tensor, experts: ExpertWeights, fused: str, **routed: Any
    ) -> torch.Tensor:
        """Quantize and multiply all experts' rows in one grouped GEMM; the bits of `matmul`."""
        codes = experts.codes[fused]
        address = codes.data_ptr()
        if address not in self._grouped:
            weights = [self._weight(experts, fused, e) for e in range(codes.shape[0])]
            self._grouped[address] = ExpertOperands(weights)
        return experts_linear(x_MK, self._grouped[address], out_dtype=experts.dtype, **routed)
