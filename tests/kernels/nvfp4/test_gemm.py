"""The W4A4 GEMM against published code, exact integers, and itself at other batch sizes."""

from __future__ import annotations

from fractions import Fraction

import oracles
import pytest
import torch
from data import matrix
from torch import Tensor

from minite_kernels.dispatch import ImplementationUnavailableError
from minite_kernels.nvfp4.format import E2M1_GRID
from minite_kernels.nvfp4.gemm import accumulate, gemm, prepare
from minite_kernels.nvfp4.gemm._ref import EXACT_COLUMNS, decode
from minite_kernels.nvfp4.layout import pack_codes, swizzle_scale, unpack_codes
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.recipe import get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def adversarial(m: int, k: int, seed: int) -> Nvfp4Tensor:
    """Random codes with random E4M3 scales over all their binades: sums beyond 24 bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (m, k), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 127, (m, k // 16), dtype=torch.uint8, generator=generator)
    one = torch.ones(())
    return Nvfp4Tensor(
        codes=pack_codes(codes),
        block_scale=scale.view(torch.float8_e4m3fn),
        amax=one * 2688.0,
        global_encode_scale=one,
        global_decode_scale=one,
        shape=(m, k),
        recipe=get_recipe("pow2"),
        role="activation",
    )


@pytest.mark.parametrize("kind", ("normal", "heavy_t2", "zero_blocks", "silu_mul"))
def test_equals_te_reference(kind: str) -> None:
    """Same bits as TE's qgemm; its FP32 order differs from ours, the exact sums fit 24 bits."""
    te = oracles.transformer_engine()
    x, w = matrix(kind, 32, 512).bfloat16(), matrix("normal", 64, 512, seed=1).bfloat16()
    activation = te.NVFP4QuantizerRef(dtype=None, columnwise=False)
    weight = te.NVFP4QuantizerRef(dtype=None, columnwise=False, quant_tile_shape=(16, 16))
    qx, qw = activation.quantize(x), weight.quantize(w)
    theirs = activation.qgemm(
        qx.data, qw.data, None, torch.bfloat16, qx.scale, qw.scale, qresult_x=qx, qresult_w=qw
    )
    qw.global_amax_col = qw.global_amax_row
    ours = gemm(quantize(x, "te-python"), quantize(w, "te-python", role="weight"))
    assert torch.equal(bits(ours), bits(theirs))


def test_equals_vllm_emulation() -> None:
    vllm = oracles.vllm_emulation()
    x, w = matrix("normal", 48, 512).bfloat16(), matrix("heavy_t2", 64, 512, seed=1).bfloat16()
    encode = 2688.0 * x.float().abs().amax().reciprocal()
    qw = quantize(w, "vllm-emulation", role="weight")
    scales = swizzle_scale(qw.block_scale).view(torch.float8_e4m3fn)
    theirs = vllm.run_nvfp4_emulations(
        x, encode, qw.codes, scales, qw.global_decode_scale, swizzle=True
    )
    qx = quantize(x, "vllm-emulation", global_encode_scale=encode)
    assert torch.equal(bits(gemm(qx, qw)), bits(theirs))


def test_accumulator_is_the_exact_sum_rounded_once() -> None:
    """Rational arithmetic decides, on data whose sums need more than 24 bits."""
    a, b = adversarial(3, 2048 + 32, 0), adversarial(4, 2048 + 32, 1)
    ours = accumulate(a, b)
    left, right = rational(a), rational(b)
    inexact = 0
    for i in range(3):
        for j in range(4):
            exact = sum(p * q for p, q in zip(left[i], right[j], strict=True))
            assert ours[i, j].item() == float(torch.tensor(float(exact)))
            inexact += Fraction(ours[i, j].item()) != exact
    assert inexact > 0  # otherwise this test proves nothing about rounding


def rational(q: Nvfp4Tensor) -> list[list[Fraction]]:
    codes = unpack_codes(q.codes).tolist()
    scales = q.block_scale.float().tolist()
    return [
        [Fraction(E2M1_GRID[c]) * Fraction(s[k // 16]) for k, c in enumerate(row)]
        for row, s in zip(codes, scales, strict=True)
    ]


def test_a_slice_of_exact_columns_cannot_overflow_fp64() -> None:
    assert EXACT_COLUMNS * (6 * 448) ** 2 * 2**20 < 2**53


@pytest.mark.parametrize("recipe", ("te", "te-row-scaled", "pow2", "torchao"))
def test_rows_do_not_depend_on_the_batch(recipe: str) -> None:
    w = prepare(quantize(matrix("normal", 96, 4096, seed=1), recipe, role="weight"))
    q = quantize(matrix("outlier_channels", 130, 4096), recipe)
    whole = gemm(q, w, out_dtype=torch.float32)
    for start, stop in ((0, 1), (5, 8), (64, 97), (129, 130)):
        part = gemm(q.rows(slice(start, stop)), w, out_dtype=torch.float32)
        assert torch.equal(bits(part), bits(whole[start:stop]))


def test_rows_do_not_depend_on_the_batch_or_threads_with_adversarial_scales() -> None:
    a, b = adversarial(130, 4096, 2), prepare(adversarial(64, 4096, 3))
    whole = accumulate(a, b)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(bits(accumulate(a, b)), bits(whole))
    finally:
        torch.set_num_threads(threads)
    for row in (0, 7, 129):
        assert torch.equal(
            bits(accumulate(a.rows(slice(row, row + 1)), b)), bits(whole[row : row + 1])
        )


def test_permuting_k_by_blocks_changes_no_bit_within_an_exact_slice() -> None:
    a, b = adversarial(4, EXACT_COLUMNS, 4), adversarial(4, EXACT_COLUMNS, 5)
    order = torch.randperm(EXACT_COLUMNS, generator=torch.Generator().manual_seed(0))
    plain = decode(a) @ decode(b).t()
    shuffled = decode(a)[:, order] @ decode(b)[:, order].t()
    assert torch.equal(plain, shuffled)


def test_fp32_output_is_close_to_the_dequantized_product() -> None:
    for recipe in ("te", "te-row-scaled", "te-4over6", "pow2", "modelopt", "compressed-tensors"):
        a = quantize(matrix("normal", 17, 320), recipe)
        b = quantize(matrix("normal", 48, 320, seed=1), recipe, role="weight")
        reference = dequantize(a).double() @ dequantize(b).double().t()
        ours = gemm(a, b, out_dtype=torch.float32).double()
        assert ((ours - reference).norm() / reference.norm()).item() < 1e-6


def test_alpha_argument_replaces_the_recipe_factor() -> None:
    a, b = quantize(matrix("normal"), "te"), quantize(matrix("normal", seed=1), "te", role="weight")
    alpha = torch.tensor(0.125)
    ours = gemm(a, b, out_dtype=torch.float32, alpha=alpha)
    assert torch.equal(ours, accumulate(a, b) * 0.125)


def test_alpha_formulas_differ_between_te_and_its_reference() -> None:
    """16.7 % of amax pairs give another alpha; the two recipes must not be merged."""
    generator = torch.Generator().manual_seed(0)
    different = 0
    for _ in range(200):
        amax = torch.rand(2, generator=generator) + 1
        results = []
        for recipe in ("te", "te-python"):
            a = quantize(matrix("normal", 1, 32), recipe, amax=amax[0])
            b = quantize(matrix("normal", 16, 32), recipe, role="weight", amax=amax[1])
            results.append(gemm(a, b, out_dtype=torch.float32))
        different += not torch.equal(*results)
    assert 10 < different < 190


def test_errors_say_what_to_do() -> None:
    a = quantize(matrix("normal"), "te")
    with pytest.raises(ValueError, match="K differs"):
        gemm(a, quantize(matrix("normal", 64, 128), "te", role="weight"))
    with pytest.raises(ValueError, match="quantize both operands under one recipe"):
        gemm(a, quantize(matrix("normal"), "torchao", role="weight"))
    with pytest.raises(ValueError, match="static activation scale"):
        quantize(matrix("normal"), "vllm-cuda")
    with pytest.raises(ImplementationUnavailableError, match="native"):
        gemm(a, quantize(matrix("normal"), "te", role="weight"), impl="native")
    with pytest.raises(ValueError, match="flatten leading"):
        quantize(torch.zeros(2, 3, 16), "te")
