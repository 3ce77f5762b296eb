"""Ops that compute other bits from equal input, read off the stored comparison.

Works on comparison rows: no torch, no engine. Only sites whose every input was bitwise equal count,
so this finds what the stored run proves; live local errors (attribute.live) cover the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from minite_diag.attribute.causes import OPS, SPLIT_SUM
from minite_diag.attribute.finding import Finding

_EXPERT_DOWN: Final = re.compile(r"(.*\.experts\.\d+)\.down_proj$")
"""An expert's activation has no module of its own: what it gives is what down_proj takes."""
_INSIDE_EXPERTS: Final = re.compile(r"(.*\.experts)\.\d+\.")
_SUM_OVER_RANKS: Final = re.compile(r"\.(o_proj|down_proj|experts)$")
"""Sites whose input features tensor-parallel ranks share."""
_ATTENTION: Final = re.compile(r"(.*\.self_attn)\.(attn|q_rope|k_rope)$")


def op_of(fqn: str, kind: str) -> str | None:
    """The op class that produces a site; None for sites that nothing produces."""
    name = fqn.rpartition(".")[2]
    if kind == "input" and _EXPERT_DOWN.match(fqn):
        return "activation"
    if kind == "input" or kind.startswith(("act_", "weight", "bias")):
        return None
    if fqn == "lm_head" or kind == "logits":
        return "lm_head"
    if kind in ("router_logits", "topk_ids", "topk_weights"):
        return "router"
    if name == "attn":
        return "attention"
    if name.endswith("_rope"):
        return "rope"
    if name == "act_fn":
        return "activation"
    if name == "experts":
        return "experts"
    if "norm" in name:
        return "norm"
    if name == "embed_tokens":
        return "embedding"
    return "linear" if name.endswith("_proj") else None


def inputs_of(fqn: str, kind: str, has_qk_norm: bool) -> list[tuple[str, str]]:
    """The sites that an op reads, as (fqn, kind)."""
    match = _ATTENTION.match(fqn)
    if match:
        attention, name = match.groups()
        if name == "attn":
            parts = ((f"{attention}.q_rope"), (f"{attention}.k_rope"), (f"{attention}.v_proj"))
            return [(part, "output") for part in parts]
        source = f"{name[0]}_norm" if has_qk_norm else f"{name[0]}_proj"
        return [(f"{attention}.{source}", "output")]
    expert = _EXPERT_DOWN.match(fqn)
    if expert and kind == "input":
        return [(f"{expert[1]}.{part}", "output") for part in ("gate_proj", "up_proj")]
    if fqn.endswith(".act_fn"):
        mlp = fqn.removesuffix(".act_fn")
        return [(f"{mlp}.gate_proj", "output"), (f"{mlp}.up_proj", "output")]
    if kind in ("topk_ids", "topk_weights"):
        return [(fqn.removesuffix("experts") + "gate", "router_logits")]
    if fqn.endswith(".mlp.experts"):
        return [(fqn, "input"), (fqn, "topk_ids"), (fqn, "topk_weights")]
    if fqn.endswith("embed_tokens"):
        return []
    return [(fqn, "input")]


def operator_findings(
    rows: pd.DataFrame, basis: str, ranks: tuple[int, int] = (1, 1)
) -> list[Finding]:
    """One finding per op class that split bits although all that it read was equal.

    `ranks` are the tensor-parallel ranks of both sides: where they differ, the sums over ranks are
    a class of their own.
    """
    score = rows[(rows["status"] == "compared") & (rows["mode"] == "score")]
    equal = {(row.probe, row.fqn, row.kind): _same(row) for row in score.itertuples(index=False)}
    has_qk_norm = bool(score["fqn"].str.endswith(".q_norm").any())
    static = rows[(rows["mode"] == "static") & (rows["status"] == "compared")]
    unequal_weights = set(static[static["bitwise_fraction"] < 1.0]["fqn"])
    # A bias that one side doesn't have: the rows of a tensor that only one trace holds.
    unequal_weights |= set(rows[(rows["kind"] == "bias") & (rows["status"] == "skipped")]["fqn"])
    quantized = set(rows[rows["kind"] == "weight_codes"]["fqn"])
    unequal_inside = {
        (row.probe, match[1])
        for row in score.itertuples(index=False)
        if not _same(row) and (match := _INSIDE_EXPERTS.match(row.fqn))
    }
    splits = [
        row
        for row in score.itertuples(index=False)
        if not _same(row)
        and (op := op_of(row.fqn, row.kind)) is not None
        and not (op == "linear" and row.fqn in quantized)
        and row.fqn not in unequal_weights
        # What an expert computes is blamed on its own ops where they are seen.
        and not (op == "experts" and (row.probe, row.fqn) in unequal_inside)
        and _all_equal(equal, row, has_qk_norm)
    ]
    return list(_by_op(splits, basis, ranks))


def _same(row: Any) -> bool:
    """Equal numbers: bits alone are compared on the coarser dtype's grid."""
    return bool(row.bitwise_fraction == 1.0 and not row.max_abs_diff > 0.0)


def _all_equal(equal: dict[tuple[str, str, str], bool], row: Any, has_qk_norm: bool) -> bool:
    reads = inputs_of(row.fqn, row.kind, has_qk_norm)
    return all(equal.get((row.probe, *site), False) for site in reads)


def _by_op(splits: list[Any], basis: str, ranks: tuple[int, int]) -> Iterator[Finding]:
    groups: dict[tuple[str, bool], list[Any]] = {}
    for row in splits:
        is_sum = ranks[0] != ranks[1] and bool(_SUM_OVER_RANKS.search(row.fqn))
        groups.setdefault((str(op_of(row.fqn, row.kind)), is_sum), []).append(row)
    for (op, is_sum), found in groups.items():
        first = min(found, key=lambda row: row.order)
        share = sum(row.bitwise_fraction for row in found) / len(found)
        yield Finding(
            SPLIT_SUM if is_sum else OPS[op],
            str(first.fqn),
            f"{op}: equal input, {1 - share:.1%} of the output elements differ "
            f"(first at {first.fqn})"
            + (f"; summed over {ranks[0]} and {ranks[1]} ranks" if is_sum else ""),
            {
                "op": op,
                "sites": sorted({str(row.fqn) for row in found})[:20],
                "bitwise_fraction": share,
                "max_abs_diff": max((row.max_abs_diff or 0.0) for row in found),
                "ulp_max": max((row.ulp_max or 0.0) for row in found),
            },
            "proved",
            basis,
        )


def logprob_finding(rows: pd.DataFrame, logprobs: pd.DataFrame, basis: str) -> list[Finding]:
    """Log-probabilities that differ although the logits of their position are equal."""
    logits = rows[
        (rows["kind"] == "logits") & (rows["mode"] == "score") & (rows["status"] == "compared")
    ]
    equal = {row.probe for row in logits.itertuples(index=False) if _same(row)}
    score = logprobs[(logprobs["mode"] == "score") & logprobs["probe"].isin(equal)]
    difference = (score["baseline_logprob"] - score["target_logprob"]).abs()
    if not (difference > 0.0).any():
        return []
    return [
        Finding(
            "MD210",
            "log-softmax",
            f"{(difference > 0).mean():.1%} of the log-probabilities differ on equal logits "
            f"(largest {difference.max():.3g})",
            {"share": float((difference > 0).mean()), "max_abs": float(difference.max())},
            "proved",
            basis,
        )
    ]
