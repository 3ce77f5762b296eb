"""What routing alone accounts for: the baseline's expert choice replayed in the target.

Knows live runs; no tensor. Invariant: the two gaps are measured on the same sequences in the same
process, and a replay that changed no tensor is an error of the live worker.
"""

from __future__ import annotations

from typing import Any

from minite_diag.attribute.causal import Experiment
from minite_diag.attribute.gap import closed
from minite_diag.capture.live import Job, Patch
from minite_diag.site import Site


def routing_sites(sites: tuple[str, ...]) -> tuple[str, ...]:
    """The expert ids and weights among `fqn:kind` names."""
    return tuple(s for s in sites if Site.parse(s).kind in ("topk_ids", "topk_weights"))


def replay_routing(
    experiment: Experiment, sites: tuple[str, ...], target_id: str
) -> dict[str, Any] | None:
    """The gap with and without the baseline's routing; None for a model without a router.

    `sites` are all that the baseline captured.
    """
    chosen = routing_sites(sites)
    if not chosen:
        return None
    before, _ = experiment.measure("unpatched", frozenset())
    result = experiment.runs.run(
        "routing",
        Job(
            "routing-replayed",
            tuple(experiment.sequences),
            patch=(Patch(experiment.baseline_id, sites=chosen),),
        ),
    )
    after = experiment.gap(result)
    nats = before["mean_abs"] - after["mean_abs"]
    return {
        "baseline": experiment.baseline_id,
        "target": target_id,
        "gap": before,
        "gap_replayed": after,
        "closed": closed(before, after),
        "nats": nats,
        "patched": result.patched,
        "rows_changed": result.rows_changed,
        "rows": result.routed_rows,
        "text": f"routing accounts for {nats:.4g} of {before['mean_abs']:.4g} nats",
    }
