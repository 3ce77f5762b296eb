"""The E2M1 and E4M3 casts against brute force, packing, and the tiled scale layouts."""

from __future__ import annotations

import pytest
import torch

from minite_kernels.nvfp4.format import (
    E2M1_GRID,
    E2M1_TIES,
    decode_e2m1,
    encode_e2m1,
    encode_e2m1_stochastic,
    to_e4m3,
)
from minite_kernels.nvfp4.layout import pack_codes, swizzle_scale, unpack_codes, unswizzle_scale


def nearest_code(value: float) -> int:
    """RNE by search over the grid: nearest magnitude, the even code on a tie, sign bit kept."""
    grid = E2M1_GRID[:8]
    magnitude = min(abs(value), 6.0)
    best = min(range(8), key=lambda code: (abs(grid[code] - magnitude), code & 1))
    sign = 8 if torch.signbit(torch.tensor(value)) else 0
    return best | sign


def interesting_values() -> list[float]:
    points = [0.0, 1e-40, 1e30, float("inf"), 6.0, 5.0]
    for tie in E2M1_TIES:
        t = torch.tensor(tie)
        up, down = torch.tensor(100.0), torch.tensor(0.0)
        points += [tie, torch.nextafter(t, up).item(), torch.nextafter(t, down).item()]
    points += torch.linspace(0, 7, 1001).tolist()
    return points + [-p for p in points]


def test_encode_is_round_to_nearest_even_code() -> None:
    values = interesting_values()
    expected = torch.tensor([nearest_code(v) for v in values], dtype=torch.uint8)
    assert torch.equal(encode_e2m1(torch.tensor(values)), expected)


def test_ties_toward_zero_take_the_smaller_magnitude() -> None:
    ties = torch.tensor(E2M1_TIES)
    assert encode_e2m1(ties, ties="toward_zero").tolist() == list(range(7))
    above = torch.nextafter(ties, torch.full_like(ties, 9.0))
    assert encode_e2m1(above, ties="toward_zero").tolist() == list(range(1, 8))


def test_negative_zero_and_nan_are_arguments() -> None:
    y = torch.tensor([-0.0, -0.1, float("nan"), -float("nan")])
    assert encode_e2m1(y).tolist() == [8, 8, 7, 7]
    assert encode_e2m1(y, negative_zero="positive", nan_code=0).tolist() == [0, 8, 0, 0]


def test_grid_values_survive_encode_and_stochastic_encode() -> None:
    grid = torch.tensor(E2M1_GRID)
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(grid), codes)
    assert torch.equal(decode_e2m1(codes).view(torch.int32), grid.view(torch.int32))
    for bits in (0, 1, 128, 255):
        assert torch.equal(encode_e2m1_stochastic(grid, torch.full((16,), bits)), codes)


def test_encode_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match="float32"):
        encode_e2m1(torch.zeros(4, dtype=torch.bfloat16))


def test_stochastic_rounding_is_unbiased_with_the_expected_variance() -> None:
    """Mean within 5 standard errors of the value; only the two neighbours ever occur."""
    generator = torch.Generator().manual_seed(3)
    draws = 1 << 16
    for value in (0.1, 0.6, 1.9, 2.3, 3.7, 4.5, 5.9, -0.3, -5.1):
        y = torch.full((draws,), value)
        bits = torch.randint(0, 256, (draws,), dtype=torch.uint8, generator=generator)
        rounded = decode_e2m1(encode_e2m1_stochastic(y, bits)).double()
        neighbours = sorted(set(rounded.tolist()))
        assert len(neighbours) == 2
        low, high = neighbours
        assert low <= value <= high
        variance = (value - low) * (high - value)
        resolution = (high - low) / 512  # 8 random bits: the mean may sit half a step low
        error = abs(rounded.mean().item() - value)
        assert error < 5 * (variance / draws) ** 0.5 + resolution


def test_e4m3_cast_saturates_and_has_one_nan() -> None:
    values = torch.tensor([1e9, float("inf"), 449.0, 2**-10, 2**-9, 3 * 2**-10, float("nan")])
    assert to_e4m3(values).view(torch.uint8).tolist() == [0x7E, 0x7E, 0x7E, 0, 1, 2, 0x7F]
    assert to_e4m3(-values[-1:]).view(torch.uint8).item() == 0x7F


def test_packing_puts_the_first_element_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 15, 3, 8]], dtype=torch.uint8)
    packed = pack_codes(codes)
    assert packed.tolist() == [[0xF1, 0x83]]
    assert torch.equal(unpack_codes(packed), codes)
    with pytest.raises(ValueError, match="odd"):
        pack_codes(codes[:, :3])


@pytest.mark.parametrize("layout", ("128x4", "8x4"))
@pytest.mark.parametrize("shape", ((1, 1), (128, 4), (130, 9), (257, 64), (7, 5)), ids=str)
def test_swizzle_places_every_scale_where_the_formula_says(
    shape: tuple[int, int], layout: str
) -> None:
    m, b = shape
    generator = torch.Generator().manual_seed(m * b)
    scale = torch.randint(1, 127, shape, dtype=torch.uint8, generator=generator)
    flat = swizzle_scale(scale, layout)  # type: ignore[arg-type]
    columns = -(-b // 4)
    seen = torch.zeros(flat.numel(), dtype=torch.bool)
    for i in range(m):
        for j in range(b):
            if layout == "128x4":
                tile = (i // 128) * columns + j // 4
                at = tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
            else:
                at = ((i // 8) * columns + j // 4) * 32 + (i % 8) * 4 + j % 4
            assert flat[at] == scale[i, j]
            seen[at] = True
    assert not flat[~seen].any()
    assert torch.equal(unswizzle_scale(flat, shape, layout), scale)  # type: ignore[arg-type]


def test_unswizzle_refuses_a_wrong_size() -> None:
    with pytest.raises(ValueError, match="take 512 bytes"):
        unswizzle_scale(torch.zeros(100, dtype=torch.uint8), (1, 1))


def test_stochastic_encode_is_the_stated_formula() -> None:
    """t = |y| + bits/256 * step(|y|), floored to t's own step: every draw of many values."""
    for y in (0.0, 0.1, 0.49, 0.5, 1.3, 1.99, 2.0, 2.7, 3.99, 4.0, 5.5, 5.99, 6.0, 9.0):
        for bits in range(256):
            step = 0.5 if y < 2 else 1.0 if y < 4 else 2.0
            t = y + bits / 256 * step
            own = 0.5 if t < 2 else 1.0 if t < 4 else 2.0
            expected = min(t // own * own, 6.0)
            code = encode_e2m1_stochastic(torch.tensor([-y]), torch.tensor([bits]))
            assert decode_e2m1(code).item() == -expected
