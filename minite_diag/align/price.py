"""What an alignment costs: bare forward passes, without hooks, of the aligned engine and of itself.

Runs engines again through live sessions. Invariant: both runs score the same sequences, in
processes of their own, and the faster of two passes counts on both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from minite_diag.capture.live import Job, LiveSession, sequences_of
from minite_diag.capture.runner import Report
from minite_diag.errors import MiniteDiagError
from minite_diag.plan import read_plan

SEQUENCES: Final = 4
PASSES: Final = 2


def bare_price(before: Path, after: Path, report: Report) -> list[dict[str, Any]]:
    """Tokens per second and peak memory of each engine, aligned and as it is, with their ratios."""
    rows: list[dict[str, Any]] = []
    for spec in read_plan(before).engines:
        try:
            old, new = (_measure(run, spec.id, report) for run in (before, after))
        except MiniteDiagError as error:
            rows.append({"engine": spec.id, "error": error.message})
            continue
        rows.append(
            {
                "engine": spec.id,
                "error": None,
                "tokens_per_second": new["tokens_per_second"],
                "tokens_per_second_before": old["tokens_per_second"],
                "speed_ratio": new["tokens_per_second"] / old["tokens_per_second"],
            }
        )
    return rows


def _measure(run: Path, engine_id: str, report: Report) -> dict[str, float]:
    plan = read_plan(run)
    keys = [("score", "", probe.id) for probe in plan.probes[:SEQUENCES]]
    sequences = tuple(sequences_of(run, keys))
    job = Job("price", sequences, hooked=False)
    with LiveSession(run, engine_id, report) as session:
        session.run(Job("warm", sequences[:1], hooked=False))
        seconds = min(session.run(job).seconds for _ in range(PASSES))
    return {"tokens_per_second": sum(len(s.token_ids) for s in sequences) / seconds}
