"""Triton invariant kernels in the interpreter: the reference's bits, or FP32 accuracy and invariance."""

from __future__ import annotations

import interpreter  # noqa: F401
import pytest
import torch
from data import matrix
from torch import Tensor

from minite_kernels.dispatch import Impl, ImplementationUnavailableError
from minite_kernels.invariant.attention import attention, paged_attention
from minite_kernels.invariant.log_softmax import log_softmax
from minite_kernels.invariant.matmul import lm_head, matmul
from minite_kernels.invariant.rms_norm import add_rms_norm, rms_norm
from minite_kernels.invariant.rope import rope, rope_tables
from minite_kernels.invariant.router import route_logits
from minite_kernels.invariant.silu_mul import silu_mul

IMPLS: tuple[Impl, Impl] = ("ref", "triton")
DTYPES = (torch.float32, torch.bfloat16)


def same(a: Tensor, b: Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and torch.equal(*flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_gives_the_reference_bits(dtype: torch.dtype) -> None:
    x, w = matrix("heavy_t2", 21, 300).to(dtype), matrix("normal", 1, 300, seed=1)[0].to(dtype)
    assert same(*(rms_norm(x, w, 1e-6, impl=i) for i in IMPLS))
    for normalize in ("rounded", "float32"):
        for rounding in ("once", "twice"):
            ref, ours = (
                add_rms_norm(
                    x, x.flip(0), w, 1e-6, normalize=normalize, weight_rounding=rounding, impl=i
                )
                for i in IMPLS
            )
            assert same(ours[0], ref[0]) and same(ours[1], ref[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise_ops_give_the_reference_bits(dtype: torch.dtype) -> None:
    x = matrix("heavy_t2", 21, 300).to(dtype)
    for rounding in ("once", "twice"):
        assert same(*(silu_mul(x, rounding=rounding, impl=i) for i in IMPLS))
        gradients = []
        for impl in IMPLS:
            leaf = x.clone().requires_grad_()
            silu_mul(leaf, rounding=rounding, impl=impl).backward(x[:, :150])
            gradients.append(leaf.grad)
        assert same(*gradients)
    z = matrix("normal", 7, 3 * 80).view(7, 3, 80).to(dtype)
    tables = rope_tables(torch.arange(7) + 3, 1e4 ** (-torch.arange(0, 64, 2) / 64.0))
    for pairs in ("half", "interleaved"):
        for each in ("once", "each"):
            assert same(*(rope(z, *tables, pairs=pairs, rounding=each, impl=i) for i in IMPLS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_and_log_softmax_give_the_reference_bits(dtype: torch.dtype) -> None:
    logits = matrix("normal", 9, 24).to(dtype).round(decimals=0)  # many ties
    for renormalize in (True, False):
        ref, ours = (route_logits(logits, 5, renormalize=renormalize, impl=i) for i in IMPLS)
        assert same(ours[0], ref[0]) and torch.equal(ours[1], ref[1])
    x = matrix("normal", 5, 9000).to(dtype) * 4
    assert same(*(log_softmax(x, impl=i) for i in IMPLS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_is_close_to_fp64_and_row_invariant(dtype: torch.dtype) -> None:
    x, w = matrix("normal", 100, 200).to(dtype), matrix("normal", 40, 200, seed=1).to(dtype)
    exact = x.double() @ w.double().t() + w[:, 0].double()
    ours = matmul(x, w, bias=w[:, 0], out_dtype=torch.float32, impl="triton")
    assert ((ours - exact).norm() / exact.norm()).item() < 1e-6
    assert same(lm_head(x[70:71], w, impl="triton"), lm_head(x, w, impl="triton")[70:71])


def test_attention_of_fp32_would_be_tf32_and_is_refused() -> None:
    q = k = v = matrix("normal", 4, 32).view(4, 1, 32)
    with pytest.raises(ImplementationUnavailableError, match="16 bits"):
        attention(q, k, v, torch.tensor([0, 4]), scale=0.2, impl="triton")


def test_attention_phases_and_pages_give_the_same_bits() -> None:
    q, k, v = (
        matrix("normal", 150, h * 32, seed=s).view(150, h, 32).bfloat16()
        for s, h in enumerate((4, 2, 2))
    )
    start = torch.tensor([0, 150])
    whole = attention(q, k, v, start, scale=0.2, impl="triton")
    ref = attention(q, k, v, start, scale=0.2, impl="ref")
    assert ((whole.double() - ref.double()).norm() / ref.double().norm()).item() < 4e-3
    for first, last in ((0, 1), (63, 65), (149, 150), (100, 150)):
        pages = -(-last // 16)
        order = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(last))[:pages]
        caches = []
        for value in (k, v):
            cache = torch.full((pages + 2, 16, 2, 32), 3.0).bfloat16()
            padded = torch.zeros(pages * 16, 2, 32).bfloat16()
            padded[:last] = value[:last]
            cache[order] = padded.view(pages, 16, 2, 32)
            caches.append(cache)
        part = paged_attention(
            q[first:last],
            caches[0],
            caches[1],
            order[None].to(torch.int32),
            torch.tensor([0, last - first]),
            torch.tensor([last]),
            scale=0.2,
            impl="triton",
        )
        assert same(part, whole[first:last])
