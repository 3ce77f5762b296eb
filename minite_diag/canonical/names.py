"""Native names -> checkpoint sites, per token sequence.

Knows traces and layouts; no engine and no metric. Invariant: every captured tensor lands under at
least one site, so what one side captured and the other did not can be listed.

A trace of a large mixture of experts has a million tensors: sequences are looked up one at a time,
a site is an entry of a few numbers, and its pieces are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from minite_diag.canonical.scales import public_kind
from minite_diag.engines.base import Part
from minite_diag.site import STATIC_KINDS, Site
from minite_diag.trace.index import Coded, TensorRef
from minite_diag.trace.store import Trace

Array = np.ndarray[Any, Any]


class SequenceKey(NamedTuple):
    """Which tokens: mode, source engine, probe. `STATIC` stands for no tokens at all."""

    mode: str
    source: str
    probe: str


STATIC: Final = SequenceKey("static", "", "")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one call that belong to one sequence, and their positions."""

    rows: Array
    positions: Array


@dataclass(frozen=True, slots=True)
class Piece:
    """One captured tensor (or a part of it) that makes up a site."""

    ref: TensorRef
    part: Part
    rows: Rows | None


class _Entry(NamedTuple):
    """Index rows of one native tensor, in the order of the calls, and the part of it."""

    rows: Array
    part: Part


class Sites(Mapping[Site, list[Piece]]):
    """Every site of one sequence; its pieces are in the order of the calls."""

    def __init__(self, trace: Trace, calls: dict[int, Rows]) -> None:
        self._trace = trace
        self._calls = calls
        self._entries: dict[Site, list[_Entry]] = {}
        self._hidden: dict[Site, list[_Entry]] = {}

    def add(self, site: Site, rows: Array, part: Part) -> None:
        """Enter index rows of one native tensor."""
        self._entries.setdefault(site, []).append(_Entry(rows, part))

    def share(self, site: Site, other: Sites) -> None:
        """Take a site that `other` hides, unless it is here."""
        if site not in self._entries:
            self._entries[site] = other._hidden[site]

    def hide(self, site: Site) -> None:
        """Keep a site for `share` only."""
        self._hidden[site] = self._entries.pop(site)

    def __getitem__(self, site: Site) -> list[Piece]:
        return [
            Piece(ref, entry.part, None if ref.rows == "static" else self._calls[ref.call])
            for entry in self._entries[site]
            for ref in map(self._trace.index.__getitem__, entry.rows.tolist())
        ]

    def __contains__(self, site: object) -> bool:
        return site in self._entries

    def __iter__(self) -> Iterator[Site]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def order(self, site: Site) -> int:
        """Order of first execution."""
        order = self._trace.index.order
        return min(int(order[entry.rows].min()) for entry in self._entries[site])


class TraceSites(Mapping[SequenceKey, Sites]):
    """The sites of a trace by sequence; those of the last one asked for are kept."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        index = trace.index
        self._tensors = (
            index.native.codes.astype(np.int64) * len(index.kind.names) + index.kind.codes
        )
        self._by_call = np.argsort(index.call, kind="stable")
        self._sorted_calls = index.call[self._by_call]
        self._is_static = np.array([name == "static" for name in index.rows.names] or [False])[
            index.rows.codes
        ]
        self._calls = _Calls(trace)
        self._named: dict[int, list[tuple[Site, Part]]] = {}
        self._last: tuple[SequenceKey, Sites] | None = None
        self._static = self._build(STATIC)
        self._shared = [site for site in self._static if site.kind not in STATIC_KINDS]
        for site in self._shared:
            self._static.hide(site)
        self._keys = self._list_keys()

    def _list_keys(self) -> dict[SequenceKey, None]:
        """Sequences with tensors, in the order of their first call."""
        keys = [STATIC] if self._is_static.any() else []
        for call in np.unique(self._sorted_calls).tolist():
            keys += self._calls.keys_of(call)
        return dict.fromkeys(keys)

    def __getitem__(self, key: SequenceKey) -> Sites:
        if key == STATIC and STATIC in self._keys:
            return self._static
        if key not in self._keys:
            raise KeyError(key)
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = (key, self._build(key))
        return self._last[1]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[SequenceKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _build(self, key: SequenceKey) -> Sites:
        calls = {} if key == STATIC else self._calls.of(key)
        sites = Sites(self.trace, calls)
        rows = np.flatnonzero(self._is_static) if key == STATIC else self._rows_of(list(calls))
        tensors = self._tensors[rows]
        order = np.argsort(tensors, kind="stable")
        rows = rows[order]
        found, starts = np.unique(tensors[order], return_index=True)
        # In the order in which they ran, as far as one number per tensor says it.
        ends = [*starts[1:].tolist(), len(rows)][: len(found)]
        for tensor, start, end in zip(found.tolist(), starts.tolist(), ends, strict=True):
            for site, part in self._sites_of(tensor):
                sites.add(site, rows[start:end], part)
        if key != STATIC:
            self._share_static_scales(sites)
        return sites

    def _rows_of(self, calls: list[int]) -> Array:
        """Index rows of these calls, call by call."""
        starts = np.searchsorted(self._sorted_calls, calls, side="left").tolist()
        ends = np.searchsorted(self._sorted_calls, calls, side="right").tolist()
        ranges = [self._by_call[a:b] for a, b in zip(starts, ends, strict=True)]
        rows = np.concatenate([np.empty(0, np.int64), *ranges])
        return rows[~self._is_static[rows]]

    def _sites_of(self, tensor: int) -> list[tuple[Site, Part]]:
        """The sites inside one native tensor (a native name and a kind)."""
        if tensor not in self._named:
            native, kind = divmod(tensor, len(self.trace.index.kind.names))
            name = self.trace.index.native.names[native]
            public = public_kind(self.trace.index.kind.names[kind])
            parts = self.trace.layout.parts.get(name) or (Part(name),)
            self._named[tensor] = [(Site(part.fqn, public), part) for part in parts]
        return self._named[tensor]

    def _share_static_scales(self, sites: Sites) -> None:
        """A calibrated activation scale is held once and holds for every sequence."""
        for site in self._shared:
            # An expert that saw no token of a sequence used no scale in it.
            if Site(site.fqn, "act_codes") in sites:
                sites.share(site, self._static)


class _Calls:
    """Which rows of which call belong to which sequence."""

    def __init__(self, trace: Trace) -> None:
        table = trace.call_table
        columns = [Coded(table[name]) for name in SequenceKey._fields]
        sequence = np.zeros(len(table), np.int64)
        for column in columns:
            sequence = sequence * max(1, len(column.names)) + column.codes
        call = table["call"].to_numpy()
        order = np.lexsort((np.arange(len(table)), call, sequence))
        self._rows = table["row"].to_numpy().astype(np.int64)[order]
        self._positions = table["position"].to_numpy().astype(np.int64)[order]
        sequence, call = sequence[order], call[order]
        first = np.ones(len(order), bool)
        first[1:] = (sequence[1:] != sequence[:-1]) | (call[1:] != call[:-1])
        self._starts = np.append(np.flatnonzero(first), len(order))
        self._call_of_group = call[first]
        keys = [SequenceKey(*(column[row] for column in columns)) for row in order[first].tolist()]
        self._groups: dict[SequenceKey, list[int]] = {}
        self._keys_of_call: dict[int, list[SequenceKey]] = {}
        for group, key in enumerate(keys):
            self._groups.setdefault(key, []).append(group)
            self._keys_of_call.setdefault(int(self._call_of_group[group]), []).append(key)

    def keys_of(self, call: int) -> list[SequenceKey]:
        """The sequences that have rows in a call."""
        return self._keys_of_call.get(call, [])

    def of(self, key: SequenceKey) -> dict[int, Rows]:
        """The rows of a sequence by call, in the order of the calls."""
        return {
            int(self._call_of_group[group]): self._of_group(group) for group in self._groups[key]
        }

    def _of_group(self, group: int) -> Rows:
        start, end = self._starts[group], self._starts[group + 1]
        return Rows(self._rows[start:end], self._positions[start:end])


def index_trace(trace: Trace) -> Mapping[SequenceKey, Sites]:
    """Every site of a trace by sequence; pieces are in the order of the calls."""
    return TraceSites(trace)


def execution_order(sites: Sites) -> dict[Site, int]:
    """Order of first execution of each site."""
    order = {site: sites.order(site) for site in sites}
    for site in [site for site in order if site.kind.startswith("act_") and order[site] < 0]:
        order[site] = order.get(Site(site.fqn, "act_codes"), -1)
    return order
