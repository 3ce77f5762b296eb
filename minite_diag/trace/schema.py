"""Every Parquet table of a run, declared once.

Knows pyarrow only: no torch, no engine. Invariant: each file on disk carries `schema_version`
in its metadata, and a reader refuses another version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from minite_diag.errors import TraceError

SCHEMA_VERSION: Final = 1
BATCH_ROWS: Final = 4096
"""Rows of a table in memory while it is written."""


def _table(name: str, *fields: tuple[str, pa.DataType, str]) -> pa.Schema:
    return pa.schema(
        [pa.field(n, t, metadata={"doc": doc}) for n, t, doc in fields],
        metadata={"table": name, "schema_version": str(SCHEMA_VERSION)},
    )


_S, _I, _F, _B = pa.string(), pa.int32(), pa.float64(), pa.bool_()

TOKENS: Final = _table(
    "tokens",
    ("mode", _S, "score (teacher-forced) or sample (decoded by `source`)"),
    ("source", _S, "engine id that generated the tokens; empty in score mode"),
    ("probe", _S, "probe id"),
    ("position", _I, "index of the token in the sequence, from 0"),
    ("token_id", _I, "vocabulary id"),
    ("logprob", _F, "natural log-probability given the earlier tokens; null at position 0"),
    ("phase", _S, "prefill or decode: how this engine computed the logprob"),
    ("generated", _B, "whether the sampler chose this token"),
    ("top_ids", pa.list_(_I), "the k most probable ids at this position"),
    ("top_logprobs", pa.list_(pa.float32()), "their log-probabilities"),
)

CALLS: Final = _table(
    "calls",
    ("call", _I, "forward pass, counted from 0"),
    ("row", _I, "row of the call's flat token batch"),
    ("mode", _S, "score or sample"),
    ("source", _S, "engine id that generated the tokens; empty in score mode"),
    ("probe", _S, "probe id"),
    ("position", _I, "index of the row's token in its sequence"),
    ("phase", _S, "prefill or decode"),
)

TENSORS: Final = _table(
    "tensors",
    ("order", _I, "execution order within the call; -1 for static tensors"),
    ("native", _S, "module name in the engine"),
    ("kind", _S, "site kind, or a native kind that canonical.scales converts"),
    ("call", _I, "forward pass; -1 for tensors that don't depend on tokens"),
    ("rows", _S, "static, tokens (dim 0 is the call's rows), call (one per call), routed"),
    ("dtype", _S, "torch dtype without the prefix"),
    ("shape", pa.list_(pa.int64()), "shape as captured"),
    ("file", _S, "segment under tensors/; empty when only statistics were kept"),
    ("offset", pa.int64(), "byte offset in the segment"),
    ("nbytes", pa.int64(), "bytes of the tensor"),
    ("row_offset", pa.int64(), "offset of the int32 row indices of a routed or sliced tensor"),
    (
        "digest",
        _S,
        "BLAKE2b-128 of the bytes, after that of the row indices if routed; empty unless stats_only",
    ),
    ("abs_max", _F, "largest magnitude; null unless stats_only"),
    ("l2", _F, "Euclidean norm; null unless stats_only"),
    ("mean", _F, "mean; null unless stats_only"),
)

COMPARISON: Final = _table(
    "comparison",
    ("baseline", _S, "engine id of the baseline (the learner)"),
    ("target", _S, "engine id of the target"),
    ("mode", _S, "score, sample, or static for weights"),
    ("source", _S, "engine id that generated the tokens; empty in score mode"),
    ("probe", _S, "probe id; empty for static tensors"),
    ("order", _I, "execution order in the baseline (target where it has no partner)"),
    ("fqn", _S, "checkpoint module name"),
    ("kind", _S, "tensor kind"),
    ("layer_index", _I, "decoder layer; null outside"),
    ("expert_index", _I, "expert; null outside"),
    ("status", _S, "compared or skipped"),
    ("reason", _S, "why it was skipped; notes on how it was compared"),
    ("baseline_dtype", _S, "dtype as captured"),
    ("target_dtype", _S, "dtype as captured"),
    ("elements", pa.int64(), "elements compared"),
    ("bitwise_fraction", _F, "share of equal elements, compared as bytes (E2M1: 0x8 = 0x0)"),
    ("max_abs_diff", _F, "largest absolute difference"),
    ("mean_abs_diff", _F, "mean absolute difference"),
    ("rel_l2", _F, "norm of the difference / norm of the baseline"),
    ("rel_diff", _F, "1 - 2xy / (x^2 + y^2)"),
    ("cosine", _F, "cosine similarity"),
    ("sqnr_db", _F, "20 log10(norm of the baseline / norm of the difference)"),
    ("ulp_p50", _F, "median distance in units in the last place of the narrower dtype"),
    ("ulp_p99", _F, "99th percentile of it"),
    ("ulp_max", _F, "largest of it"),
    ("mismatch_rate", _F, "share of differing codes or block scales (zero blocks masked)"),
    ("scale_ratio", _F, "target / baseline global decode scale (median)"),
    ("agreement", _F, "top-k ids: share of rows with the same expert set"),
    ("nonfinite", pa.int64(), "elements that are NaN or infinite on either side"),
    ("first_row", _I, "first token position that differs; null if none"),
)

SCALES: Final = _table(
    "scales",
    ("baseline", _S, "engine id of the baseline (the learner)"),
    ("target", _S, "engine id of the target"),
    ("mode", _S, "score, sample, or static for weights"),
    ("kind", _S, "weight_block_scale or act_block_scale"),
    ("layer_index", _I, "decoder layer; null outside"),
    ("code", _I, "block scale as an E4M3 byte"),
    ("baseline_blocks", pa.int64(), "blocks of the baseline with this scale"),
    ("target_blocks", pa.int64(), "blocks of the target with this scale"),
)

LOGPROBS: Final = _table(
    "logprobs",
    ("baseline", _S, "engine id of the baseline (the learner)"),
    ("target", _S, "engine id of the target"),
    ("mode", _S, "score or sample"),
    ("source", _S, "engine id that generated the tokens; empty in score mode"),
    ("probe", _S, "probe id"),
    ("category", _S, "probe category"),
    ("position", _I, "index of the token in the sequence"),
    ("token_id", _I, "vocabulary id"),
    ("generated", _B, "whether the sampler chose this token"),
    ("target_phase", _S, "prefill or decode, in the target"),
    ("baseline_logprob", _F, "natural log-probability"),
    ("target_logprob", _F, "natural log-probability"),
    ("full_kl", _F, "KL(baseline || target) over the vocabulary; null without logits"),
    ("topk_overlap", _F, "share of common ids among the k most probable"),
)

ATTRIBUTION: Final = _table(
    "attribution",
    ("baseline", _S, "engine id of the baseline (the learner); of both for a leg"),
    ("target", _S, "engine id of the target"),
    ("analysis", _S, "cause, routing, leg, local, causal-ops, causal-layers, routing-replay"),
    ("code", _S, "cause code, such as MD101; null where none applies"),
    ("where", _S, "site, op class, layer range or leg"),
    ("text", _S, "the finding in a sentence"),
    ("value", _F, "the analysis' main number; its meaning is in `evidence`"),
    ("strength", _S, "proved, measured or hint"),
    ("basis", _S, "least native arithmetic that the evidence rests on"),
    ("evidence", _S, "JSON: the numbers behind it"),
)

TABLES: Final = {
    t.metadata[b"table"].decode(): t
    for t in (TOKENS, CALLS, TENSORS, COMPARISON, SCALES, LOGPROBS, ATTRIBUTION)
}


def write_table(file: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Write rows under a declared schema, atomically; an unknown column is a KeyError."""
    with TableWriter(file, schema) as table:
        for row in rows:
            table.append(row)


class TableWriter:
    """Rows of one table, written in batches; the file appears when all of them are in it.

    A context manager: leaving it by an exception removes what was written. Invariant: no more than
    BATCH_ROWS rows are in memory.
    """

    def __init__(self, file: Path, schema: pa.Schema) -> None:
        self.file = file
        self.schema = schema
        self._partial = file.with_suffix(".partial")
        self._names = frozenset(schema.names)
        self._rows: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> TableWriter:
        self._writer = pq.ParquetWriter(self._partial, self.schema, compression="zstd")
        return self

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; a column that it lacks is null, an unknown one is a KeyError."""
        if not self._names.issuperset(row):
            unknown = sorted(set(row) - self._names)
            raise KeyError(f"{self.file.name}: columns not in the schema: {unknown}")
        self._rows.append(row)
        if len(self._rows) >= BATCH_ROWS:
            self._write()

    def _write(self) -> None:
        assert self._writer is not None
        columns = [
            pa.array([row.get(field.name) for row in self._rows], field.type)
            for field in self.schema
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self.schema))
        self._rows = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._writer is not None
        if error is None and self._rows:
            self._write()
        self._writer.close()
        if error is None:
            self._partial.replace(self.file)
        else:
            self._partial.unlink(missing_ok=True)


def read_table(
    file: Path, schema: pa.Schema, *, dictionary: Sequence[str] = (), **options: Any
) -> pa.Table:
    """Read a table; raises TraceError if it is missing, damaged or of another version.

    The columns in `dictionary` stay dictionary-encoded, as they are stored.
    """
    name = schema.metadata[b"table"].decode()
    try:
        # Not pq.read_table: that imports pandas, half a second.
        with pq.ParquetFile(file, read_dictionary=list(dictionary)) as stored:
            table = stored.read(**options)
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceError(
            f"can't read {file}: {error}", "the run is incomplete: compare --resume RUN"
        ) from error
    found = (table.schema.metadata or {}).get(b"schema_version", b"?").decode()
    if found != str(SCHEMA_VERSION):
        raise TraceError(
            f"{file}: {name} has schema {found}, this version reads {SCHEMA_VERSION}",
            "run compare again with this version",
        )
    return table
