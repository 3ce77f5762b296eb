"""Replacements inside SGLang: each returns the names of what it patched.

All of them are made before the model exists, through SGLang's plugin hooks, and check the version.
The ops are those of transformers_ops and vllm_ops. Imported only inside a process that runs SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from minite_diag.alignments.ran import note
from minite_diag.engines.sglang_plugin import nvfp4, nvfp4_methods
from minite_diag.engines.sglang_plugin.plugin_hooks import around, check_sglang, replace
from minite_diag.errors import EngineError
from minite_kernels.invariant.attention import paged_attention
from minite_kernels.invariant.log_softmax import log_softmax
from minite_kernels.invariant.matmul import PreparedWeight, matmul
from minite_kernels.invariant.rms_norm import add_rms_norm, rms_norm
from minite_kernels.invariant.rope import rope, rope_tables
from minite_kernels.invariant.router import route_logits
from minite_kernels.invariant.silu_mul import silu_mul

NVFP4_RECIPE: Final = "pow2-row-scaled"

LAYERS: Final = "sglang.srt.layers"


def _refuse(what: str, unsupported: dict[str, bool]) -> None:
    for name, present in unsupported.items():
        if present:
            raise EngineError(f"aligned {what} has no {name}", f"leave {what!r} out")


def align_nvfp4_linear(_: Any) -> Iterator[str]:
    """The W4A4 linear of recipe pow2-row-scaled, on CPU."""
    nvfp4_methods.register(NVFP4_RECIPE, None)
    yield f"{nvfp4_methods.__name__}.apply_linear"


def align_nvfp4_moe(_: Any) -> Iterator[str]:
    """The experts of recipe pow2-row-scaled, on CPU."""
    nvfp4_methods.register(None, NVFP4_RECIPE)
    yield f"{nvfp4_methods.__name__}.apply_experts"


def align_norm(_: Any) -> Iterator[str]:
    """RMSNorm of the sum as it is stored, with and without the residual add."""
    check_sglang("the alignment norm")

    def forward(
        self: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: Any = None,
    ) -> Any:
        note("norm")
        _refuse(
            "norm",
            {
                "second residual": post_residual_addition is not None,
                "fused quantization": quant_linear is not None,
                "partial variance": self.variance_size_override is not None,
                "residual in FP32": self.fp32_residual,
            },
        )
        weight, eps = self.weight.data, self.variance_epsilon
        if residual is None:
            return rms_norm(x, weight, eps)
        return add_rms_norm(x, residual, weight, eps)

    yield replace(f"{LAYERS}.layernorm.RMSNorm.forward_native", forward)


def align_rope(_: Any) -> Iterator[str]:
    """The plain rotary embedding, from FP32 tables of FP64 angles; scaled ones stay native."""
    check_sglang("the alignment rope")

    def forward(
        native: Any,
        self: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        plain = type(self).__name__ == "RotaryEmbedding" and self.rotary_dim == self.head_size
        if not (plain and self.is_neox_style and offsets is None):
            return native(self, positions, query, key, offsets, *args, **kwargs)
        note("rope")
        cos, sin = rope_tables(positions.flatten(), self._compute_inv_freq(self.base))

        def turn(x: torch.Tensor) -> torch.Tensor:
            heads = x.reshape(cos.shape[0], -1, self.head_size)
            return rope(heads, cos, sin).reshape(x.shape)

        return turn(query), turn(key)

    yield around(f"{LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_native", forward)


def align_attention(_: Any) -> Iterator[str]:
    """The two functions of SGLang's torch backend that attend; its cache stays as it is."""
    check_sglang("the alignment attention")

    def extend(
        _backend: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        note("attention")
        _refuse(
            "attention",
            {
                "attention that is not causal": not causal,
                "cross attention": is_cross_attn or encoder_lens is not None,
                "sliding window": sliding_window_size is not None,
            },
        )
        longest = int(seq_lens.max())
        found = paged_attention(
            query,
            k_cache[:, None].to(query.dtype),
            v_cache[:, None].to(query.dtype),
            req_to_token[req_pool_indices, :longest].to(torch.int32),
            torch.nn.functional.pad(extend_seq_lens.cumsum(0), (1, 0)),
            seq_lens,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        )
        return output.copy_(found)

    def decode(
        backend: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        # One query a sequence, its last: there is nothing to mask, and SGLang says causal=False.
        ones = torch.ones_like(seq_lens)
        cache = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        kwargs["causal"] = True
        return extend(backend, query, output, *cache, seq_lens - ones, ones, encoder_lens, **kwargs)

    backend = f"{LAYERS}.attention.torch_native_backend.TorchNativeAttnBackend"
    yield replace(f"{backend}._run_sdpa_forward_extend", extend)
    yield replace(f"{backend}._run_sdpa_forward_decode", decode)


def align_activation(_: Any) -> Iterator[str]:
    """SiluAndMul of dense layers and experts: SiLU rounded, times up, rounded."""
    check_sglang("the alignment activation")

    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        note("activation")
        return silu_mul(x)

    yield replace(f"{LAYERS}.activation.SiluAndMul.forward_native", forward)


def align_router(_: Any) -> Iterator[str]:
    """The torch function that chooses experts."""
    check_sglang("the alignment router")

    def choose(
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        topk: int,
        renormalize: bool,
        correction_bias: torch.Tensor | None = None,
        scoring_func: str = "softmax",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        note("router")
        _refuse(
            "router",
            {
                "correction bias": correction_bias is not None,
                "scoring function but softmax": scoring_func != "softmax",
            },
        )
        weights, ids = route_logits(gating_output, topk, renormalize=renormalize)
        return weights, ids.to(torch.int32)

    yield replace(f"{LAYERS}.moe.topk.fused_topk_native", choose)


def align_experts(_: Any) -> Iterator[str]:
    """Sum the NVFP4 experts in slot order, in FP32, rounded once."""
    check_sglang("the alignment experts")
    nvfp4.COMBINE_IN_SLOT_ORDER = True
    yield f"{nvfp4.__name__}.run_experts"


def align_lm_head(_: Any) -> Iterator[str]:
    """The product with lm_head; the weight stays as loaded."""
    check_sglang("the alignment lm-head")
    prepared: dict[int, PreparedWeight] = {}

    def multiply(
        self: Any, hidden_states: torch.Tensor, lm_head: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        note("lm_head")
        _refuse(
            "lm-head",
            {
                "quantized head": not hasattr(lm_head, "weight"),
                "output in FP32": self.use_fp32_lm_head or self.use_fp32_lm_head_output,
            },
        )
        weight = lm_head.weight.detach()
        if weight.data_ptr() not in prepared:
            prepared[weight.data_ptr()] = PreparedWeight(weight)
        return matmul(hidden_states, prepared[weight.data_ptr()])

    yield replace(f"{LAYERS}.logits_processor.LogitsProcessor._compute_lm_head", multiply)


def align_logprobs(_: Any) -> Iterator[str]:
    """Log-probabilities of prompts and of generated tokens, both by one log-softmax."""
    check_sglang("the alignment logprobs")

    def normalizer(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # SGLang subtracts the two from a logit, in this order: the bits of log_softmax, whose value
        # at the largest logit is the negated logarithm of the sum.
        note("logprobs")
        row_max, at = logits.float().max(dim=-1)
        return row_max, -log_softmax(logits).gather(-1, at[:, None])[:, 0]

    def sample(
        native: Any,
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        _refuse("logprobs", {"logits processor": sampling_info.has_custom_logit_processor})
        # The sampler turns the logits into probabilities in place.
        logits = logits_output.next_token_logits.clone() if return_logprob else None
        arguments = (sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs)
        tokens: torch.Tensor = native(self, logits_output, *arguments, *args, **kwargs)
        if logits is not None:
            if not sampling_info.is_all_greedy:
                logits = logits / sampling_info.temperatures
            note("logprobs")
            self.output_logprob_processor.compute_logprobs(
                log_softmax(logits), top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        return tokens

    yield replace(f"{LAYERS}.logprob_processor.compute_row_log_normalizer", normalizer)
    yield around(f"{LAYERS}.sampler.Sampler.forward", sample)
