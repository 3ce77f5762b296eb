"""Triton NVFP4 kernels in the interpreter against the reference, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import interpreter  # noqa: F401
import pytest
import torch
import triton
import triton.language as tl
from data import DISTRIBUTIONS, NOT_FINITE, amax_sweep, matrix
from torch import Tensor

from minite_kernels.invariant.rms_norm import add_rms_norm, rms_norm
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4 import grouped_linear
from minite_kernels.nvfp4.format import decode_e2m1, encode_e2m1_stochastic, to_e4m3
from minite_kernels.nvfp4.gemm import _ref as gemm_ref
from minite_kernels.nvfp4.gemm import configs, gemm, linear
from minite_kernels.nvfp4.grouped_gemm import (
    ExpertOperands,
    amax_per_expert,
    combine,
    experts_linear,
    gather,
    grouped_gemm,
    quantize_grouped,
    route,
)
from minite_kernels.nvfp4.quantize import _ref, _triton, quantize
from minite_kernels.nvfp4.quantize import _triton_arithmetic as arithmetic
from minite_kernels.nvfp4.quantize.fused import (
    add_rms_norm_quantize,
    rms_norm_quantize,
    silu_mul_quantize,
)
from minite_kernels.nvfp4.recipe import RECIPES, OperandRecipe, Recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


def same(a: Tensor, b: Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and torch.equal(*flat)


def operands() -> dict[str, tuple[Recipe, str]]:
    """One recipe and role for each different arithmetic: the kernels do all of them.

    The interpreter has no rcp.approx: its recipes run here with IEEE division in both
    implementations, which leaves their guards, orders and expressions under test.
    """
    seen: dict[OperandRecipe, tuple[Recipe, str]] = {}
    for recipe in RECIPES.values():
        for role in ("activation", "weight"):
            operand = replace(getattr(recipe, role), reciprocal="div")
            seen.setdefault(operand, (replace(recipe, **{role: operand}), role))
    return {f"{recipe.name}-{role}": (recipe, role) for recipe, role in seen.values()}


OPERANDS = operands()


def test_all_the_arithmetics_are_here() -> None:
    assert len(OPERANDS) >= 32


@pytest.mark.parametrize("case", OPERANDS)
def test_quantizer(case: str) -> None:
    recipe, role = OPERANDS[case]
    inputs = [matrix(kind, 16, 256).bfloat16() for kind in (*DISTRIBUTIONS, *NOT_FINITE)]
    inputs += [*amax_sweep(torch.float32, 4), matrix("normal", 32, 272)]
    inputs += [matrix("heavy_t2", 7, 250).half(), matrix("normal", 3, 768).bfloat16()]
    for x in inputs:
        amax = None
        if getattr(recipe, role).amax_scope == "static":
            amax = x.float().abs().nan_to_num(0, 1, 1).amax().clamp(min=1e-30)
        ref, ours = (
            quantize(x, recipe, role=role, amax=amax, impl=impl)  # type: ignore[arg-type]
            for impl in ("ref", "triton")
        )
        assert same(ours.codes, ref.codes)
        assert same(ours.block_scale, ref.block_scale)
        for field in ("amax", "global_encode_scale", "global_decode_scale"):
            mine, theirs = getattr(ours, field), getattr(ref, field)
            assert torch.equal(mine.nan_to_num(1.5), theirs.nan_to_num(1.5)), field


@pytest.mark.parametrize(
    "name", ("te", "te-python", "modelopt", "fp-quant", "te-row-scaled", "te-4over6")
)
def test_decoded_values_are_the_codes_times_the_scales(name: str) -> None:
    operand = RECIPES[name].activation
    for kind in ("normal", "negative_zeros", "ties", "underflow"):
        x = matrix(kind, 16, 256)
        q = quantize(x, name, impl="ref")
        scale = _ref.GlobalScale(q.amax, q.global_encode_scale, q.global_decode_scale)
        expected = gemm_ref.decode(q, torch.float32)
        assert torch.equal(_triton.quantize_values(operand, x, scale).float(), expected)
        if operand.amax_scope == "token":
            values, _ = _triton.quantize_token_values(operand, x)
            assert torch.equal(values.float(), expected)


@pytest.mark.parametrize("role", ("activation", "weight"))
def test_transposed_input_needs_no_copy(role: str) -> None:
    x = matrix("normal", 48, 32).t()
    ref = quantize(x.contiguous(), "te", role=role, impl="ref")  # type: ignore[arg-type]
    ours = quantize(x, "te", role=role, impl="triton")  # type: ignore[arg-type]
    assert same(ours.codes, ref.codes) and same(ours.block_scale, ref.block_scale)


def same_tensors(ours: Nvfp4Tensor, ref: Nvfp4Tensor) -> bool:
    scales = ("amax", "global_encode_scale", "global_decode_scale")
    fields = all(torch.equal(getattr(ours, f), getattr(ref, f)) for f in scales)
    return same(ours.codes, ref.codes) and same(ours.block_scale, ref.block_scale) and fields


def divided(name: str) -> Recipe:
    """A recipe whose activations use IEEE division, as ``operands`` explains."""
    recipe = RECIPES[name]
    return replace(recipe, activation=replace(recipe.activation, reciprocal="div"))


#: Static scales (vLLM, FlashInfer with flushing), one amax a token, one of the tensor, 4/6.
FUSED_RECIPES = ("vllm-cuda", "flashinfer-fast", "te-row-scaled", "te", "te-4over6")


@pytest.mark.parametrize("name", FUSED_RECIPES)
def test_fused_silu_mul_is_the_composition(name: str) -> None:
    recipe = divided(name)
    for kind, width in (("normal", 512), ("heavy_t2", 192), ("nan_element", 96)):
        x = matrix(kind, 13, 2 * width).bfloat16()
        for rounding in ("once", "twice"):
            hidden = silu_mul(x, rounding=rounding, impl="ref")  # type: ignore[arg-type]
            amax = None
            if recipe.activation.amax_scope == "static":
                amax = hidden.float().abs().nan_to_num().amax()
            expected = quantize(hidden, recipe, amax=amax, impl="ref")
            for impl in ("ref", "triton"):
                ours = silu_mul_quantize(x, recipe, rounding=rounding, amax=amax, impl=impl)  # type: ignore[arg-type]
                assert same_tensors(ours, expected), (kind, rounding, impl)


@pytest.mark.parametrize("name", FUSED_RECIPES)
def test_fused_rms_norm_is_the_composition(name: str) -> None:
    recipe = divided(name)
    for dtype, k in ((torch.bfloat16, 304), (torch.float32, 128)):
        x, w = matrix("heavy_t2", 21, k).to(dtype), matrix("normal", 1, k, seed=1)[0].to(dtype)
        normed = rms_norm(x, w, 1e-6, impl="ref")
        static = recipe.activation.amax_scope == "static"
        row_amax = normed.float().abs().amax(1)
        for amax in (row_amax.amax(), row_amax) if static else (None,):
            expected = quantize(normed, recipe, amax=amax, impl="ref")
            for impl in ("ref", "triton"):
                ours = rms_norm_quantize(x, w, 1e-6, recipe, amax=amax, impl=impl)  # type: ignore[arg-type]
                assert same_tensors(ours, expected)


@pytest.mark.parametrize("form", ("weight_first", "rounded", "float32"))
@pytest.mark.parametrize("name", ("flashinfer-rmsnorm", "te-row-scaled"))
def test_fused_add_rms_norm_is_the_composition(name: str, form: str) -> None:
    recipe = divided(name)
    x, w = matrix("heavy_t2", 21, 304).bfloat16(), matrix("normal", 1, 304, seed=1)[0].bfloat16()
    encode = torch.tensor(100.0) if recipe.activation.amax_scope == "static" else None
    arguments = {"recipe": recipe, "form": form, "global_encode_scale": encode}
    ref, ours = (
        add_rms_norm_quantize(x, x.flip(0), w, 1e-6, impl=impl, **arguments)  # type: ignore[arg-type]
        for impl in ("ref", "triton")
    )
    assert same_tensors(ours[0], ref[0]) and same(ours[1], ref[1])
    if form != "weight_first":
        normed, total = add_rms_norm(x, x.flip(0), w, 1e-6, normalize=form, impl="ref")  # type: ignore[arg-type]
        expected = quantize(normed, recipe, global_encode_scale=encode, impl="ref")
        assert same_tensors(ours[0], expected) and same(ours[1], total)


@pytest.mark.parametrize("k", (256, 768, 2880, 20480))
def test_rows_of_any_width_take_one_launch(k: int) -> None:
    for kind in ("normal", "nan_element", "all_nan_row"):
        x = matrix("normal" if kind == "all_nan_row" else kind, 5, k).bfloat16()
        if kind == "all_nan_row":
            x[3] = torch.nan
        for name in ("te-row-scaled", "flashinfer-token-exact"):
            ref, ours = (quantize(x, name, impl=i) for i in ("ref", "triton"))  # type: ignore[arg-type]
            assert same(ours.codes, ref.codes) and same(ours.block_scale, ref.block_scale)
            assert same(ours.amax.nan_to_num(-1), ref.amax.nan_to_num(-1))


def test_amax_per_expert() -> None:
    x = matrix("heavy_t2", 40, 272).bfloat16()
    x[3, 5], x[30:] = torch.nan, torch.nan
    offsets = torch.tensor([0, 7, 7, 30, 40])
    for name in ("te", "te-python"):
        ref, ours = (
            amax_per_expert(x, offsets, name, "activation", impl=i)  # type: ignore[arg-type]
            for i in ("ref", "triton")
        )
        assert same(ours.nan_to_num(-1), ref.nan_to_num(-1)), name


def test_ragged_k_is_multiplied_too() -> None:
    for recipe in ("te-row-scaled", "modelopt"):
        a = quantize(matrix("normal", 7, 90).bfloat16(), recipe, impl="ref")
        b = quantize(matrix("normal", 48, 90, seed=1), recipe, role="weight", impl="ref")
        expected = gemm(a, b, impl="ref")
        assert same(gemm(a, b, impl="triton"), expected)
        assert same(linear(matrix("normal", 7, 90).bfloat16(), b, impl="triton"), expected)


def test_stochastic_rounding_is_seeded_and_unbiased() -> None:
    def run(seed: int, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return quantize(x, "te", role="gradient", impl="triton", generator=generator).codes

    x = matrix("normal", 16, 256)
    assert torch.equal(run(1, x), run(1, x))
    assert not torch.equal(run(1, x), run(2, x))
    constant = torch.full((64, 256), 1.3)
    constant[:, ::16] = 6.0
    codes = run(3, constant)
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()][:, 1::8]
    assert set(value.unique().tolist()) == {1.0, 1.5}
    assert abs(value.mean().item() - 1.3) < 5 * 0.25 / value.numel() ** 0.5


RECIPES_WITH_ALPHA = (
    *("te", "te-row-scaled", "te-python", "pow2", "torchao"),
    *("compressed-tensors-fp32", "flashinfer-exact"),
)


@pytest.mark.parametrize(
    "shape", ((3, 96, 256), (70, 96, 192), (140, 80, 128), (16, 64, 80)), ids=str
)
@pytest.mark.parametrize("recipe", RECIPES_WITH_ALPHA)
def test_gemm(recipe: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    scale = {"global_encode_scale": torch.tensor(512.0)} if recipe == "flashinfer-exact" else {}
    a = quantize(matrix("normal", m, k).bfloat16(), recipe, impl="ref", **scale)
    b = quantize(matrix("normal", n, k, seed=1), recipe, role="weight", impl="ref")
    bias = matrix("normal", 1, n)[0].bfloat16() if m == 3 else None
    for dtype in (torch.bfloat16, torch.float32):
        ours, ref = (
            gemm(a, b, out_dtype=dtype, bias=bias, impl=impl)  # type: ignore[arg-type]
            for impl in ("triton", "ref")
        )
        assert same(ours, ref)
    alpha = torch.tensor(0.125)
    assert same(gemm(a, b, alpha=alpha, impl="triton"), gemm(a, b, alpha=alpha, impl="ref"))


@pytest.mark.parametrize("decode_rows", (64, -1), ids=("packed", "decoded"))
@pytest.mark.parametrize("recipe", ("te", "te-row-scaled"))
def test_grouped_gemm(recipe: str, decode_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "GROUPED_DECODE_ROWS", decode_rows)
    tokens, slots, experts, k, n = 40, 2, 5, 128, 72
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    scores[:, 3] = -1.0  # an expert without tokens
    routing = route(scores.topk(slots).indices, experts)
    x = matrix("normal", tokens, k).bfloat16()
    weights = [
        quantize(matrix("normal", n, k, seed=e), recipe, role="weight", impl="ref")
        for e in range(experts)
    ]
    q = quantize_grouped(gather(x, routing), routing.offsets, recipe, impl="ref")
    ours, ref = (
        grouped_gemm(q, weights, routing.offsets, impl=impl)  # type: ignore[arg-type]
        for impl in ("triton", "ref")
    )
    assert same(ours, ref)
    if recipe == "te-row-scaled":
        tokens_q = quantize(x, recipe, impl="ref")
        rows = routing.order // routing.slots
        gathered = grouped_gemm(tokens_q, weights, routing.offsets, rows=rows, impl="triton")
        assert same(gathered, ref)
    router_weights = torch.rand(tokens, slots, generator=torch.Generator().manual_seed(1))
    ours, ref = (
        combine(ref, routing, router_weights, impl=impl)  # type: ignore[arg-type]
        for impl in ("triton", "ref")
    )
    assert same(ours, ref)


TRAINED = ("te", "te-1d", "te-python", "te-row-scaled", "pow2", "te-4over6", "flashinfer-exact")


@pytest.mark.parametrize("recipe", TRAINED)
def test_grouped_linear_gives_the_reference_bits_in_all_three_gemms(recipe: str) -> None:
    base = RECIPES[recipe]
    rne = replace(base, gradient=replace(base.gradient, rounding="rne"))
    offsets = torch.tensor([0, 64, 64, 192])
    x, dy = matrix("normal", 256, 64).bfloat16(), matrix("normal", 256, 128, seed=5).bfloat16()
    for tensor in (x, dy):
        tensor[50:64] = 0  # padding within an expert
        tensor[192:] = 0  # rows of no expert
    w = torch.stack([matrix("normal", 128, 64, seed=e) for e in range(3)]).bfloat16()
    calls = (
        (grouped_linear.forward, (x, w)),
        (grouped_linear.data_gradient, (dy, w)),
        (grouped_linear.weight_gradient, (dy, x)),
    )
    static = rne.activation.amax_scope == "static"
    for function, (first, second) in calls:
        amax = {}
        if static and function is grouped_linear.forward:
            amax = {"input_amax": torch.tensor([3.0, 1.0, 4.5])}
        ref, ours = (
            function(first, second, offsets, grouped_linear.Options(rne, i), aligned=True, **amax)
            for i in ("ref", "triton")
        )
        if function is grouped_linear.weight_gradient:
            # After the RHT some exact sums need more than 24 bits: FP32's order shows there.
            assert ((ours - ref).norm() / ref.norm()).item() < 1e-6
            assert (ours != ref).float().mean().item() < 1e-3
        else:
            assert same(ours, ref), function.__name__


def test_routing_ops_give_the_reference_bits() -> None:
    scores = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    routing = route(scores.topk(2).indices, 5, align=16)
    x = matrix("normal", 40, 72).bfloat16()
    rows = gather(x, routing, impl="ref")
    assert same(gather(x, routing, impl="triton"), rows)
    weights = torch.rand(40, 2, generator=torch.Generator().manual_seed(1))
    gradients = []
    for impl in ("ref", "triton"):
        y, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        combine(y, routing, w, impl=impl).backward(x)
        gradients.append((y.grad, w.grad))
    assert same(gradients[0][0], gradients[1][0])
    assert torch.allclose(gradients[0][1], gradients[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ("te", "te-row-scaled", "pow2", "modelopt"))
def test_linear_gives_the_bits_of_quantize_and_gemm(recipe: str) -> None:
    w = quantize(matrix("normal", 96, 256, seed=1), recipe, role="weight", impl="ref")
    for m in (3, 70):
        x = matrix("normal", m, 256).bfloat16()
        expected = gemm(quantize(x, recipe, impl="ref"), w, impl="ref")
        assert same(linear(x, w, impl="triton"), expected)
        assert same(linear(x, w, impl="ref"), expected)


def test_experts_linear_gives_the_bits_of_quantize_and_grouped_gemm() -> None:
    scores = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    routing = route(scores.topk(2).indices, 5)
    x = matrix("normal", 40, 128).bfloat16()
    b = ExpertOperands(
        [
            quantize(matrix("normal", 72, 128, seed=e), "te-row-scaled", role="weight", impl="ref")
            for e in range(5)
        ]
    )
    rows = routing.order // routing.slots
    ref, ours = (
        experts_linear(x, b, routing.offsets, rows=rows, impl=impl) for impl in ("ref", "triton")
    )
    assert same(ours, ref)


@triton.jit
def _round_kernel(y_ptr, random_ptr, dithered_ptr, scale_ptr, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    y = tl.load(y_ptr + i)
    dithered = arithmetic.dither_e2m1(y, tl.load(random_ptr + i))
    tl.store(dithered_ptr + i, dithered)
    tl.store(scale_ptr + i, _triton._encode_e4m3(_triton._round_e4m3(tl.minimum(tl.abs(y), 448.0))))


def test_dither_and_e4m3_by_arithmetic_are_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(-7000, 7001, (4096,), generator=generator) / 1024.0
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (every[1:] + every[:-1]) / 2  # ties
    y[: 127 + 126] = torch.cat((every, middle))
    y[300:900] *= 2.0**-9  # subnormal scales
    y[900:1500] *= 100.0
    random = torch.randint(0, 256, y.shape, dtype=torch.uint8, generator=generator)
    dithered = torch.empty_like(y)
    scale = torch.empty(y.shape, dtype=torch.float8_e4m3fn)
    _round_kernel[(1,)](y, random.to(torch.int32), dithered, scale, N=4096)
    # Where a sum of the two meets a grid point within an ulp, FP32 rounds one of them.
    expected = decode_e2m1(encode_e2m1_stochastic(y, random))
    assert (dithered != expected).sum().item() <= 2
    assert same(scale, to_e4m3(y.abs()))
