"""The first site, in execution order, whose bits differ; and what was equal just before it.

Works on stored comparison rows: no torch, no engine. Invariant: a site that was skipped is never
called equal; skips that come earlier than the divergence are counted beside it.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

PRODUCED_KINDS = ("output", "logits", "router_logits", "topk_ids", "topk_weights")

BY_PROBE = 200


def first_divergence(rows: pd.DataFrame) -> dict[str, Any] | None:
    """The earliest differing site over all probes in score mode; None if all bits are equal.

    `rows` are the comparison rows of one pair. `input_equal` says whether the site's own input was
    bitwise equal (None: not seen), and so `weights_equal`, `codes_equal`, `scales_equal` of its
    weights, activation codes and block scales. `by_probe` has the first site and token of each
    probe, at most BY_PROBE of them.
    """
    tokenwise = rows[(rows["mode"] != "static") & (rows["status"] == "compared")]
    score = tokenwise[tokenwise["mode"] == "score"]
    tokenwise = score if len(score) else tokenwise
    different = tokenwise[tokenwise["bitwise_fraction"].fillna(1.0) < 1.0]
    if not len(different):
        return None
    earliest = different.sort_values(["order", "probe"], kind="stable").iloc[0]
    here = different[
        (different["fqn"] == earliest["fqn"]) & (different["kind"] == earliest["kind"])
    ]
    before = rows[(rows["mode"] == earliest["mode"]) & (rows["order"] < earliest["order"])]
    skipped = before[before["status"] == "skipped"]
    first_row = here["first_row"].dropna()
    return {
        "site": str(earliest["fqn"]),
        "kind": str(earliest["kind"]),
        "layer_index": _int_or_none(earliest["layer_index"]),
        "probe": str(earliest["probe"]),
        "position": int(first_row.iloc[0]) if len(first_row) else None,
        "probes": int(here["probe"].nunique()),
        "bitwise_fraction": float(here["bitwise_fraction"].mean()),
        "rel_l2": _mean_or_none(here["rel_l2"]),
        "input_equal": _is_equal(tokenwise, earliest, "input"),
        "weights_equal": _weights_equal(rows, str(earliest["fqn"])),
        "codes_equal": _is_equal(tokenwise, earliest, "act_codes"),
        "scales_equal": _is_equal(tokenwise, earliest, "act_block_scale"),
        "by_probe": _by_probe(different),
        "skipped_before": int(skipped[["fqn", "kind"]].drop_duplicates().shape[0]),
    }


def _by_probe(different: pd.DataFrame) -> list[dict[str, Any]]:
    """Where each probe parts: its first differing site, and the first differing token there."""
    ordered = different.sort_values(["order", "fqn", "kind"], kind="stable")
    first = ordered.drop_duplicates("probe").sort_values("probe", kind="stable")
    return [
        {
            "probe": str(row["probe"]),
            "site": str(row["fqn"]),
            "kind": str(row["kind"]),
            "position": _int_or_none(row["first_row"]),
        }
        for _, row in first.head(BY_PROBE).iterrows()
    ]


def _is_equal(rows: pd.DataFrame, site: pd.Series, kind: str) -> bool | None:
    if site["kind"] == kind:
        return False
    found = rows[
        (rows["fqn"] == site["fqn"]) & (rows["kind"] == kind) & (rows["probe"] == site["probe"])
    ]["bitwise_fraction"].dropna()
    return bool((found == 1.0).all()) if len(found) else None


def _weights_equal(rows: pd.DataFrame, fqn: str) -> bool | None:
    found = rows[
        (rows["fqn"] == fqn)
        & rows["kind"].str.startswith("weight")
        & (rows["status"] == "compared")
        & (rows["kind"] != "weight_global_decode_scale")
    ]["bitwise_fraction"].dropna()
    return bool((found == 1.0).all()) if len(found) else None


def _int_or_none(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _mean_or_none(values: pd.Series) -> float | None:
    values = values.dropna()
    return float(values.mean()) if len(values) else None
