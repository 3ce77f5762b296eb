"""Contract diff: what learner and sampler each compute in a quantized linear, field by field.

Both sides' arithmetic is found by recipe search on their own bytes; the cause is what differs
between the two recipes, and what the static scales do to the activations that really came.
Invariant: fields are compared only between recipes that reproduce their engine's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import pandas as pd
import torch

from minite_diag.attribute.causes import GEMM_FIELDS, RECIPE_FIELDS
from minite_diag.attribute.finding import Finding
from minite_diag.attribute.recipes import (
    Found,
    HeldScale,
    Match,
    activation_inputs,
    field_effect,
    search,
    search_gemm,
)
from minite_diag.canonical.names import STATIC, SequenceKey
from minite_diag.checkpoints import fused_group
from minite_diag.compare import Side
from minite_diag.metrics import is_bitwise_equal
from minite_diag.plan import Plan
from minite_diag.site import Site
from minite_kernels.nvfp4.recipe import RECIPES, GemmRecipe, OperandRecipe

MIN_SHARE: Final = 0.999
"""A recipe that reproduces less than this is not an answer."""
SATURATED: Final = 1e-3
"""Share of values beyond the largest that a static scale can hold."""
E2M1_E4M3_MAX: Final = 6.0 * 448.0


@dataclass(frozen=True)
class Contract:
    """What one engine was found to compute; None where it shows no codes."""

    engine: str
    basis: str
    weight: Found | None
    activation: Found | None
    gemm: Found | None
    quantizes: bool = True
    """Whether the engine's evidence names a quantizer of activations, shown or not."""
    weight_only: tuple[str, ...] = ()
    """Ops of which the engine's own kernel says that it computes W4A16."""


def read_contract(plan: Plan, side: Side) -> Contract:
    """Search the recipes of one engine."""
    found = {item.role: item for item in search(plan, side)}
    weight, activation = found.get("weight"), found.get("activation")
    gemm = search_gemm(plan, side, activation, weight) if weight and activation else None
    quantizes = any(item.op == "nvfp4_quantize" for item in side.trace.evidence)
    weight_only = tuple(
        item.op
        for item in side.trace.evidence
        if item.status == "native" and "W4A16" in f"{item.impl} {item.note}"
    )
    return Contract(side.trace.id, _basis(side), weight, activation, gemm, quantizes, weight_only)


def _basis(side: Side) -> str:
    statuses = {item.status for item in side.trace.evidence if item.op.startswith("nvfp4")}
    order = ("modelled", "replaced", "emulated", "native")
    return next((status for status in order if status in statuses), "native")


def contract_findings(
    learner: Side, sampler: Side, rows: pd.DataFrame, mine: Contract, theirs: Contract
) -> list[Finding]:
    """Causes in the quantized linears of a pair.

    `rows` are the pair's comparison rows, `mine` and `theirs` the contracts of its engines.
    """
    basis = _least_native(mine.basis, theirs.basis)
    return [
        *_operand_findings("weight", mine.weight, theirs.weight, rows, basis),
        *_operand_findings("activation", mine.activation, theirs.activation, rows, basis),
        *_gemm_findings(mine.gemm, theirs.gemm, basis),
        *_weight_only(mine, theirs),
        *static_scale_differences(learner, sampler, rows, mine, theirs),
        *(static_scale_findings(sampler) if _may_be_static(theirs.activation) else ()),
        *fused_scale_findings(learner, sampler, basis),
    ]


def _least_native(*statuses: str) -> str:
    order = ("modelled", "replaced", "emulated", "native")
    return min(statuses, key=order.index)


def _tied(found: Found) -> list[Match]:
    return [match for match in found.matches if match.rank == found.best.rank]


def _operand_findings(
    role: str, mine: Found | None, theirs: Found | None, rows: pd.DataFrame, basis: str
) -> Iterator[Finding]:
    if mine is None or theirs is None:
        return
    for found in (mine, theirs):
        if found.best.share < MIN_SHARE:
            yield Finding(
                "MD199",
                f"{found.engine} {role}",
                f"no known arithmetic reproduces the {role} codes of {found.engine}: the nearest, "
                f"{found.best.name}, gives {found.best.codes:.2%} of the codes and "
                f"{found.best.scales:.2%} of the scales",
                {
                    "nearest": found.best.name,
                    "codes": found.best.codes,
                    "scales": found.best.scales,
                },
                "measured",
                basis,
            )
    if min(mine.best.share, theirs.best.share) < MIN_SHARE:
        return
    (name_a, a), (name_b, b) = closest(mine, theirs, role)
    prefix = "weight" if role == "weight" else "act"
    shared = {
        "learner_recipe": name_a,
        "sampler_recipe": name_b,
        "code_mismatch_rate": _mean(rows, f"{prefix}_codes"),
        "scale_mismatch_rate": _mean(rows, f"{prefix}_block_scale"),
        "learner_ties": list(mine.ties),
        "sampler_ties": list(theirs.ties),
    }
    differing = differing_fields(a, b)
    effects = {
        name: field_effect(theirs.samples, mine.candidates[name_a], theirs.role, name, value)
        for name, _, value in differing
    }
    inert = [name for name, (codes, scales) in effects.items() if not codes and not scales]
    for name, x, y in sorted(differing, key=lambda d: -sum(effects[d[0]])):
        codes, scales = effects[name]
        if name in inert:
            continue
        yield Finding(
            RECIPE_FIELDS[name],
            f"{role} quantizer",
            f"{name.replace('_', ' ')} of the {role}: learner {_say(x)}, sampler {_say(y)}; "
            f"by itself it changes {codes:.3%} of the codes and {scales:.3%} of the block scales",
            shared
            | {
                "field": name,
                "learner": str(x),
                "sampler": str(y),
                "codes_changed": codes,
                "scales_changed": scales,
                "fields_without_effect_here": inert,
            },
            "proved",
            basis,
        )


def _say(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _mean(rows: pd.DataFrame, kind: str) -> float | None:
    values = rows[(rows["kind"] == kind) & (rows["status"] == "compared")]["mismatch_rate"]
    values = values.dropna()
    return float(values.mean()) if len(values) else None


def closest(
    mine: Found, theirs: Found, role: str
) -> tuple[tuple[str, OperandRecipe], tuple[str, OperandRecipe]]:
    """Of the arithmetics that the data can't tell apart, the two that differ least."""

    def operand(found: Found, name: str) -> OperandRecipe:
        recipe = found.candidates[name]
        return recipe.weight if role == "weight" else recipe.activation

    pairs = [
        ((m.name, operand(mine, m.name)), (t.name, operand(theirs, t.name)))
        for m in _tied(mine)
        for t in _tied(theirs)
    ]
    return min(pairs, key=lambda pair: len(differing_fields(pair[0][1], pair[1][1])))


def differing_fields(a: OperandRecipe, b: OperandRecipe) -> list[tuple[str, Any, Any]]:
    """Fields that change bytes and differ; `dequantize` belongs to the GEMM."""
    return [
        (f.name, getattr(a, f.name), getattr(b, f.name))
        for f in fields(OperandRecipe)
        if f.name in RECIPE_FIELDS and getattr(a, f.name) != getattr(b, f.name)
    ]


def _gemm_findings(mine: Found | None, theirs: Found | None, basis: str) -> Iterator[Finding]:
    if mine is None or theirs is None:
        return
    pairs = [(a, b) for a in _tied(mine) for b in _tied(theirs)]

    def recipe(match: Match) -> GemmRecipe:
        return RECIPES[match.name].gemm

    def differing(pair: tuple[Match, Match]) -> list[str]:
        return [
            n for n in GEMM_FIELDS if getattr(recipe(pair[0]), n) != getattr(recipe(pair[1]), n)
        ]

    a, b = min(pairs, key=lambda pair: len(differing(pair)))
    names = differing((a, b))
    if "operands" in names:
        # Dequantized operands carry their scales, so alpha and double rounding don't apply.
        names = ["operands"]
    cross = next((m.codes for m in theirs.matches if m.name == a.name), None)
    for name in names:
        x, y = getattr(recipe(a), name), getattr(recipe(b), name)
        yield Finding(
            GEMM_FIELDS[name],
            "GEMM of quantized linears",
            f"{name} of the GEMM: learner {x}, sampler {y}" + _cross_text(cross),
            {
                "learner_recipe": a.name,
                "learner_bits_reproduced": a.codes,
                "sampler_recipe": b.name,
                "sampler_bits_reproduced": b.codes,
                "sampler_bits_under_learner_recipe": cross,
            },
            "proved" if min(a.codes, b.codes) >= MIN_SHARE else "measured",
            basis,
        )


def _cross_text(cross: float | None) -> str:
    if cross is None:
        return ""
    return f"; on the sampler's own codes the learner's GEMM changes {1 - cross:.1%} of the outputs"


def _weight_only(mine: Contract, theirs: Contract) -> Iterator[Finding]:
    for one, other in ((mine, theirs), (theirs, mine)):
        if other.activation is None:
            continue
        shows = one.weight is not None and one.activation is None
        # Codes may exist and not be visible, as inside of a fused emulation kernel.
        if one.weight_only or (shows and not one.quantizes):
            says = f"computes W4A16 in {', '.join(one.weight_only)}"
            what = says if one.weight_only else "shows no quantized activation"
            yield Finding(
                "MD115",
                f"{one.engine} linears",
                f"{one.engine} holds NVFP4 weights and {what}, {other.engine} quantizes both",
                {},
                "measured",
                one.basis,
            )


def static_scale_findings(side: Side) -> Iterator[Finding]:
    """MD112: static activation scales that clip what came, over every quantized linear."""
    reach: dict[str, float] = {}
    outside: dict[str, list[int]] = {}
    for sample in activation_inputs(side):
        limit = _limit(sample.scale)
        if limit is None:
            continue
        magnitude = sample.x.float().abs()
        reach[sample.site] = max(reach.get(sample.site, 0.0), float(magnitude.max()) / limit)
        count = outside.setdefault(sample.site, [0, 0])
        count[0] += int((magnitude > limit).sum())
        count[1] += magnitude.numel()
    clipped = {site: beyond / total for site, (beyond, total) in outside.items()}
    worst = max(clipped, key=lambda site: clipped[site], default=None)
    if worst is None or clipped[worst] <= SATURATED:
        return
    sites = sorted(site for site, share in clipped.items() if share > SATURATED)
    yield Finding(
        "MD112",
        worst,
        f"{clipped[worst]:.2%} of the input of {worst} exceeds what its static scale holds "
        f"({reach[worst]:.2f}x); {len(sites)} of {len(clipped)} static scales clip",
        {"clipped": clipped[worst], "amax_over_limit": reach[worst], "sites": sites},
        "measured",
    )


def static_scale_differences(
    learner: Side, sampler: Side, rows: pd.DataFrame, mine: Contract, theirs: Contract
) -> Iterator[Finding]:
    """MD118: both sides hold calibrated activation scales, and other ones."""
    found = (mine.activation, theirs.activation)
    if any(one is None or not _is_static(one) for one in found):
        return
    different = rows[
        (rows["kind"] == "act_global_decode_scale")
        & (rows["status"] == "compared")
        & (rows["bitwise_fraction"] < 1.0)
    ]
    if not len(different):
        return
    first = different.sort_values("order", kind="stable").iloc[0]
    key = SequenceKey(first["mode"], first["source"], first["probe"])
    values = []
    for side in (learner, sampler):
        held = side.read(key, Site(first["fqn"], "act_global_decode_scale"))
        assert held is not None
        values.append(float(held.tensor.reshape(-1)[0]))
    sites = list(dict.fromkeys(different["fqn"]))
    yield Finding(
        "MD118",
        first["fqn"],
        f"{len(sites)} static activation scales differ, the first at {first['fqn']}: "
        f"{values[0]:.6g} in {learner.trace.id}, {values[1]:.6g} in {sampler.trace.id}",
        {"learner": values[0], "sampler": values[1], "sites": sites},
    )


def _is_static(found: Found) -> bool:
    return found.candidates[found.best.name].activation.amax_scope == "static"


def _may_be_static(found: Found | None) -> bool:
    """A dynamic scale clips nothing: what is above its limit is rounding."""
    return found is None or _is_static(found)


def fused_scale_findings(learner: Side, sampler: Side, basis: str) -> Iterator[Finding]:
    """MD113: q/k/v or gate/up share one global weight scale on one side, and not on the other."""
    shared = [_groups_that_share(side) for side in (learner, sampler)]
    common = sorted(shared[0].keys() & shared[1].keys())
    for one, other, mine, theirs in (
        (learner, sampler, shared[0], shared[1]),
        (sampler, learner, shared[1], shared[0]),
    ):
        groups = [group for group in common if mine[group] and not theirs[group]]
        if groups:
            yield Finding(
                "MD113",
                groups[0],
                f"the parts of {groups[0]} share one global weight scale in {one.trace.id} and "
                f"not in {other.trace.id}; so it is in {len(groups)} of {len(common)} fused modules",
                {"groups": groups[:50], "count": len(groups)},
                "proved",
                basis,
            )


def _groups_that_share(side: Side) -> dict[str, bool]:
    """Fused module -> whether all of its parts hold the same global decode scale."""
    scales: dict[str, list[torch.Tensor]] = {}
    for site in side.sites.get(STATIC, {}):
        if site.kind == "weight_global_decode_scale":
            held = side.read(STATIC, site)
            if held is not None:
                scales.setdefault(fused_group(site.fqn), []).append(held.tensor.reshape(-1)[:1])
    return {
        group: all(is_bitwise_equal(parts[0], part) for part in parts[1:])
        for group, parts in scales.items()
        if len(parts) > 1
    }


def _limit(scale: HeldScale) -> float | None:
    """Largest magnitude that a per-tensor scale can hold: 6 * 448 / S."""
    encode, decode = scale.encode, scale.decode
    if encode is not None:
        return E2M1_E4M3_MAX / float(encode) if float(encode) else None
    if decode is None or decode.numel() != 1:
        return None
    return E2M1_E4M3_MAX * float(torch.as_tensor(decode))
