"""Routing, per-expert quantization, the grouped GEMM and the fixed-order combine."""

from __future__ import annotations

import pytest
import torch
from data import matrix

from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.grouped_gemm import (
    combine,
    combine_slots,
    gather,
    grouped_gemm,
    quantize_grouped,
    route,
)
from minite_kernels.nvfp4.quantize import quantize

TOKENS, SLOTS, EXPERTS, K, N = 50, 3, 6, 128, 48


def ids(tokens: int = TOKENS) -> torch.Tensor:
    """Three different experts a token; expert 4 gets none."""
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(0))
    scores[:, 4] = -1.0
    return scores.topk(SLOTS).indices


def weights(recipe: str) -> list:
    return [quantize(matrix("normal", N, K, seed=e), recipe, role="weight") for e in range(EXPERTS)]


def test_route_sorts_stably_and_counts_empty_experts() -> None:
    routing = route(ids(), EXPERTS)
    flat = ids().reshape(-1)
    assert torch.equal(flat[routing.order], flat.sort(stable=True).values)
    assert routing.offsets[4] == routing.offsets[5]
    assert routing.offsets[-1] == TOKENS * SLOTS
    with pytest.raises(ValueError, match="expert ids"):
        route(torch.tensor([[0, 6]]), EXPERTS)


@pytest.mark.parametrize("recipe", ("te", "te-1d", "te-row-scaled", "pow2", "flashinfer-exact"))
def test_each_expert_gets_what_its_rows_alone_would_get(recipe: str) -> None:
    x = matrix("row_binades", TOKENS, K).bfloat16()
    routing = route(ids(), EXPERTS)
    rows = gather(x, routing)
    static = torch.linspace(1, 2, EXPERTS) if recipe == "flashinfer-exact" else None
    q = quantize_grouped(rows, routing.offsets, recipe, amax=static)
    w = weights(recipe)
    ours = grouped_gemm(q, w, routing.offsets)
    bounds = routing.offsets.tolist()
    for e in range(EXPERTS):
        part = rows[bounds[e] : bounds[e + 1]]
        amax = None if static is None else static[e]
        alone = gemm(quantize(part, recipe, amax=amax), w[e])
        assert torch.equal(
            alone.view(torch.int16), ours[bounds[e] : bounds[e + 1]].view(torch.int16)
        )


def test_per_token_rows_do_not_depend_on_the_other_tokens() -> None:
    x = matrix("normal", TOKENS, K).bfloat16()
    w = weights("te-row-scaled")
    router_weights = torch.rand(TOKENS, SLOTS, generator=torch.Generator().manual_seed(1))

    def run(tokens: slice) -> torch.Tensor:
        routing = route(ids()[tokens], EXPERTS)
        q = quantize_grouped(gather(x[tokens], routing), routing.offsets, "te-row-scaled")
        return combine(grouped_gemm(q, w, routing.offsets), routing, router_weights[tokens])

    whole = run(slice(0, TOKENS))
    for tokens in (slice(0, 1), slice(7, 20), slice(49, 50)):
        assert torch.equal(run(tokens).view(torch.int16), whole[tokens].view(torch.int16))


def test_combine_adds_in_slot_order() -> None:
    routing = route(ids(), EXPERTS)
    y = matrix("normal", TOKENS * SLOTS, N)
    w = torch.rand(TOKENS, SLOTS, generator=torch.Generator().manual_seed(1))
    by_slot = torch.empty_like(y)
    by_slot[routing.order] = y
    by_slot = by_slot.view(TOKENS, SLOTS, N)
    expected = (by_slot[:, 0] * w[:, :1] + by_slot[:, 1] * w[:, 1:2]) + by_slot[:, 2] * w[:, 2:3]
    assert torch.equal(combine(y, routing, w), expected)


def test_no_tokens_at_all() -> None:
    routing = route(torch.empty(0, SLOTS, dtype=torch.int64), EXPERTS)
    q = quantize_grouped(torch.empty(0, K), routing.offsets, "te")
    assert grouped_gemm(q, weights("te"), routing.offsets).shape == (0, N)


def test_errors() -> None:
    routing = route(ids(), EXPERTS)
    rows = gather(matrix("normal", TOKENS, K), routing)
    with pytest.raises(ValueError, match="static"):
        quantize_grouped(rows, routing.offsets, "vllm-emulation")
    with pytest.raises(ValueError, match="16x16"):
        quantize_grouped(rows, routing.offsets, "te", role="weight")
    q = quantize_grouped(rows, routing.offsets, "te")
    with pytest.raises(ValueError, match="offsets"):
        grouped_gemm(q, weights("te")[:5], routing.offsets)


def test_aligned_routing_pads_with_zero_rows_and_changes_no_result() -> None:
    x = matrix("normal", TOKENS, K).bfloat16()
    plain, padded = route(ids(), EXPERTS), route(ids(), EXPERTS, align=16)
    assert not (padded.offsets % 16).any()
    assert (padded.order >= 0).sum() == TOKENS * SLOTS
    rows = gather(x, padded)
    assert not rows[padded.order < 0].any()
    assert torch.equal(rows[padded.place], gather(x, plain)[plain.place])
    w = weights("te")
    router_weights = torch.rand(TOKENS, SLOTS, generator=torch.Generator().manual_seed(1))
    results = []
    for routing in (plain, padded):
        owned = gather(x, routing)[: int(routing.offsets[-1])]
        q = quantize_grouped(owned, routing.offsets, "te")
        results.append(combine(grouped_gemm(q, w, routing.offsets), routing, router_weights))
    assert torch.equal(*results)


def test_gather_and_combine_gradients_match_autograd() -> None:
    x = matrix("normal", TOKENS, 24).double().float().requires_grad_()
    w = torch.rand(TOKENS, SLOTS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for align in (1, 16):
        routing = route(ids(), EXPERTS, align=align)
        (
            combine(gather(x, routing).sin(), routing, w) * matrix("normal", TOKENS, 24, seed=3)
        ).sum().backward()
        ours = [x.grad, w.grad]
        x.grad = w.grad = None
        y = x[:, None, :].expand(-1, SLOTS, -1).sin()
        ((y * w[:, :, None]).sum(1) * matrix("normal", TOKENS, 24, seed=3)).sum().backward()
        assert torch.allclose(ours[0], x.grad, atol=1e-5) and torch.allclose(
            ours[1], w.grad, atol=1e-4
        )
        x.grad = w.grad = None


def test_slots_in_place_are_summed_as_combine_does() -> None:
    scores = torch.rand(9, 6, generator=torch.Generator().manual_seed(0))
    routing = route(scores.topk(4).indices, 6)
    y = matrix("heavy_t2", 36, 40).bfloat16()
    weights = torch.rand(9, 4, generator=torch.Generator().manual_seed(1))
    by_slot = y[routing.place].view(9, 4, 40)
    expected = combine(y, routing, weights, out_dtype=torch.float32)
    assert torch.equal(combine_slots(by_slot, weights), expected)
    assert torch.equal(combine_slots(by_slot.float() * weights[..., None]), expected)
    assert not torch.equal(combine_slots(by_slot.flip(1), weights.flip(1)), expected)
