"""The invariant ops against FP64, and each row against itself in other batches and phases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minite_kernels.invariant.attention import attention, paged_attention
from minite_kernels.invariant.elementary import (
    EXP_POLYNOMIAL,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_POLYNOMIAL,
    ROUND,
    SQRT_HALF,
    exp,
    log,
    row_sum,
)
from minite_kernels.invariant.log_softmax import log_softmax, token_logprobs
from minite_kernels.invariant.matmul import PreparedWeight, lm_head, matmul
from minite_kernels.invariant.rms_norm import add_rms_norm, rms_norm
from minite_kernels.invariant.rope import rope, rope_tables
from minite_kernels.invariant.router import route_logits, router
from minite_kernels.invariant.silu_mul import silu_mul

TOLERANCES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6}
DTYPES = tuple(TOLERANCES)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def test_exp_and_log_are_within_two_ulp_and_cover_the_edges() -> None:
    x = torch.linspace(-87, 88.5, 200_001)
    assert ((exp(x).double() - x.double().exp()) / x.double().exp()).abs().max() < 2.0**-22
    edge = torch.tensor([-200.0, -104.1, 89.0, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    assert exp(edge)[:5].tolist() == [0, 0, torch.inf, torch.inf, 0]
    assert exp(edge)[5].isnan()
    assert exp(edge)[6:].tolist() == [1, 1]
    subnormal = exp(torch.tensor([-90.0, -100.0, -103.0]))
    assert torch.allclose(
        subnormal.double(),
        torch.tensor([-90.0, -100.0, -103.0]).double().exp(),
        rtol=0,
        atol=2.0**-149,
    )
    y = torch.exp(torch.linspace(-80, 80, 100_001))
    assert (
        (log(y).double() - y.double().log()).abs() / y.double().log().abs().clamp(min=1)
    ).max() < 2.0**-22


def test_row_sum_does_not_see_padding() -> None:
    x = randn(3, 100, seed=1)
    padded = torch.nn.functional.pad(x, (0, 500))
    assert same_bits(row_sum(x), row_sum(padded))


def test_elementwise_functions_do_not_see_their_neighbours() -> None:
    """Library exp differs between vector body and scalar tail; ours must not."""
    x = randn(1031, seed=2) * 20
    whole = exp(x)
    for index in (0, 7, 8, 1023, 1030):
        assert same_bits(exp(x[index : index + 1]), whole[index : index + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_is_accurate_and_invariant(dtype: torch.dtype) -> None:
    x, w = randn(130, 1000, dtype=dtype), PreparedWeight(randn(70, 1000, seed=1, dtype=dtype))
    bias = randn(70, seed=2, dtype=dtype)
    exact = x.double() @ w.w.double().t() + bias.double()
    whole = matmul(x, w, bias=bias)
    assert whole.dtype == dtype
    assert relative(whole, exact) < TOLERANCES[dtype]
    for rows in (slice(0, 1), slice(3, 10), slice(129, 130)):
        assert same_bits(matmul(x[rows], w, bias=bias), whole[rows])


def test_matmul_does_not_depend_on_threads_or_column_order_within_a_slice() -> None:
    x, w = randn(65, 256), randn(33, 256, seed=1)
    whole = matmul(x, w)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    assert same_bits(matmul(x[:, order], w[:, order]), whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert same_bits(matmul(x, w), whole)
    finally:
        torch.set_num_threads(threads)


def test_matmul_keeps_bf16_products_exact_within_14_binades() -> None:
    x, w = (t.sign() * (1 + t.abs().fmod(1)) for t in (randn(4, 256), randn(8, 256, seed=1)))
    x[:, ::5] *= 2.0**-13
    x, w = x.bfloat16(), w.bfloat16()
    exact = (x.double() @ w.double().t()).float()
    assert same_bits(lm_head(x, w), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = randn(40, 576, dtype=dtype), randn(576, seed=1, dtype=dtype)
    exact = (
        x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    )
    for rounding in ("once", "twice"):
        ours = rms_norm(x, weight, 1e-6, weight_rounding=rounding)
        assert relative(ours, exact) < TOLERANCES[dtype]
        assert same_bits(rms_norm(x[5:6], weight, 1e-6, weight_rounding=rounding), ours[5:6])


def test_add_rms_norm_can_norm_the_rounded_or_the_unrounded_sum() -> None:
    x, residual = randn(40, 576).bfloat16(), randn(40, 576, seed=1).bfloat16()
    weight = torch.ones(576, dtype=torch.bfloat16)
    rounded, total = add_rms_norm(x, residual, weight, 1e-6)
    assert same_bits(total, x + residual)
    assert same_bits(rounded, rms_norm(total, weight, 1e-6))
    unrounded, same_total = add_rms_norm(x, residual, weight, 1e-6, normalize="float32")
    assert same_bits(total, same_total)
    assert 0.05 < (unrounded != rounded).float().mean() < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_and_its_gradient(dtype: torch.dtype) -> None:
    x = randn(33, 200, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    for rounding in ("once", "twice"):
        assert relative(silu_mul(x, rounding=rounding), exact) < TOLERANCES[dtype]
    assert same_bits(silu_mul(x[7:8]), silu_mul(x)[7:8])
    leaf = x.float().clone().requires_grad_()
    silu_mul(leaf).square().sum().backward()
    check = x.double().requires_grad_()
    gate, up = check.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).square().sum().backward()
    assert relative(leaf.grad, check.grad) < 1e-5


def test_silu_mul_rounds_once_or_twice() -> None:
    x = randn(64, 512).bfloat16()
    changed = (silu_mul(x, rounding="once") != silu_mul(x, rounding="twice")).float().mean()
    assert 0.1 < changed < 0.5


@pytest.mark.parametrize("pairs", ("half", "interleaved"))
def test_rope_rotates_pairs_and_passes_the_rest(pairs: str) -> None:
    x = randn(9, 3, 80)
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    cos, sin = rope_tables(torch.arange(9) + 5, frequencies)
    ours = rope(x, cos, sin, pairs=pairs)
    assert same_bits(ours[..., 64:], x[..., 64:])
    body = x[..., :64].double()
    z = (
        torch.complex(body[..., 0::2], body[..., 1::2])
        if pairs == "interleaved"
        else torch.complex(*body.chunk(2, -1))
    )
    z = (
        z
        * torch.polar(
            torch.ones(9, 32).double(), (torch.arange(9).double() + 5)[:, None] * frequencies
        )[:, None]
    )
    exact = (
        torch.view_as_real(z).flatten(-2)
        if pairs == "interleaved"
        else torch.cat((z.real, z.imag), -1)
    )
    assert relative(ours[..., :64], exact) < 1e-6
    assert same_bits(rope(x[4:5], cos[4:5], sin[4:5], pairs=pairs), ours[4:5])


def test_router_breaks_ties_toward_the_lower_expert() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5])
    weights, ids = route_logits(logits, 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)
    raw, _ = route_logits(logits, 2, renormalize=False)
    assert raw[1].tolist() == pytest.approx([0.2, 0.2])


def test_router_is_invariant() -> None:
    x, w = randn(100, 320).bfloat16(), randn(16, 320, seed=1).bfloat16()
    weights, ids, logits = router(x, w, 4)
    one = router(x[17:18], w, 4)
    assert same_bits(one[0], weights[17:18]) and same_bits(one[2], logits[17:18])
    assert torch.equal(one[1], ids[17:18])


def test_log_softmax() -> None:
    x = randn(20, 5000) * 5
    ours = log_softmax(x)
    assert (ours.double() - x.double().log_softmax(-1)).abs().max() < 4e-6
    assert same_bits(log_softmax(x[3:4]), ours[3:4])
    ids = torch.arange(20) * 7
    assert same_bits(token_logprobs(x, ids), ours[torch.arange(20), ids])


def paged(k: Tensor, v: Tensor, page: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scatter one sequence's keys and values over shuffled pages."""
    count = -(-k.shape[0] // page)
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))[:count]
    caches = []
    for value in (k, v):
        cache = torch.full((count + 3, page, *value.shape[1:]), 7.0, dtype=value.dtype)
        padded = torch.zeros(count * page, *value.shape[1:], dtype=value.dtype)
        padded[: value.shape[0]] = value
        cache[order] = padded.view(count, page, *value.shape[1:])
        caches.append(cache)
    return caches[0], caches[1], order[None].to(torch.int32)


def test_attention_is_accurate() -> None:
    q, k, v = randn(150, 6, 64), randn(150, 2, 64, seed=1), randn(150, 2, 64, seed=2)
    ours = attention(q, k, v, torch.tensor([0, 100, 150]), scale=0.125)
    for start, stop in ((0, 100), (100, 150)):
        part = [t[start:stop].double().transpose(0, 1)[None] for t in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(
            *part, is_causal=True, scale=0.125, enable_gqa=True
        )[0].transpose(0, 1)
        assert relative(ours[start:stop], exact) < 1e-6


@pytest.mark.parametrize("page", (1, 16, 32))
def test_attention_decode_chunks_and_pages_give_the_bits_of_prefill(page: int) -> None:
    length = 150
    q, k, v = (randn(length, h, 32, seed=s).bfloat16() for h, s in ((4, 0), (2, 1), (2, 2)))
    k *= torch.exp2(torch.arange(length) % 9 - 4.0)[:, None, None].bfloat16()
    v *= torch.exp2(torch.arange(length) % 23 - 4.0)[:, None, None].bfloat16()
    whole = attention(q, k, v, torch.tensor([0, length]), scale=0.2)
    for start, stop in ((0, 1), (62, 66), (63, 64), (64, 65), (100, 150), (149, 150)):
        k_cache, v_cache, table = paged(k[:stop], v[:stop], page, stop)
        part = paged_attention(
            q[start:stop],
            k_cache,
            v_cache,
            table,
            torch.tensor([0, stop - start]),
            torch.tensor([stop]),
            scale=0.2,
        )
        assert same_bits(part, whole[start:stop]), (start, stop)


def test_rms_norm_rounds_where_it_says() -> None:
    x, weight = randn(40, 576).bfloat16(), randn(576, seed=1).bfloat16()
    mean = x.double().square().mean(-1, keepdim=True).float()
    normed = x.float() * (1.0 / (mean + 1e-6).double().sqrt()).float()
    once = (normed * weight.float()).bfloat16()
    twice = (normed.bfloat16().float() * weight.float()).bfloat16()
    ours_once = rms_norm(x, weight, 1e-6, weight_rounding="once")
    ours_twice = rms_norm(x, weight, 1e-6, weight_rounding="twice")
    assert (ours_once != once).float().mean() < 1e-3  # the check's reciprocal root is not IEEE
    assert (ours_twice != twice).float().mean() < 1e-3
    assert 0.1 < (ours_once != ours_twice).float().mean() < 0.6


def test_exp_and_log_are_the_stated_fp32_operations() -> None:
    """numpy's FP32 does one rounding an operation: the same steps must give the same bits."""
    f = np.float32
    x = np.linspace(-87, 88, 20_001, dtype=np.float32)
    n = (x * f(LOG2_E) + f(ROUND)) - f(ROUND)
    r = (x - n * f(LN2_HIGH)) - n * f(LN2_LOW)
    y = np.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        y = y * r + f(coefficient)
    y = np.ldexp((y * (r * r) + r) + f(1), n.astype(np.int32)).astype(np.float32)
    assert same_bits(exp(torch.from_numpy(x)), torch.from_numpy(y))
    positive = np.exp(np.linspace(-80, 80, 20_001)).astype(np.float32)
    m, e = np.frexp(positive)
    small = m < f(SQRT_HALF)
    exponent = np.where(small, e - 1, e).astype(np.float32)
    m = np.where(small, (m + m) - f(1), m - f(1)).astype(np.float32)
    y = np.full_like(m, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        y = y * m + f(coefficient)
    y = ((y * m) * (m * m) + exponent * f(LN2_LOW)) - (m * m) * f(0.5)
    y = (m + y) + exponent * f(LN2_HIGH)
    assert same_bits(log(torch.from_numpy(positive)), torch.from_numpy(y))


def test_a_prepared_weight_that_is_written_in_place_is_prepared_again() -> None:
    """A refit of RL writes through `.data`, which no version counter sees."""
    x, w = randn(5, 300), randn(40, 300, seed=1)
    prepared = PreparedWeight(w)
    matmul(x, prepared)
    new = randn(40, 300, seed=2)
    w.data.copy_(new)
    assert torch.equal(matmul(x, prepared), matmul(x, new))
