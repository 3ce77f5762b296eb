"""A site of a stored run -> a folder with its operands and a script, ready for an upstream issue.

Knows stored traces, recipe search and torch. Invariant: the bundle holds the bytes that the engines
held, of one sequence: the one with the fewest elements in which the site differs; and its recorded
mismatch is that of the run's own comparison, or there is no bundle.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import torch

from minite_diag import __version__
from minite_diag.attribute.recipes import (
    HeldScale,
    Sample,
    gemm_recipes,
    operands,
    search_samples,
    weight_samples,
)
from minite_diag.canonical.names import STATIC, SequenceKey
from minite_diag.canonical.tokens import SiteTensor
from minite_diag.checkpoints import read_tensor
from minite_diag.compare_site import CODE_KINDS, SCALE_KINDS, Side
from minite_diag.errors import CheckpointError, TraceError, UsageError
from minite_diag.gate.limits import suggestion
from minite_diag.plan import Plan, read_plan
from minite_diag.repro import reproduce
from minite_diag.site import Site
from minite_diag.stored_summary import read_summary
from minite_diag.trace.schema import COMPARISON, read_table
from minite_diag.trace.store import Trace
from minite_kernels.nvfp4.recipe import Role

Tensors = dict[str, torch.Tensor]
_PREFIXES: Final[tuple[tuple[str, Role], ...]] = (("weight", "weight"), ("act", "activation"))
QUANTIZER_KINDS: Final[dict[str, tuple[Role, str]]] = {
    f"{prefix}_{part}": (role, part)
    for prefix, role in _PREFIXES
    for part in ("codes", "block_scale", "global_decode_scale")
}
REDACTED: Final = "redacted"


@dataclass(frozen=True)
class Bundle:
    """What was written, and what the script will see."""

    folder: Path
    site: str
    mismatches: int
    elements: int


@dataclass(frozen=True)
class _Place:
    """One site of one sequence of one pair, and the run's own comparison of it."""

    plan: Plan
    sides: tuple[Side, Side]
    key: SequenceKey
    site: Site
    mismatches: int
    elements: int


def write_bundle(run: Path, site: str | None, out: Path | None, *, redact: bool) -> Bundle:
    """Write the bundle of a site (default: where the bits first part); returns what it holds.

    Raises UsageError where the site is unknown, differs nowhere or was not kept.
    """
    summary = read_summary(run)
    place = _find(run, summary, site)
    folder = out or run / f"repro-{place.site.fqn}-{place.site.kind}"
    if (folder / "bundle.json").exists():
        raise UsageError(f"{folder} holds a bundle already", "remove it, or give another --out")
    tensors, steps = _collect(place)
    bundle = _describe(run, summary, place, steps, redact)
    arrays, entries = _pack(tensors)
    bundle["tensors"] = entries
    seen = reproduce.mismatch(bundle, tensors)
    if seen != (place.mismatches, place.elements):
        raise TraceError(
            f"{place.site}: the bundle shows {seen[0]} of {seen[1]} mismatches, the comparison "
            f"{place.mismatches} of {place.elements}",
            "compare the run again: minite-diag compare --resume RUN",
        )
    _record_unreproduced(bundle, tensors)
    _write(folder, bundle, arrays)
    return Bundle(folder, str(place.site), place.mismatches, place.elements)


def _find(run: Path, summary: Mapping[str, Any], text: str | None) -> _Place:
    rows = read_table(run / "comparison.parquet", COMPARISON).to_pandas()
    site = _site(summary, rows, text)
    here = rows[(rows["fqn"] == site.fqn) & (rows["kind"] == site.kind)]
    compared = here[(here["status"] == "compared") & (here["bitwise_fraction"] < 1.0)]
    if not len(compared):
        equal = (here["status"] == "compared").any()
        why = "bitwise equal in every sequence" if equal else f"skipped: {here['reason'].iloc[0]}"
        raise UsageError(f"{site} shows no mismatch: it is {why}", "choose another --site")
    # Teacher-forced sequences first: their tokens are in the plan.
    order = compared.assign(sampled=compared["mode"] == "sample")
    row = order.sort_values(["sampled", "elements", "probe"], kind="stable").iloc[0]
    plan = read_plan(run)
    sides = tuple(Side.of(Trace(run / "traces" / row[end])) for end in ("baseline", "target"))
    key = (
        STATIC if row["mode"] == "static" else SequenceKey(row["mode"], row["source"], row["probe"])
    )
    elements = int(row["elements"])
    return _Place(
        plan,
        (sides[0], sides[1]),
        key,
        site,
        round(elements * (1.0 - float(row["bitwise_fraction"]))),
        elements,
    )


def _site(summary: Mapping[str, Any], rows: pd.DataFrame, text: str | None) -> Site:
    if text is None:
        first = next(
            (p["first_divergence"] for p in summary["pairs"] if p["first_divergence"]), None
        )
        if first is None:
            raise UsageError("all compared tensors are bitwise equal", "there is nothing to show")
        return Site(first["site"], first["kind"])
    names = rows["fqn"] + ":" + rows["kind"]
    if text not in set(names):
        raise UsageError(
            f"the run has no site {text!r}", suggestion(text, sorted(set(names))[:2000])
        )
    site = Site.parse(text)
    if site.kind == "topk_weights":
        raise UsageError(
            "routing weights are compared for the tokens that chose the same experts only",
            f"show what they come from: --site {site.fqn}:topk_ids",
        )
    return site


def _collect(place: _Place) -> tuple[Tensors, list[dict[str, Any] | None]]:
    """Both sides' tensors under `learner.` and `sampler.`, and the arithmetic of each side."""
    tensors: Tensors = {}
    steps = []
    values = [_read(side, place.key, place.site) for side in place.sides]
    for name, side, value in zip(("learner", "sampler"), place.sides, values, strict=True):
        own: Tensors = {"value": value.tensor}
        other = CODE_KINDS.get(place.site.kind) or SCALE_KINDS.get(place.site.kind)
        if other is not None:
            found = side.read(place.key, Site(place.site.fqn, other))
            if found is not None:
                own["other"] = found.tensor
        operand, step = _arithmetic(place, side, value)
        steps.append(step)
        tensors |= {f"{name}.{k}": t.contiguous() for k, t in (own | operand).items()}
    _add_common_rows(tensors, values)
    return tensors, steps


def _read(side: Side, key: SequenceKey, site: Site) -> SiteTensor:
    found = side.read(key, site)
    if found is None:
        raise UsageError(
            f"{side.trace.id} kept no bytes of {site}", "capture it: compare without --stats-only"
        )
    return found


def _add_common_rows(tensors: Tensors, values: list[SiteTensor]) -> None:
    """Indices of the tokens that both sides saw, where they saw different ones."""
    mine, theirs = values[0].positions, values[1].positions
    if mine is None or theirs is None or np.array_equal(mine, theirs):
        return
    _, i, j = np.intersect1d(mine, theirs, return_indices=True)
    tensors["learner.rows"], tensors["sampler.rows"] = torch.from_numpy(i), torch.from_numpy(j)


def _arithmetic(
    place: _Place, side: Side, value: SiteTensor
) -> tuple[Tensors, dict[str, Any] | None]:
    """Operands of a side and the arithmetic that makes its value of them, if one is known."""
    kind, fqn = place.site.kind, place.site.fqn
    if kind in QUANTIZER_KINDS:
        role, part = QUANTIZER_KINDS[kind]
        sample = _sample(place, side, role)
        if sample is None:
            return {}, None
        step = {"op": "quantize", "role": role, "returns": part, **_recipe(side, role, sample)}
        return _of_sample(sample, ""), step
    if kind not in ("output", "router_logits", "logits"):
        return {}, None
    activation, weight = _sample(place, side, "activation"), _sample(place, side, "weight")
    if activation is not None and weight is not None:
        return _quantized_linear(side, activation, weight, value.tensor)
    return _plain(place, side, fqn)


def _sample(place: _Place, side: Side, role: Role) -> Sample | None:
    """One quantization of this site as the engine did it; None where it shows none."""
    fqn = place.site.fqn
    if role == "weight":
        wanted = [Site(fqn, "weight_codes")]
        return next(iter(weight_samples(place.plan, side, wanted)), None)
    parts = {
        kind: side.read(place.key, Site(fqn, kind))
        for kind in ("input", "act_codes", "act_block_scale", "act_global_decode_scale")
    }
    x, codes, block_scale = parts["input"], parts["act_codes"], parts["act_block_scale"]
    if x is None or codes is None or block_scale is None or len(x.tensor) != len(codes.tensor):
        return None
    scale = parts["act_global_decode_scale"]
    held = HeldScale() if scale is None else HeldScale(decode=_scalar(scale.tensor.float()))
    return Sample(fqn, x.tensor, codes.tensor, block_scale.tensor, _encode(place, side) or held)


def _encode(place: _Place, side: Side) -> HeldScale | None:
    """The encode scale, where the engine holds that: its reciprocal would be rounded once more."""
    pieces = side.sites.get(place.key, {}).get(Site(place.site.fqn, "act_global_decode_scale"))
    if not pieces or not pieces[0].ref.kind.endswith("_encode_scale"):
        return None
    raw = side.trace.read(pieces[0].ref).float()
    expert = pieces[0].part.expert
    return HeldScale(encode=_scalar(raw[expert] if expert is not None and raw.dim() else raw))


def _scalar(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(()) if scale.numel() == 1 else scale


def _of_sample(sample: Sample, prefix: str) -> Tensors:
    found = {"x": sample.x, "codes": sample.codes, "block_scale": sample.block_scale}
    found |= {
        name: tensor
        for name, tensor in (
            ("encode", sample.scale.encode),
            ("decode", sample.scale.decode),
            ("amax", sample.amax),
        )
        if tensor is not None
    }
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}


def _recipe(side: Side, role: Role, sample: Sample) -> dict[str, Any]:
    """The recipe that reproduces most of this tensor, by name and at most one changed field."""
    best = search_samples(side.trace.id, role, [sample]).best
    base, _, changed = best.name.partition(" with ")
    if base not in operands(role) or not changed:
        return {"base": base, "field": None, "value": None}
    field, _, value = changed.partition("=")
    return {"base": base, "field": field, "value": value}


def _quantized_linear(
    side: Side, activation: Sample, weight: Sample, value: torch.Tensor
) -> tuple[Tensors, dict[str, Any] | None]:
    """The GEMM arithmetic that makes most of this output of the side's own codes and scales."""
    operand = _of_sample(activation, "act_") | _of_sample(weight, "weight_")
    step: dict[str, Any] = {
        "op": "nvfp4_linear",
        "dtype": str(value.dtype).removeprefix("torch."),
        "activation": _recipe(side, "activation", activation),
        "weight": _recipe(side, "weight", weight),
    }
    best: tuple[int, str] | None = None
    for name in gemm_recipes():
        made = reproduce.compute({**step, "gemm": {"base": name}}, operand)
        assert made is not None
        wrong = reproduce.count("output", made, value)[0]
        if best is None or wrong < best[0]:
            best = (wrong, name)
    assert best is not None
    return operand, {**step, "gemm": {"base": best[1]}}


def _plain(place: _Place, side: Side, fqn: str) -> tuple[Tensors, dict[str, Any] | None]:
    """An unquantized linear or a norm: torch's own op on the side's input and the master weight."""
    x = side.read(place.key, Site(fqn, "input"))
    if x is None:
        return {}, None
    folder = Path(place.plan.model.path)
    try:
        w = read_tensor(folder, f"{fqn}.weight")
    except (CheckpointError, KeyError, OSError):
        return {"x": x.tensor}, None
    if w.dim() == 2 and w.shape[1] == x.tensor.shape[-1]:
        return {"x": x.tensor, "w": w.to(x.tensor.dtype)}, {"op": "linear"}
    if w.dim() == 1 and w.shape[0] == x.tensor.shape[-1]:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        eps = float(config.get("rms_norm_eps", 1e-6))
        return {"x": x.tensor, "w": w.to(x.tensor.dtype)}, {"op": "norm", "eps": eps}
    return {"x": x.tensor}, None


def _describe(
    run: Path,
    summary: Mapping[str, Any],
    place: _Place,
    steps: list[dict[str, Any] | None],
    redact: bool,
) -> dict[str, Any]:
    engines = {engine["id"]: engine for engine in summary["engines"]}
    bundle: dict[str, Any] = {
        "schema": 1,
        "site": str(place.site),
        "kind": place.site.kind,
        "model": REDACTED if redact else summary["model"]["name"],
        "architecture": summary["model"]["architecture"],
        "sequence": REDACTED if redact else place.key.probe,
        "mismatches": place.mismatches,
        "elements": place.elements,
        "minite_diag": __version__,
        "torch": importlib.metadata.version("torch"),
    }
    for name, side, step in zip(("learner", "sampler"), place.sides, steps, strict=True):
        engine = engines[side.trace.id]
        facts = ("engine", "label", "version", "device", "dtype", "evidence")
        bundle[name] = {key: engine[key] for key in facts} | {"step": step, "unreproduced": 0}
    return bundle


def _record_unreproduced(bundle: dict[str, Any], tensors: Tensors) -> None:
    """How many elements of each side its own arithmetic does not give."""
    for name in ("learner", "sampler"):
        own = reproduce.side_of(tensors, name)
        made = reproduce.compute(bundle[name]["step"], own)
        if made is None:
            continue
        if made.numel() != own["value"].numel():
            bundle[name]["step"] = None
            continue
        wrong, _ = reproduce.count(bundle["kind"], made, own["value"].reshape(made.shape))
        bundle[name]["unreproduced"] = wrong


def _pack(tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bytes by array name, each stored once, and which tensor lies where."""
    arrays: dict[str, Any] = {}
    names: dict[bytes, str] = {}
    entries = {}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        key = raw.tobytes()
        if key not in names:
            names[key] = f"array_{len(names)}"
            arrays[names[key]] = raw
        entries[name] = {
            "array": names[key],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
    return arrays, entries


def _write(folder: Path, bundle: dict[str, Any], arrays: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "operands.npz", **arrays)
        shutil.copyfile(str(reproduce.__file__), folder / "reproduce.py")
        (folder / "README.md").write_text(_issue(bundle), encoding="utf-8")
        text = json.dumps(bundle, indent=1) + "\n"
        (folder / "bundle.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"can't write {folder}: {error.strerror}", "give a writable folder with --out"
        ) from error


def _issue(bundle: dict[str, Any]) -> str:
    """The text of an issue."""
    sides = []
    for name in ("learner", "sampler"):
        side = bundle[name]
        step = side["step"]
        how = reproduce.describe(step) if step else "no arithmetic of minite_kernels is known"
        sides.append(
            f"- {name}: {side['engine']}, {side['label']} {side['version']}, {side['device']}, "
            f"{side['dtype']}; {how}, {side['unreproduced']} elements not reproduced"
        )
    return (
        f"# {bundle['mismatches']} of {bundle['elements']} elements of `{bundle['site']}` differ\n\n"
        f"Model {bundle['model']} ({bundle['architecture']}), one sequence ({bundle['sequence']}).\n"
        "Both engines held the same checkpoint; `operands.npz` has the bytes that they held at "
        "this site.\n\n" + "\n".join(sides) + "\n\n"
        "```\npip install --no-deps minite-diag   # for minite_kernels: torch and numpy must be there\n"
        "python reproduce.py\n```\n"
    )
