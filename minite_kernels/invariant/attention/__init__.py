"""Causal attention over a paged KV cache, prefill and decode with the same bits.

Promise: a query's output depends on that query and its own keys and values alone: not on the other
queries of its chunk, the other sequences, the page table or the page size. Keys are visited in
ascending blocks from position 0, and masked positions contribute exact zeros.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from minite_kernels.dispatch import Impl, select

__all__ = ["attention", "paged_attention"]


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_BP: Tensor,
    query_start: Tensor,
    seq_lens_B: Tensor,
    *,
    scale: float,
    impl: Impl = "auto",
) -> Tensor:
    """Attend q [T, H, D] of B sequences to their caches [pages, page, Hkv, D]: [T, H, D].

    Sequence b owns queries query_start[b]:query_start[b + 1], its last ones: query i sits at
    position seq_lens[b] - num_queries + i and sees keys 0 up to itself. H is a multiple of Hkv.
    The Triton kernel takes 16-bit tensors only: of FP32 it would make TF32.
    """
    if q_THD.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q_THD.shape[1]} query heads over {k_cache.shape[2]} key heads")
    wide = (
        None if q_THD.element_size() == 2 else f"its tensor cores take 16 bits, not {q_THD.dtype}"
    )
    module = select("attention", __name__, impl, q_THD.device, {"triton": wide})
    out: Tensor = module.paged_attention(
        q_THD, k_cache, v_cache, page_table_BP, query_start, seq_lens_B, scale
    )
    return out


def attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sequence_start: Tensor,
    *,
    scale: float,
    impl: Impl = "auto",
) -> Tensor:
    """Attend packed sequences (starts [B + 1]) causally, each to itself: the bits of the paged op."""
    page = 16
    bounds = sequence_start.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    pages = [-(-length // page) for length in lengths]
    first = [sum(pages[:index]) for index in range(len(pages))]
    row = torch.cat(
        [
            torch.arange(length, device=q_THD.device) + start * page
            for length, start in zip(lengths, first, strict=True)
        ]
    )
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=q_THD.device)
    for index, (count, start) in enumerate(zip(pages, first, strict=True)):
        table[index, :count] = torch.arange(start, start + count, device=q_THD.device)
    caches = []
    for value in (k_THD, v_THD):
        flat = torch.zeros(
            sum(pages) * page, *value.shape[1:], dtype=value.dtype, device=value.device
        )
        flat[row] = value
        caches.append(flat.view(-1, page, *value.shape[1:]))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=q_THD.device)
    return paged_attention(
        q_THD, caches[0], caches[1], table, sequence_start, seq_lens, scale=scale, impl=impl
    )
