"""Comparison by bytes, and the count of sums that no order can change."""

from __future__ import annotations

import pytest
import torch
from data import matrix

from minite_kernels.nvfp4.gemm._ref import decode
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.testing import assert_same_bits, different_elements, exact_in_any_blocking


def test_bytes_decide() -> None:
    a = torch.tensor([0.0, 1.0, torch.nan])
    assert_same_bits(a, a.clone())
    assert different_elements(a, torch.tensor([-0.0, 1.0, torch.nan])).tolist() == [
        True,
        False,
        False,
    ]
    with pytest.raises(AssertionError, match=r"1 of 3 elements of x differ; at \(1,\)"):
        assert_same_bits(a, torch.tensor([0.0, 2.0, torch.nan]), "x")
    with pytest.raises(ValueError, match="cannot compare"):
        assert_same_bits(a, a.double())


#: Share of outputs proved exact at K = 4096 and 16384: at least, at most.
SHARES = {
    "normal": ((1.0, 1.0), (0.99, 1.0)),
    "silu_mul": ((0.9, 1.0), (0.4, 0.8)),
    "heavy_t2": ((0.95, 1.0), (0.8, 1.0)),
    "outlier_channels": ((0.5, 0.9), (0.0, 0.2)),
}


@pytest.mark.parametrize(("index", "k"), ((0, 4096), (1, 16384)))
@pytest.mark.parametrize("kind", SHARES)
def test_sums_proved_exact_do_not_depend_on_the_blocking(kind: str, index: int, k: int) -> None:
    """FP32 sums in two blockings agree wherever the proof holds, and the proof is counted."""
    a = quantize(matrix(kind, 16, k).bfloat16(), "te")
    b = quantize(matrix("normal", 24, k, seed=1).bfloat16() * 0.02, "te-1d", role="weight")
    proved = exact_in_any_blocking(a, b)
    exact = decode(a) @ decode(b).t()
    products = decode(a, torch.float32)[:, None, :] * decode(b, torch.float32)[None, :, :]
    for width in (16, 256):
        blocks = products.view(16, 24, -1, width)
        total = blocks[..., 0]
        for element in range(1, width):
            total = total + blocks[..., element]
        acc = total[..., 0]
        for block in range(1, total.shape[-1]):
            acc = acc + total[..., block]
        assert not (proved & (acc.double() != exact)).any()
    low, high = SHARES[kind][index]
    share = proved.float().mean().item()
    print(f"{kind} K={k}: {share:.3f}")
    assert low <= share <= high
