"""Block scales for the HTML report: how often each E4M3 value occurs on either side.

Knows the scales table; no template, no torch. Invariant: counts of both sides are over the same
blocks; a run that didn't keep them says so.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from minite_diag.report import figures
from minite_diag.report.tables import Cell, Row, Table, columns, number, share, text
from minite_diag.trace.schema import SCALES, read_table

WHERE: Final = "scales.parquet"
NAMES: Final = {"weight_block_scale": "weights", "act_block_scale": "activations"}


def scales_of(run: Path, ends: tuple[str, str], key: str) -> dict[str, Any]:
    """{"figures", "layers", "missing"}: a histogram for each kind, a table by layer."""
    if not (run / WHERE).exists():
        return {
            "figures": [],
            "layers": None,
            "missing": "Block scales were not counted when this run was compared.",
        }
    rows = read_table(run / WHERE, SCALES).to_pandas()
    own = rows[(rows["baseline"] == ends[0]) & (rows["target"] == ends[1])]
    if not len(own):
        return {
            "figures": [],
            "layers": None,
            "missing": "No block scale was compared: nothing is quantized to NVFP4 on both sides.",
        }
    own = own.assign(value=[e4m3_value(code) for code in own["code"]])
    drawn = [
        _histogram(own[own["kind"] == kind], ends, f"{key}-{kind.partition('_')[0]}-scales", name)
        for kind, name in NAMES.items()
        if (own["kind"] == kind).any()
    ]
    return {"figures": drawn, "layers": _by_layer(own, key), "missing": ""}


def e4m3_value(code: int) -> float:
    """The value of an E4M3 byte (OCP FP8: bias 7, no infinities, 0x7F is NaN)."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _histogram(own: pd.DataFrame, ends: tuple[str, str], key: str, name: str) -> dict[str, Any]:
    """Shares by power of two: 2^k stands for 2^k <= scale < 2^(k+1)."""
    totals = own[["baseline_blocks", "target_blocks"]].sum()
    bins = own["value"].map(_bin)
    sums = own.groupby(bins)[["baseline_blocks", "target_blocks"]].sum()
    known = [at for at in sums.index if at is not None and math.isfinite(at)]
    order = [*(at for at in sums.index if at == -math.inf)]
    order += [float(at) for at in range(int(min(known)), int(max(known)) + 1)] if known else []
    order += [at for at in sums.index if at == math.inf]
    shares = [
        [float(sums[column].get(at, 0)) / max(float(totals[column]), 1.0) for at in order]
        for column in ("baseline_blocks", "target_blocks")
    ]
    labels = [_label(at) for at in order]
    modes = ", ".join(dict.fromkeys(own["mode"]))
    return {
        "key": key,
        "title": f"Block scales of {name}",
        "note": f"{int(totals.iloc[0])} blocks of 16 ({modes}); 2^k: from 2^k to below 2^(k+1). "
        "The largest E4M3 scale is 448. Blocks of zeros are not counted.",
        "svg": figures.histogram(
            key,
            labels,
            list(zip(ends, shares, strict=True)),
            x_label="block scale (E4M3)",
            y_label="share of blocks",
        ),
        "wide": False,
        "table": Table(
            f"{key}-n",
            f"Block scales of {name}: the numbers",
            columns("Scale", *(f"#{end}" for end in ends)),
            [
                Row(
                    [
                        Cell(label, at if math.isfinite(at) else None),
                        *(
                            Cell(f"{share(side[i]).text} ({int(sums[column].get(at, 0))})", side[i])
                            for side, column in zip(
                                shares, ("baseline_blocks", "target_blocks"), strict=True
                            )
                        ),
                    ]
                )
                for i, (label, at) in enumerate(zip(labels, order, strict=True))
            ],
        ),
    }


def _bin(value: float) -> float:
    if math.isnan(value):
        return math.inf
    return math.floor(math.log2(abs(value))) if value else -math.inf


def _label(at: float) -> str:
    if at == -math.inf:
        return "0"
    return "NaN" if at == math.inf else f"2^{int(at)}"


def _by_layer(own: pd.DataFrame, key: str) -> Table:
    """Median and largest scale of both sides, layer by layer."""
    rows = []
    on = ["kind", "mode", "layer_index"]
    for (kind, mode, layer), group in own.groupby(on, dropna=False, sort=True):
        cells = [
            text(NAMES[str(kind)]),
            text(mode),
            Cell("-" if pd.isna(layer) else str(int(layer)), None if pd.isna(layer) else layer),
            Cell(str(int(group["baseline_blocks"].sum())), float(group["baseline_blocks"].sum())),
        ]
        for column in ("baseline_blocks", "target_blocks"):
            found = group[(group[column] > 0) & group["value"].notna()].sort_values("value")
            cells += [number(_median(found, column)), number(found["value"].max())]
        rows.append(Row(cells))
    return Table(
        f"{key}-scales-layers",
        "Block scales by layer",
        columns(
            *("Of", "Mode", "#Layer", "#Blocks", "#Learner median", "#Learner largest"),
            *("#Sampler median", "#Sampler largest"),
        ),
        rows,
        filters=len(rows) > 12,
    )


def _median(found: pd.DataFrame, column: str) -> float | None:
    if not len(found):
        return None
    half = np.cumsum(found[column].to_numpy()) * 2
    return float(found["value"].iloc[int(np.searchsorted(half, half[-1] / 2))])
