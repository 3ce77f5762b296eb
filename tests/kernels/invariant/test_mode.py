"""The mode on plain torch modules: rows stop depending on the batch, and it cannot stay on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minite_kernels.invariant.mode import batch_invariant
from minite_kernels.testing import assert_same_bits, different_elements


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(384, 512), nn.SiLU(), nn.Linear(512, 96, bias=False))


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 384, generator=torch.Generator().manual_seed(1))


def test_rows_do_not_depend_on_the_batch_inside_and_replacements_are_counted() -> None:
    network, x = model(), rows(100)
    with torch.no_grad(), batch_invariant() as mode:
        whole = network(x).log_softmax(-1)
        alone = torch.cat([network(x[i : i + 1]).log_softmax(-1) for i in range(8)])
    assert_same_bits(alone, whole[:8])
    assert mode.replaced["aten.addmm.default"] == 9
    assert mode.replaced["aten.mm.default"] == 9
    assert mode.replaced["aten._log_softmax.default"] == 9


def test_results_and_gradients_stay_close_to_torch() -> None:
    network, x = model(), rows(20).requires_grad_()
    network(x).square().mean(-1).sum().backward()
    plain = x.grad.clone()
    x.grad = None
    with batch_invariant() as mode:
        network(x).square().mean(-1).sum().backward()
    assert torch.allclose(x.grad, plain, rtol=1e-4, atol=1e-6)
    assert mode.replaced["aten.mean.dim"] == 1
    assert mode.replaced["aten.mm.default"] >= 4  # one forward, three backward


def test_the_mode_ends_with_an_exception() -> None:
    x = rows(40)
    w = torch.randn(384, 64, generator=torch.Generator().manual_seed(2))
    plain = x @ w
    with pytest.raises(RuntimeError, match="planted"), batch_invariant():
        raise RuntimeError("planted")
    assert_same_bits(x @ w, plain)


def test_what_cannot_be_invariant_raises() -> None:
    x = rows(4)
    with batch_invariant():
        with pytest.raises(NotImplementedError, match="addmm"):
            torch.addmm(torch.zeros(4, 4), x, x.t())
        with pytest.raises(NotImplementedError, match="log_softmax"):
            x.log_softmax(0)
        with pytest.raises(NotImplementedError, match="mean"):
            x.mean(0)


def test_bf16_linear_is_rounded_once() -> None:
    x, w = rows(33).bfloat16(), torch.randn(64, 384, generator=torch.Generator().manual_seed(2))
    w = w.bfloat16()
    with batch_invariant():
        ours = nn.functional.linear(x, w)
    exact = (x.double() @ w.double().t()).float().bfloat16()
    assert different_elements(ours, exact).float().mean() < 1e-3
