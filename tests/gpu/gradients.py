"""Gradients through the aligned ops on a GPU: each parameter's against transformers' own.

    python tests/gpu/gradients.py

Prints for each alignment the smallest cosine and the norms' largest deviation over all parameters;
the exit code is 1 if a cosine is below 0.999 or a parameter has no gradient.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import torch

from minite_diag.alignments.learner import aligned
from minite_diag.checkpoints import open_demo_moe

ALIGNMENTS: Final = ("norm", "rope", "attention", "activation", "router", "lm-head")
LEAST: Final = 0.999


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """FP64 gradient of the mean log-likelihood, by parameter."""
    ids = torch.arange(40, 104, device=model.device)[None]
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.double().flatten() for n, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, names: tuple[str, ...], native: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Smallest cosine and largest deviation of a norm."""
    with aligned(model, names):
        found = gradients(model)
    missing = sorted(native.keys() - found.keys())
    cosines = {n: float(torch.cosine_similarity(found[n], native[n], 0)) for n in found}
    norms = [abs(float(found[n].norm() / native[n].norm()) - 1) for n in found]
    worst = min(cosines, key=lambda n: cosines[n])
    return {"cosine": cosines[worst], "at": worst, "norm": max(norms), "missing": missing}


def main() -> int:
    """Print one JSON line for each alignment and for all of them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(open_demo_moe().path, dtype=torch.float32)
    model = model.cuda().train()
    native = gradients(model)
    bad = 0
    for names in (*((name,) for name in ALIGNMENTS), ALIGNMENTS):
        found = compare(model, names, native)
        bad += bool(found["missing"]) or found["cosine"] < LEAST
        print(json.dumps({"aligned": names, **found}), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
