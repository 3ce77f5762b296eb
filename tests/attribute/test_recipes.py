"""Recipe search finds the arithmetic that made the bytes, and says when the data can't tell."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minite_diag.attribute.contract import _may_be_static, closest, differing_fields
from minite_diag.attribute.recipes import (
    HeldScale,
    Sample,
    field_effect,
    operands,
    search_samples,
)
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import RECIPES, Recipe


def tensors(count: int = 24, seed: int = 0) -> list[torch.Tensor]:
    """BF16 tensors whose amax takes many mantissas: a single tensor hides most rules."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(32, 128, generator=g) * torch.rand((), generator=g) * 8).bfloat16()
        for _ in range(count)
    ]


def samples(recipe: Recipe, role: str) -> list[Sample]:
    found = []
    for i, x in enumerate(tensors()):
        amax = x.abs().max().float()
        static = recipe.operand(role).amax_scope == "static"
        scale = {"global_encode_scale": 2688.0 * amax.reciprocal()} if static else {}
        q = quantize(x, recipe, role=role, **scale)
        held = (
            HeldScale(encode=q.global_encode_scale)
            if static
            else HeldScale(decode=q.global_decode_scale)
        )
        found.append(Sample(f"t{i}", x, q.codes, q.block_scale, held))
    return found


@pytest.mark.parametrize("name", operands("weight"))
def test_each_weight_arithmetic_is_found_again(name: str) -> None:
    made = samples(RECIPES[name], "weight")
    found = search_samples("engine", "weight", made)
    assert found.best.share == 1.0
    assert name in (found.best.name, *found.ties)
    # What ties with it can't be told apart on this data, and is a small set.
    assert len(found.ties) <= 4


@pytest.mark.parametrize("name", ["te", "te-1d", "te-row-scaled", "vllm-emulation", "torchao"])
def test_each_activation_arithmetic_is_found_again(name: str) -> None:
    found = search_samples("engine", "activation", samples(RECIPES[name], "activation"))
    assert found.best.share == 1.0
    same = operands("activation")
    wanted = RECIPES[name].activation
    assert wanted in [same[n].activation for n in (found.best.name, *found.ties)]
    assert found.runner_up is None or found.runner_up.rank < found.best.rank


def test_an_unknown_arithmetic_is_one_field_from_a_known_one() -> None:
    odd = replace(RECIPES["te"].activation, element_scale="x * (S/s)")
    made = samples(replace(RECIPES["te"], name="odd", activation=odd), "activation")
    found = search_samples("engine", "activation", made)
    assert found.best.share == 1.0
    names = {found.best.name, *found.ties}
    assert "te with element_scale='x * (S/s)'" in names


def test_foreign_bytes_are_no_match() -> None:
    made = samples(RECIPES["te"], "activation")
    g = torch.Generator().manual_seed(9)
    noise = torch.randint(0, 256, made[0].codes.shape, generator=g, dtype=torch.uint8)
    found = search_samples("engine", "activation", [replace(made[0], codes=noise)])
    assert found.best.share < 0.5


def test_the_effect_of_a_field_is_measured() -> None:
    made = tuple(samples(RECIPES["te-1d"], "weight"))
    codes, scales = field_effect(made, RECIPES["te-1d"], "weight", "tile", (16, 16))
    assert 0.5 < codes < 0.8
    assert scales > 0.8
    assert field_effect(made, RECIPES["te-1d"], "weight", "nan_code", 0) == (0.0, 0.0)


def test_two_sides_are_compared_by_their_closest_tie() -> None:
    mine = search_samples("a", "weight", samples(RECIPES["te"], "weight"))
    theirs = search_samples("b", "weight", samples(RECIPES["te-1d"], "weight"))
    (_, a), (_, b) = closest(mine, theirs, "weight")
    assert [name for name, *_ in differing_fields(a, b)] == ["tile"]


@pytest.mark.parametrize(
    ("name", "static"), (("te", False), ("pow2-row-scaled", False), ("vllm-emulation", True))
)
def test_only_a_static_scale_can_clip(name: str, static: bool) -> None:
    found: Any = SimpleNamespace(candidates=RECIPES, best=SimpleNamespace(name=name))
    assert _may_be_static(found) is static
    assert _may_be_static(None)
