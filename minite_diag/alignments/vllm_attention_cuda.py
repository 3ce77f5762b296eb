"""vLLM's Triton and FlashAttention backends on CUDA with minite_kernels' paged attention.

Named by `align_attention`; imported by vLLM itself in each worker. Both backends keep keys and
values in pages [blocks, 2, block size, kv heads, head size], written by vLLM's own kernel; only the
attention is another. Invariant: what the op does not support is an error, never native.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from minite_diag.alignments.ran import note
from minite_diag.errors import EngineError
from minite_kernels.invariant.attention import paged_attention


def _attend(
    impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
) -> torch.Tensor:
    """Fill `output` [T, H * D or H, D] up to the tokens that are real."""
    if metadata is None:
        return output.fill_(0)
    note("attention")
    _check(impl, metadata, kv_cache)
    keys, values = kv_cache.unbind(1)
    count = metadata.num_actual_tokens
    found = paged_attention(
        query[:count].reshape(count, -1, impl.head_size),
        keys,
        values,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale=impl.scale,
    )
    output[:count] = found.reshape(output[:count].shape)
    return output


def _check(impl: Any, metadata: Any, kv_cache: torch.Tensor) -> None:
    unsupported = {
        "attention that is not causal": not getattr(metadata, "causal", True),
        "a sliding window": impl.sliding_window not in (-1, (-1, -1), None),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a logits soft cap": bool(getattr(impl, "logits_soft_cap", 0)),
        "cascade attention": bool(getattr(metadata, "use_cascade", False)),
        "a quantized KV cache": not kv_cache.dtype.is_floating_point or kv_cache.itemsize == 1,
    }
    for what, present in unsupported.items():
        if present:
            raise EngineError(f"aligned attention has no {what}", "leave 'attention' out")


class AlignedTritonAttention(TritonAttentionImpl):  # type: ignore[misc]
    """Attends in a fixed order."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *_scales: Any,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's."""
        return _attend(self, query, kv_cache, attn_metadata, output)


class AlignedTritonBackend(TritonAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with another implementation; the name stays, vLLM looks it up."""

    @staticmethod
    def get_impl_cls() -> type:
        """The implementation class."""
        return AlignedTritonAttention


class AlignedFlashAttention(FlashAttentionImpl):  # type: ignore[misc]
    """Attends in a fixed order."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *_scales: Any,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's."""
        return _attend(self, query, kv_cache, attn_metadata, output)


class AlignedFlashBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with another implementation; the name stays, vLLM looks it up."""

    @staticmethod
    def get_impl_cls() -> type:
        """The implementation class."""
        return AlignedFlashAttention
