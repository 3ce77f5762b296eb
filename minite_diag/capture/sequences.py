"""Which sequences an engine scores or samples, from the plan and from what samplers wrote.

Knows the plan and stored tokens; no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minite_diag.engines.base import ScoredTokens, TokenSequence
from minite_diag.plan import Plan
from minite_diag.trace.store import Trace


def score_sequences(plan: Plan) -> list[TokenSequence]:
    """The probes, teacher-forced."""
    return [
        TokenSequence("score", "", probe.id, probe.token_ids, probe.prompt_length)
        for probe in plan.probes
    ]


def sample_prompts(plan: Plan, engine_id: str) -> list[TokenSequence]:
    """The probes' prompts, for the sampler to continue."""
    return [
        TokenSequence(
            "sample",
            engine_id,
            probe.id,
            probe.token_ids[: probe.prompt_length],
            probe.prompt_length,
        )
        for probe in plan.probes
    ]


def sampled_sequences(plan: Plan, trace: Trace) -> list[TokenSequence]:
    """What one sampler generated, for another engine to score."""
    rows = trace.tokens
    rows = rows[(rows["mode"] == "sample") & (rows["source"] == trace.id)]
    lengths = {probe.id: probe.prompt_length for probe in plan.probes}
    return [
        TokenSequence(
            "sample",
            trace.id,
            str(probe),
            tuple(int(i) for i in group.sort_values("position")["token_id"]),
            lengths[str(probe)],
        )
        for probe, group in rows.groupby("probe", sort=False)
    ]


def sampler_traces(plan: Plan, run: Path) -> list[Trace]:
    """Traces of the samplers whose generated tokens are on disk."""
    found = []
    for spec in plan.samplers:
        folder = run / "traces" / spec.id
        if (folder / "tokens.parquet").exists():
            found.append(Trace(folder))
    return found


def token_rows(scored: ScoredTokens) -> list[dict[str, Any]]:
    """Rows of the `tokens` table."""
    sequence = scored.sequence
    generated_from = (
        sequence.prompt_length if sequence.mode == "sample" else len(sequence.token_ids)
    )
    return [
        {
            "mode": sequence.mode,
            "source": sequence.source,
            "probe": sequence.probe,
            "position": i,
            "token_id": token_id,
            "logprob": scored.logprobs[i],
            "phase": scored.phases[i],
            "generated": i >= generated_from,
            "top_ids": list(scored.top_ids[i]) if scored.top_ids else [],
            "top_logprobs": list(scored.top_logprobs[i]) if scored.top_logprobs else [],
        }
        for i, token_id in enumerate(sequence.token_ids)
    ]
