"""Weights that are not the same weights: stale, swapped, permuted, off by a factor.

Reads both traces' static tensors and the master checkpoint. Invariant: differences that the two
sides' quantization recipes explain are not reported here; a gain is measured against the master.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pandas as pd
import torch

from minite_diag.attribute.finding import Finding
from minite_diag.canonical.names import STATIC
from minite_diag.canonical.scales import unpack
from minite_diag.checkpoints import read_tensor
from minite_diag.checkpoints.reader import read_json
from minite_diag.compare import Side
from minite_diag.errors import CheckpointError
from minite_diag.metrics import is_bitwise_equal
from minite_diag.plan import Plan
from minite_diag.site import Site
from minite_kernels.nvfp4.format import decode_e2m1
from minite_kernels.nvfp4.layout import ScaleLayout, unswizzle_scale

GAIN: Final = 0.02
"""Relative error of a part's scale above which it is a fault, not rounding."""
ROUNDING: Final = 0.2
"""Relative L2 error that no rule of NVFP4 rounding makes."""
UNLIKE: Final = 0.5
"""Relative L2 difference from the master above which the weight is another weight."""

INERT_KEYS: Final = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
        *("quantization_config", "attention_dropout", "router_aux_loss_coef"),
        *("output_router_logits", "output_attentions", "output_hidden_states", "return_dict"),
    }
)
"""Keys of config.json that change no bit of a forward pass."""


def weight_findings(plan: Plan, learner: Side, sampler: Side, rows: pd.DataFrame) -> list[Finding]:
    """Findings of one pair."""
    found = [*_high_precision(learner, sampler, rows), *_biases(learner, sampler, rows)]
    if plan.model.path and not plan.model.format.startswith("nvfp4"):
        for side in (learner, sampler):
            found += list(_against_master(plan, side))
    return [*config_findings(plan, learner, sampler), *_merged(found)]


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding for each cause: the first site's, with the list of all."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.code, []).append(finding)
    merged = []
    for first, *rest in groups.values():
        sites = [first.where, *(finding.where for finding in rest)]
        merged.append(
            dataclasses.replace(
                first,
                text=first.text + (f"; and {len(rest)} more" if rest else ""),
                evidence={**first.evidence, "sites": sites},
            )
        )
    return merged


def config_findings(plan: Plan, learner: Side, sampler: Side) -> Iterator[Finding]:
    """MD307: the two checkpoints' config.json differ in a key that changes what is computed."""
    mine, theirs = (_config(plan, side) for side in (learner, sampler))
    if not mine or not theirs:
        return  # an engine without a checkpoint, or an imported side
    keys = sorted((mine.keys() | theirs.keys()) - INERT_KEYS)
    different = {k: (mine.get(k), theirs.get(k)) for k in keys if mine.get(k) != theirs.get(k)}
    if different:
        said = "; ".join(f"{k}: learner {a!r}, sampler {b!r}" for k, (a, b) in different.items())
        yield Finding(
            "MD307", "config.json", said, {"keys": {k: list(v) for k, v in different.items()}}
        )


def _config(plan: Plan, side: Side) -> dict[str, Any]:
    """The config of the checkpoint that an engine loaded; empty for an engine without one."""
    folder = plan.engine(side.trace.id).checkpoint
    try:
        return dict(read_json(Path(folder) / "config.json")) if folder else {}
    except CheckpointError:
        return {}


def _biases(learner: Side, sampler: Side, rows: pd.DataFrame) -> Iterator[Finding]:
    for row in rows[rows["kind"] == "bias"].itertuples(index=False):
        site = Site(row.fqn, "bias")
        sides = [side for side in (learner, sampler) if site in side.sites.get(STATIC, {})]
        if row.status == "compared" and row.bitwise_fraction < 1.0:
            text = f"{1 - row.bitwise_fraction:.1%} of the elements differ"
            evidence = {"rel_l2": row.rel_l2, "bitwise_fraction": row.bitwise_fraction}
            yield Finding("MD305", row.fqn, f"bias of {row.fqn}: {text}", evidence)
        elif row.status == "skipped" and len(sides) == 1:
            found = sides[0].read(STATIC, site)
            if found is None or not found.tensor.any():
                continue
            absent = sampler if sides[0] is learner else learner
            evidence = {"max_abs": float(found.tensor.abs().max())}
            text = f"{row.fqn} has a bias in {sides[0].trace.id} and none in {absent.trace.id}"
            yield Finding("MD305", row.fqn, text, evidence)


def _head_is_stale(learner: Side, sampler: Side) -> bool:
    """Whether the learner ties lm_head to the embedding and the sampler holds an older head."""
    embedding = Site("model.embed_tokens", "weight")

    def tied(side: Side) -> bool | None:
        one, other = side.read(STATIC, embedding), side.read(STATIC, Site("lm_head", "weight"))
        return None if one is None or other is None else is_bitwise_equal(one.tensor, other.tensor)

    return tied(learner) is True and tied(sampler) is False


def _high_precision(learner: Side, sampler: Side, rows: pd.DataFrame) -> Iterator[Finding]:
    different = rows[
        (rows["kind"] == "weight") & (rows["status"] == "compared") & (rows["bitwise_fraction"] < 1)
    ]
    same_dtype = different[different["baseline_dtype"] == different["target_dtype"]]
    for row in same_dtype.itertuples(index=False):
        x = learner.read(STATIC, Site(row.fqn, "weight"))
        y = sampler.read(STATIC, Site(row.fqn, "weight"))
        if x is None or y is None:
            continue
        code, text = _what_happened(row.fqn, x.tensor, y.tensor, sampler)
        if code == "MD301" and row.fqn == "lm_head" and _head_is_stale(learner, sampler):
            code, text = "MD306", f"tied to the embedding in {learner.trace.id} only; {text}"
        evidence = {"rel_l2": row.rel_l2, "bitwise_fraction": row.bitwise_fraction}
        yield Finding(code, row.fqn, f"{row.fqn}: {text}", evidence)


def _what_happened(fqn: str, x: torch.Tensor, y: torch.Tensor, sampler: Side) -> tuple[str, str]:
    swapped = _partner(fqn)
    if swapped is not None:
        other = sampler.read(STATIC, Site(swapped, "weight"))
        if other is not None and is_bitwise_equal(x, other.tensor):
            return "MD302", f"the sampler holds it under {swapped}"
    if x.dim() == 2 and _same_rows_in_another_order(x, y):
        return "MD303", "the sampler holds the same rows in another order"
    gain = float((x.double() * y.double()).sum() / (x.double() * x.double()).sum())
    residue = float((y.double() - gain * x.double()).norm() / y.double().norm())
    if abs(gain - 1.0) > GAIN and residue < 0.01:
        return "MD304", f"the sampler's is {gain:.4g} times the learner's"
    return "MD301", f"{float((x != y).double().mean()):.1%} of the elements differ"


def _partner(fqn: str) -> str | None:
    for a, b in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
        if fqn.endswith(a):
            return fqn.removesuffix(a) + b
    return None


def _same_rows_in_another_order(x: torch.Tensor, y: torch.Tensor) -> bool:
    def keys(w: torch.Tensor) -> list[bytes]:
        rows = w.contiguous().view(torch.uint8).numpy()
        return sorted(row.tobytes() for row in rows)

    return keys(x) == keys(y)


def _against_master(plan: Plan, side: Side) -> Iterator[Finding]:
    """Each quantized weight, decoded, against the master weight that it should stand for."""
    folder = Path(plan.model.path)
    for fqn in plan.quantized:
        held = decoded_weight(side, fqn)
        if held is None:
            continue
        master = read_tensor(folder, f"{fqn}.weight").double()
        if held.shape != master.shape:
            continue
        layout = _other_layout(side, fqn, held, master)
        if layout is not None:
            evidence = {"rel_l2": float((held - master).norm() / master.norm())}
            text = f"the block scales of {fqn} are in the {layout} layout, and read as linear"
            yield Finding("MD119", fqn, f"{side.trace.id}: {text}", evidence, "measured")
            continue
        code, text, evidence = _judge(fqn, held, master, folder)
        if code is not None:
            yield Finding(code, fqn, f"{side.trace.id}: {text}", evidence, "measured")


def _other_layout(
    side: Side, fqn: str, held: torch.Tensor, master: torch.Tensor
) -> ScaleLayout | None:
    """The swizzled layout in which the block scales make sense, where the linear one doesn't."""
    size = master.norm()
    error = float((held - master).norm() / size)
    if error <= ROUNDING:
        return None
    found = side.read(STATIC, Site(fqn, "weight_block_scale"))
    assert found is not None
    rows, blocks = found.tensor.shape
    layouts: tuple[ScaleLayout, ...] = ("128x4", "8x4")
    for layout in layouts:
        try:
            linear = unswizzle_scale(found.tensor, (rows, blocks), layout)
        except (ValueError, RuntimeError):
            continue
        decoded = decoded_weight(side, fqn, linear)
        if decoded is not None and float((decoded - master).norm() / size) < error / 2:
            return layout
    return None


def _judge(
    fqn: str, held: torch.Tensor, master: torch.Tensor, folder: Path
) -> tuple[str | None, str, dict[str, float]]:
    gain = float((held * master).sum() / (master * master).sum())
    error = float((held - master).norm() / master.norm())
    evidence = {"gain": gain, "rel_l2": error}
    residue = float((held - gain * master).norm() / held.norm()) if held.any() else 1.0
    if residue < UNLIKE / 2 and abs(gain - 1.0) > GAIN:
        return "MD304", f"{fqn} is {gain:.4g} times the master weight", evidence
    if error <= UNLIKE:
        return None, "", evidence
    partner = _partner(fqn)
    if partner is not None:
        other = read_tensor(folder, f"{partner}.weight").double()
        if float((held - other).norm() / other.norm()) <= UNLIKE / 2:
            return "MD302", f"{fqn} holds the weight of {partner}", evidence
    order = _nearest_rows(held, master)
    if order is not None:
        return "MD303", f"{fqn} holds the master's rows in another order", evidence
    return "MD301", f"{fqn} is not the master weight (relative L2 {error:.2f})", evidence


def _nearest_rows(held: torch.Tensor, master: torch.Tensor) -> torch.Tensor | None:
    """The permutation that maps master rows to held rows, if each held row has its own."""
    a, b = (w / w.norm(dim=1, keepdim=True).clamp_min(1e-30) for w in (held, master))
    likeness = a @ b.T
    best = likeness.max(1)
    unique = len(best.indices.unique()) == len(best.indices)
    return best.indices if unique and float(best.values.min()) > 1.0 - UNLIKE / 2 else None


def decoded_weight(
    side: Side, fqn: str, block_scale: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Codes * block scale * global decode scale as float64 [N, K]; None without codes.

    `block_scale` [N, K/16] is taken instead of the held one.
    """
    parts = [
        side.read(STATIC, Site(fqn, kind))
        for kind in ("weight_codes", "weight_block_scale", "weight_global_decode_scale")
    ]
    if any(part is None for part in parts):
        return None
    codes, held, scale = (part.tensor for part in parts if part is not None)
    block_scale = held if block_scale is None else block_scale
    values = decode_e2m1(unpack(codes)).double()
    spread = block_scale.float().double().repeat_interleave(16, -1)[:, : values.shape[1]]
    return values * spread * float(scale.double().reshape(-1)[0])
