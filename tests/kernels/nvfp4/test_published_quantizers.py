"""Our quantizer against published code, byte for byte: codes, block scales and global scales.

Every recipe with a published CPU implementation is compared on 128 amax mantissas (where most
arithmetic differences hide: ``S`` a power of two hides them all), on ordinary distributions and on
special blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import oracles
import pytest
import torch
from data import DISTRIBUTIONS, NOT_FINITE, amax_sweep, matrix
from torch import Tensor

from minite_kernels.nvfp4.format import encode_e2m1
from minite_kernels.nvfp4.layout import pack_codes, unpack_codes
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import OperandRecipe, Role, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

Published = Callable[[Tensor], tuple[Tensor, Tensor]]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_same_bytes(
    q: Nvfp4Tensor, published: tuple[Tensor, Tensor], defined: Tensor | None = None
) -> None:
    """Compare codes and block scales; ``defined`` [M, K] masks codes that the oracle leaves open."""
    codes, scales = published
    ours = q.block_scale.view(torch.uint8)
    theirs = scales.view(torch.uint8)[: ours.shape[0]]
    theirs = torch.where(theirs == 0xFF, 0x7F, theirs)  # the sign of a NaN is the CPU's choice
    assert torch.equal(ours, theirs), _difference("block scales", ours, theirs)
    mine, published_codes = unpack_codes(q.codes), unpack_codes(codes)
    if defined is not None:
        mine, published_codes = mine * defined, published_codes * defined
    assert torch.equal(mine, published_codes), _difference("codes", mine, published_codes)


def _difference(what: str, ours: Tensor, theirs: Tensor) -> str:
    where = (ours != theirs).nonzero()
    first = tuple(where[0].tolist())
    return f"{len(where)} of {ours.numel()} {what} differ; at {first} {ours[first]} {theirs[first]}"


def te_python(tile: tuple[int, int] = (1, 16), **options: object) -> Published:
    te = oracles.transformer_engine()
    quantizer = te.NVFP4QuantizerRef(dtype=None, columnwise=False, quant_tile_shape=tile, **options)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        result = quantizer.quantize(x)
        return result.data, result.scale

    return run


def vllm_emulation(x: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM returns values, not codes; a value names its code, except that NaN has none."""
    values, scales = oracles.vllm_emulation().ref_nvfp4_quant(x, static_scale(x), 16)
    return pack_codes(encode_e2m1(values)), scales.to(torch.float8_e4m3fn)


def static_scale(x: Tensor) -> Tensor:
    """An encode scale such as a checkpoint holds: 1 / (amax / 2688), finite for every amax."""
    amax = x.float().abs().nan_to_num(0, 1, 1).amax().clamp(min=1e-30)
    return 1.0 / (amax / 2688.0)


def torchao(x: Tensor) -> tuple[Tensor, Tensor]:
    module = oracles.torchao()
    scale = module.per_tensor_amax_to_scale(x.abs().max())
    scales, codes = module.nvfp4_quantize(x, 16, scale)
    return codes.view(torch.uint8), scales


def torchao_single_level(x: Tensor) -> tuple[Tensor, Tensor]:
    scales, codes = oracles.torchao().nvfp4_quantize(x, 16)
    return codes.view(torch.uint8), scales


def modelopt(x: Tensor) -> tuple[Tensor, Tensor]:
    result, scales, _ = oracles.modelopt().NVFP4QTensor.quantize(x.clone(), 16)
    return result._quantized_data, scales


def compressed_tensors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics in the dtype of x, as an observer of a BF16 weight takes them."""
    return _compressed_tensors(x, x)


def compressed_tensors_fp32(x: Tensor) -> tuple[Tensor, Tensor]:
    return _compressed_tensors(x, x.float())


def _compressed_tensors(x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    ct = oracles.compressed_tensors()
    with torch.compiler.set_stance("force_eager"):
        scale = ct.generate_gparam(observed.min(), observed.max())
        scales, _ = ct.compute_scales(observed, ct.arguments, None, scale)
        values = ct.quantize(x, scales, None, ct.arguments, global_scale=scale)
    return ct.pack(values), scales.to(torch.float8_e4m3fn)


CASES: dict[str, tuple[str, Role, Callable[[], Published]]] = {
    "te-python 1x16": ("te-python", "activation", te_python),
    "te-python 16x16": ("te-python", "weight", lambda: te_python((16, 16))),
    "vllm-emulation": ("vllm-emulation", "activation", lambda: vllm_emulation),
    "torchao": ("torchao", "weight", lambda: torchao),
    "torchao-single-level": ("torchao-single-level", "activation", lambda: torchao_single_level),
    "modelopt": ("modelopt", "weight", lambda: modelopt),
    "compressed-tensors": ("compressed-tensors", "weight", lambda: compressed_tensors),
    "compressed-tensors-fp32": (
        "compressed-tensors-fp32",
        "weight",
        lambda: compressed_tensors_fp32,
    ),
}
NO_FP16 = {"torchao", "torchao-single-level"}


def compare(case: str, x: Tensor) -> None:
    recipe, role, published = CASES[case]
    encode = static_scale(x) if recipe == "vllm-emulation" else None
    q = quantize(x, recipe, role=role, global_encode_scale=encode)
    theirs = published()(x)
    assert_same_bytes(q, theirs, torchao_defines(x, theirs[1]) if "torchao" in case else None)


def torchao_defines(x: Tensor, scales: Tensor) -> Tensor:
    """Where torchao's E2M1 cast is defined: NaN becomes bits of its own payload, as the CPU made it.

    NaN arises in blocks with a NaN scale and from 0 * (1/g) where 1/g overflows.
    """
    infinite = (x.abs().max().float() / 2688.0).reciprocal().isinf()
    return scales.float().isnan().logical_not().repeat_interleave(16, 1) & ((x != 0) | ~infinite)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_128_amax_mantissas(case: str, dtype: torch.dtype) -> None:
    for x in amax_sweep(dtype):
        compare(case, x)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("case", CASES)
def test_distributions(case: str, kind: str) -> None:
    for dtype in DTYPES:
        if dtype == torch.float16 and case in NO_FP16:
            continue
        x = matrix(kind, seed=len(kind)).to(dtype)
        compare(case, x)


@pytest.mark.parametrize("kind", NOT_FINITE)
@pytest.mark.parametrize("case", CASES)
def test_not_finite(case: str, kind: str) -> None:
    compare(case, matrix(kind))


@pytest.mark.parametrize("shape", ((5, 40), (1, 16), (33, 18), (17, 272)), ids=str)
@pytest.mark.parametrize("case", ("te-python 1x16", "te-python 16x16"))
def test_ragged_tails(case: str, shape: tuple[int, int]) -> None:
    compare(case, matrix("normal", *shape).bfloat16())


def _as_python(operand: OperandRecipe) -> OperandRecipe:
    """A native TE operand with the shipped reference's treatment of -0.0 and NaN."""
    python = get_recipe("te-python").activation
    return replace(
        operand,
        negative_zero=python.negative_zero,
        nan_code=python.nan_code,
        nan_amax=python.nan_amax,
        nan_block_scale=python.nan_block_scale,
    )


FOUR_OVER_SIX = {
    "te-4over6": (256, "MAE", False),
    "te-4over6-mse": (256, "MSE", False),
    "te-4over6-448": (448, "MAE", False),
    "te-4over6-448-mse": (448, "MSE", False),
    "te-4over6-fast-error": (256, "MAE", True),
}


@pytest.mark.parametrize("tile", ((1, 16), (16, 16)), ids=str)
@pytest.mark.parametrize("name", FOUR_OVER_SIX)
def test_four_over_six(name: str, tile: tuple[int, int]) -> None:
    e4m3_max, error, fast = FOUR_OVER_SIX[name]
    published = te_python(
        tile,
        nvfp4_use_4over6=True,
        nvfp4_e4m3_max=e4m3_max,
        nvfp4_4over6_err_mode=error,
        nvfp4_4over6_err_use_fast_math=fast,
    )
    recipe = get_recipe(name)
    recipe = replace(recipe, activation=_as_python(replace(recipe.activation, tile=tile)))
    inputs = amax_sweep(torch.bfloat16)[::4] + [matrix(kind).bfloat16() for kind in DISTRIBUTIONS]
    for x in inputs:
        assert_same_bytes(quantize(x, recipe), published(x))


@pytest.mark.parametrize("name", ("te-row-scaled", "te-4over6"))
def test_row_scaled(name: str) -> None:
    four = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256} if "4over6" in name else {}
    published = te_python(row_scaled_nvfp4=True, **four)
    operand = _as_python(replace(get_recipe(name).activation, amax_scope="token"))
    recipe = replace(get_recipe(name), activation=operand)
    for kind in DISTRIBUTIONS:
        x = matrix(kind).bfloat16()
        assert_same_bytes(quantize(x, recipe), published(x))


def test_native_te_differs_from_its_reference_only_in_negative_zero_and_nan() -> None:
    for kind in DISTRIBUTIONS:
        x = matrix(kind).bfloat16()
        native, python = quantize(x, "te"), quantize(x, "te-python")
        assert torch.equal(
            native.block_scale.view(torch.uint8), python.block_scale.view(torch.uint8)
        )
        codes = unpack_codes(native.codes)
        codes = torch.where((x == 0) & (codes == 8), 0, codes)
        assert torch.equal(pack_codes(codes), python.codes)
