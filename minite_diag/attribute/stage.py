"""The attribute stage: a compared run -> causes with evidence, in attribution.parquet and .json.

The stored half needs no engine: contract diff, weights, ops on equal input, routing, semantics.
The live half (`live=True`) runs engines again: legs, local errors, causal shares, counterfactuals.
Invariant: a semantic hit makes the pair incomparable, and no other finding is given a verdict then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from minite_diag.attribute.contract import Contract, contract_findings, read_contract
from minite_diag.attribute.effects import add_effects
from minite_diag.attribute.finding import Finding
from minite_diag.attribute.operators import logprob_finding, operator_findings
from minite_diag.attribute.preflight import other_tokens, preflight
from minite_diag.attribute.record import ATTRIBUTION_JSON
from minite_diag.attribute.routing import routing_findings, routing_layers
from minite_diag.attribute.weights import weight_findings
from minite_diag.capture.runner import Report
from minite_diag.compare import Side
from minite_diag.plan import Plan, read_plan
from minite_diag.trace.schema import ATTRIBUTION, COMPARISON, LOGPROBS, read_table, write_table
from minite_diag.trace.store import Trace

ATTRIBUTION_FILE: Final = "attribution.parquet"
ATTRIBUTION_SCHEMA: Final = 1


def attribute(
    run: Path,
    report: Report,
    *,
    live: bool = False,
    budget: int | None = None,
    patches: Sequence[str] = (),
) -> dict[str, Any]:
    """Find the causes of each pair's gap; writes both files and returns the object in the JSON.

    `budget` bounds the forward passes of the live half, `patches` are site globs that it patches
    one by one. Raises TraceError for a damaged run.
    """
    plan = read_plan(run)
    comparison = read_table(run / "comparison.parquet", COMPARISON).to_pandas()
    logprobs = read_table(run / "logprobs.parquet", LOGPROBS).to_pandas()
    sides = {
        spec.id: Side.of(Trace(run / "traces" / spec.id))
        for spec in plan.engines
        if (run / "traces" / spec.id / "tokens.parquet").exists()
    }
    contracts = {id: read_contract(plan, side) for id, side in sides.items()}
    pairs = [
        _pair(plan, (sides[a], sides[b]), contracts, _of(comparison, a, b), _of(logprobs, a, b))
        for a, b in plan.pairs
        if a in sides and b in sides
    ]
    result: dict[str, Any] = {"schema": ATTRIBUTION_SCHEMA, "pairs": pairs, "live": None}
    if live:
        # The live half reads what the stored half found.
        _write(run, result)
        from minite_diag.attribute.live import attribute_live

        result["live"] = attribute_live(run, report, budget=budget, patches=patches)
        for pair in pairs:
            add_effects(pair, result["live"])
    _write(run, result)
    return result


def _of(frame: pd.DataFrame, baseline: str, target: str) -> pd.DataFrame:
    return frame[(frame["baseline"] == baseline) & (frame["target"] == target)]


def _pair(
    plan: Plan,
    pair: tuple[Side, Side],
    contracts: dict[str, Contract],
    rows: pd.DataFrame,
    logprobs: pd.DataFrame,
) -> dict[str, Any]:
    learner, sampler = pair
    sides = [contracts[side.trace.id] for side in pair]
    hits = [*other_tokens(learner, sampler), *preflight(logprobs, learner, sampler.trace.id)]
    basis = "modelled" if _is_modelled(learner, sampler) else "native"
    contract = contract_findings(learner, sampler, rows, *sides)
    layers = routing_layers(learner, sampler)
    findings = [
        *(_semantic(hit.code, hit.text, hit.value, hit.closed) for hit in hits),
        *weight_findings(plan, learner, sampler, rows),
        *sorted(contract, key=_effect, reverse=True),
        *operator_findings(rows, basis, (_ranks(learner), _ranks(sampler))),
        # A semantic hit says already why log-probabilities differ on equal logits.
        *(() if hits else logprob_finding(rows, logprobs, basis)),
        *routing_findings(layers, basis),
    ]
    return {
        "baseline": learner.trace.id,
        "target": sampler.trace.id,
        "comparable": not hits,
        "findings": [finding.as_dict() for finding in findings],
        "contracts": [_contract(side) for side in sides],
        "routing": layers,
    }


def _semantic(code: str, text: str, value: Any, closed: float) -> Finding:
    evidence = {"value": value, "closed": closed}
    return Finding(code, "log-probabilities", text, evidence, "measured")


def _ranks(side: Side) -> int:
    """Tensor-parallel ranks that an engine read back from itself."""
    settings = side.trace.manifest.get("settings", {})
    is_hf = str(settings.get("parallel", "")).startswith("tp")
    return int(settings["world_size"] if is_hf else settings.get("tensor_parallel", 1))


def _is_modelled(*sides: Side) -> bool:
    return any(item.status == "modelled" for side in sides for item in side.trace.evidence)


def _effect(finding: Finding) -> float:
    evidence = finding.evidence
    if "codes_changed" in evidence:
        return float(evidence["codes_changed"]) + float(evidence["scales_changed"])
    cross = evidence.get("sampler_bits_under_learner_recipe")
    return 1.0 - float(cross) if cross is not None else 0.0


def _contract(side: Contract) -> dict[str, Any]:
    def found(item: Any) -> dict[str, Any] | None:
        if item is None:
            return None
        runner_up = item.runner_up
        return {
            "recipe": item.best.name,
            "codes": item.best.codes,
            "scales": item.best.scales,
            "ties": list(item.ties),
            "runner_up": runner_up.name if runner_up else None,
            "runner_up_codes": runner_up.codes if runner_up else None,
            "tensors": len(item.samples),
        }

    return {
        "engine": side.engine,
        "basis": side.basis,
        "weight": found(side.weight),
        "activation": found(side.activation),
        "gemm": found(side.gemm),
    }


def _write(run: Path, result: dict[str, Any]) -> None:
    write_table(run / ATTRIBUTION_FILE, list(_rows(result)), ATTRIBUTION)
    partial = run / f"{ATTRIBUTION_JSON}.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(run / ATTRIBUTION_JSON)


def _rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for pair in result["pairs"]:
        ends = {"baseline": pair["baseline"], "target": pair["target"]}
        for finding in pair["findings"]:
            yield {
                **ends,
                "analysis": "cause",
                **{k: finding[k] for k in ("code", "where", "text", "strength", "basis")},
                "value": max((e["nats"] for e in finding.get("effect", ())), default=None),
                "evidence": json.dumps(finding["evidence"]),
            }
        for layer in pair["routing"]:
            yield {
                **ends,
                "analysis": "routing",
                "where": layer["site"],
                "value": layer["set_agreement"],
                "evidence": json.dumps(layer),
            }
    yield from _live_rows(result["live"])


def _live_rows(live: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if live is None:
        return
    for leg in live["legs"]:
        yield {
            "baseline": leg["engine"],
            "target": leg["engine"],
            "analysis": "leg",
            "where": leg["leg"],
            "code": leg.get("code"),
            "value": leg.get("max_abs"),
            "text": leg.get("reason") or "",
            "evidence": json.dumps(leg),
        }
    for row in live["local"]:
        yield {
            "baseline": row["baseline"],
            "target": row["target"],
            "analysis": "local",
            "where": f"{row['site']}:{row['kind']}",
            "value": row["error_local"],
            "evidence": json.dumps(row),
        }
    for causal in live["causal"]:
        ends = {"baseline": causal["baseline"], "target": causal["target"]}
        for group in ("ops", "layers", "operands", "patches"):
            for share in causal[group]:
                yield {
                    **ends,
                    "analysis": f"causal-{group}",
                    "where": share["name"],
                    "value": share["closed"],
                    "evidence": json.dumps(share),
                }
    for routing in live["routing"]:
        yield {
            "baseline": routing["baseline"],
            "target": routing["target"],
            "analysis": "routing-replay",
            "value": routing["closed"],
            "text": routing["text"],
            "evidence": json.dumps(routing),
        }
