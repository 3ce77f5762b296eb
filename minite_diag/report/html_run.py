"""The run as a whole for the HTML report: what ran, the ladder, both sides' environment, the gate.

Knows manifests, align.json and the gate object; no template, no torch. Invariant: a difference
between the sides is listed whatever its name; equal facts are counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minite_diag.change import facts_of
from minite_diag.report import figures, words
from minite_diag.report.tables import (
    Cell,
    Row,
    Table,
    capped,
    columns,
    count,
    number,
    text,
)

ALIGN_FILE: Final = "align.json"
MAX_FACTS: Final = 400
STATUS_SIGNS: Final = {"native": "●", "emulated": "◐", "modelled": "◌", "replaced": "◆"}
STATUS_WORDS: Final = {
    "native": "the engine's own kernel",
    "emulated": "the engine's own imitation of hardware",
    "modelled": "our model of an engine that isn't here",
    "replaced": "our op inside the engine",
}

Json = dict[str, Any]


def read_ladder(run: Path) -> Json | None:
    """What `align` wrote, or None."""
    try:
        found: Json = json.loads((run / ALIGN_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None
    return found


def gains_of(ladder: Json | None) -> dict[str, float]:
    """Alignment -> share of the score gap that its rung closed beyond the rung before."""
    gains: dict[str, float] = {}
    before = 0.0
    for rung in (ladder or {"ladder": [None]})["ladder"][1:]:
        now = rung["closed"]["score"]
        if now is not None:
            gains[rung["alignments"][-1]] = now - before
            before = now
    return gains


def next_command(summary: Json, ladder: Json | None) -> str:
    """The command to run now: once a ladder was climbed, judging its last rung."""
    if ladder and str(summary["next"]).startswith("minite-diag align"):
        return f"minite-diag gate {ladder['ladder'][-1]['run']} --profile bitwise"
    return str(summary["next"])


def ladder_of(ladder: Json, key: str) -> Json:
    """Before and after, rung by rung."""
    rungs = ladder["ladder"]
    series = [
        (
            mode,
            [((rung["logprob"] or {}).get(mode) or {}).get("mean_abs") for rung in rungs],
        )
        for mode in ("sample", "score")
    ]
    series = [(mode, values) for mode, values in series if any(v is not None for v in values)]
    names = [rung["rung"] for rung in rungs]
    rows = []
    for rung in rungs:
        sample, score, closed, equal, time, memory = words.rung_cells(rung)
        sides, changed, backward, ours = words.rung_changes(rung)
        rows.append(
            Row(
                [
                    text(rung["rung"]),
                    text(rung["what"]),
                    text(sides),
                    text(changed),
                    text(backward),
                    Cell(sample, _float(sample)),
                    Cell(score, _float(score)),
                    Cell(closed, _float(closed.rstrip("%"))),
                    Cell(equal, (rung["sites"] or {}).get("bitwise_equal")),
                    text(ours),
                    text(time),
                    text(memory),
                    text("; ".join(error["message"] for error in rung["error"])),
                ]
            )
        )
    return {
        "key": key,
        "title": "Gap after each alignment",
        "note": words.last_native(rungs),
        "svg": figures.bar_chart(key, names, series, label="mean |learner - sampler|, nats"),
        "wide": False,
        "table": Table(
            f"{key}-n",
            "The ladder: each rung keeps those before it",
            columns(
                *("Rung", "What it does", "Side", "Changed", "dgrad, wgrad"),
                *("#Sample gap", "#Score gap", "#Closed"),
                *("#Tensors equal", "Ours", "Time x (learner/sampler)"),
                *("Memory x (learner/sampler)", "Error"),
            ),
            rows,
        ),
        "told": [
            *_backward(rungs),
            *(
                f"{row['engine']}: {words.bare_price(row)}"
                for row in ladder.get("bare_price") or []
            ),
            *(
                f"without {row['left_out']}: {words.left_out(row)}"
                for row in ladder.get("left_out") or []
            ),
        ],
    }


def _backward(rungs: list[Json]) -> list[str]:
    """What the backward pass computes, and in which rungs."""
    said: dict[str, list[str]] = {}
    for rung in rungs:
        if rung.get("backward"):
            said.setdefault(rung["backward"], []).append(rung["rung"])
    return [f"backward: {text}: {', '.join(names)}" for text, names in said.items()]


def _float(shown: str) -> float | None:
    try:
        value = float(shown)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def engines_of(summary: Json) -> list[Json]:
    """What ran: ops by status for the top, and who computed each of them."""
    found = []
    for engine in summary["engines"]:
        groups: dict[str, list[str]] = {}
        for item in engine["evidence"]:
            groups.setdefault(item["status"], []).append(item["op"])
        found.append(
            {
                **engine,
                "name": words.name_of(engine),
                "groups": [
                    {
                        "status": status,
                        "sign": STATUS_SIGNS.get(status, "?"),
                        "ops": list(dict.fromkeys(ops)),
                    }
                    for status, ops in groups.items()
                ],
            }
        )
    return found


def evidence_table(summary: Json) -> Table:
    """Op by op, whose kernel computed it."""
    rows = [
        Row(
            [
                text(engine["id"]),
                text(item["op"]),
                text(f"{STATUS_SIGNS.get(item['status'], '?')} {item['status']}"),
                text(item["impl"], code=True),
                text(item["note"]),
            ]
        )
        for engine in summary["engines"]
        for item in engine["evidence"]
    ]
    heading = columns("Engine", "Op", "Who", "Implementation", "Note")
    return Table("evidence", "Op by op, whose kernel ran", heading, rows, filters=len(rows) > 12)


def environment_of(manifests: Mapping[str, Json], pair: Json, key: str) -> Json:
    """Both sides' versions, machine, settings, environment: what differs, and what doesn't."""
    sides = [facts_of(manifests[pair[role]["id"]]) for role in ("learner", "sampler")]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    differ: list[Row] = []
    equal: list[Row] = []
    for name in names:
        values = [side.get(name) for side in sides]
        row = Row([text(name), text(values[0]), text(values[1])])
        (equal if values[0] == values[1] else differ).append(row)
    tables = []
    for suffix, caption, rows in (
        ("differ", "What the two sides say differently", differ),
        ("equal", "What both say alike", equal),
    ):
        shown, left_out = capped(rows, MAX_FACTS, "traces/ENGINE/manifest.json")
        heading = columns("What", pair["learner"]["id"], pair["sampler"]["id"])
        tables.append(
            Table(f"{key}-{suffix}", caption, heading, shown, left_out, filters=len(rows) > 12)
        )
    return {"differ": tables[0], "equal": tables[1]}


def gate_table(gate: Json) -> Table:
    """Every check behind the verdict."""
    rows = []
    for check in gate["checks"]:
        verdict = "waived" if check["waived"] else check["verdict"]
        tone = {"pass": "equal", "fail": "differs"}.get(verdict, "")
        sign = {"pass": "✓", "fail": "✗", "inconclusive": "?", "waived": "~"}[verdict]
        rows.append(
            Row(
                [
                    Cell(f"{sign} {verdict}", tone=tone),
                    text(check["sampler"]),
                    text(check["mode"] or check["worst"] or check["site"]),
                    text(check["metric"], code=True),
                    number(check["estimate"]),
                    number(check["low"]),
                    number(check["high"]),
                    number(check["limit"]),
                    number(check["warn"]),
                    count(check["tokens"]),
                    count(check["sequences"]),
                    text(_why(check)),
                ]
            )
        )
    return Table(
        "gate-checks",
        f"Checks of profile {words.visible(gate['profile'])}",
        columns(
            *("Verdict", "Sampler", "Mode or site", "Metric", "#Estimate", "#From", "#To"),
            *("#Limit", "#Warning up to", "#Tokens", "#Sequences", "Reason"),
        ),
        rows,
    )


def _why(check: Json) -> str:
    waived = check["waived"]
    if waived:
        return f"{waived['reason']}, until {waived['expires']}; {check['reason']}".rstrip("; ")
    return str(check["reason"])


METHODS: Final = {
    "Gap": (
        "r = learner - sampler log-probability of one token, natural logarithm, float64. "
        "`sample`: tokens that the sampler drew; `score`: given text. Only tokens that both "
        "sides gave a log-probability for. docs/metrics.md, Of tokens."
    ),
    "Interval": (
        "95 %, from 2000 resamples of whole sequences; each end is the wider of a percentile "
        "and a studentized interval on the log scale. None below 4 sequences. "
        "docs/metrics.md, The gate."
    ),
    "Bits equal": (
        "`bitwise_fraction`: share of elements whose bytes are equal, in the narrower dtype "
        "where dtypes differ; E2M1 0x8 = 0x0. Means over probes and experts."
    ),
    "Rel L2": (
        "`rel_l2`: norm of the difference / norm of the learner's tensor. docs/metrics.md, Of "
        "sites."
    ),
    "Codes or scales differ": (
        "`mismatch_rate`: share of E2M1 codes, or E4M3 block scales, that differ; blocks of "
        "zeros are not counted."
    ),
    "Local, inherited, total": (
        "The sampler runs once more with every input replaced by the learner's recorded one. "
        "Local: its output against the learner's. Inherited: its output then against its own "
        "in the captured run. Total: the captured runs. Amplification: inherited / error of "
        "the input."
    ),
    "Causal shares": (
        "The local error of a set of ops is taken out of the running sampler and the forward "
        "is finished: share = 1 - gap left / gap. Interaction = what all together close less "
        "the sum of single shares. If it exceeds half of the gap, the verdict is "
        "inconclusive."
    ),
    "Operands": (
        "Each quantized linear is computed with the learner's weights, codes, scales, "
        "activation rule or GEMM, only where the model with the sampler's own operands is "
        "bit-exact."
    ),
    "Recipes": (
        "The named arithmetic that reproduces an engine's own codes and scales from its own "
        "input; a cause is a field in which the sides' recipes differ, its effect is what "
        "that field alone changes."
    ),
    "Ladder": (
        "The same plan run again with alignments added one by one. Closed: share of the first "
        "run's mean gap. Time and memory: hooked runs against the first, learner/sampler."
    ),
}
"""How each number is computed, as the report's last section tells it."""
