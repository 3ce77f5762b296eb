"""A quantized linear of the running target, computed with some of the baseline's operands.

Weights, weight codes, weight scales, the rule that quantizes activations, the GEMM: each is taken
from the target or from the baseline, and the linear's output is what minite_kernels computes from
them. Invariant: with everything from the target the output has to be the engine's own, bit for bit;
a site where it isn't takes part in no experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from minite_diag.attribute.recipes import (
    HeldScale,
    Sample,
    gemm_recipes,
    global_scale,
    operands,
    quantize_sample,
    weight_samples,
)
from minite_diag.compare import Side
from minite_diag.plan import Plan
from minite_diag.site import Site
from minite_kernels.nvfp4.gemm import PreparedOperand, gemm, prepare
from minite_kernels.nvfp4.recipe import RECIPES, Recipe

PARTS: Final = ("weights", "weight codes", "weight scales", "activation rule", "gemm rule")
"""What can come from the baseline."""
MIN_SHARE: Final = 0.999
"""A recipe that reproduces less of an engine's bytes is not its arithmetic."""


@dataclass(frozen=True)
class OperandSwap:
    """Plain data: which of PARTS come from `baseline`, and the arithmetics that were found.

    `recipes` maps the two engines' ids to {"weight", "activation", "gemm"} recipe names.
    """

    baseline: str
    target: str
    recipes: dict[str, dict[str, str]]
    swapped: tuple[str, ...] = ()


@dataclass
class OperandModel:
    """The target's quantized linears under one swap."""

    plan: Plan
    sides: dict[str, Side]
    swap: OperandSwap
    _weights: dict[tuple[str, str], Sample | None] = field(default_factory=dict)
    _prepared: dict[tuple[Any, ...], PreparedOperand | None] = field(default_factory=dict)

    def output(self, fqn: str, x_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """[T, N] of the linear `fqn`; None where a side doesn't hold its operands."""
        recipe = self._recipe()
        weight = self._weight(fqn, recipe)
        if weight is None:
            return None
        chosen = self._side("activation rule")
        empty = torch.empty(0)
        sample = Sample(fqn, x_TK, empty, empty, self._act_scale(chosen, fqn))
        quantized = quantize_sample(sample, recipe, "activation")
        return None if quantized is None else gemm(quantized, weight, out_dtype=dtype)

    def _side(self, part: str) -> str:
        return self.swap.baseline if part in self.swap.swapped else self.swap.target

    def _recipe(self) -> Recipe:
        names = self.swap.recipes
        arithmetic = gemm_recipes()[names[self._side("gemm rule")]["gemm"]]
        gemm_side = names[self._side("gemm rule")]
        left = operands("activation")[names[self._side("activation rule")]["activation"]]
        right = operands("weight")[names[self.swap.target]["weight"]]
        # How an operand is decoded belongs to the GEMM that multiplies decoded operands.
        decoders = {
            "activation": operands("activation")[gemm_side["activation"]].activation.dequantize,
            "weight": operands("weight")[gemm_side["weight"]].weight.dequantize,
        }
        return replace(
            RECIPES["te"],
            activation=replace(left.activation, dequantize=decoders["activation"]),
            weight=replace(right.weight, dequantize=decoders["weight"]),
            gemm=arithmetic,
        )

    def _weight(self, fqn: str, recipe: Recipe) -> PreparedOperand | None:
        whole = "weights" in self.swap.swapped
        sources = tuple(
            self.swap.baseline if whole or part in self.swap.swapped else self.swap.target
            for part in ("weight codes", "weight scales")
        )
        key = (fqn, *sources, recipe)
        if key not in self._prepared:
            codes, scales = (self._sample(source, fqn) for source in sources)
            self._prepared[key] = None
            if codes is not None and scales is not None:
                made = quantize_sample(scales, recipe, "weight")
                if made is not None:
                    self._prepared[key] = prepare(
                        replace(made, codes=codes.codes, block_scale=scales.block_scale)
                    )
        return self._prepared[key]

    def _sample(self, engine: str, fqn: str) -> Sample | None:
        if (engine, fqn) not in self._weights:
            side = self.sides[engine]
            found = weight_samples(self.plan, side, [Site(fqn, "weight_codes")])
            self._weights[engine, fqn] = next(iter(found), None)
        return self._weights[engine, fqn]

    def _act_scale(self, engine: str, fqn: str) -> HeldScale:
        side = self.sides[engine]
        site = Site(fqn, "act_global_decode_scale")
        for key in side.sites:
            found = global_scale(side, key, site)
            if found.encode is not None or found.decode is not None:
                return found
        return HeldScale()


def swap_recipes(contracts: list[dict[str, Any]]) -> dict[str, dict[str, str]] | str:
    """Recipe names by engine from a pair's stored contracts, or why there are none."""
    known: dict[str, Mapping[str, Any]] = {
        "weight": operands("weight"),
        "activation": operands("activation"),
        "gemm": gemm_recipes(),
    }
    recipes: dict[str, dict[str, str]] = {}
    for contract in contracts:
        for role, names in known.items():
            found = contract[role]
            if (
                found is None
                or found["recipe"] not in names
                or min(found["codes"], found["scales"]) < MIN_SHARE
            ):
                return f"no named arithmetic reproduces the {role} bytes of {contract['engine']}"
            recipes.setdefault(contract["engine"], {})[role] = found["recipe"]
    return recipes
