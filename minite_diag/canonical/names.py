"""Native names -> checkpoint sites, per token sequence.

Knows traces and layouts; no engine and no metric. Invariant: every captured tensor lands under at
least one site, so what one side captured and the other did not can be listed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from minite_diag.canonical.scales import public_kind
from minite_diag.engines.base import Part
from minite_diag.site import Site
from minite_diag.trace.store import TensorRef, Trace


class SequenceKey(NamedTuple):
    """Which tokens: mode, source engine, probe. `STATIC` stands for no tokens at all."""

    mode: str
    source: str
    probe: str


STATIC: Final = SequenceKey("static", "", "")


@dataclass(frozen=True)
class Rows:
    """The rows of one call that belong to one sequence, and their positions."""

    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    positions: np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Piece:
    """One captured tensor (or a part of it) that makes up a site."""

    ref: TensorRef
    part: Part
    rows: Rows | None


Sites = dict[Site, list[Piece]]


def index_trace(trace: Trace) -> dict[SequenceKey, Sites]:
    """Every site of a trace by sequence; pieces are in the order of the calls."""
    calls = _rows_of_calls(trace)
    found: dict[SequenceKey, Sites] = defaultdict(dict)
    for ref in trace.index:
        parts = trace.layout.parts.get(ref.native) or (Part(ref.native),)
        if ref.rows == "static":
            _add(found[STATIC], ref, parts, None)
            continue
        for key, rows in calls.get(ref.call, {}).items():
            _add(found[key], ref, parts, rows)
    _share_static_scales(found)
    return dict(found)


def _share_static_scales(found: dict[SequenceKey, Sites]) -> None:
    """A calibrated activation scale is held once and holds for every sequence."""
    static = found.get(STATIC, {})
    for site in [site for site in static if site.kind.startswith("act_")]:
        pieces = static.pop(site)
        for key, sites in found.items():
            # An expert that saw no token of a sequence used no scale in it.
            if key != STATIC and Site(site.fqn, "act_codes") in sites:
                sites.setdefault(site, pieces)


def _add(sites: Sites, ref: TensorRef, parts: tuple[Part, ...], rows: Rows | None) -> None:
    kind = public_kind(ref.kind)
    for part in parts:
        sites.setdefault(Site(part.fqn, kind), []).append(Piece(ref, part, rows))


def _rows_of_calls(trace: Trace) -> dict[int, dict[SequenceKey, Rows]]:
    table = trace.calls
    result: dict[int, dict[SequenceKey, Rows]] = defaultdict(dict)
    groups = table.groupby(["call", "mode", "source", "probe"], sort=False)
    for (call, mode, source, probe), group in groups:
        key = SequenceKey(str(mode), str(source), str(probe))
        result[int(call)][key] = Rows(
            group["row"].to_numpy(np.int64), group["position"].to_numpy(np.int64)
        )
    return dict(result)


def execution_order(sites: Sites) -> dict[Site, int]:
    """Order of first execution of each site."""
    order = {site: min(piece.ref.order for piece in pieces) for site, pieces in sites.items()}
    for site in [site for site in order if site.kind.startswith("act_") and order[site] < 0]:
        order[site] = order.get(Site(site.fqn, "act_codes"), -1)
    return order
