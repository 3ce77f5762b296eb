"""Stored runs with a known truth, written table by table: no engine, no torch."""

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minite_diag.gate import GateRequest, check_gate, parse_limit
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, write_plan
from minite_diag.stored_summary import read_summary
from minite_diag.trace.schema import COMPARISON, LOGPROBS, write_table

LEARNER, SAMPLER = "learner-toy", "sampler-toy"


def write_run(
    run: Path,
    differences: Sequence[np.ndarray],
    *,
    mode: str = "sample",
    sites: Sequence[dict[str, Any]] = (),
    legs: Sequence[dict[str, Any]] = (),
    causes: Sequence[dict[str, Any]] = (),
    comparable: bool = True,
    status: str = "ok",
    version: str = "1.0",
    name: str = "model",
) -> Path:
    """A run whose sequences have these r = learner - sampler."""
    run.mkdir(parents=True, exist_ok=True)
    engines = tuple(
        EngineSpec(id, role, "toy", "python", "checkpoint", "bf16")
        for id, role in ((LEARNER, "learner"), (SAMPLER, "sampler"))
    )
    model = ModelRef(name, "path", "bf16", "ToyForCausalLM", "fingerprint", 100, 2)
    plan = Plan(
        model, engines, (), "bfloat16", "default", ("a",), "modelopt", capture=CaptureSpec()
    )
    write_plan(plan, run)
    for spec in engines:
        _write_manifest(run, spec, status, version)
    write_table(run / "logprobs.parquet", list(_logprobs(differences, mode)), LOGPROBS)
    write_table(run / "comparison.parquet", list(sites), COMPARISON)
    _write_attribution(run, legs, causes, comparable)
    return run


def _write_manifest(run: Path, spec: EngineSpec, status: str, version: str) -> None:
    folder = run / "traces" / spec.id
    folder.mkdir(parents=True, exist_ok=True)
    error = None if status == "ok" else {"message": "it broke", "hint": "mend it"}
    record = {
        "engine": spec.__dict__ | {"align": list(spec.align)},
        "status": status,
        "error": error,
        "label": "toy",
        "version": version,
        "device": "cpu",
        "dtype": "bfloat16",
        "evidence": [{"op": "linear", "status": "native", "impl": "toy", "note": ""}],
    }
    (folder / "manifest.json").write_text(json.dumps(record))


def _logprobs(differences: Sequence[np.ndarray], mode: str) -> Any:
    for number, values in enumerate(differences):
        for position, r in enumerate(values):
            yield {
                "baseline": LEARNER,
                "target": SAMPLER,
                "mode": mode,
                "source": SAMPLER if mode == "sample" else "",
                "probe": f"probe-{number}",
                "category": "synthetic",
                "position": position + 1,
                "token_id": position,
                "generated": mode == "sample",
                "target_phase": "decode" if mode == "sample" else "prefill",
                "baseline_logprob": -8.0 + float(r),
                "target_logprob": -8.0,
            }


def _write_attribution(
    run: Path,
    legs: Sequence[dict[str, Any]],
    causes: Sequence[dict[str, Any]],
    comparable: bool,
) -> None:
    pair = {
        "baseline": LEARNER,
        "target": SAMPLER,
        "comparable": comparable,
        "findings": list(causes),
        "contracts": [],
        "routing": None,
    }
    live = {"legs": list(legs), "local": [], "causal": [], "routing": []} if legs else None
    record = {"schema": 1, "pairs": [pair], "live": live}
    (run / "attribution.json").write_text(json.dumps(record))


def leg(mean_abs: float, name: str = "batch-4", engine: str = SAMPLER) -> dict[str, Any]:
    """An engine against itself."""
    return {
        "engine": engine,
        "leg": name,
        "status": "measured",
        "reason": "",
        "tokens": 100,
        "equal": 0,
        "mean_abs": mean_abs,
        "max_abs": 4 * mean_abs,
        "note": "",
        "code": "MD503" if mean_abs else None,
    }


def cause(code: str = "MD102", where: str = "weight quantizer") -> dict[str, Any]:
    return {
        "code": code,
        "title": "a title",
        "where": where,
        "text": "what it does",
        "strength": "proved",
        "basis": "native",
        "evidence": {},
    }


def site(fqn: str, kind: str, probe: str, **metrics: Any) -> dict[str, Any]:
    """A compared row, or a skipped one without metrics."""
    return {
        "baseline": LEARNER,
        "target": SAMPLER,
        "mode": "score" if probe else "static",
        "source": "",
        "probe": probe,
        "order": 0,
        "fqn": fqn,
        "kind": kind,
        "status": "compared" if metrics else "skipped",
        "reason": "" if metrics else "not seen",
        **metrics,
    }


def rounding(
    sigma: float, sequences: int, tokens: int, seed: int = 0, spread: float = 0.3
) -> list[np.ndarray]:
    """Normal r with E exp(r) = 1; each sequence has its own sigma."""
    generator = np.random.default_rng(seed)
    scales = sigma * np.exp(spread * generator.standard_normal(sequences) - spread**2 / 2)
    return [generator.normal(-s * s / 2, s, tokens) for s in scales]


def judge(run: Path, profile: str = "nvfp4", *limits: str, **options: Any) -> dict[str, Any]:
    """The gate object of a run, on a fixed day."""
    options.setdefault("today", dt.date(2026, 12, 1))
    request = GateRequest(profile, tuple(parse_limit(text) for text in limits), **options)
    return check_gate(run, read_summary(run), request)
