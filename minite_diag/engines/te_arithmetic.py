"""Which recipe each quantized linear of engine `te` has, and which activation scale.

Knows the engine's options, checkpoints and recipes; no module. Invariant: a static scale is the
number of the checkpoint, in the direction that the checkpoint stores, as its engines use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from minite_diag.checkpoints import is_expert, open_checkpoint
from minite_diag.checkpoints.input_scales import InputScale, read_input_scales
from minite_diag.errors import UsageError
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import Recipe, get_recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

OPTIONS: Final = frozenset({"recipe", "linear_recipe", "expert_recipe", "input_scales"})
"""`recipe` is of all quantized linears, the next two of dense ones and of experts; `input_scales` is
an NVFP4 checkpoint whose static activation scales are used in place of a dynamic amax."""


@dataclass(frozen=True)
class TeArithmetic:
    """The recipes of dense linears and of experts; `input_scales` by FQN, empty: dynamic."""

    linears: Recipe
    experts: Recipe
    input_scales: Mapping[str, InputScale] = field(default_factory=dict)

    def recipe_of(self, fqn: str) -> Recipe:
        """The recipe of one linear."""
        return self.experts if is_expert(fqn) else self.linears

    def quantize_input(self, fqn: str, x_TK: torch.Tensor) -> Nvfp4Tensor:
        """Quantize the activations [T, K] of one linear."""
        recipe, scale = self.recipe_of(fqn), self.input_scales.get(fqn)
        if scale is None:
            return quantize(x_TK, recipe)
        value = scale.value.to(x_TK.device)
        if scale.direction == "decode":
            return quantize(x_TK, recipe, global_decode_scale=value)
        return quantize(x_TK, recipe, global_encode_scale=value)

    def expert_scope(self) -> str:
        """What shares an activation scale among the experts, in words."""
        if self.experts.activation.amax_scope == "token":
            return "each token its own"
        if any(is_expert(fqn) for fqn in self.input_scales):
            return "static, one for all experts of a layer"
        return "each expert its own amax"

    def note(self) -> str:
        """What the arithmetic is, in words."""
        said = f"recipe {self.linears.name}"
        if self.experts.name != self.linears.name:
            said += f", experts {self.experts.name}"
        if self.input_scales:
            said += f", static activation scales of the export ({len(self.input_scales)} linears)"
        return said


def recipe_names(options: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The asked recipes of dense linears and of experts; None: TE's default."""
    every = options.get("recipe")
    return options.get("linear_recipe", every), options.get("expert_recipe", every)


def read_arithmetic(
    options: Mapping[str, str], linears: str, experts: str, quantized: Sequence[str]
) -> TeArithmetic:
    """The arithmetic of the plan's `quantized` linears under the recipes of those names.

    Raises UsageError for an unknown recipe, and for static scales that no linear would use.
    """
    try:
        found = TeArithmetic(get_recipe(linears), get_recipe(experts))
    except ValueError as error:
        raise UsageError(f"te: {error}", "give a recipe of Transformer Engine") from error
    if "input_scales" not in options:
        return found
    static = [n for n in quantized if found.recipe_of(n).activation.amax_scope != "token"]
    if not static:
        raise UsageError(
            "te: static activation scales (input_scales, alignment 'static-scale') change nothing: "
            + ("every recipe gives each token its own scale" if quantized else "nothing quantized"),
            "leave them out, or the alignments 'nvfp4-linear' and 'nvfp4-moe'",
        )
    checkpoint = open_checkpoint(Path(options["input_scales"]))
    return TeArithmetic(found.linears, found.experts, read_input_scales(checkpoint, static))
