"""Reproduce one site's mismatch: `python reproduce.py [FOLDER]`.

Needs torch, numpy and minite_kernels. Reads bundle.json and operands.npz; compares the bytes that
both engines held, computes each side again from its own operands, and computes the second side's
operands with the first side's arithmetic. Exit 0: the recorded mismatch was seen again; 1: not.
"""

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDTH = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
"""Digits of a float: two dtypes are compared in the coarser one."""


def load(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """bundle.json, and the tensors of operands.npz by name."""
    bundle = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    with np.load(folder / "operands.npz") as arrays:
        tensors = {
            name: torch.from_numpy(arrays[entry["array"]].copy())
            .view(getattr(torch, entry["dtype"]))
            .reshape(entry["shape"])
            for name, entry in bundle["tensors"].items()
        }
    return bundle, tensors


def count(
    kind: str, x: torch.Tensor, y: torch.Tensor, others: tuple[Any, Any] = (None, None)
) -> tuple[int, int]:
    """(mismatches, elements) of two tensors of a site, compared as bytes.

    E2M1 has two zeros that are one number. A block of zeros decodes to zero whatever its scale, so
    neither its scale nor its codes count; `others` are the block scales of codes, or the codes of
    block scales.
    """
    if kind.endswith("_codes"):
        different = unpack(unsigned_zero(x)) != unpack(unsigned_zero(y))
        a, b = others
        if a is not None and b is not None and a.shape == b.shape and 8 * a.numel() == x.numel():
            zero = ((a.float() == 0) & (b.float() == 0)).repeat_interleave(16, -1)
            return int((different & ~zero).sum()), int((~zero).sum())
        return int(different.sum()), different.numel()
    if kind.endswith("_block_scale"):
        different = bits(x) != bits(y)
        counted = torch.ones_like(different)
        if others[0] is not None and others[1] is not None and others[0].shape[-1] % 8 == 0:
            zero = [(unpack(unsigned_zero(c)).unflatten(-1, (-1, 16)) == 0).all(-1) for c in others]
            if zero[0].shape == different.shape:
                counted = ~(zero[0] & zero[1])
        return int((different & counted).sum()), int(counted.sum())
    if x.is_floating_point() and y.is_floating_point() and x.dtype != y.dtype:
        coarser = min((x.dtype, y.dtype), key=lambda dtype: WIDTH[dtype])
        x, y = x.to(coarser), y.to(coarser)
    different = bits(x) != bits(y)
    return int(different.sum()), different.numel()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers of the same width."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def unsigned_zero(codes: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 codes with -0 turned into 0."""
    low, high = codes & 0x0F, codes >> 4
    low, high = torch.where(low == 8, 0, low), torch.where(high == 8, 0, high)
    return (low | high << 4).to(torch.uint8)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte -> one code an element, the low nibble first."""
    return torch.stack((codes & 0x0F, codes >> 4), -1).flatten(-2)


def compute(step: dict[str, Any] | None, operand: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """What the named arithmetic makes of a side's operands; None where none is known."""
    if step is None:
        return None
    if step["op"] == "linear":
        return torch.nn.functional.linear(operand["x"], operand["w"], operand.get("bias"))
    if step["op"] == "norm":
        from minite_kernels.invariant.rms_norm import rms_norm

        return rms_norm(operand["x"], operand["w"], step["eps"])
    if step["op"] == "quantize":
        made = quantized(step, step["role"], operand, "")
        return {
            "codes": made.codes,
            "block_scale": made.block_scale,
            "global_decode_scale": made.global_decode_scale,
        }[step["returns"]]
    from minite_kernels.nvfp4.gemm import gemm
    from minite_kernels.nvfp4.recipe import RECIPES

    left, right = (recipe_of(step[role], role) for role in ("activation", "weight"))
    recipe = replace(
        left, name="reproduced", weight=right.weight, gemm=RECIPES[step["gemm"]["base"]].gemm
    )
    a, b = (
        replace(
            quantized(step[role], role, operand, prefix),
            codes=operand[f"{prefix}codes"],
            block_scale=operand[f"{prefix}block_scale"],
            recipe=recipe,
        )
        for role, prefix in (("activation", "act_"), ("weight", "weight_"))
    )
    return gemm(a, b, out_dtype=getattr(torch, step["dtype"]))


def quantized(
    step: dict[str, Any], role: Any, operand: dict[str, torch.Tensor], prefix: str
) -> Any:
    """Quantize `x` with its own dynamic scale, or with the static one that the engine held."""
    from minite_kernels.nvfp4.quantize import quantize

    recipe = recipe_of(step, role)
    scope = recipe.operand(role).amax_scope
    given: dict[str, Any] = {}
    if scope == "static":
        held = "encode" if f"{prefix}encode" in operand else "decode"
        given = {f"global_{held}_scale": operand[f"{prefix}{held}"]}
    elif scope == "tensor" and f"{prefix}amax" in operand:
        given = {"amax": operand[f"{prefix}amax"]}
    return quantize(operand[f"{prefix}x"], recipe, role=role, **given)


def recipe_of(step: dict[str, Any], role: Any) -> Any:
    """A named recipe, with one field of one operand changed where the step says so."""
    from minite_kernels.nvfp4.recipe import RECIPES

    recipe = RECIPES[step["base"]]
    if step.get("field") is None:
        return recipe
    field: dict[str, Any] = {step["field"]: ast.literal_eval(step["value"])}
    changed: dict[str, Any] = {role: replace(recipe.operand(role), **field)}
    return replace(recipe, **changed)


def side_of(tensors: dict[str, torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """A side's tensors without its name."""
    prefix = f"{side}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def rows_of(side: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """The rows that both sides saw."""
    return value[side["rows"].long()] if "rows" in side else value


def mismatch(bundle: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    """(mismatches, elements) of what the two engines held."""
    one, other = (side_of(tensors, side) for side in ("learner", "sampler"))
    x, y = rows_of(one, one["value"]), rows_of(other, other["value"])
    if x.shape != y.shape:
        y = y.reshape(x.shape) if x.numel() == y.numel() else y.reshape(-1)[:1].expand(x.shape)
    return count(bundle["kind"], x, y, (one.get("other"), other.get("other")))


def report(folder: Path) -> int:
    """Print what is seen; 0 if it is what was recorded."""
    bundle, tensors = load(folder)
    seen, elements = mismatch(bundle, tensors)
    print(
        f"{bundle['site']}: {seen} of {elements} elements differ (recorded {bundle['mismatches']})"
    )
    ok = (seen, elements) == (bundle["mismatches"], bundle["elements"])
    for name in ("learner", "sampler"):
        ok &= _report_side(bundle, tensors, name)
    steps = [bundle[name]["step"] for name in ("learner", "sampler")]
    if all(step is not None for step in steps) and steps[0]["op"] == steps[1]["op"]:
        _report_cross(bundle, tensors)
    return 0 if ok else 1


def _report_side(bundle: dict[str, Any], tensors: dict[str, torch.Tensor], name: str) -> bool:
    side, step = side_of(tensors, name), bundle[name]["step"]
    label = f"{name} ({bundle[name]['label']} {bundle[name]['version']})"
    made = compute(step, side)
    if made is None:
        print(f"{label}: no arithmetic of minite_kernels is known for it")
        return True
    wrong, total = count(bundle["kind"], made, side["value"].reshape(made.shape))
    print(f"{label}: {describe(step)} gives {total - wrong} of {total} elements of its bytes")
    return wrong == bundle[name]["unreproduced"]


def _report_cross(bundle: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    if bundle["learner"]["step"] == bundle["sampler"]["step"]:
        for name in ("learner", "sampler"):
            if bundle[name]["unreproduced"]:
                print(f"{name} computes other bits of its own operands")
                return
        print("both sides compute the same: their operands differ")
        return
    side = side_of(tensors, "sampler")
    ours, theirs = (compute(bundle[n]["step"], side) for n in ("learner", "sampler"))
    if ours is None or theirs is None:
        return
    wrong, total = count(bundle["kind"], ours, theirs.reshape(ours.shape))
    print(
        f"on the sampler's own operands, {describe(bundle['learner']['step'])} and "
        f"{describe(bundle['sampler']['step'])} differ in {wrong} of {total} elements"
    )


def describe(step: dict[str, Any]) -> str:
    """An arithmetic in a few words."""
    if step["op"] in ("linear", "norm"):
        return {"linear": "torch.nn.functional.linear", "norm": "rms_norm"}[str(step["op"])]
    if step["op"] == "quantize":
        return f"quantize({_named(step)!r}, role={step['role']!r})"
    return f"gemm of recipe {_named(step['gemm'])!r}"


def _named(step: dict[str, Any]) -> str:
    changed = "" if step.get("field") is None else f" with {step['field']}={step['value']}"
    return f"{step['base']}{changed}"


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
