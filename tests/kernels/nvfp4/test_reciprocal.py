"""The measured ``rcp.approx``: its table's statistics, the mantissas that are exact, its use."""

from __future__ import annotations

import lzma

import pytest
import torch

from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.reciprocal import (
    correction_ulps,
    flush,
    pack_corrections,
    rcp_approx,
    unpack_corrections,
)


def test_the_table_is_the_measured_one() -> None:
    """Counts of an independent run on another H200: 86.8 % exact, 8.7 % high, 4.5 % low."""
    table = correction_ulps()
    assert table.shape == (1 << 23,)
    shares = [round((table == ulps).double().mean().item(), 3) for ulps in (0, 1, -1)]
    assert shares == [0.868, 0.087, 0.045]


def test_eleven_of_128_amax_derived_scales_are_off_by_an_ulp() -> None:
    """The count that another GPU run gave for S = 1/(A/2688) over BF16's 128 amax mantissas."""
    amax = (1.0 + torch.arange(128) / 128).float()
    encode = torch.reciprocal(torch.div(amax, torch.full((), 2688.0)))
    wrong = rcp_approx(encode).view(torch.int32) - torch.reciprocal(encode).view(torch.int32)
    assert (wrong != 0).sum() == 11
    assert wrong.abs().max() == 1


def test_e4m3_mantissas_and_six_are_exact_at_every_exponent() -> None:
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for values in (codes, codes * 2.0**100, codes * 2.0**-60, torch.tensor([6.0])):
        assert torch.equal(rcp_approx(values), torch.reciprocal(values))


def test_correction_applies_by_mantissa_and_keeps_the_sign() -> None:
    table = correction_ulps()
    mantissa = int((table == 1).nonzero()[12345])
    bits = torch.tensor([127 << 23, 200 << 23, 30 << 23], dtype=torch.int32) | mantissa
    x = bits.view(torch.float32)
    expected = torch.reciprocal(x).view(torch.int32) + 1
    assert torch.equal(rcp_approx(x).view(torch.int32), expected)
    assert torch.equal(rcp_approx(-x), -rcp_approx(x))


def test_subnormals_flush_and_specials_are_ieee() -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-40, torch.inf, -torch.inf, 2.0**127])
    expected = [torch.inf, -torch.inf, torch.inf, -torch.inf, 0.0, -0.0, 0.0]
    ours = rcp_approx(x)
    assert torch.equal(ours.view(torch.int32), torch.tensor(expected).view(torch.int32))
    assert rcp_approx(torch.tensor([torch.nan])).isnan().all()
    assert torch.equal(flush(torch.tensor([1e-40, 1.0])), torch.tensor([0.0, 1.0]))


def test_corrections_pack_and_unpack() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-1, 2, (1001,), dtype=torch.int8, generator=generator)
    assert torch.equal(unpack_corrections(lzma.decompress(pack_corrections(table)), 1001), table)


def test_vllm_codes_depend_on_the_approximation() -> None:
    """With a generic amax, rcp.approx moves codes against IEEE division; with 2^k it moves none."""
    from dataclasses import replace

    from minite_kernels.nvfp4.recipe import get_recipe

    recipe = get_recipe("vllm-cuda")
    exact = replace(recipe, activation=replace(recipe.activation, reciprocal="div"))
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = 0
    for index in range(32):
        amax = torch.tensor(4.0 + index / 16)
        pair = [quantize(x, r, amax=amax).codes for r in (recipe, exact)]
        changed += int((pair[0] != pair[1]).sum())
    assert changed > 0
    power = torch.tensor(512.0)
    pair = [quantize(x, r, global_encode_scale=power).codes for r in (recipe, exact)]
    assert torch.equal(*pair)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        rcp_approx(torch.ones(3, dtype=torch.float64))
