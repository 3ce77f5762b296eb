"""Autograd modules: gradients against FP64, and against the GEMMs that TE's semantics name."""

from __future__ import annotations

from dataclasses import replace

import oracles
import pytest
import torch
from data import matrix

from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.hadamard import hadamard_matrix, random_hadamard_transform
from minite_kernels.nvfp4.linear import Nvfp4Experts, Nvfp4Linear
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.recipe import get_recipe


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def run(layer: Nvfp4Linear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


def test_hadamard_is_orthogonal_and_rounds_to_the_input_dtype() -> None:
    h = hadamard_matrix()
    assert torch.equal(h @ h.t(), torch.eye(16, dtype=torch.float64))
    x = matrix("normal", 8, 64)
    y = random_hadamard_transform(x)
    assert relative(y.square().sum(), x.double().square().sum()) < 1e-6
    assert random_hadamard_transform(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="16"):
        random_hadamard_transform(x[:, :20])


@pytest.mark.parametrize("recipe", ("te", "te-1d", "te-row-scaled", "te-python", "pow2"))
def test_forward_and_gradients_are_near_fp64(recipe: str) -> None:
    """Three W4A4 GEMMs each carry about 0.13 of relative quantization noise, and no more."""
    generator = torch.Generator().manual_seed(0)
    layer = Nvfp4Linear(256, 96, recipe, generator=generator)
    x, dy = matrix("normal", 72, 256), matrix("normal", 72, 96, seed=1)
    y, dx, dw = run(layer, x, dy)
    w = layer.weight.detach().double()
    for ours, exact in (
        (y, x.double() @ w.t()),
        (dx, dy.double() @ w),
        (dw, dy.double().t() @ x.double()),
    ):
        assert 0.05 < relative(ours, exact) < 0.25


def test_te_gemms_are_exactly_the_ones_of_the_recipe() -> None:
    """RNE gradients make the recipe deterministic; each GEMM is then rebuilt from its parts."""
    te = get_recipe("te")
    recipe = replace(te, gradient=replace(te.gradient, rounding="rne"))
    layer = Nvfp4Linear(64, 32, recipe, dtype=torch.bfloat16)
    x, dy = matrix("normal", 40, 64).bfloat16(), matrix("normal", 40, 32, seed=1).bfloat16()
    y, dx, dw = run(layer, x, dy)
    w = layer.weight.detach()
    qw = quantize(w, recipe, role="weight")
    qwt = quantize(w.t().contiguous(), recipe, role="weight")
    assert torch.equal(dequantize(qw), dequantize(qwt).t())  # a 16x16 tile transposes
    assert torch.equal(y, gemm(quantize(x, recipe), qw))
    assert torch.equal(dx, gemm(quantize(dy, recipe, role="gradient"), qwt))
    pad = torch.nn.functional.pad
    dyt = random_hadamard_transform(pad(dy.t(), (0, 8)))
    xt = random_hadamard_transform(pad(x.t(), (0, 8)))
    expected = gemm(
        quantize(dyt, recipe, role="gradient"), quantize(xt, recipe), out_dtype=torch.float32
    )
    assert torch.equal(dw, expected.bfloat16())


def test_stochastic_gradients_are_seeded_and_unbiased() -> None:
    x, dy = matrix("normal", 64, 64), matrix("normal", 64, 32, seed=1)
    torch.manual_seed(0)
    base = Nvfp4Linear(64, 32, "te", generator=torch.Generator().manual_seed(1))

    def gradient(seed: int) -> torch.Tensor:
        base.options.generator.manual_seed(seed)
        base.weight.grad = None
        return run(base, x, dy)[1]

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
    draws = torch.stack([gradient(seed) for seed in range(50)]).double()
    w = quantize(base.weight.detach().t().contiguous(), "te", role="weight")
    exact = dy.double() @ dequantize(w).double().t()
    # SR's mean is the unrounded gradient (block scales saturate nothing): noise falls as 1/sqrt(n).
    single, averaged = relative(draws[0], exact), relative(draws.mean(0), exact)
    assert averaged < 0.2 * single + 0.01


@pytest.mark.parametrize("backward", ("high_precision", "dequantized"))
def test_other_backwards(backward: str) -> None:
    layer = Nvfp4Linear(64, 32, "te", backward=backward)
    x, dy = matrix("normal", 40, 64), matrix("normal", 40, 32, seed=1)
    _, dx, dw = run(layer, x, dy)
    w = layer.weight.detach()
    if backward == "dequantized":
        x, w = dequantize(quantize(x, "te")), dequantize(quantize(w, "te", role="weight"))
    assert relative(dx, dy.double() @ w.double()) < 1e-6
    assert relative(dw, dy.double().t() @ x.double()) < 1e-6


def test_bias_and_leading_dims() -> None:
    layer = Nvfp4Linear(64, 32, "te", bias=True)
    with torch.no_grad():
        layer.bias.copy_(matrix("normal", 1, 32)[0])
    x = matrix("normal", 24, 64).view(2, 3, 4, 64)
    y = layer(x)
    assert y.shape == (2, 3, 4, 32)
    y.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 24.0))
    q = quantize(x.view(24, 64), "te")
    w = quantize(layer.weight.detach(), "te", role="weight")
    expected = gemm(q, w, out_dtype=torch.float32) + layer.bias.detach()
    assert torch.equal(y.detach().view(24, 32), expected)


def test_static_recipe_needs_its_buffer() -> None:
    layer = Nvfp4Linear(64, 32, "flashinfer-exact")
    with pytest.raises(ValueError, match="static"):
        layer(matrix("normal", 4, 64))
    layer.input_amax = torch.tensor(4.0)
    assert layer(matrix("normal", 4, 64)).shape == (4, 32)


def experts_in_fp64(layer: Nvfp4Experts, x, ids, weights):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            w13, w2 = layer.w13[ids[t, s]].double(), layer.w2[ids[t, s]].double()
            gate, up = (w13 @ x[t].double()).chunk(2)
            out[t] = out[t] + weights[t, s] * (w2 @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("recipe", ("te", "te-row-scaled"))
def test_experts_forward_and_gradients_are_near_fp64(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Nvfp4Experts(4, 64, 32, recipe, generator=generator)
    x = matrix("normal", 48, 64).requires_grad_()
    scores = torch.rand(48, 4, generator=generator)
    weights, ids = scores.topk(2)
    y = layer(x, ids, weights)
    y.square().sum().backward()
    ours = [t.clone() for t in (y.detach(), x.grad, layer.w13.grad, layer.w2.grad)]
    for t in (x, layer.w13, layer.w2):
        t.grad = None
    exact = experts_in_fp64(layer, x, ids, weights.double())
    exact.square().sum().backward()
    for mine, theirs in zip(
        ours, (exact.detach(), x.grad, layer.w13.grad, layer.w2.grad), strict=True
    ):
        assert relative(mine, theirs.double()) < 0.45


def test_experts_with_high_precision_backward_match_autograd_of_their_own_forward() -> None:
    layer = Nvfp4Experts(3, 64, 32, "te-1d", backward="high_precision")
    x = matrix("normal", 12, 64).requires_grad_()
    ids = torch.tensor([[0, 2], [2, 0]]).repeat(6, 1)
    layer(x, ids, torch.full((12, 2), 0.5)).sum().backward()
    assert torch.equal(layer.w13.grad[1], torch.zeros_like(layer.w13.grad[1]))
    assert layer.w13.grad[0].norm() > 0


def test_hadamard_equals_te_reference() -> None:
    te = oracles.transformer_engine()
    quantizer = te.NVFP4QuantizerRef(dtype=None, with_rht=True)
    for kind in ("normal", "heavy_t2", "row_binades", "outlier_channels"):
        x = matrix(kind, 64, 512).bfloat16()
        assert torch.equal(random_hadamard_transform(x), quantizer._apply_rht(x))
