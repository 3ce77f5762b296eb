"""Tensors of a site in token order, read one at a time.

Knows traces; no engine and no metric. Invariant: rows come out sorted by position, whatever the
batching, chunking or routing order of the engine was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minite_diag.canonical.names import Piece
from minite_diag.canonical.scales import public_kind, to_decode
from minite_diag.canonical.shards import take_part
from minite_diag.trace.store import Trace

Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class SiteTensor:
    """A site's tensor; `positions` int64 [rows] for token-wise tensors, None for others."""

    tensor: torch.Tensor
    positions: Positions | None


def read_site(trace: Trace, pieces: list[Piece]) -> SiteTensor:
    """Read, slice, convert and order the pieces of one site."""
    tensors, positions = [], []
    for piece in pieces:
        tensor, where = _read_piece(trace, piece)
        tensors.append(tensor)
        positions.append(where)
    if positions[0] is None:
        return SiteTensor(_one_or_stack(tensors), None)
    return _in_order(tensors, [p for p in positions if p is not None])


def _one_or_stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Per-call scalars of several calls form a vector in call order."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([tensor.reshape(-1)[0] for tensor in tensors])


def _in_order(tensors: list[torch.Tensor], positions: list[Positions]) -> SiteTensor:
    tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    where = positions[0] if len(positions) == 1 else np.concatenate(positions)
    if len(where) > 1 and not bool(np.all(where[1:] > where[:-1])):
        order = np.argsort(where, kind="stable")
        tensor, where = tensor[torch.from_numpy(order)], where[order]
    return SiteTensor(tensor, where)


def _read_piece(trace: Trace, piece: Piece) -> tuple[torch.Tensor, Positions | None]:
    ref = piece.ref
    tensor = to_decode(trace.read(ref), ref.kind)
    siblings = trace.layout.parts.get(ref.native) or (piece.part,)
    tensor = take_part(tensor, public_kind(ref.kind), piece.part, siblings)
    if ref.rows in ("static", "call") or piece.rows is None:
        return tensor, None
    row_index = trace.read_rows(ref)
    if row_index is None and len(piece.rows.rows) == tensor.shape[0]:
        return tensor, piece.rows.positions
    own = row_index.numpy() if row_index is not None else np.arange(tensor.shape[0])
    position_of = np.full(max(own.max(initial=-1), piece.rows.rows.max(initial=-1)) + 1, -1)
    position_of[piece.rows.rows] = piece.rows.positions
    where = position_of[own]
    mine = where >= 0
    if mine.all():
        return tensor, where
    return tensor[torch.from_numpy(mine)], where[mine]
