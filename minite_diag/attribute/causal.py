"""How much of the log-probability gap each op class and each layer range accounts for.

The local error of a set of ops is taken out of the running target (`correction`: what they
inherited stays) and the forward is finished; the share of the gap that closes is the set's share.
Putting in the baseline's values instead would bring in everything upstream: the final norm alone
would close all of it. Also the reverse (all but the set), the cumulative prefix over layers, and
the smallest set that closes 95 %.

Knows live runs and local rows; no tensor. Invariant: each figure is a measured gap, and a set
without local error has the share zero without a forward.

Rule for `inconclusive`: the sets' own shares don't add up to what all of them close by more than
half of the gap (interaction dominates, as W4A4 makes it), or all of them close less than 90 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minite_diag.attribute.gap import Key, closed, gap, live_logprobs
from minite_diag.attribute.live_runs import BudgetSpent, LiveRuns
from minite_diag.attribute.local_error import LocalRun, op_class
from minite_diag.capture.live import Job, JobResult, Patch, SequenceSpec
from minite_diag.site import Site, matches

MAX_INTERACTION: Final = 0.5
MIN_CLOSED_BY_ALL: Final = 0.9
ENOUGH: Final = 0.95
LAYER_RANGES: Final = 8

Sets = dict[str, frozenset[Site]]


def causal_group(site: Site) -> str:
    """The op class under which a site is corrected; all inside of experts is one class."""
    op = op_class(site)
    if op is None:
        return "other"
    if op != "router" and ".experts" in site.fqn:
        return "experts"
    return op


def by_op(sites: Iterable[Site]) -> Sets:
    """Sites by op class."""
    return _grouped(sites, causal_group)


def by_layers(sites: Iterable[Site], num_layers: int, ranges: int = LAYER_RANGES) -> Sets:
    """Sites by contiguous layer ranges, `embed` before and `head` after them, in that order."""
    count = min(ranges, max(1, num_layers))
    bounds = [round(i * num_layers / count) for i in range(count + 1)]
    labels = {
        layer: f"{a}" if b - a == 1 else f"{a}-{b - 1}"
        for a, b in itertools.pairwise(bounds)
        for layer in range(a, b)
    }

    def label(site: Site) -> str:
        if site.layer_index is not None:
            return labels.get(site.layer_index, str(site.layer_index))
        return "embed" if "embed" in site.fqn else "head"

    found = _grouped(sites, label)
    order = ["embed", *dict.fromkeys(labels.values()), "head"]
    return {name: found[name] for name in order if name in found}


def _grouped(sites: Iterable[Site], name: Callable[[Site], str]) -> Sets:
    groups: dict[str, set[Site]] = {}
    for site in sites:
        groups.setdefault(name(site), set()).add(site)
    return {key: frozenset(members) for key, members in groups.items()}


@dataclass
class Experiment:
    """Runs the target with a set of sites corrected and measures the gap that is left.

    `baseline` are its stored log-probabilities, `local` the target's ops on its inputs.
    """

    runs: LiveRuns
    baseline_id: str
    baseline: Mapping[Key, Mapping[int, float]]
    local: LocalRun
    sequences: list[SequenceSpec]
    patched: int = 0
    _known: dict[frozenset[Site], tuple[dict[str, Any], int]] = field(default_factory=dict)

    def measure(self, name: str, sites: frozenset[Site]) -> tuple[dict[str, Any], int]:
        """(gap, patched tensors) with `sites` corrected; measured once for each set."""
        if sites not in self._known:
            patches = (
                (
                    Patch(
                        self.baseline_id,
                        mode="correction",
                        sites=tuple(map(str, sorted(sites))),
                        local=self.local.folder,
                    ),
                )
                if sites
                else ()
            )
            result = self.runs.run("causal", Job(name, tuple(self.sequences), patch=patches))
            self.patched += result.patched
            self._known[sites] = self.gap(result), result.patched
        return self._known[sites]

    def measure_value(self, name: str, site: Site) -> dict[str, Any]:
        """The gap with the baseline's own tensor at `site`, and all that is upstream of it."""
        patch = Patch(self.baseline_id, sites=(str(site),))
        result = self.runs.run("causal", Job(name, tuple(self.sequences), patch=(patch,)))
        self.patched += result.patched
        return self.gap(result)

    def swap(
        self, name: str, swap: dict[str, Any], swapped: tuple[str, ...], sites: tuple[str, ...]
    ) -> JobResult:
        """Run with these parts of the quantized linears' operands from the baseline."""
        job = Job(
            name,
            tuple(self.sequences),
            operands={**swap, "swapped": swapped},
            operand_sites=sites,
        )
        return self.runs.run("operands", job)

    def gap(self, result: JobResult) -> dict[str, Any]:
        """The gap of one job against the baseline's stored log-probabilities."""
        prompts = {s.probe: s.prompt_length for s in self.sequences}
        return gap(self.baseline, live_logprobs(result.scored), prompts)


def measure_shares(
    experiment: Experiment,
    num_layers: int,
    target_id: str,
    floor: float,
    layer_outputs: Mapping[int, Site],
    operands: OperandExperiment | None = None,
    patches: Sequence[str] = (),
) -> dict[str, Any]:
    """The causal record of one pair.

    `floor` is the noise of the engines themselves (mean_abs), `layer_outputs` the baseline's
    captured layer outputs, `operands` what to swap inside of quantized linears. `patches` are
    site globs, each corrected by itself, and their linears' weights swapped.
    """
    born = with_routing(experiment.local.born())
    everything = frozenset(born)
    ops, layers = by_op(born), by_layers(born, num_layers)
    record: dict[str, Any] = {
        "baseline": experiment.baseline_id,
        "target": target_id,
        "mode": "correction",
        "sequences": len(experiment.sequences),
        "ops": [],
        "layers": [],
        "prefix": [],
        "upstream": [],
        "operands": [],
        "operand_sites": 0,
        "patches": [],
        "interaction_ops": None,
        "interaction_layers": None,
        "smallest": None,
        "gap_all": None,
        "patched": 0,
        "notes": [],
    }
    before, _ = experiment.measure("unpatched", frozenset())
    record |= {"gap": before, "tokens": before["tokens"]}
    record["sampled_tokens"] = sum(
        len(s.token_ids) - s.prompt_length for s in experiment.sequences if s.mode == "sample"
    )
    if not before["mean_abs"]:
        return record | {"verdict": "equal", "reason": "every log-probability is equal"}
    try:
        for glob in patches:
            record["patches"] += list(_patch(experiment, glob, born, operands, before))
        _fill(record, experiment, everything, ops, layers)
        record["upstream"] = [
            _upstream(experiment, layer, layer_outputs[layer], before)
            for layer in last_of_ranges(num_layers)
            if layer in layer_outputs
        ]
        if operands is not None:
            _swap_operands(record, experiment, operands)
    except BudgetSpent as spent:
        record["notes"].append(f"cut short: {spent}")
    record["patched"] = experiment.patched
    record["verdict"], record["reason"] = _verdict(record, floor)
    return record


def with_routing(sites: Iterable[Site]) -> list[Site]:
    """Expert ids and weights are one decision: corrected together or not at all."""
    found = dict.fromkeys(sites)
    for site in list(found):
        if site.kind in ("topk_ids", "topk_weights"):
            found[Site(site.fqn, "topk_ids")] = None
            found[Site(site.fqn, "topk_weights")] = None
    return list(found)


@dataclass(frozen=True)
class OperandExperiment:
    """The quantized linears of a pair: `swap` is an attribute.operands.OperandSwap as data.

    `sites` are their outputs, `reason` says why there is no experiment.
    """

    swap: dict[str, Any]
    sites: tuple[str, ...]
    parts: tuple[str, ...]
    reason: str = ""


def _patch(
    experiment: Experiment,
    glob: str,
    born: list[Site],
    operands: OperandExperiment | None,
    before: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Shares of the sites that a glob names: their outputs corrected, their weights swapped."""
    sites = frozenset(site for site in born if matches(site.fqn, site.kind, (glob,)))
    if not sites:
        yield {"name": glob, "part": "output", "sites": 0, "closed": 0.0, "gap": before}
        return
    share = _share(
        experiment, f"patch-{glob}", glob, frozenset(with_routing(sorted(sites))), before
    )
    yield share | {"part": "output"}
    if operands is None or operands.reason:
        return
    chosen = tuple(s for s in operands.sites if matches(*_split(s), (glob,)))
    for part in operands.parts if chosen else ():
        result = experiment.swap(f"patch-{glob}-{part}", operands.swap, (part,), chosen)
        after = experiment.gap(result)
        yield {
            "name": glob,
            "part": part,
            "sites": len(chosen),
            "closed": closed(before, after),
            "gap": after,
        }


def _split(site: str) -> tuple[str, str]:
    parsed = Site.parse(site)
    return parsed.fqn, parsed.kind


def _swap_operands(
    record: dict[str, Any], experiment: Experiment, operands: OperandExperiment
) -> None:
    """Shares of weights, their codes and scales, the activation rule and the GEMM."""
    if operands.reason:
        record["notes"].append(f"operands not swapped: {operands.reason}")
        return
    before = record["gap"]
    control = experiment.swap("operands-own", operands.swap, (), operands.sites)
    exact = tuple(sorted(set(operands.sites) - set(control.inexact)))
    record["operand_sites"] = len(exact)
    if len(exact) < len(operands.sites):
        record["notes"].append(
            f"operands swapped at {len(exact)} of {len(operands.sites)} quantized linears: the "
            "model of the others is not exact"
        )
    if not exact:
        return
    for name, swapped in (
        *((part, (part,)) for part in operands.parts),
        ("all operands", ("weights", "activation rule", "gemm rule")),
    ):
        result = experiment.swap(f"operands-{name}", operands.swap, swapped, exact)
        after = experiment.gap(result)
        record["operands"].append(
            {
                "name": name,
                "sites": len(exact),
                "changed": len(result.inexact),
                "closed": closed(before, after),
                "closed_p99": closed(before, after, "p99_abs"),
                "closed_k3": closed(before, after, "k3"),
                "gap": after,
            }
        )


def _fill(
    record: dict[str, Any],
    experiment: Experiment,
    everything: frozenset[Site],
    ops: Sets,
    layers: Sets,
) -> None:
    """Measure into `record`, the most telling figures first; raises BudgetSpent on the way."""
    before = record["gap"]
    record["gap_all"], _ = experiment.measure("all", everything)
    for name, sets in (("ops", ops), ("layers", layers)):
        for label, sites in sets.items():
            record[name].append(_share(experiment, f"{name}-{label}", label, sites, before))
        record[f"interaction_{name}"] = _interaction(record, name)
    so_far: frozenset[Site] = frozenset()
    for label, sites in layers.items():
        so_far |= sites
        left, _ = experiment.measure(f"upto-{label}", so_far)
        record["prefix"].append({"upto": label, "closed": closed(before, left), "gap": left})
    for name, sets in (("ops", ops), ("layers", layers)):
        for share in record[name]:
            left, _ = experiment.measure(
                f"without-{share['name']}", everything - sets[share["name"]]
            )
            share["without"] = left["mean_abs"] / before["mean_abs"]
    record["smallest"] = _smallest_of_both(
        smallest(experiment, ops, record["ops"], before),
        smallest(experiment, layers, record["layers"], before),
    )


def last_of_ranges(num_layers: int, ranges: int = LAYER_RANGES) -> list[int]:
    """The last layer of each layer range."""
    count = min(ranges, max(1, num_layers))
    return [round(i * num_layers / count) - 1 for i in range(1, count + 1)]


def _upstream(
    experiment: Experiment, layer: int, site: Site, before: dict[str, Any]
) -> dict[str, Any]:
    """The gap that the ops after a layer make on the baseline's own hidden states."""
    after = experiment.measure_value(f"value-of-layer-{layer}", site)
    return {"upto": str(layer), "closed": closed(before, after), "gap": after}


def _share(
    experiment: Experiment, name: str, label: str, sites: frozenset[Site], before: dict[str, Any]
) -> dict[str, Any]:
    after, patched = experiment.measure(name, sites)
    return {
        "name": label,
        "sites": len(sites),
        "closed": closed(before, after),
        "closed_p99": closed(before, after, "p99_abs"),
        "closed_k3": closed(before, after, "k3"),
        "without": None,
        "patched": patched,
        "gap": after,
    }


def _interaction(record: dict[str, Any], name: str) -> dict[str, float] | None:
    total = closed(record["gap"], record["gap_all"])
    if total is None:
        return None
    singles = float(sum(share["closed"] for share in record[name]))
    return {"total": total, "sum_of_singles": singles, "interaction": total - singles}


def _verdict(record: dict[str, Any], floor: float) -> tuple[str, str]:
    if record["gap"]["mean_abs"] <= floor:
        return "inconclusive", f"the gap is not above the engines' own noise ({floor:.3g} nats)"
    total = closed(record["gap"], record["gap_all"]) if record["gap_all"] else None
    interaction = record["interaction_ops"]
    if total is None or interaction is None:
        return "inconclusive", "the budget ended before the op classes were measured"
    if total < MIN_CLOSED_BY_ALL:
        return "inconclusive", f"all visible ops together close {total:.0%} of the gap only"
    if abs(interaction["interaction"]) > MAX_INTERACTION:
        singles = interaction["sum_of_singles"]
        reason = f"the op classes' own shares add up to {singles:.0%}, together they close "
        return "inconclusive", f"{reason}{total:.0%}: interaction dominates"
    return "attributed", f"all visible ops together close {total:.0%} of the gap"


def _smallest_of_both(
    ops: dict[str, Any] | None, layers: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The smallest sets of op classes and of layers as one record; `closed` is the lesser one."""
    found = [one for one in (ops, layers) if one is not None]
    if not found:
        return None
    return {
        "ops": ops["sets"] if ops else [],
        "layers": layers["sets"] if layers else [],
        "closed": min(one["closed"] for one in found),
        "closed_ops": ops["closed"] if ops else None,
        "closed_layers": layers["closed"] if layers else None,
        "runs": sum(one["runs"] for one in found),
    }


def smallest(
    experiment: Experiment, sets: Sets, shares: list[dict[str, Any]], before: dict[str, Any]
) -> dict[str, Any] | None:
    """The fewest sets that close 95 % of the gap; None where all of them don't.

    Ordered by their own shares, the shortest sufficient prefix is found by bisection (as if more
    sets never closed less), then each of its members is left out once. Not a proof of minimality:
    what is returned was measured to be enough, and to be too little without any one of its sets.
    """
    known = len(experiment._known)
    names = [s["name"] for s in sorted(shares, key=lambda share: -(share["closed"] or 0.0))]

    def closes(chosen: list[str]) -> float:
        sites = frozenset[Site]().union(*(sets[name] for name in chosen))
        after, _ = experiment.measure(f"only-{'+'.join(chosen)}", sites)
        return closed(before, after) or 0.0

    if not names or closes(names) < ENOUGH:
        return None
    low, high = 1, len(names)
    while low < high:
        middle = (low + high) // 2
        if closes(names[:middle]) >= ENOUGH:
            high = middle
        else:
            low = middle + 1
    chosen = names[:high]
    for name in list(reversed(chosen)):
        rest = [other for other in chosen if other != name]
        if rest and closes(rest) >= ENOUGH:
            chosen = rest
    return {"sets": chosen, "closed": closes(chosen), "runs": len(experiment._known) - known}
