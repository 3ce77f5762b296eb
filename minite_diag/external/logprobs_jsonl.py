"""Log-probabilities from a training run (JSONL) -> a run directory with two sides.

One JSON object a line, one sequence::

    token_ids         [int]            prompt and response
    prompt_length     int              response starts here; 0 if it is not given
    learner_logprobs  [float or null]  of every token, or of the response only
    sampler_logprobs  [float or null]  likewise
    id                str              default: the line number
    learner_token_ids [int]            where the learner retokenized; default: token_ids

Knows files and the trace's tables; no engine. Invariant: a token without a log-probability on a
side is in no figure, and nothing is guessed: a list of another length is an error with its line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minite_diag import __version__
from minite_diag.engines.base import ScoredTokens, TokenSequence
from minite_diag.engines.registry import IMPORTED
from minite_diag.errors import UsageError
from minite_diag.external.sequences import read_logprobs, read_prompt_length, read_token_ids
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, write_plan
from minite_diag.probe import Probe

SIDES: Final = ("learner", "sampler")


@dataclass(frozen=True)
class Sequence:
    """One line: a sequence and both sides' log-probabilities, [T] each."""

    id: str
    token_ids: dict[str, tuple[int, ...]]
    prompt_length: int
    logprobs: dict[str, tuple[float | None, ...]]


def read_jsonl(file: Path) -> list[Sequence]:
    """Every sequence of the file; raises UsageError with file, line and what to correct."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"can't read {file}: {error}", "give a JSONL file of UTF-8 text"
        ) from error
    found = [_parse(f"{file}:{n}", n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"{file} holds no sequence", "one JSON object a line")
    seen: set[str] = set()
    for sequence in found:
        if sequence.id in seen:
            raise UsageError(
                f"{file}: id {sequence.id!r} occurs twice", "give each line its own id"
            )
        seen.add(sequence.id)
    return found


def _parse(where: str, number: int, line: str) -> Sequence:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg})", "one object a line") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: not a JSON object", "one object a line")
    ids = read_token_ids(where, record)
    prompt = read_prompt_length(where, record, len(ids))
    own = ids
    if "learner_token_ids" in record:
        own = read_token_ids(where, record, "learner_token_ids")
    if len(own) != len(ids):
        raise UsageError(
            f"{where}: learner_token_ids has {len(own)} tokens, token_ids {len(ids)}",
            "send the sampler's ids to the learner: retokenized text can't be compared",
        )
    logprobs = {
        side: read_logprobs(where, record, f"{side}_logprobs", len(ids), prompt) for side in SIDES
    }
    name = str(record.get("id", f"line-{number}"))
    return Sequence(name, {"learner": own, "sampler": ids}, prompt, logprobs)


def import_logprobs(file: Path, run: Path) -> Plan:
    """Write `run`: plan, both sides' tokens, comparison; returns the plan.

    Raises UsageError for a bad line, or where `run` holds a run already.
    """
    from minite_diag.compare import compare

    if (run / "plan.json").exists():
        raise UsageError(f"{run} holds a run already", "give another folder with --out")
    sequences = read_jsonl(file)
    plan = _plan(file, sequences)
    run.mkdir(parents=True, exist_ok=True)
    write_plan(plan, run)
    for spec in plan.engines:
        _write_trace(run, plan, spec, sequences)
    compare(run)
    return plan


def _plan(file: Path, sequences: list[Sequence]) -> Plan:
    engines = tuple(
        EngineSpec(f"{side}-{IMPORTED}", side, IMPORTED, sys.executable, "", "unknown")
        for side in SIDES
    )
    vocabulary = 1 + max(max(map(max, s.token_ids.values())) for s in sequences)
    return Plan(
        model=ModelRef(file.stem, "", "unknown", "unknown", "", vocabulary, 0),
        engines=engines,
        probes=tuple(
            Probe.make(s.id, list(s.token_ids["sampler"]), s.prompt_length or 1) for s in sequences
        ),
        dtype="unknown",
        quantize="unknown",
        quantized=(),
        export_recipe="unknown",
        modes=("sample",),
        capture=CaptureSpec(sites=()),
        version=__version__,
    )


def _write_trace(run: Path, plan: Plan, spec: EngineSpec, sequences: list[Sequence]) -> None:
    from minite_diag.capture.sequences import token_rows
    from minite_diag.trace.store import TraceWriter

    writer = TraceWriter(run / "traces" / spec.id)
    sampler = plan.samplers[0].id
    for scored in _scored(sequences, spec.role, sampler):
        writer.tokens(token_rows(scored))
    writer.manifest(
        {
            "engine": {**spec.__dict__, "align": list(spec.align)},
            "status": "ok",
            "error": None,
            "label": f"{spec.role} of {plan.model.name}",
            "version": "",
            "device": "",
            "dtype": "",
            "evidence": [],
            "layout": {"parts": {}, "block_scale_layout": "linear"},
            "invisible": {"*": "log-probabilities were imported: no tensor was seen"},
        }
    )
    writer.close()


def _scored(sequences: list[Sequence], role: str, sampler: str) -> Iterator[ScoredTokens]:
    for s in sequences:
        ids = s.token_ids[role]
        phase = "decode" if role == "sampler" else "prefill"
        phases = ("prefill",) * s.prompt_length + (phase,) * (len(ids) - s.prompt_length)
        sequence = TokenSequence("sample", sampler, s.id, ids, s.prompt_length)
        yield ScoredTokens(sequence, s.logprobs[role], phases)
