"""What a rung of the ladder changes: on which side, which setting or op, and what is left of W4A4.

Knows plans, alignments and summaries; measures nothing. Invariant: a change is what the alignment's data and
the rung's plan say, in the engines' own option names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minite_diag.alignments.base import EXPORT, Alignment, Application, application
from minite_diag.plan import EngineSpec, Plan
from minite_kernels.nvfp4.recipe import get_recipe


def is_equal(pair: dict[str, Any] | None) -> bool:
    """Whether every log-probability and every compared tensor of a pair is bitwise equal."""
    return pair is not None and (
        pair["sites"]["compared"] == pair["sites"]["bitwise_equal"]
        and all(mode["equal"] == mode["tokens"] for mode in pair["logprob"].values())
    )


def sides_of(alignment: Alignment | None, plan: Plan) -> list[str]:
    """The roles whose engine does something else than before: learner, sampler.

    A sampler that loads another export counts.
    """
    if alignment is None:
        return []
    found = []
    for spec in plan.engines:
        how = application(alignment.name, spec.engine)
        does = how is not None and how != Application(how.versions, how.device)
        loads = bool(alignment.export) and spec.checkpoint_format.startswith("nvfp4")
        if does or loads:
            found.append(spec.role)
    return list(dict.fromkeys(found))


def changes_of(alignment: Alignment | None, plan: Plan) -> list[str]:
    """Each setting, export and op that the alignment changes, in words."""
    if alignment is None:
        return []
    found: dict[str, list[str]] = {}
    for spec in plan.engines:
        how = application(alignment.name, spec.engine)
        for change in _changes(how) if how is not None else ():
            found.setdefault(change, []).append(spec.role)
    words = [f"{' and '.join(dict.fromkeys(roles))}: {what}" for what, roles in found.items()]
    return words + [f"export: {key}={value}" for key, value in alignment.export.items()]


def _changes(how: Application) -> list[str]:
    options = [
        f"{key}={'those of the export' if value == EXPORT else value}"
        for key, value in how.options.items()
    ]
    variables = [f"{key}={value}" for key, value in how.environment.items()]
    return [*options, *variables, *(f"op {op}" for op, _ in how.replacements)]


def recipe_of(learner: EngineSpec) -> str:
    """The learner's recipe, that of its experts and its activation scale where they are others."""
    linears, experts = _recipes(learner)
    said = linears if linears == experts else f"{linears}, experts {experts}"
    scales = learner.options.get("input_scales")
    return f"{said}, static scales of {Path(scales).name}" if scales else said


def _recipes(learner: EngineSpec) -> tuple[str, str]:
    every = learner.options.get("recipe", "te")
    options = learner.options
    return options.get("linear_recipe", every), options.get("expert_recipe", every)


def backward_of(plan: Plan) -> str | None:
    """How the learner's dgrad and wgrad compute under its recipes; None without quantized linears.

    An alignment changes the forward rule of activations and weights; the gradient operands keep
    the recipe's own rule, so both stay W4A4 GEMMs.
    """
    if not plan.quantized or plan.learner.engine != "te":
        return None
    parts = {"experts" if ".experts." in fqn else "linears" for fqn in plan.quantized}
    said = {
        part: _backward(name)
        for part, name in zip(("linears", "experts"), _recipes(plan.learner), strict=True)
        if part in parts
    }
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{part}: {text}" for part, text in said.items())


def _backward(recipe_name: str) -> str:
    recipe = get_recipe(recipe_name)
    hadamard = ", wgrad after RHT" if recipe.rht_wgrad else ""
    return f"W4A4 dgrad and wgrad, {recipe.gradient.rounding} gradients{hadamard}"
