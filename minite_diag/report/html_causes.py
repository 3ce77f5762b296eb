"""Causes for the HTML report: findings with evidence and fixes, causal shares, routing, legs.

Knows the summary and the attribution object; no template, no torch. Invariant: a share that was not
measured is said to be so, never drawn as zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from minite_diag.attribute.explain import effect_lines
from minite_diag.report import figures, words
from minite_diag.report.tables import (
    Cell,
    Row,
    Table,
    capped,
    columns,
    count,
    finite,
    number,
    share,
    text,
)

WHERE: Final = "attribution.parquet"
MAX_LOCAL: Final = 600
MAX_EVIDENCE: Final = 40
MAX_CAUSES: Final = 60

Json = dict[str, Any]
Href = Callable[[str], str]


def causes_of(pair: Json, run: str, gains: Mapping[str, float], href: Href) -> list[Json]:
    """Each cause with its fixes as typed in this run's engines, its worth and its evidence."""
    found = []
    for cause in (pair["causes"] or [])[:MAX_CAUSES]:
        site = cause["where"]
        found.append(
            {
                **cause,
                "href": href(site) if "." in site else "",
                "worth": effect_lines(cause),
                "fix_list": [_fix(fix, run, gains) for fix in cause.get("fixes") or []],
                "facts": _facts(cause["evidence"], href),
            }
        )
    return found


def _fix(fix: Json, run: str, gains: Mapping[str, float]) -> Json:
    """A remedy as typed; its gain where the ladder measured it."""
    where = "" if fix["engine"] == "any" else f"{fix['engine']} {fix['versions']}".strip()
    gain = ""
    if fix["alignment"]:
        measured = gains.get(fix["alignment"])
        gain = (
            f"measured here: closes {measured:.1%} of the score gap"
            if measured is not None
            else "gain not measured yet"
        )
    return {
        "kind": fix["kind"],
        "where": where,
        "line": fix["line"].replace("RUN", run),
        "note": fix["note"],
        "gain": gain,
    }


def _facts(evidence: Mapping[str, Any], href: Href) -> list[Json]:
    """Numbers behind a cause as (name, value, link)."""
    facts = []
    for name, value in list(evidence.items())[:MAX_EVIDENCE]:
        if isinstance(value, float):
            shown = words.number(value)
        elif isinstance(value, list | dict):
            shown = ", ".join(map(str, value)) if value else "none"
        else:
            shown = str(value)
        shown = words.visible(shown)
        is_site = isinstance(value, str) and "." in value and name in ("site", "where", "worst")
        facts.append(
            {
                "name": name.replace("_", " "),
                "value": shown if len(shown) <= 400 else f"{shown[:400]}…",
                "href": href(value) if is_site else "",
            }
        )
    return facts


def first_cause(causes: list[Json]) -> Json | None:
    """The cause to begin with: the first that isn't noise."""
    return next((c for c in causes if not c.get("below_noise")), causes[0] if causes else None)


def causal_figures(live: Json, key: str) -> list[Json]:
    """Waterfall of op classes, operands, layers: each with its numbers."""
    drawn: list[Json] = []
    for i, causal in enumerate(live["causal"]):
        own = f"{key}-causal{i}"
        if causal["ops"]:
            drawn.append(_waterfall(causal, "ops", f"{own}-ops", "By op"))
        if causal.get("operands"):
            drawn.append(_operands(causal, f"{own}-operands"))
        if causal["layers"]:
            drawn.append(_layers(causal, f"{own}-layers"))
    return drawn


def _waterfall(causal: Json, group: str, key: str, title: str) -> Json:
    shares = sorted(causal[group], key=lambda s: -(s["closed"] or 0.0))
    steps: list[tuple[str, float, float, str]] = []
    at = 0.0
    for one in shares:
        if one["closed"] is not None:
            end = at + one["closed"]
            steps.append((one["name"], at, end, f"{one['closed']:+.1%}"))
            at = end
    together = causal[f"interaction_{group}"]
    note = "Each op corrected alone, one after the other; the gap is not a sum of ops, "
    if together is not None:
        steps.append(("interaction", at, together["total"], f"{together['interaction']:+.1%}"))
        steps.append(("all together", 0.0, together["total"], f"{together['total']:.1%}"))
        note += "and what is missing from their sum to what all together close is the interaction."
    else:
        note += "and what all together close was not measured."
    return {
        "key": key,
        "title": f"{title}: share of the gap that correcting it closes",
        "note": note,
        "svg": figures.waterfall(key, steps, label="share of the gap closed"),
        "wide": False,
        "table": _share_table(causal, group, f"{key}-n", f"{title}: the numbers"),
    }


def _share_table(causal: Json, group: str, key: str, caption: str) -> Table:
    rows = [
        Row(
            [
                text(one["name"]),
                count(one["sites"]),
                share(one["closed"]),
                share(one["closed_p99"]),
                share(one["closed_k3"]),
                share(one.get("without")),
                number(one["gap"]["mean_abs"]),
            ]
        )
        for one in causal[group]
    ]
    together = causal.get(f"interaction_{group}")
    if together is not None:
        for name, value in (
            ("sum of the above", together["sum_of_singles"]),
            ("interaction", together["interaction"]),
            ("all together", together["total"]),
        ):
            rows.append(Row([text(name), count(None), share(value), *[Cell("-")] * 4]))
    return Table(
        key,
        caption,
        columns(
            *("Corrected", "#Sites", "#Closes (mean)", "#Closes (p99)", "#Closes (k3)"),
            *("#Gap that returns without it", "#Gap left, nats"),
        ),
        rows,
    )


def _operands(causal: Json, key: str) -> Json:
    found = causal["operands"]
    return {
        "key": key,
        "title": "Inside quantized linears: whose weights, activation rule, GEMM",
        "note": f"{causal['operand_sites']} quantized linears of the sampler computed with the "
        "learner's part. A negative share: this part alone makes the gap wider.",
        "svg": figures.bar_chart(
            key,
            [one["name"] for one in found],
            [("closed", [_bounded(one["closed"]) for one in found])],
            label="share of the gap closed (bars end at -100 %)",
            share=True,
            texts=[["-" if o["closed"] is None else f"{o['closed']:.1%}" for o in found]],
        ),
        "wide": False,
        "table": Table(
            f"{key}-n",
            "Operands: the numbers",
            columns(
                *("From the learner", "#Linears", "#Outputs changed in", "#Closes (mean)"),
                *("#Closes (p99)", "#Closes (k3)", "#Gap left, nats"),
            ),
            [
                Row(
                    [
                        text(one["name"]),
                        count(one["sites"]),
                        count(one["changed"]),
                        share(one["closed"]),
                        share(one["closed_p99"]),
                        share(one["closed_k3"]),
                        number(one["gap"]["mean_abs"]),
                    ]
                )
                for one in found
            ],
        ),
    }


def _bounded(value: float | None) -> float | None:
    """One part alone can widen the gap many times: the text beside the bar says how much."""
    return None if value is None else max(value, -1.0)


def _whole(value: float | None) -> str:
    """Per cent without decimals, and without a minus that rounding left."""
    return "-" if value is None else f"{value:.0%}".replace("-0%", "0%")


def _layers(causal: Json, key: str) -> Json:
    names = [one["name"] for one in causal["layers"]]
    prefix = {one["upto"]: one["closed"] for one in causal.get("prefix", [])}
    upstream = {one["upto"]: one["closed"] for one in causal.get("upstream", [])}

    def last(name: str) -> str:
        return name.rpartition("-")[2]

    lines = [
        ("corrected alone", [one["closed"] for one in causal["layers"]]),
        ("all up to here", [prefix.get(name) for name in names]),
        ("learner's hidden state after it", [upstream.get(last(name)) for name in names]),
        ("returns without it", [one["without"] for one in causal["layers"]]),
    ]
    shown = [(name, values) for name, values in lines if any(v is not None for v in values)]
    return {
        "key": key,
        "title": "By layers: share of the gap closed",
        "note": f"Layer ranges in order: {', '.join(map(words.visible, names))}.",
        "svg": figures.bar_chart(
            key,
            [f"layers {name}" if name[:1].isdigit() else name for name in names],
            [
                (name, [None if v is None else float(np.clip(v, -1, 2)) for v in values])
                for name, values in shown
            ],
            label="share of the gap (bars end at -100 % and 200 %)",
            share=True,
            texts=[[_whole(value) for value in values] for _, values in shown],
        ),
        "wide": False,
        "table": Table(
            f"{key}-n",
            "Layers: the numbers",
            columns("Layers", *(f"#{name}" for name, _ in shown)),
            [
                Row([text(name), *(share(values[i]) for _, values in shown)])
                for i, name in enumerate(names)
            ],
        ),
    }


def local_table(live: Json, key: str, href: Href) -> Table:
    """Local, inherited and total error by layer and op: the worst site of each leads to its row."""
    groups: dict[tuple[Any, str], list[Json]] = {}
    for row in live["local"]:
        groups.setdefault((row["layer_index"], row["op"]), []).append(row)
    rows = []
    for (layer, op), found in groups.items():
        worst = max(found, key=lambda row: row["error_local"] or 0.0)
        split = sum(r["bitwise_local"] < 1.0 or (r["error_local"] or 0.0) > 0 for r in found)
        rows.append(
            Row(
                [
                    Cell("-" if layer is None else str(layer), -1.0 if layer is None else layer),
                    text(op),
                    count(len(found)),
                    count(split, tone="differs" if split else "equal"),
                    share(min(r["bitwise_local"] for r in found), marked=True),
                    number(_mean(found, "error_local")),
                    number(_mean(found, "error_inherited")),
                    number(_mean(found, "error_total")),
                    number(_mean(found, "amplification")),
                    text(
                        f"{worst['site']}:{worst['kind']}" if split else None,
                        href=href(worst["site"]) if split else "",
                        code=True,
                    ),
                ]
            )
        )
    shown, left_out = capped(rows, MAX_LOCAL, WHERE)
    return Table(
        f"{key}-local-ops",
        "Born here or inherited, by layer and op",
        columns(
            *("#Layer", "Op", "#Sites", "#Split here", "#Least bits equal", "#Local error"),
            *("#Inherited", "#Total", "#Amplification", "Worst site"),
        ),
        shown,
        left_out,
        filters=True,
    )


def _mean(rows: list[Json], column: str) -> float | None:
    values = [v for row in rows if (v := finite(row[column])) is not None]
    return float(np.mean(values)) if values else None


def legs_table(live: Json, key: str) -> Table:
    """Each engine against itself."""
    rows = []
    for leg in live["legs"]:
        told = [text(leg["engine"]), text(leg["leg"]), text(leg["note"])]
        if leg["status"] == "measured":
            told += [
                count(leg["tokens"]),
                count(leg["equal"]),
                number(leg["mean_abs"], tone="equal" if leg["mean_abs"] == 0 else "differs"),
                number(leg["max_abs"]),
                text(leg["code"]),
            ]
        else:
            told += [*[Cell("-")] * 4, text(f"not measured: {leg['reason']}")]
        rows.append(Row(told))
    return Table(
        f"{key}-legs",
        "The engines against themselves",
        columns(
            *("Engine", "Leg", "What differs", "#Tokens", "#Equal", "#Mean |r|", "#Largest |r|"),
            "Cause or reason",
        ),
        rows,
    )


def contracts_table(pair: Json, key: str) -> Table | None:
    """The named arithmetic that reproduces each engine's bytes."""
    rows = []
    for side in pair["contracts"]:
        for role in ("weight", "activation", "gemm"):
            found = side[role]
            if found is None:
                rows.append(
                    Row([text(side["engine"]), text(role), text("no tensors")] + [Cell("-")] * 5)
                )
                continue
            rows.append(
                Row(
                    [
                        text(side["engine"]),
                        text(role),
                        text(found["recipe"], code=True),
                        share(found["codes"], marked=True),
                        share(found["scales"], marked=True),
                        text(", ".join(found["ties"])),
                        text(found["runner_up"]),
                        share(found["runner_up_codes"]),
                    ]
                )
            )
    if not rows:
        return None
    return Table(
        f"{key}-contracts",
        "Arithmetic that reproduces each engine's bytes",
        columns(
            *("Engine", "Of", "Recipe", "#Codes or outputs", "#Scales", "As good", "Runner-up"),
            "#Its share",
        ),
        rows,
    )


def routing_of(layers: list[Json] | None, key: str, href: Href) -> list[Json]:
    """Agreement and margins by MoE layer."""
    if not layers:
        return []
    x = [_layer_of(one["site"], i) for i, one in enumerate(layers)]
    margin = [one["margin_quantiles"][2] for one in layers]
    agreement = figures.line_chart(
        f"{key}-agree",
        [
            figures.Line("same set of experts", x, [one["set_agreement"] for one in layers]),
            figures.Line("same order too", x, [one["order_agreement"] for one in layers]),
        ],
        x_label="layer",
        y_label="share of tokens",
        share=True,
    )
    margins = figures.line_chart(
        f"{key}-margin",
        [
            figures.Line("median margin of the choice", x, margin),
            figures.Line("10th percentile", x, [o["margin_quantiles"][1] for o in layers]),
            figures.Line("median change of a logit", x, [o["noise_median"] for o in layers]),
        ],
        x_label="layer",
        y_label="router logits",
    )
    table = Table(
        f"{key}-routing",
        "Routing by layer",
        columns(
            *("Site", "#Tokens", "#Same set", "#Same order", "#Flips", "#Within twice the noise"),
            *("#Margin p1", "#p10", "#p50", "#p90", "#Median noise", "On equal logits"),
        ),
        [
            Row(
                [
                    text(one["site"], href=href(one["site"]), code=True),
                    count(one["tokens"]),
                    share(one["set_agreement"], marked=True),
                    share(one["order_agreement"]),
                    count(one["flips"]),
                    count(one["flips_within_noise"]),
                    *(number(q) for q in one["margin_quantiles"]),
                    number(one["noise_median"]),
                    text("yes" if one["flips_on_equal_logits"] else "no"),
                ]
            )
            for one in layers
        ],
        filters=len(layers) > 12,
    )
    note = (
        "A margin is the distance of the last expert that was chosen from the first that was not, "
        "in the learner's router logits. A flip with a margin below twice the change of the "
        "token's logits is explained by rounding."
    )
    return [
        {
            "key": f"{key}-agree",
            "title": "Routing agreement",
            "note": "",
            "svg": agreement,
            "wide": False,
            "table": table,
        },
        {
            "key": f"{key}-margin",
            "title": "Routing margins against the noise of the logits",
            "note": note,
            "svg": margins,
            "wide": False,
            "table": None,
        },
    ]


def _layer_of(site: str, otherwise: int) -> int:
    parts = site.split(".")
    found = [b for a, b in itertools.pairwise(parts) if a == "layers" and b.isdigit()]
    return int(found[0]) if found else otherwise
