"""Sites for the HTML report: layer by layer, experts together, worst tensors by name.

Knows the comparison table; no template, no torch. Invariant: the number of rows and of figures does
not grow with the number of experts, and a tensor that can't be shown is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from minite_diag.report import figures
from minite_diag.report.tables import (
    Cell,
    Column,
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
from minite_diag.report.words import number as shown
from minite_diag.site import KINDS
from minite_diag.trace.schema import COMPARISON, read_table

WHERE: Final = "comparison.parquet"
MAX_PLACES: Final = 1500
MAX_WORST: Final = 60
MAX_REASONS: Final = 60
OUTPUTS: Final = ("output", "router_logits", "logits")
CODES: Final = ("weight_codes", "weight_block_scale", "act_codes", "act_block_scale")
_LABELS: Final = ("baseline", "target", "mode", "probe", "fqn", "kind", "status", "reason")
_NUMBERS: Final = (
    "order",
    "layer_index",
    "expert_index",
    "bitwise_fraction",
    "rel_l2",
    "max_abs_diff",
    "ulp_max",
    "mismatch_rate",
    "scale_ratio",
    "agreement",
    "nonfinite",
)
_LAYER: Final = re.compile(r"^.*?layers\.\d+\.?")
_EXPERT: Final = re.compile(r"\.experts\.\d+(?=\.|$)")
OUTSIDE: Final = "-"
"""Layer of what lies outside of the layers."""


def read_sites(run: Path) -> pd.DataFrame:
    """The comparison's columns that the report shows; names stay dictionary-encoded."""
    table = read_table(run / WHERE, COMPARISON, columns=[*_LABELS, *_NUMBERS], dictionary=_LABELS)
    rows = table.to_pandas()
    for name in _LABELS:
        rows[name] = rows[name].astype("category")
    places = {fqn: place_of(fqn) for fqn in rows["fqn"].cat.categories}
    rows["place"] = rows["fqn"].map(places).astype("category")
    return rows


def place_of(fqn: str) -> str:
    """A module's name inside of its layer, all experts as one: `mlp.experts.*.down_proj`."""
    inner = _LAYER.sub("", fqn)
    return _EXPERT.sub(".experts.*", inner) or "(layer)"


@dataclass
class Sites:
    """What the report shows of one pair's sites; `anchors` finds the row of a place."""

    table: Table
    worst: Table
    skips: Table | None
    figures: list[dict[str, Any]]
    mismatches: list[dict[str, Any]]
    anchors: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def href(self, fqn: str, kind: str | None = None) -> str:
        """`#row` of the place that a site belongs to, or nothing."""
        match = re.search(r"layers\.(\d+)", fqn)
        layer = match.group(1) if match else OUTSIDE
        kinds = [kind] if kind else [*OUTPUTS, *KINDS]
        for one in kinds:
            found = self.anchors.get((layer, place_of(fqn), one))
            if found:
                return f"#{found}"
        return ""


def sites_of(rows: pd.DataFrame, key: str, local: Iterable[Mapping[str, Any]] = ()) -> Sites:
    """Tables and figures of one pair's rows; `local` are the live half's rows of the pair."""
    compared = rows[rows["status"] == "compared"]
    places = _places(compared)
    anchors = {
        (row["layer"], row["place"], row["kind"]): f"{key}-s{i}"
        for i, row in enumerate(places[:MAX_PLACES])
    }
    layers = _layer_names(places)
    drawn = [
        *_heat_maps(places, layers, key, anchors, list(local)),
        *_lines(places, layers, key, list(local)),
    ]
    return Sites(
        _place_table(places, key, anchors),
        _worst(compared, key, anchors),
        _skips(rows, key),
        [figure for figure in drawn if figure],
        [figure for figure in (_mismatch(places, layers, key),) if figure],
        anchors,
    )


def _places(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """One record per layer, place and kind, in execution order; sampled sequences apart."""
    if not len(compared):
        return []
    frame = compared.assign(
        layer=compared["layer_index"].fillna(-1).astype(int),
        equal=compared["bitwise_fraction"] == 1.0,
    )
    on = ["layer", "place", "kind"]
    given = frame[frame["mode"] != "sample"]
    drawn = frame[frame["mode"] == "sample"]
    main = given if len(given) else drawn
    found = main.groupby(on, observed=True, sort=False).agg(
        order=("order", "min"),
        static=("mode", lambda modes: (modes == "static").all()),
        tensors=("equal", "size"),
        equal=("equal", "sum"),
        experts=("expert_index", "nunique"),
        **{name: (name, "mean") for name in ("bitwise_fraction", "rel_l2", "mismatch_rate")},
        scale_ratio=("scale_ratio", "mean"),
        agreement=("agreement", "mean"),
        worst_rel_l2=("rel_l2", "max"),
        max_abs_diff=("max_abs_diff", "max"),
        ulp_max=("ulp_max", "max"),
        nonfinite=("nonfinite", "sum"),
    )
    if len(given) and len(drawn):
        sampled = drawn.groupby(on, observed=True, sort=False)
        found["sampled"] = sampled[["rel_l2", "mismatch_rate"]].mean().bfill(axis=1)["rel_l2"]
    found = found.reset_index()
    rank = {kind: i for i, kind in enumerate(KINDS)}
    found["rank"] = found["kind"].map(rank).astype(float).fillna(len(rank))
    found["place"] = found["place"].astype(str)
    found = found.sort_values(["static", "order", "layer", "place", "rank"], kind="stable")
    records = found.to_dict("records")
    for record in records:
        record["kind"] = str(record["kind"])
        record["layer"] = OUTSIDE if record["layer"] < 0 else str(record["layer"])
    return [{str(k): v for k, v in record.items()} for record in records]


def _place_table(
    places: list[dict[str, Any]], key: str, anchors: Mapping[tuple[str, str, str], str]
) -> Table:
    sampled = any("sampled" in place for place in places)
    rows = []
    for place in places:
        name = place["place"]
        if place["experts"]:
            name = f"{name} ({int(place['experts'])} experts)"
        cells = [
            Cell(place["layer"], -1.0 if place["layer"] == OUTSIDE else float(place["layer"])),
            text(name, code=True),
            text(place["kind"]),
            count(place["tensors"]),
            count(place["equal"]),
            share(place["bitwise_fraction"], marked=True),
            number(place["rel_l2"]),
            number(place["worst_rel_l2"]),
            share(place["mismatch_rate"]),
            number(place["scale_ratio"]),
            number(place["max_abs_diff"]),
            number(place["ulp_max"]),
        ]
        if sampled:
            cells.append(number(place.get("sampled")))
        rows.append(Row(cells, anchors.get((place["layer"], place["place"], place["kind"]), "")))
    shown_rows, left_out = capped(rows, MAX_PLACES, WHERE)
    heading = columns(
        *("#Layer", "Module", "Tensor", "#Tensors", "#Equal", "#Bits equal", "#Rel L2"),
        *("#Worst rel L2", "#Codes or scales differ", "#Scale ratio", "#Max abs", "#Max ulp"),
    )
    if sampled:
        heading.append(Column("Sampled: rel L2, or differ", True))
    return Table(
        f"{key}-sites",
        "Every place in execution order: means over probes and experts",
        heading,
        shown_rows,
        left_out,
        filters=True,
    )


def _worst(compared: pd.DataFrame, key: str, anchors: Mapping[tuple[str, str, str], str]) -> Table:
    """The tensors with the largest relative error, one by one."""
    outputs = compared[compared["kind"].isin(OUTPUTS) & (compared["rel_l2"] > 0)]
    found = outputs.nlargest(MAX_WORST, "rel_l2", keep="first")
    rows = []
    for row in found.itertuples(index=False):
        layer = OUTSIDE if pd.isna(row.layer_index) else str(int(row.layer_index))
        anchor = anchors.get((layer, str(row.place), str(row.kind)), "")
        rows.append(
            Row(
                [
                    text(f"{row.fqn}:{row.kind}", href=f"#{anchor}" if anchor else "", code=True),
                    text(row.mode),
                    text(row.probe),
                    number(row.rel_l2),
                    share(row.bitwise_fraction, marked=True),
                    number(row.max_abs_diff),
                    count(row.nonfinite),
                ]
            )
        )
    hidden = len(outputs) - len(rows)
    return Table(
        f"{key}-worst",
        "Outputs with the largest relative error, one tensor a row",
        columns("Site", "Mode", "Probe", "#Rel L2", "#Bits equal", "#Max abs", "#NaN or infinite"),
        rows,
        f"the worst {len(rows)} of {len(outputs)} outputs that differ; the rest is in {WHERE}"
        if hidden > 0
        else "",
        filters=len(rows) > 12,
    )


def _skips(rows: pd.DataFrame, key: str) -> Table | None:
    skipped = rows[rows["status"] == "skipped"]
    if not len(skipped):
        return None
    groups = skipped.groupby("reason", observed=True, sort=False)
    found = sorted(
        ((str(reason), len(group), group.iloc[0]) for reason, group in groups),
        key=lambda item: -item[1],
    )
    shown_rows, left_out = capped(
        [
            Row([text(reason), count(size), text(f"{first['fqn']}:{first['kind']}", code=True)])
            for reason, size, first in found
        ],
        MAX_REASONS,
        WHERE,
    )
    return Table(
        f"{key}-skips",
        "Tensors that were not compared, by reason",
        columns("Reason", "#Rows", "Example"),
        shown_rows,
        left_out,
    )


def _layer_names(places: list[dict[str, Any]]) -> list[str]:
    return sorted({p["layer"] for p in places if p["layer"] != OUTSIDE}, key=int)


def _heat_maps(
    places: list[dict[str, Any]],
    layers: list[str],
    key: str,
    anchors: Mapping[tuple[str, str, str], str],
    local: list[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    found = [p for p in places if p["layer"] != OUTSIDE and p["kind"] in OUTPUTS]
    if not found:
        return []
    born = _local_by_place(local)
    maps = [
        ("bits", "Share of bits equal, outputs", "bitwise_fraction", False, False),
        ("rel", "Relative L2 error, outputs", "rel_l2", True, True),
    ]
    drawn = [
        _heat_map(found, layers, f"{key}-{name}", anchors, title, metric, log, low)
        for name, title, metric, log, low in maps
    ]
    if born:
        own = [
            {**p, "local": born[p["layer"], p["place"]]}
            for p in found
            if (p["layer"], p["place"]) in born
        ]
        drawn.append(
            _heat_map(
                own,
                layers,
                f"{key}-local",
                anchors,
                "Local error: of the op alone, on the learner's own inputs",
                "local",
                log=True,
                low=True,
            )
        )
    return drawn


def _heat_map(
    found: list[dict[str, Any]],
    layers: list[str],
    key: str,
    anchors: Mapping[tuple[str, str, str], str],
    title: str,
    metric: str,
    log: bool,
    low: bool,
) -> dict[str, Any]:
    names = _in_order(found)
    cell = {(p["layer"], p["place"]): p for p in found}
    values: list[list[float | None]] = []
    texts, links, titles = [], {}, {}
    for i, layer in enumerate(layers):
        row: list[float | None] = []
        for j, name in enumerate(names):
            place = cell.get((layer, name))
            value = finite(place[metric]) if place else None
            row.append(value)
            if place and value is not None:
                anchor = anchors.get((layer, name, place["kind"]))
                if anchor:
                    links[i, j] = anchor
                titles[i, j] = f"layer {layer}, {name}: {shown(value)}"
        values.append(row)
        texts.append([_cell_text(v, metric) for v in row])
    data = figures.HeatMap(layers, names, values, texts, links, titles)
    svg = figures.heat_map(key, data, log=log, low_is_good=low)
    as_share = metric == "bitwise_fraction"
    return {
        "key": key,
        "title": title,
        "note": "Pale is good, dark is bad; an empty box was not measured. A cell leads to its row.",
        "svg": svg,
        "wide": True,
        "table": Table(
            f"{key}-n",
            f"{title}: the numbers",
            columns("#Layer", *(f"#{name}" for name in names)),
            [
                Row(
                    [
                        Cell(layer, float(layer)),
                        *(_linked(v, as_share, links.get((i, j))) for j, v in enumerate(row)),
                    ]
                )
                for i, (layer, row) in enumerate(zip(layers, values, strict=True))
            ],
        ),
    }


def _linked(value: float | None, as_share: bool, anchor: str | None) -> Cell:
    cell = (share if as_share else number)(value)
    return replace(cell, href=f"#{anchor}") if anchor else cell


def _cell_text(value: float | None, metric: str) -> str:
    if value is None:
        return ""
    if metric == "bitwise_fraction":
        return "=" if value == 1.0 else f"{100 * value:.0f}%" if value >= 0.01 else "<1%"
    if value == 0.0:
        return "0"
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:.2g}"


def _in_order(found: list[dict[str, Any]]) -> list[str]:
    """Places by their mean rank within a layer."""
    base: dict[str, float] = {}
    for place in found:
        base[place["layer"]] = min(base.get(place["layer"], np.inf), place["order"])
    offsets: dict[str, list[float]] = {}
    for place in found:
        offsets.setdefault(place["place"], []).append(place["order"] - base[place["layer"]])
    return sorted(offsets, key=lambda name: (float(np.mean(offsets[name])), name))


def _local_by_place(local: list[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], list[float]] = {}
    for row in local:
        if row["kind"] in OUTPUTS and row["layer_index"] is not None:
            place = (str(row["layer_index"]), place_of(row["site"]))
            sums.setdefault(place, []).append(float(row["error_local"] or 0.0))
    return {place: float(np.mean(values)) for place, values in sums.items()}


def _lines(
    places: list[dict[str, Any]],
    layers: list[str],
    key: str,
    local: list[Mapping[str, Any]],
) -> list[dict[str, Any] | None]:
    if not layers:
        return []
    bits = [
        figures.Line(name, [int(layer) for layer in layers], values)
        for name, values in (
            ("layer output", _by_layer(places, layers, "bitwise_fraction", whole=True)),
            ("mean of all outputs", _by_layer(places, layers, "bitwise_fraction", whole=False)),
        )
        if any(v is not None for v in values)
    ]
    errors = [
        ("layer output, total", _by_layer(places, layers, "rel_l2", whole=True)),
        ("mean of all outputs, total", _by_layer(places, layers, "rel_l2", whole=False)),
        ("inherited", _local_by_layer(local, layers, "error_inherited")),
        ("local", _local_by_layer(local, layers, "error_local")),
    ]
    rel = [
        figures.Line(name, [int(layer) for layer in layers], values)
        for name, values in errors
        if any(v is not None for v in values)
    ]
    note = (
        "Local: the sampler's op on the learner's recorded input. Inherited: what the wrong input "
        "alone makes of it. Both are means over the layer's outputs."
        if local
        else "Local and inherited error were not measured: minite-diag attribute RUN --live."
    )
    return [
        _line_figure(f"{key}-bitline", "Bits equal, layer by layer", "", bits, "share", False),
        _line_figure(f"{key}-relline", "Error, layer by layer", note, rel, "relative L2", True),
    ]


def _line_figure(
    key: str, title: str, note: str, lines: list[figures.Line], label: str, log: bool
) -> dict[str, Any] | None:
    if not lines:
        return None
    is_share = label == "share"
    return {
        "key": key,
        "title": title,
        "note": note,
        "svg": figures.line_chart(
            key, lines, x_label="layer", y_label=label, log=log, share=is_share
        ),
        "wide": False,
        "table": Table(
            f"{key}-n",
            f"{title}: the numbers",
            columns("#Layer", *(f"#{line.name}" for line in lines)),
            [
                Row(
                    [
                        Cell(f"{x:g}", x),
                        *((share if is_share else number)(line.y[i]) for line in lines),
                    ]
                )
                for i, x in enumerate(lines[0].x)
            ],
        ),
    }


def _by_layer(
    places: list[dict[str, Any]], layers: list[str], metric: str, *, whole: bool
) -> list[float | None]:
    sums: dict[str, list[float]] = {}
    for place in places:
        is_layer = place["place"] == "(layer)"
        value = finite(place[metric])
        if place["kind"] in OUTPUTS and is_layer == whole and value is not None:
            sums.setdefault(place["layer"], []).append(value)
    return [float(np.mean(sums[layer])) if layer in sums else None for layer in layers]


def _local_by_layer(
    local: list[Mapping[str, Any]], layers: list[str], column: str
) -> list[float | None]:
    sums: dict[str, list[float]] = {}
    for row in local:
        value = finite(row[column])
        if row["kind"] in OUTPUTS and row["layer_index"] is not None and value is not None:
            sums.setdefault(str(row["layer_index"]), []).append(value)
    return [float(np.mean(sums[layer])) if layer in sums else None for layer in layers]


def _mismatch(places: list[dict[str, Any]], layers: list[str], key: str) -> dict[str, Any] | None:
    """Codes and block scales that differ, by layer and by module."""
    found = [p for p in places if p["kind"] in CODES and finite(p["mismatch_rate"]) is not None]
    if not found or not layers:
        return None
    lines, rows = [], []
    for kind in CODES:
        own = [p for p in found if p["kind"] == kind]
        sums: dict[str, list[float]] = {}
        for place in own:
            sums.setdefault(place["layer"], []).append(place["mismatch_rate"])
        if own:
            values = [float(np.mean(sums[x])) if x in sums else None for x in layers]
            lines.append(figures.Line(kind, [int(x) for x in layers], values))
        modules: dict[str, list[dict[str, Any]]] = {}
        for place in own:
            modules.setdefault(place["place"], []).append(place)
        for name, members in modules.items():
            rates = [m["mismatch_rate"] for m in members]
            worst = max(members, key=lambda m: m["mismatch_rate"])
            rows.append(
                Row(
                    [
                        text(name, code=True),
                        text(kind),
                        count(sum(m["tensors"] for m in members)),
                        share(float(np.mean(rates))),
                        share(min(rates)),
                        share(max(rates)),
                        count(None if worst["layer"] == OUTSIDE else worst["layer"]),
                    ]
                )
            )
    return {
        "key": f"{key}-mismatch",
        "title": "Codes and block scales that differ, layer by layer",
        "note": "Blocks of zeros are not counted. Means over modules and experts.",
        "svg": figures.line_chart(
            f"{key}-mismatch", lines, x_label="layer", y_label="share that differs", share=True
        ),
        "wide": False,
        "table": Table(
            f"{key}-mismatch-n",
            "Codes and block scales that differ, by module",
            columns("Module", "Tensor", "#Tensors", "#Mean", "#Least", "#Most", "#Most in layer"),
            rows,
        ),
    }
