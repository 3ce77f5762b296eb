"""vLLM's CPU attention backend with minite_kernels' paged attention.

Named by `align_attention`; imported by vLLM itself in each worker. The cache keeps vLLM's blocks
[blocks, kv heads, block size, 2 * head size] in a plain layout: keys, then values. Invariant: what
the op does not support (windows, soft caps, sinks, encoder attention) is an error, never native.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from minite_diag.alignments.ran import note
from minite_diag.errors import EngineError
from minite_kernels.invariant.attention import paged_attention


class AlignedAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Writes keys and values in plain pages and attends in a fixed order."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store keys and values [T, Hkv, D] at their slots; padded tokens have none."""
        size, dim = kv_cache.shape[2], self.head_size
        kept = slot_mapping >= 0
        slots = slot_mapping[kept].long()
        block, offset = slots // size, slots % size
        count = slot_mapping.shape[0]
        kv_cache[block, :, offset, :dim] = key[:count][kept].to(kv_cache.dtype)
        kv_cache[block, :, offset, dim:] = value[:count][kept].to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill `output` [T, H * D or H, D]; profiling runs have no metadata."""
        if attn_metadata is None:
            return output
        note("attention")
        self._check(attn_metadata)
        dim = self.head_size
        count = int(attn_metadata.query_start_loc[-1])
        pages = kv_cache.permute(0, 2, 1, 3)
        found = paged_attention(
            query[:count].reshape(count, -1, dim),
            pages[..., :dim],
            pages[..., dim:],
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            scale=self.scale,
        )
        output[:count] = found.reshape(output[:count].shape)
        return output

    def _check(self, metadata: Any) -> None:
        unsupported = {
            "attention that is not causal": not metadata.causal,
            "a sliding window": getattr(self, "sliding_window", -1) not in (-1, (-1, -1), None),
            "ALiBi": getattr(self, "alibi_slopes", None) is not None,
            "attention sinks": getattr(self, "sinks", None) is not None,
            "a logits soft cap": bool(getattr(self, "logits_soft_cap", 0)),
        }
        for what, present in unsupported.items():
            if present:
                raise EngineError(f"aligned attention has no {what}", "leave 'attention' out")


class AlignedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with another implementation; the name stays, vLLM looks it up."""

    @staticmethod
    def get_impl_cls() -> type:
        """The implementation class."""
        return AlignedAttention
