"""What a run found, as one JSON object: the `--json` output, schema 1.

Reads a run directory without torch. Invariant: every number comes from a stored table; the label
of what really ran is beside it.

The object::

    schema      1
    run         run directory
    verdict     measured | pass | fail | inconclusive | error
    model       name, format, architecture, notes of the master checkpoint
    quantize    pattern and number of quantized linears
    engines     [{id, role, engine, label, version, device, dtype, status, error, evidence, ...}]
    pairs       [{learner, sampler, logprob: {score, sample}, sites, first_divergence, worst,
                 routing, comparable, causes: [{code, title, where, text, strength, basis,
                 evidence, fixes, effect, below_noise}], contracts, live, noise}]
    gate        the gate object, described in minite_diag/gate/judge.py (only with a gate)
    files       comparison, logprobs, report
    next        the command to run next
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import pandas as pd

from minite_diag.attribute.first_divergence import first_divergence
from minite_diag.attribute.fixes import fixes_for
from minite_diag.attribute.record import read_attribution
from minite_diag.logprobs import logprob_summary
from minite_diag.plan import read_plan
from minite_diag.trace.manifest import read_manifests
from minite_diag.trace.schema import COMPARISON, LOGPROBS, read_table

SUMMARY_SCHEMA: Final = 1
WORST: Final = 5
WORST_KINDS: Final = ("output", "logits", "router_logits")


def summarize(run: Path) -> dict[str, Any]:
    """Build the summary object of a run that was captured and compared."""
    plan = read_plan(run)
    manifests = read_manifests(run, plan)
    comparison = read_table(run / "comparison.parquet", COMPARISON).to_pandas()
    logprobs = read_table(run / "logprobs.parquet", LOGPROBS).to_pandas()
    engines = [_engine(manifests[spec.id]) for spec in plan.engines]
    by_id = {engine["id"]: engine for engine in engines}
    pairs = [
        _pair(by_id[baseline], by_id[target], _of(comparison, key), _of(logprobs, key))
        for key in plan.pairs
        for baseline, target in [key]
        if len(_of(logprobs, key)) or len(_of(comparison, key))
    ]
    attribution = read_attribution(run)
    for pair in pairs:
        _add_causes(pair, attribution)
    failed = [engine for engine in engines if engine["status"] not in ("ok", "truncated")]
    return {
        "schema": SUMMARY_SCHEMA,
        "run": str(run),
        "verdict": _verdict(failed, pairs),
        "model": {
            "name": plan.model.name,
            "format": plan.model.format,
            "architecture": plan.model.architecture,
            "notes": list(plan.model.notes),
        },
        "dtype": plan.dtype,
        "quantize": {"pattern": plan.quantize, "linears": len(plan.quantized)},
        "export_recipe": plan.export_recipe if plan.quantized else None,
        "engines": engines,
        "pairs": pairs,
        "files": {
            "comparison": str(run / "comparison.parquet"),
            "logprobs": str(run / "logprobs.parquet"),
            "report": str(run / "report.html"),
        },
        "next": _next(run, failed, pairs),
    }


def _next(run: Path, failed: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> str:
    """The command that a person would run now."""
    if failed:
        return f"minite-diag compare --resume {run}"
    strange = [pair for pair in pairs if not pair["comparable"]]
    if strange:
        return f"minite-diag explain {strange[0]['causes'][0]['code']}"
    if any(pair["first_divergence"] is not None for pair in pairs):
        return f"minite-diag align {run}"
    return f"minite-diag gate {run} --profile bitwise"


def _verdict(failed: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> str:
    if failed or not pairs:
        return "error"
    return "measured" if all(pair["comparable"] for pair in pairs) else "inconclusive"


def _add_causes(pair: dict[str, Any], attribution: dict[str, Any] | None) -> None:
    """Add `comparable`, `causes` (None if attribution did not run), `contracts` and `live`."""
    ends = (pair["learner"]["id"], pair["sampler"]["id"])
    pair.update(comparable=True, causes=None, contracts=[], live=None, noise=None)
    for found in (attribution or {}).get("pairs", []):
        if (found["baseline"], found["target"]) == ends:
            pair["comparable"] = found["comparable"]
            pair["causes"] = found["findings"]
            pair["contracts"] = found["contracts"]
            pair["noise"] = found.get("noise")
            for cause in pair["causes"]:
                cause["fixes"] = fixes_for(cause["code"], (pair["learner"], pair["sampler"]))
    live = (attribution or {}).get("live")
    if live is not None:
        pair["live"] = {
            name: [row for row in live[name] if (row["baseline"], row["target"]) == ends]
            for name in ("local", "causal", "routing")
        }
        pair["live"]["legs"] = [leg for leg in live["legs"] if leg["engine"] in ends]


def _of(frame: pd.DataFrame, key: tuple[str, str]) -> pd.DataFrame:
    return frame[(frame["baseline"] == key[0]) & (frame["target"] == key[1])]


def _engine(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["engine"]
    return {
        "id": spec["id"],
        "role": spec["role"],
        "engine": spec["engine"],
        "label": manifest.get("label"),
        "version": manifest.get("version"),
        "device": manifest.get("device"),
        "dtype": manifest.get("dtype"),
        "checkpoint_format": spec.get("checkpoint_format"),
        "status": manifest["status"],
        "error": manifest.get("error"),
        "evidence": manifest.get("evidence", []),
        "settings": manifest.get("settings", {}),
        "silent_hooks": manifest.get("silent_hooks", []),
        "seconds": manifest.get("seconds", {}),
        "bytes": manifest.get("bytes"),
        "peak_rss_bytes": manifest.get("peak_rss_bytes"),
        "peak_gpu_bytes": manifest.get("peak_gpu_bytes"),
    }


def _brief(engine: dict[str, Any]) -> dict[str, Any]:
    keys = ("id", "engine", "label", "version", "device", "dtype")
    return {key: engine[key] for key in keys}


def _pair(
    learner: dict[str, Any], sampler: dict[str, Any], rows: pd.DataFrame, logprobs: pd.DataFrame
) -> dict[str, Any]:
    compared = rows[rows["status"] == "compared"]
    return {
        "learner": _brief(learner),
        "sampler": _brief(sampler),
        "logprob": _logprob(logprobs, sampler["id"]),
        "sites": {
            "compared": len(compared),
            "bitwise_equal": int((compared["bitwise_fraction"] == 1.0).sum()),
            "skipped": int((rows["status"] == "skipped").sum()),
        },
        "first_divergence": first_divergence(rows),
        "worst": _worst(compared),
        "routing": _routing(compared),
    }


def _logprob(rows: pd.DataFrame, sampler_id: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    score = rows[rows["mode"] == "score"]
    if len(score):
        result["score"] = logprob_summary(
            score["baseline_logprob"], score["target_logprob"], on_policy=False
        )
        for column in ("full_kl", "topk_overlap"):
            values = score[column].dropna()
            result["score"][column] = float(values.mean()) if len(values) else None
    sample = rows[(rows["mode"] == "sample") & (rows["source"] == sampler_id) & rows["generated"]]
    if len(sample):
        result["sample"] = logprob_summary(
            sample["baseline_logprob"], sample["target_logprob"], on_policy=True
        )
    return result


def _worst(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """The sites with the largest mean relative L2 difference, and that of their own input."""
    rows = compared[compared["mode"] == "score"]
    means = rows.groupby(["fqn", "kind"])[["rel_l2", "bitwise_fraction"]].mean()
    outputs = means[means.index.get_level_values("kind").isin(WORST_KINDS)]
    outputs = outputs[outputs["rel_l2"] > 0.0].sort_values("rel_l2", ascending=False)
    worst = []
    for (fqn, kind), row in outputs.head(WORST).iterrows():
        own_input = means["rel_l2"].get((fqn, "input"))
        worst.append(
            {
                "site": fqn,
                "kind": kind,
                "rel_l2": _finite(row["rel_l2"]),
                "input_rel_l2": _finite(own_input),
                "bitwise_fraction": _finite(row["bitwise_fraction"]),
            }
        )
    return worst


def _routing(compared: pd.DataFrame) -> dict[str, Any] | None:
    rows = compared[(compared["kind"] == "topk_ids") & (compared["mode"] == "score")]
    if not len(rows):
        return None
    lowest = rows.groupby("fqn")["agreement"].mean().sort_values()
    return {
        "agreement": float(rows["agreement"].mean()),
        "lowest": {"site": str(lowest.index[0]), "agreement": float(lowest.iloc[0])},
    }


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
