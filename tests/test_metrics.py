"""Each metric against a definition written out here, and exact values where tensors are equal."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minite_diag import metrics
from minite_diag.canonical.scales import unpack
from minite_diag.logprobs import logprob_summary


def pair(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 33, generator=g)
    return x.to(dtype), (x + 0.01 * torch.randn(7, 33, generator=g)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_tensors_are_exactly_equal(dtype: torch.dtype) -> None:
    x, _ = pair(dtype)
    row = metrics.compare_values(x, x.clone())
    assert (row["bitwise_fraction"], row["max_abs_diff"], row["rel_l2"]) == (1.0, 0.0, 0.0)
    assert (row["cosine"], row["rel_diff"], row["ulp_max"]) == (1.0, 0.0, 0.0)
    assert row["sqnr_db"] == math.inf
    assert row["first_row"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_definitions(dtype: torch.dtype) -> None:
    x, y = pair(dtype)
    row = metrics.compare_values(x, y)
    a, b = x.double().numpy().ravel(), y.double().numpy().ravel()
    d = b - a
    assert row["bitwise_fraction"] == pytest.approx(
        np.mean(x.numpy(force=True) == y.numpy(force=True))
        if dtype != torch.bfloat16
        else float((x == y).double().mean())
    )
    assert row["max_abs_diff"] == np.abs(d).max()
    assert row["mean_abs_diff"] == pytest.approx(np.abs(d).mean())
    assert row["rel_l2"] == pytest.approx(np.linalg.norm(d) / np.linalg.norm(a))
    assert row["rel_diff"] == pytest.approx(1 - 2 * (a @ b) / (a @ a + b @ b), abs=1e-12)
    assert row["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert row["sqnr_db"] == pytest.approx(20 * np.log10(np.linalg.norm(a) / np.linalg.norm(d)))


def test_memory_is_bounded_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair(torch.float32)
    whole = metrics.compare_values(x, y)
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 10)
    parts = metrics.compare_values(x, y)
    for name in ("max_abs_diff", "mean_abs_diff", "rel_l2", "cosine"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-12)


def test_ulps_count_steps_of_the_grid() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.bfloat16)
    y = x.view(torch.int16)
    y = torch.tensor([y[0] + 3, y[1] + 1, -32768, y[3]], dtype=torch.int16).view(torch.bfloat16)
    row = metrics.compare_values(x, y)
    assert row["ulp_max"] == 3.0  # -0.0 and 0.0 are no step apart
    assert row["bitwise_fraction"] == 0.25  # but their bytes differ
    assert row["ulp_p50"] == 0.0


def distances(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    a, b = metrics.ordered(x.view(bits)), metrics.ordered(y.view(bits))
    return np.sort((a - b).abs().numpy().ravel())


@pytest.mark.parametrize("chunk", [1 << 15, 16])
@pytest.mark.parametrize("spread", [1e-6, 1e-2, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulp_percentiles_are_those_of_the_sorted_distances(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, spread: float, chunk: int
) -> None:
    """One chunk selects, several ones count: 16 bits at once, 32 bits in halves."""
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", chunk)
    x = torch.randn(11, 37)
    y = (x + spread * torch.randn(11, 37) * (torch.rand(11, 37) < 0.7)).to(dtype)
    y[0, 0] += 1
    x = x.to(dtype)
    row, found = metrics.compare_values(x, y), distances(x, y)
    n = len(found)
    assert row["ulp_p50"] == found[math.ceil(0.5 * n) - 1]
    assert row["ulp_p99"] == found[math.ceil(0.99 * n) - 1]
    assert row["ulp_max"] == found[-1]
    different = (x.view(torch.uint8) != y.view(torch.uint8)).reshape(11, 37, -1).any(-1)
    assert row["bitwise_fraction"] == pytest.approx(1 - int(different.sum()) / n)
    assert row["first_row"] == 0


def test_a_late_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 16)
    for shape in ((40, 7), (1,), ()):
        x = torch.randn(shape)
        y = x.clone()
        y.view(-1)[-1] += 1
        row = metrics.compare_values(x, y)
        assert row["first_row"] == max(0, (shape[0] if shape else 1) - 1)
        assert row["bitwise_fraction"] == pytest.approx(1 - 1 / x.numel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_empty_tensors_are_equal(dtype: torch.dtype) -> None:
    row = metrics.compare_values(torch.empty(0, 4, dtype=dtype), torch.empty(0, 4))
    assert (row["elements"], row["bitwise_fraction"], row["first_row"]) == (0, 1.0, None)


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
@settings(max_examples=300, deadline=None)
def test_ordered_bits_follow_the_floats(i: int, j: int) -> None:
    bits = torch.tensor([i - 2**15, j - 2**15], dtype=torch.int16)
    a, b = bits.view(torch.bfloat16).float().tolist()
    if math.isnan(a) or math.isnan(b):
        return
    p, q = metrics.ordered(bits).tolist()
    assert (p < q) == (a < b)
    assert (p == q) == (a == b)


def test_nan_bytes_can_be_equal_and_are_counted() -> None:
    x = torch.tensor([float("nan"), 1.0])
    row = metrics.compare_values(x, x.clone())
    assert (row["bitwise_fraction"], row["nonfinite"]) == (1.0, 1)
    row = metrics.compare_values(x, torch.tensor([float("nan"), 2.0]))
    assert row["nonfinite"] == 1
    assert row["max_abs_diff"] == 1.0


def test_different_dtypes_meet_on_the_narrower_grid() -> None:
    x = torch.randn(64, 8)
    row = metrics.compare_values(x, x.bfloat16())
    assert row["bitwise_fraction"] == 1.0
    assert row["max_abs_diff"] > 0.0


def test_codes_and_masks() -> None:
    x = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    y = torch.tensor([[1, 2, 0, 0]], dtype=torch.uint8)
    assert metrics.compare_codes(x, y)["mismatch_rate"] == 0.5
    counted = torch.tensor([[True, True, True, False]])
    assert metrics.compare_codes(x, y, counted)["mismatch_rate"] == pytest.approx(1 / 3)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_packed_codes_are_compared_as_unpacked_ones(seed: int, masked: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (5, 24), dtype=torch.uint8, generator=g)
    y = torch.where(torch.rand(5, 24, generator=g) < 0.2, x + 17, x)
    zero = torch.rand(5, 3, generator=g) < 0.3 if masked else None
    counted = None if zero is None else ~zero.repeat_interleave(16, -1)
    assert metrics.compare_packed_codes(x, y, zero) == metrics.compare_codes(
        unpack(x), unpack(y), counted
    )


def test_expert_sets_ignore_order() -> None:
    x = torch.tensor([[0, 1], [2, 3], [4, 5]])
    y = torch.tensor([[1, 0], [2, 3], [4, 6]])
    row = metrics.compare_expert_sets(x, y)
    assert row["agreement"] == pytest.approx(2 / 3)
    assert row["bitwise_fraction"] == 0.5
    assert row["first_row"] == 2


def test_full_kl() -> None:
    x, y = torch.randn(3, 11), torch.randn(3, 11)
    p, q = x.double().softmax(-1), y.double().softmax(-1)
    assert metrics.full_kl(x, y) == pytest.approx((p * (p / q).log()).sum(-1).tolist())
    assert metrics.full_kl(x, x.clone()) == [0.0, 0.0, 0.0]
    # A common offset of logits changes no distribution, whatever its size.
    assert metrics.full_kl(x.double(), y.double() + 1e4) == pytest.approx(metrics.full_kl(x, y))


def test_logprob_estimators() -> None:
    learner, sampler = np.array([-1.0, -2.0, -0.5]), np.array([-1.1, -1.5, -0.5])
    r = learner - sampler
    found = logprob_summary(learner, sampler, on_policy=True)
    assert found["mean_abs"] == pytest.approx(np.abs(r).mean())
    assert found["mult_prob_error"] == pytest.approx(np.exp(np.abs(r)).mean())
    assert found["k1_kl"] == pytest.approx(-r.mean())
    assert found["k3_kl"] == pytest.approx((np.exp(r) - r - 1).mean())
    assert found["chi2"] == pytest.approx((np.exp(r) ** 2).mean() - 1)
    assert found["equal"] == 1
    assert "k1_kl" not in logprob_summary(learner, sampler, on_policy=False)


def test_k1_estimates_the_kl_of_the_sampler() -> None:
    """Samples from p, scored by q: the mean of k1 and k3 is KL(p || q)."""
    g = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    draws = g.choice(3, size=400_000, p=p)
    found = logprob_summary(np.log(q)[draws], np.log(p)[draws], on_policy=True)
    kl = float((p * np.log(p / q)).sum())
    assert found["k1_kl"] == pytest.approx(kl, abs=2e-3)
    assert found["k3_kl"] == pytest.approx(kl, abs=2e-3)
