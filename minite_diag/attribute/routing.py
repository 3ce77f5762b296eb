"""Routing forensics: where tokens chose other experts, and whether a small margin explains it.

Reads stored traces. `margin` is the gap between the last chosen and the first rejected router
logit of the baseline; `noise` the largest change of a logit of that token between the sides. A
flip is explained by rounding if the margin is below twice the noise.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from minite_diag.attribute.finding import Finding
from minite_diag.compare import Side
from minite_diag.site import Site

QUANTILES: Final = (0.01, 0.1, 0.5, 0.9)


def routing_layers(learner: Side, sampler: Side) -> list[dict[str, Any]]:
    """One row per MoE layer: set and order agreement, margins, flips and what explains them."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for key, sites in learner.sites.items():
        for site in sites:
            if site.kind == "topk_ids" and key.mode == "score":
                row = _one(learner, sampler, key, site.fqn)
                if row is not None:
                    layers.setdefault(site.fqn, []).append(row)
    return [_merge(fqn, rows) for fqn, rows in layers.items()]


def _one(learner: Side, sampler: Side, key: Any, fqn: str) -> dict[str, Any] | None:
    ids_x, ids_y = (side.read(key, Site(fqn, "topk_ids")) for side in (learner, sampler))
    gate = Site(fqn.removesuffix("experts") + "gate", "router_logits")
    logits_x, logits_y = learner.read(key, gate), sampler.read(key, gate)
    if ids_x is None or ids_y is None or logits_x is None or logits_y is None:
        return None
    if ids_x.tensor.shape != ids_y.tensor.shape or logits_x.tensor.shape != logits_y.tensor.shape:
        return None
    a, b = ids_x.tensor.long(), ids_y.tensor.long()
    k = a.shape[1]
    x, y = logits_x.tensor.double(), logits_y.tensor.double()
    ordered = x.sort(-1, descending=True).values
    flips = (a.sort(-1).values != b.sort(-1).values).any(-1)
    margin = ordered[:, k - 1] - ordered[:, k]
    noise = (x - y).abs().max(-1).values
    return {
        "order": (a == b).all(-1).numpy(),
        "flips": flips.numpy(),
        "margin": margin.numpy(),
        "noise": noise.numpy(),
        "explained": (flips & (margin < 2 * noise)).numpy(),
        "input_equal": torch.equal(logits_x.tensor, logits_y.tensor),
    }


def _merge(fqn: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    joined = {k: np.concatenate([r[k] for r in rows]) for k in rows[0] if k != "input_equal"}
    flips = int(joined["flips"].sum())
    return {
        "site": fqn,
        "tokens": len(joined["flips"]),
        "set_agreement": float(1.0 - joined["flips"].mean()),
        "order_agreement": float(joined["order"].mean()),
        "flips": flips,
        "flips_within_noise": int(joined["explained"].sum()),
        "margin_quantiles": [float(q) for q in np.quantile(joined["margin"], QUANTILES)],
        "noise_median": float(np.median(joined["noise"])),
        "flips_on_equal_logits": bool(flips and all(r["input_equal"] for r in rows)),
    }


def routing_findings(layers: list[dict[str, Any]], basis: str) -> list[Finding]:
    """MD601 if any token changed its set of experts; MD205 if it did so on equal logits."""
    tokens = sum(layer["tokens"] for layer in layers)
    flips = sum(layer["flips"] for layer in layers)
    if not flips:
        return []
    explained = sum(layer["flips_within_noise"] for layer in layers)
    worst = min(layers, key=lambda layer: layer["set_agreement"])
    found = [
        Finding(
            "MD601",
            worst["site"],
            f"{flips / tokens:.1%} of token-layer pairs chose other experts; {explained} of {flips}"
            f" flips have a margin within twice the router's noise; most at {worst['site']}",
            {"flips": flips, "tokens": tokens, "within_noise": explained},
            "measured",
            basis,
        )
    ]
    tied = [layer["site"] for layer in layers if layer["flips_on_equal_logits"]]
    if tied:
        text = (
            f"{tied[0]} chose other experts from bitwise equal logits: another tie or softmax rule"
        )
        found.append(Finding("MD205", tied[0], text, {"sites": tied}, "proved", basis))
    return found
