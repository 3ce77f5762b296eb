"""Recipe search: which named arithmetic reproduces an engine's codes and scales bit for bit.

Reads stored traces and the master weights; runs minite_kernels' quantizers on the engine's own
captured input, so that what came from upstream plays no part. Invariant: a recipe is an answer only
with its measured match rate, and the runner-up stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from minite_diag.canonical.names import STATIC, SequenceKey
from minite_diag.canonical.scales import unpack, unsigned_zero
from minite_diag.canonical.tokens import read_site
from minite_diag.checkpoints import fused_group, read_tensor
from minite_diag.compare import Side
from minite_diag.plan import Plan
from minite_diag.site import Site
from minite_kernels.nvfp4.gemm import gemm
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import RECIPES, GemmRecipe, OperandRecipe, Recipe, Role
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

MAX_SITES: Final = 12
NEAREST: Final = 4
"""Recipes of which one field is varied when none reproduces everything."""


@dataclass(frozen=True)
class Match:
    """How much of an engine's bytes one arithmetic reproduces; shares of 1.

    `globals` is the share of tensors whose global scale it predicts from the data: 0 for a static
    scale, which is taken from the engine and proves nothing.
    """

    name: str
    codes: float
    scales: float
    globals: float
    elements: int

    @property
    def share(self) -> float:
        """The smaller of codes and scales: 1.0 only if every byte is equal."""
        return min(self.codes, self.scales)

    @property
    def rank(self) -> tuple[float, float]:
        """Bytes first, then whether the global scale was predicted too."""
        return (self.share, self.globals)


@dataclass(frozen=True)
class HeldScale:
    """A global scale, FP32, in the direction in which the engine holds it; the other is None."""

    encode: torch.Tensor | None = None
    decode: torch.Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """One quantization that an engine did: its input [M, K], its global scale, its bytes."""

    site: str
    x: torch.Tensor
    codes: torch.Tensor
    block_scale: torch.Tensor
    scale: HeldScale
    amax: torch.Tensor | None = None


@dataclass(frozen=True)
class Found:
    """The answer for one engine and one role: best, runner-up and every other match."""

    engine: str
    role: Role | Literal["gemm"]
    matches: tuple[Match, ...]
    samples: tuple[Sample, ...]
    candidates: dict[str, Recipe] = field(default_factory=dict)

    @property
    def best(self) -> Match:
        """The arithmetic that reproduces most."""
        return self.matches[0]

    @property
    def runner_up(self) -> Match | None:
        """The next one that is a different arithmetic on this data."""
        return next((m for m in self.matches if m.rank < self.best.rank), None)

    @property
    def ties(self) -> tuple[str, ...]:
        """Other recipes that reproduce just as much: the data can't tell them apart."""
        return tuple(m.name for m in self.matches[1:] if m.rank == self.best.rank)


def operands(role: Role) -> dict[str, Recipe]:
    """One recipe for each distinct arithmetic of a role; stochastic ones can't be reproduced."""
    distinct: dict[OperandRecipe, Recipe] = {}
    for recipe in RECIPES.values():
        operand = recipe.operand(role)
        if operand.rounding == "rne":
            distinct.setdefault(operand, recipe)
    return {recipe.name: recipe for recipe in distinct.values()}


def search(plan: Plan, side: Side) -> list[Found]:
    """Search weights and activations of one engine; an engine without codes gives nothing."""
    found = []
    roles: tuple[tuple[Role, list[Sample]], ...] = (
        ("weight", list(weight_samples(plan, side))),
        ("activation", list(activation_samples(side))),
    )
    for role, samples in roles:
        if samples:
            found.append(search_samples(side.trace.id, role, samples))
    return found


def search_samples(engine: str, role: Role, samples: list[Sample]) -> Found:
    """Rank every named arithmetic by how much of the samples it reproduces."""
    candidates = operands(role)
    matches = [_match(name, recipe, role, samples) for name, recipe in candidates.items()]
    nearest = sorted(matches, key=lambda m: m.rank, reverse=True)[:NEAREST]
    if nearest[0].share < 1.0:
        for match in nearest:
            variants = one_field_variants(candidates[match.name], role)
            matches += [_match(name, recipe, role, samples) for name, recipe in variants.items()]
            candidates |= variants
    ranked = sorted(matches, key=lambda m: m.rank, reverse=True)
    return Found(engine, role, tuple(ranked), tuple(samples), candidates)


def one_field_variants(recipe: Recipe, role: Role) -> dict[str, Recipe]:
    """The recipe with one field of its operand set to each value that any recipe uses."""
    operand = recipe.operand(role)
    values: dict[str, set[Any]] = {}
    for other in RECIPES.values():
        for name in OperandRecipe.__dataclass_fields__:
            values.setdefault(name, set()).add(getattr(other.operand(role), name))
    variants: dict[str, Recipe] = {}
    for name, options in values.items():
        for value in sorted(options - {getattr(operand, name)}, key=repr):
            changed = replace(operand, **{name: value})
            if changed.rounding == "rne":
                label = f"{recipe.name} with {name}={value!r}"
                variants[label] = _with_operand(recipe, role, changed)
    return variants


def field_effect(
    samples: tuple[Sample, ...], recipe: Recipe, role: str, name: str, value: Any
) -> tuple[float, float]:
    """Shares of codes and of block scales that change if one field of `recipe` becomes `value`.

    Measured on the samples' own inputs, with their held scale where the changed field asks for it.
    """
    assert role != "gemm"
    kind: Role = "weight" if role == "weight" else "activation"
    changed = _with_operand(recipe, kind, replace(recipe.operand(kind), **{name: value}))
    different = []
    for sample in samples:
        before, after = (
            quantize_sample(sample, recipe, kind),
            quantize_sample(sample, changed, kind),
        )
        if before is None or after is None:
            continue
        a, b = unpack(unsigned_zero(before.codes)), unpack(unsigned_zero(after.codes))
        scales = before.block_scale.view(torch.uint8) != after.block_scale.view(torch.uint8)
        different.append((float((a != b).double().mean()), float(scales.double().mean())))
    if not different:
        return 0.0, 0.0
    codes, scales_changed = zip(*different, strict=True)
    return sum(codes) / len(codes), sum(scales_changed) / len(scales_changed)


def _with_operand(recipe: Recipe, role: Role, operand: OperandRecipe) -> Recipe:
    if role == "weight":
        return replace(recipe, weight=operand)
    if role == "activation":
        return replace(recipe, activation=operand)
    return replace(recipe, gradient=operand)


def _match(name: str, recipe: Recipe, role: Role, samples: list[Sample]) -> Match:
    codes = scales = code_count = scale_count = predicted = 0
    for sample in samples:
        made = quantize_sample(sample, recipe, role)
        if made is None:
            return Match(name, 0.0, 0.0, 0.0, 0)
        equal = unsigned_zero(made.codes) ^ unsigned_zero(sample.codes)
        codes += int(((equal & 0x0F) == 0).sum()) + int(((equal & 0xF0) == 0).sum())
        code_count += 2 * equal.numel()
        same = made.block_scale.view(torch.uint8) == sample.block_scale.view(torch.uint8)
        empty = (unsigned_zero(sample.codes).reshape(*same.shape, -1) == 0).all(-1)
        scales += int((same | empty).sum())
        scale_count += same.numel()
        if recipe.operand(role).amax_scope != "static":
            predicted += _predicts_global_scale(made, sample.scale)
    return Match(
        name, codes / code_count, scales / scale_count, predicted / len(samples), code_count
    )


def _predicts_global_scale(made: Nvfp4Tensor, held: HeldScale) -> bool:
    if held.encode is not None:
        return torch.equal(made.global_encode_scale, held.encode)
    return held.decode is not None and torch.equal(made.global_decode_scale, held.decode)


def quantize_sample(sample: Sample, recipe: Recipe, role: Role) -> Nvfp4Tensor | None:
    """With the recipe's own dynamic scale, or else the engine's captured one."""
    scope = recipe.operand(role).amax_scope
    try:
        if scope == "static":
            return quantize(
                sample.x,
                recipe,
                role=role,
                global_encode_scale=sample.scale.encode,
                global_decode_scale=sample.scale.decode,
            )
        if scope == "tensor" and sample.amax is not None:
            return quantize(sample.x, recipe, role=role, amax=sample.amax)
        return quantize(sample.x, recipe, role=role)
    except (ValueError, TypeError, RuntimeError):
        # An arithmetic that refuses this tensor (its dtype, a device-only reciprocal) is no match.
        return None


def global_scale(side: Side, key: SequenceKey, site: Site) -> HeldScale:
    """The global scale in the engine's own direction: converting it would cost a rounding."""
    pieces = side.sites.get(key, {}).get(site)
    if not pieces:
        return HeldScale()
    native = pieces[0].ref.kind
    if native.endswith("_encode_scale"):
        part, trace = pieces[0].part, side.trace
        raw = trace.read(pieces[0].ref)
        if part.expert is not None and raw.dim():
            raw = raw[part.expert]
        return HeldScale(encode=raw.float().reshape(-1)[:1].reshape(()))
    scale = read_site(side.trace, pieces).tensor.float()
    return HeldScale(decode=scale.reshape(()) if scale.numel() == 1 else scale)


@dataclass(frozen=True)
class ActivationInput:
    """What went into one quantized linear in one sequence, [T, K], and the scale that held."""

    site: str
    x: torch.Tensor
    scale: HeldScale


def activation_inputs(side: Side) -> Iterator[ActivationInput]:
    """The inputs of every linear that shows codes, one at a time; fused parts' input once."""
    for key, sites in side.sites.items():
        seen: set[str] = set()
        for site in sites:
            group = fused_group(site.fqn)
            if site.kind != "act_codes" or key.mode != "score" or group in seen:
                continue
            seen.add(group)
            x = side.read(key, Site(site.fqn, "input"))
            if x is not None and x.tensor.numel():
                scale = global_scale(side, key, Site(site.fqn, "act_global_decode_scale"))
                yield ActivationInput(site.fqn, x.tensor, scale)
        side.trace.release()


def activation_samples(side: Side) -> Iterator[Sample]:
    """Quantized activations of up to MAX_SITES linears, spread over the model."""
    for key, site in _spread(side, "act_codes"):
        parts = {
            kind: side.read(key, Site(site.fqn, kind)) for kind in ("input", "act_block_scale")
        }
        codes = side.read(key, site)
        x, block_scale = parts["input"], parts["act_block_scale"]
        if x is None or block_scale is None or codes is None:
            continue
        if len(x.tensor) != len(codes.tensor):
            continue
        yield Sample(
            site.fqn,
            x.tensor,
            codes.tensor,
            block_scale.tensor,
            global_scale(side, key, Site(site.fqn, "act_global_decode_scale")),
        )


def weight_samples(plan: Plan, side: Side, wanted: list[Site] | None = None) -> Iterator[Sample]:
    """Quantized weights with their master weight and group amax: `wanted`, or MAX_SITES spread."""
    if plan.model.format.startswith("nvfp4"):
        return
    sites = wanted if wanted is not None else [s for _, s in _spread(side, "weight_codes")]
    for site in sites:
        codes, scale = (
            side.read(STATIC, site),
            side.read(STATIC, Site(site.fqn, "weight_block_scale")),
        )
        if codes is None or scale is None:
            continue
        group = [name for name in plan.quantized if fused_group(name) == fused_group(site.fqn)]
        names = dict.fromkeys((site.fqn, *group))
        read = {name: _master_weight(plan, side, name) for name in names}
        masters = {name: weight for name, weight in read.items() if weight is not None}
        if len(masters) < len(names):
            continue
        weight = masters[site.fqn]
        amax = torch.stack([masters[name].abs().max().float() for name in group]).max()
        yield Sample(
            site.fqn,
            weight,
            codes.tensor,
            scale.tensor,
            global_scale(side, STATIC, Site(site.fqn, "weight_global_decode_scale")),
            amax,
        )


def _master_weight(plan: Plan, side: Side, fqn: str) -> torch.Tensor | None:
    """Of the master checkpoint; of a run without one, the weight that the side itself holds."""
    if plan.model.path:
        return read_tensor(Path(plan.model.path), f"{fqn}.weight")
    held = side.read(STATIC, Site(fqn, "weight"))
    return None if held is None else held.tensor


def _spread(side: Side, kind: str) -> list[tuple[SequenceKey, Site]]:
    """Up to MAX_SITES sites of a kind at even distances, each in the sequence it was seen in."""
    seen: dict[Site, SequenceKey] = {}
    for key, sites in side.sites.items():
        for site in sites:
            if site.kind == kind:
                seen.setdefault(site, key)
    every = list(seen)
    step = max(1, len(every) // MAX_SITES)
    return [(seen[site], site) for site in every[::step][:MAX_SITES]]


def gemm_recipes() -> dict[str, GemmRecipe]:
    """Distinct GEMM arithmetics, each named by the first recipe that has it."""
    distinct: dict[GemmRecipe, str] = {}
    for recipe in RECIPES.values():
        distinct.setdefault(recipe.gemm, recipe.name)
    return {name: recipe for recipe, name in distinct.items()}


def search_gemm(plan: Plan, side: Side, activation: Found, weight: Found) -> Found | None:
    """Which GEMM arithmetic turns the engine's own codes into the engine's own output bits.

    None where no sampled linear shows codes, scales and a BF16 or FP32 output.
    """
    samples = list(activation_samples(side))
    wanted = [Site(sample.site, "weight_codes") for sample in samples]
    weights = {sample.site: sample for sample in weight_samples(plan, side, wanted)}
    triples = [
        (sample, weights[sample.site], output)
        for sample in samples
        if sample.site in weights and (output := _output(side, sample.site)) is not None
    ]
    if not triples:
        return None
    left = activation.candidates[activation.best.name].activation
    right = weight.candidates[weight.best.name].weight
    matches = []
    for name, arithmetic in gemm_recipes().items():
        recipe = replace(RECIPES["te"], activation=left, weight=right, gemm=arithmetic)
        equal = count = 0
        for a, b, output in triples:
            made = _multiply(recipe, a, b, output.dtype)
            equal += int((made == output).sum())
            count += output.numel()
        matches.append(Match(name, equal / count, 1.0, 0.0, count))
    ranked = tuple(sorted(matches, key=lambda m: m.rank, reverse=True))
    return Found(side.trace.id, "gemm", ranked, tuple(b for _, b, _ in triples))


def _output(side: Side, fqn: str) -> torch.Tensor | None:
    for key in side.sites:
        found = side.read(key, Site(fqn, "output"))
        if found is not None:
            return found.tensor
    return None


def _multiply(recipe: Recipe, a: Sample, b: Sample, dtype: torch.dtype) -> torch.Tensor:
    """GEMM of the engine's bytes; the amax that some epilogues use comes from the tensors."""
    left = _as_operand(recipe, "activation", a)
    right = _as_operand(recipe, "weight", b)
    return gemm(left, right, out_dtype=dtype)


def _as_operand(recipe: Recipe, role: Role, sample: Sample) -> Nvfp4Tensor:
    made = quantize_sample(sample, recipe, role)
    assert made is not None
    return replace(made, codes=sample.codes, block_scale=sample.block_scale)
