"""The HTML report: one self-contained file, rendered from a stored run without torch.

Knows the summary object and the comparison table. Invariant: every name that comes from a model,
probe or engine is escaped (autoescape is on), and the file fetches nothing.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from minite_diag.report import words
from minite_diag.trace.schema import COMPARISON, read_table

MAX_ROWS = 2000
"""Site rows in the table; the rest are in comparison.parquet, and the report says so."""


def write_report(run: Path, summary: dict[str, Any], out: Path | None) -> Path:
    """Render `RUN/report.html` (or `out`) atomically; returns the file."""
    file = out or run / "report.html"
    rows = read_table(run / "comparison.parquet", COMPARISON).to_pandas()
    text = _template().render(
        summary=summary,
        words=words,
        pairs=[_pair(pair, rows) for pair in summary["pairs"]],
    )
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
    return file


def _template() -> jinja2.Template:
    folder = importlib.resources.files("minite_diag.report") / "templates"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = words.number
    environment.filters["share"] = lambda v: "-" if v is None or pd.isna(v) else f"{v:.2%}"
    return environment.from_string((folder / "report.html.j2").read_text(encoding="utf-8"))


def _pair(pair: dict[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    own = rows[
        (rows["baseline"] == pair["learner"]["id"]) & (rows["target"] == pair["sampler"]["id"])
    ]
    sites = site_table(own)
    return {
        **pair,
        "site_rows": sites.head(MAX_ROWS).to_dict("records"),
        "site_count": len(sites),
        "skips": skip_table(own),
    }


def site_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per site and kind: means over the probes, in execution order."""
    compared = rows[rows["status"] == "compared"]
    table = compared.groupby(["fqn", "kind"], sort=False).agg(
        order=("order", "min"),
        probes=("probe", "nunique"),
        bitwise_fraction=("bitwise_fraction", "mean"),
        rel_l2=("rel_l2", "mean"),
        max_abs_diff=("max_abs_diff", "max"),
        mismatch_rate=("mismatch_rate", "mean"),
        scale_ratio=("scale_ratio", "mean"),
    )
    table = table.reset_index().sort_values("order", kind="stable")
    return table.astype(object).where(table.notna(), None)


def skip_table(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Reasons of the skips, with their number and an example."""
    skipped = rows[rows["status"] == "skipped"]
    groups = skipped.groupby("reason", sort=False)
    return [
        {"reason": reason, "count": len(group), "example": f"{first['fqn']}:{first['kind']}"}
        for reason, group in groups
        for first in [group.iloc[0]]
    ]
