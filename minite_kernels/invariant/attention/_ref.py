"""Reference attention: exact-window products and halving sums, one sequence at a time.

A score is ``invariant.matmul``'s exact product of one query and one key. The value product goes
through slices of 64 keys at absolute positions: a slice wholly in a query's past is an exact-window
product (its scale depends on those 64 keys only); the slice that a query sits in is summed
elementwise in halving order, where masked keys are exact zeros. So no bit depends on later keys.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from minite_kernels.invariant.elementary import row_sum, softmax_parts
from minite_kernels.invariant.matmul._ref import product, slices

KEY_SLICE: Final = 64


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_BP: Tensor,
    query_start: Tensor,
    seq_lens_B: Tensor,
    scale: float,
) -> Tensor:
    """[T, H, D], each sequence gathered from its pages."""
    out = torch.empty_like(q_THD)
    page = k_cache.shape[1]
    bounds, lengths = query_start.tolist(), seq_lens_B.tolist()
    for b, length in enumerate(lengths):
        queries = slice(bounds[b], bounds[b + 1])
        pages = page_table_BP[b, : -(-length // page)].to(torch.int64)
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[queries] = attend(q_THD[queries], k, v, scale)
    return out


def attend(q_QHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
    """[Q, H, D]: the last Q positions of a sequence of L attend to it causally."""
    queries, heads, dim = q_QHD.shape
    length, kv_heads, _ = k_LHD.shape
    group = heads // kv_heads
    first = length - queries
    position = torch.arange(first, length, device=q_QHD.device)
    hidden = torch.arange(length, device=q_QHD.device)[None, :] > position[:, None]
    out = torch.empty_like(q_QHD)
    for kv in range(kv_heads):
        own = slice(kv * group, (kv + 1) * group)
        q = q_QHD[:, own].transpose(0, 1).reshape(-1, dim)
        score = product(slices(q), slices(k_LHD[:, kv])).to(torch.float32) * scale
        score = score.view(group, queries, length).masked_fill_(hidden, -torch.inf)
        numerator, total = softmax_parts(score)
        value = _values(numerator, v_LHD[:, kv], first).to(torch.float32)
        out[:, own] = torch.div(value, total).transpose(0, 1).to(q_QHD.dtype)
    return out


def _values(p_GQL: Tensor, v_LD: Tensor, first: int) -> Tensor:
    """FP64 [G, Q, D] of probabilities times values, in ascending slices of keys."""
    group, queries, length = p_GQL.shape
    total = torch.zeros(group, queries, v_LD.shape[1], dtype=torch.float64, device=v_LD.device)
    for start in range(0, length, KEY_SLICE):
        keys = slice(start, min(start + KEY_SLICE, length))
        begins = max(0, start - first)  # first query that sees the slice at all
        whole = max(0, start + KEY_SLICE - 1 - first)  # first query that sees all of it
        if begins < min(whole, queries):
            p = p_GQL[:, begins:whole, keys].to(torch.float64)
            terms = p[:, :, None, :] * v_LD[keys].t().to(torch.float64)
            total[:, begins:whole] += row_sum(terms)
        if whole < queries:
            p = p_GQL[:, whole:, keys].flatten(0, 1)
            part = product(slices(p), slices(v_LD[keys].t()))
            total[:, whole:] += part.view(group, queries - whole, -1)
    return total
