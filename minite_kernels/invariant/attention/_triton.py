"""Triton attention: online softmax over key blocks at absolute positions, one tile for all phases.

A row of the query tile never mixes with another, key blocks start at position 0 and ascend, and a
block wholly beyond a row's position multiplies its state by exp2(0) = 1 and adds zeros. So the bits
of a row depend on its own position and keys only.
"""

# Kernels have no annotations: their arguments are pointers and constants of the compiler.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite_kernels.invariant.attention import configs
from minite_kernels.invariant.launch import unfused


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    scale_log2,
    H,
    group,
    page,
    D,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_table,
    BQ: tl.constexpr,
    BL: tl.constexpr,
    DP: tl.constexpr,
):
    """One tile of one sequence's queries, one head."""
    b = tl.program_id(1)
    h = tl.program_id(2)
    start = tl.load(query_start_ptr + b).to(tl.int64)
    queries = (tl.load(query_start_ptr + b + 1) - start).to(tl.int32)
    length = tl.load(seq_lens_ptr + b).to(tl.int32)
    row = tl.program_id(0) * BQ + tl.arange(0, BQ)
    if tl.program_id(0) * BQ >= queries:
        return
    d = tl.arange(0, DP)
    known = (row < queries)[:, None] & (d < D)[None, :]
    q_offset = (start + row)[:, None] * stride_qt + h * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_offset, mask=known, other=0.0)
    position = length - queries + row
    last = length - queries + tl.minimum(tl.program_id(0) * BQ + BQ, queries)
    largest = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, DP), tl.float32)
    for block in range(0, last, BL):
        key = block + tl.arange(0, BL)
        exists = (key < length)[:, None] & (d < D)[None, :]
        pages = tl.load(table_ptr + b * stride_table + key // page, mask=key < length, other=0)
        slot = pages.to(tl.int64)
        inside = key % page
        k_offset = slot * stride_kp + inside * stride_ks + (h // group) * stride_kh
        v_offset = slot * stride_vp + inside * stride_vs + (h // group) * stride_vh
        k = tl.load(k_ptr + k_offset[:, None] + d[None, :], mask=exists, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale_log2
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp2(largest - new)
        p = tl.exp2(score - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + v_offset[:, None] + d[None, :], mask=exists, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        largest = new
    out = tl.div_rn(acc, tl.broadcast_to(total[:, None], (BQ, DP)))
    o_offset = ((start + row)[:, None] * H + h) * D + d[None, :]
    tl.store(out_ptr + o_offset, out.to(out_ptr.dtype.element_ty), mask=known)


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_BP: Tensor,
    query_start: Tensor,
    seq_lens_B: Tensor,
    scale: float,
) -> Tensor:
    """[T, H, D]; q, k and v are 16-bit."""
    tokens, heads, dim = q_THD.shape
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    sequences = seq_lens_B.shape[0]
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(tokens, configs.QUERIES), sequences, heads)
    _attention_kernel[grid](
        q_THD,
        k_cache,
        v_cache,
        out,
        page_table_BP,
        query_start,
        seq_lens_B,
        scale * 1.4426950408889634,
        heads,
        heads // k_cache.shape[2],
        k_cache.shape[1],
        dim,
        q_THD.stride(0),
        q_THD.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table_BP.stride(0),
        BQ=configs.QUERIES,
        BL=configs.KEYS,
        DP=max(16, triton.next_power_of_2(dim)),
        num_warps=configs.NUM_WARPS,
        num_stages=configs.NUM_STAGES,
        **unfused(),
    )
    return out
