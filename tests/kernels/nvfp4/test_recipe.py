"""Recipes are complete data: every expression they name exists, and nothing asks for their name."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import get_args

import pytest

import minite_kernels
from minite_kernels.nvfp4 import recipe as recipe_module
from minite_kernels.nvfp4.gemm._alpha import ALPHAS
from minite_kernels.nvfp4.quantize import _arithmetic
from minite_kernels.nvfp4.recipe import RECIPES, Recipe, get_recipe

TABLES = {
    "GlobalScale": _arithmetic.GLOBAL_SCALES,
    "BlockScale": _arithmetic.BLOCK_SCALES,
    "ElementScale": _arithmetic.FACTORS | _arithmetic.QUOTIENTS,
    "Dequantize": _arithmetic.DEQUANTIZE,
    "Alpha": ALPHAS,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_named_expression_is_implemented_and_every_implementation_named(name: str) -> None:
    assert set(get_args(getattr(recipe_module, name))) == set(TABLES[name])


def test_unknown_names_list_near_matches() -> None:
    with pytest.raises(ValueError, match=r"did you mean .*vllm-cuda"):
        get_recipe("vllm_cuda")
    with pytest.raises(ValueError, match="known: "):
        get_recipe("zzz")


def test_recipes_are_frozen_named_by_their_key_and_pairwise_different() -> None:
    with pytest.raises(FrozenInstanceError):
        RECIPES["te"].name = "x"  # type: ignore[misc]
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    nameless = [replace(recipe, name="", engine="") for recipe in RECIPES.values()]
    assert len(set(nameless)) == len(nameless)


def test_get_recipe_returns_a_recipe_as_it_is() -> None:
    mine = replace(get_recipe("te"), name="mine")
    assert get_recipe(mine) is mine


def test_unknown_role_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown role"):
        get_recipe("te").operand("bias")  # type: ignore[arg-type]


def test_no_code_compares_a_recipe_name() -> None:
    """``recipe.name == "te"`` anywhere would hide arithmetic outside the recipe."""
    for path in Path(minite_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                names = [s.attr for s in sides if isinstance(s, ast.Attribute)]
                assert "engine" not in names, path
                if "name" in names and any(isinstance(s, ast.Constant) for s in sides):
                    raise AssertionError(f"{path}:{node.lineno} compares a name")


def test_every_field_of_an_operand_is_used_by_some_recipe() -> None:
    """A field that no recipe sets differently from another is dead data."""
    operands = [
        r.operand(role) for r in RECIPES.values() for role in ("activation", "weight", "gradient")
    ]
    for field in fields(operands[0]):
        assert len({getattr(o, field.name) for o in operands}) > 1, field.name


def test_recipe_type_is_hashable() -> None:
    assert len({*RECIPES.values()}) == len(RECIPES)
    assert isinstance(get_recipe("te"), Recipe)
