"""te-emu against te-ref, module by module: real `te.Linear` and minite_kernels on the same tensors.

    python tests/gpu/te_modules.py OUT.json

Counts the elements whose bytes differ in weight codes, weight scales, activation codes, activation
scales and the forward output, under the recipes `te-python-cuda` (what TE's reference computes on
this device), `te-python` (the same on CPU: another alpha) and `te` (the native arithmetic). Under
`te-python-cuda` every count has to be 0.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Final

import torch

from minite_diag.engines.te_emu import EmulatedLinear
from minite_kernels.nvfp4.gemm import gemm, prepare
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import get_recipe

SHAPES: Final = ((1, 64, 64), (7, 128, 96), (64, 576, 1536), (200, 1024, 512), (33, 4096, 256))
"""Tokens, K, N."""

RECIPES: Final = ("te-python-cuda", "te-python", "te")


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bytes differ."""
    size = a.element_size()
    flat = (t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
    left, right = (t.reshape(-1, size) for t in flat)
    return int((left != right).any(1).sum())


def inputs(tokens: int, k: int, n: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] and weights [N, K] in BF16."""
    x = torch.randn(tokens, k, device="cuda")
    w = torch.randn(n, k, device="cuda") * 0.05
    if kind == "outliers":
        x[:, ::97] *= 60
        w[::13] *= 8
    if kind == "zeros":
        x = x * (torch.rand_like(x) > 0.7)
        x.view(-1)[::5] = -0.0
        w[: n // 4] = 0
    if kind == "tiny":
        x, w = x * 1e-20, w * 1e-12
    return x.bfloat16(), w.bfloat16()


def check(tokens: int, k: int, n: int, kind: str) -> dict[str, Any]:
    """Counts of one case, for each recipe of te-ref."""
    x, w = inputs(tokens, k, n, kind)
    emulated = EmulatedLinear(w, get_recipe("te-python-cuda"), "emu")
    y, q = emulated.multiply(x)
    row: dict[str, Any] = {"tokens": tokens, "k": k, "n": n, "input": kind, "elements": y.numel()}
    for name in RECIPES:
        recipe = get_recipe(name)
        weight, act = quantize(w, recipe, role="weight"), quantize(x, recipe)
        row[name] = {
            "weight_codes": different(weight.codes, emulated.weight_q.codes),
            "weight_block_scale": different(weight.block_scale, emulated.weight_q.block_scale),
            "weight_amax": different(weight.amax, emulated.weight_q.amax),
            "act_codes": different(act.codes, q.codes),
            "act_block_scale": different(act.block_scale, q.block_scale),
            "act_amax": different(act.amax, q.amax),
            "output": different(gemm(act, prepare(weight), out_dtype=torch.bfloat16), y),
        }
    return row


def main() -> int:
    """Print and write the counts; 1 if any under te-python-cuda is not 0."""
    torch.manual_seed(0)
    rows = [
        check(tokens, k, n, kind)
        for tokens, k, n in SHAPES
        for kind in ("normal", "outliers", "zeros", "tiny")
    ]
    total = {
        name: {key: sum(row[name][key] for row in rows) for key in rows[0][name]}
        for name in RECIPES
    }
    found = {
        "transformer_engine": importlib.metadata.version("transformer_engine"),
        "device": torch.cuda.get_device_name(),
        "cases": len(rows),
        "output_elements": sum(row["elements"] for row in rows),
        "different": total,
        "rows": rows,
    }
    target = Path(sys.argv[1]).with_suffix(".json")
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}))
    return int(any(total["te-python-cuda"].values()))


if __name__ == "__main__":
    sys.exit(main())
