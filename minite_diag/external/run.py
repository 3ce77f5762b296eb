"""The import stage: sides from outside, and those of a run if one is named, as a new run directory.

Knows the plan, traces and the readers of foreign formats; no engine. Invariant: two sides meet only
in sequences with the same token ids; the run that sides are taken from is not changed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minite_diag import __version__
from minite_diag.canonical.names import SequenceKey
from minite_diag.checkpoints.names import natural_key
from minite_diag.engines.registry import IMPORTED
from minite_diag.errors import CheckpointError, UsageError
from minite_diag.external import manifest as manifests
from minite_diag.external.modules import HeadCounts
from minite_diag.external.sequences import ExternalSequence
from minite_diag.external.side import ImportedSide, SideWriter
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, read_plan, write_plan
from minite_diag.probe import Probe

FORMATS: Final = ("logprobs-jsonl", *manifests.FORMATS)
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class ImportRequest:
    """A file with both sides, or folders of each role and where the rest of the run comes from.

    `run`: a run whose other engines are kept; `model`: folder of the checkpoint (config.json);
    `format`: what every folder has to be, or None to look.
    """

    file: Path | None = None
    learner: Path | None = None
    samplers: tuple[Path, ...] = ()
    run: Path | None = None
    model: Path | None = None
    format: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says of the model."""

    name: str = "unknown"
    architecture: str = "unknown"
    vocab_size: int = 0
    num_layers: int = 0
    counts: HeadCounts = field(default_factory=HeadCounts)


def detect_format(folder: Path) -> str:
    """Which of FORMATS a path is; raises UsageError where it is none."""
    if folder.is_file():
        return "logprobs-jsonl"
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}", "give a folder of dumped tensors")
    if manifests.has_manifest(folder):
        record = manifests.read_json(folder / manifests.FILE)
        found = record.get("format") if isinstance(record, dict) else None
        if found not in manifests.FORMATS:
            raise UsageError(
                f"{folder / manifests.FILE}: format is {found!r}",
                f"one of {', '.join(manifests.FORMATS)}: see docs/traces.md",
            )
        return str(found)
    from minite_diag.external.sglang_dumper import is_sglang_dump
    from minite_diag.external.te_dumps import is_te_dump

    if is_te_dump(folder):
        return "te-dumps"
    if is_sglang_dump(folder):
        return "sglang-dumper"
    raise UsageError(
        f"{folder} is no dump that is known: no {manifests.FILE}, no tensor_dumps/rank_0 "
        "(Transformer Engine) and no ...___rank=...___name=....pt (SGLang)",
        f"one of {', '.join(manifests.FORMATS)}: see docs/traces.md",
    )


def read_side(folder: Path, format: str | None, facts: ModelFacts) -> ImportedSide:
    """Read a folder; raises UsageError where it isn't of `format` or can't be used."""
    found = detect_format(folder)
    if format is not None and format != found:
        raise UsageError(f"{folder} is of format {found}, not {format}", f"--format {found}")
    if found == "sharded":
        from minite_diag.external.sharded import read_sharded

        return read_sharded(folder, facts.counts)
    if found == "te-dumps":
        from minite_diag.external.te_dumps import read_te_dumps

        return read_te_dumps(folder, facts.counts)
    if found == "sglang-dumper":
        from minite_diag.external.sglang_dumper import read_sglang_dump

        return read_sglang_dump(folder, facts.counts)
    raise UsageError(f"{folder} is a file", "a side is a folder; a JSONL file holds both sides")


def import_traces(request: ImportRequest, out: Path, say: Callable[[str], None]) -> Plan:
    """Write the run `out` of what the request names; returns its plan. Raises UsageError.

    What a dump holds and a trace can't is said, a line for each reason.
    """
    if request.format is not None and request.format not in FORMATS:
        raise UsageError(f"no format {request.format!r}", f"one of {', '.join(FORMATS)}")
    if request.file is None:
        return import_sides(request, out, say)
    if request.learner or request.samplers or request.run:
        raise UsageError(
            f"{request.file} holds both sides", "give a file, or folders by --learner and --sampler"
        )
    if request.file.is_dir():
        raise UsageError(
            f"{request.file} is a folder: is it the learner's or a sampler's?",
            f"minite-diag import --learner {request.file} or --sampler {request.file}",
        )
    if request.format not in (None, "logprobs-jsonl"):
        raise UsageError(f"{request.file} is a file, not {request.format}", "give a folder")
    from minite_diag.external.logprobs_jsonl import import_logprobs

    return import_logprobs(request.file, out)


def import_sides(request: ImportRequest, out: Path, say: Callable[[str], None]) -> Plan:
    """Write the run `out`: plan, traces, comparison; returns the plan. Raises UsageError.

    A run directory that this call made is removed again if it fails.
    """
    from minite_diag.compare import compare

    if (out / "plan.json").exists() or (out / "traces").exists():
        raise UsageError(f"{out} holds a run already", "give another folder with --out")
    base = read_plan(request.run) if request.run is not None else None
    facts = read_facts(request.model, base)
    folders = [("learner", request.learner)] if request.learner else []
    folders += [("sampler", folder) for folder in request.samplers]
    sides = [(role, read_side(folder, request.format, facts)) for role, folder in folders]
    kept = _kept(base, replaces_learner=request.learner is not None)
    _check_roles([role for role, _ in sides] + [spec.role for spec in kept])
    specs = _specs([role for role, _ in sides], kept)
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        known: dict[SequenceKey, TokenIds] = {}
        quantized: set[str] = set()
        if request.run is not None:
            for spec in kept:
                _copy_trace(request.run, spec, out)
            known = _sequences_of(out, kept)
        for spec, (_, side) in zip(specs, sides, strict=True):
            keys = match_sequences(side, known)
            known |= {keys[s.id]: known.get(keys[s.id], s.token_ids) for s in side.sequences}
            writer = SideWriter(out, spec, side, keys)
            writer.write()
            quantized |= writer.quantized
            _report(spec, side, writer.count, say)
        engines = [*specs, *kept]
        plan = _plan(base, facts, engines, [side for _, side in sides], known, quantized)
        write_plan(plan, out)
        compare(out)
    except BaseException:
        _remove(out, existed=existed)
        raise
    return plan


def _report(spec: EngineSpec, side: ImportedSide, count: int, say: Callable[[str], None]) -> None:
    tokens = sum(len(sequence.token_ids) for sequence in side.sequences)
    say(
        f"{spec.id}: {count} tensors, {len(side.sequences)} sequences, {tokens} tokens "
        f"({side.format})"
    )
    reasons: dict[str, list[str]] = {}
    for name, reason in side.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(f"{spec.id}: left out {names[0]}{more}: {reason}")


def _kept(base: Plan | None, *, replaces_learner: bool) -> list[EngineSpec]:
    """The engines of the named run that stay: all, but for a learner that is replaced."""
    if base is None:
        return []
    return [spec for spec in base.engines if not (replaces_learner and spec.role == "learner")]


def _check_roles(roles: Sequence[str]) -> None:
    if roles.count("learner") != 1 or "sampler" not in roles:
        missing = "sampler" if "learner" in roles else "learner"
        raise UsageError(
            f"a run needs a learner and a sampler, here is no {missing}",
            f"add --{missing} FOLDER, or --run RUN to take it from a run",
        )


def _specs(roles: Sequence[str], kept: Sequence[EngineSpec]) -> list[EngineSpec]:
    taken = {spec.id for spec in kept}
    found = []
    for role in roles:
        name = f"{role}-{IMPORTED}"
        number = 1
        while name in taken:
            number += 1
            name = f"{role}-{IMPORTED}-{number}"
        taken.add(name)
        found.append(EngineSpec(name, role, IMPORTED, sys.executable, "", "unknown"))
    return found


def _copy_trace(run: Path, spec: EngineSpec, out: Path) -> None:
    """A trace of another run: linked where the file system can, else copied."""

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
        return target

    source = run / "traces" / spec.id
    if not (source / "tokens.parquet").exists():
        raise UsageError(
            f"{spec.id} of {run} was not captured", f"minite-diag compare --resume {run}"
        )
    shutil.copytree(source, out / "traces" / spec.id, copy_function=link)


def _sequences_of(run: Path, specs: Sequence[EngineSpec]) -> dict[SequenceKey, TokenIds]:
    """Token ids of every sequence that the kept traces hold."""
    from minite_diag.trace.store import Trace

    found: dict[SequenceKey, TokenIds] = {}
    for spec in specs:
        tokens = Trace(run / "traces" / spec.id).tokens.sort_values("position", kind="stable")
        for key, rows in tokens.groupby(list(SequenceKey._fields), sort=False):
            found.setdefault(SequenceKey(*key), tuple(int(i) for i in rows["token_id"]))
    return found


def match_sequences(
    side: ImportedSide, known: dict[SequenceKey, TokenIds]
) -> dict[str, SequenceKey]:
    """Each sequence's key: the known one with its tokens, else its own. Raises UsageError.

    A dump of a decode holds no row for the token that came last, so a known sequence may have one
    token more.
    """
    keys: dict[str, SequenceKey] = {}
    by_tokens = {tokens: key for key, tokens in reversed(known.items())}
    shorter = {tokens[:-1]: key for key, tokens in reversed(known.items())}
    for sequence in side.sequences:
        key = by_tokens.get(sequence.token_ids) or shorter.get(sequence.token_ids)
        if known and key is None:
            raise _unmatched(side, sequence, known)
        keys[sequence.id] = key or SequenceKey("score", "", sequence.id)
    twice = [key for key in keys.values() if list(keys.values()).count(key) > 1]
    if twice:
        names = [name for name, key in keys.items() if key == twice[0]]
        raise UsageError(
            f"{side.folder}: {' and '.join(names)} have the same tokens", "keep one of them"
        )
    return keys


def _unmatched(
    side: ImportedSide, sequence: ExternalSequence, known: dict[SequenceKey, TokenIds]
) -> UsageError:
    own = sequence.token_ids

    def common(tokens: TokenIds) -> int:
        pairs = enumerate(zip(tokens, own, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(own)))

    nearest, tokens = max(known.items(), key=lambda item: common(item[1]))
    return UsageError(
        f"{side.folder}: no other side has the tokens of {sequence.id} ({len(own)}); nearest is "
        f"{nearest.probe} ({len(tokens)}), equal up to position {common(tokens)}",
        "run the same token ids: they are in `probes` of RUN/plan.json",
    )


def _plan(
    base: Plan | None,
    facts: ModelFacts,
    engines: list[EngineSpec],
    sides: list[ImportedSide],
    known: dict[SequenceKey, TokenIds],
    quantized: set[str],
) -> Plan:
    engines = sorted(engines, key=lambda spec: spec.role != "learner")
    if base is not None:
        return dataclasses.replace(base, engines=tuple(engines))
    prompts = {s.token_ids: s.prompt_length for side in sides for s in side.sequences}
    probes = tuple(
        Probe.make(key.probe, list(tokens), prompts.get(tokens, 0) or 1)
        for key, tokens in known.items()
    )
    vocabulary = facts.vocab_size or 1 + max(max(tokens) for tokens in known.values())
    dtypes = {side.dtype for side in sides if side.dtype}
    name = facts.name if facts.name != "unknown" else sides[0].folder.resolve().name
    return Plan(
        model=ModelRef(name, "", "unknown", facts.architecture, "", vocabulary, facts.num_layers),
        engines=tuple(engines),
        probes=probes,
        dtype=dtypes.pop() if len(dtypes) == 1 else "unknown",
        quantize="unknown",
        quantized=tuple(sorted(quantized, key=natural_key)),
        export_recipe="unknown",
        modes=("score",),
        capture=CaptureSpec(),
        version=__version__,
    )


def _remove(out: Path, *, existed: bool) -> None:
    """Take away what a failed import wrote; a folder that was there before stays."""
    for name in ("plan.json", "comparison.parquet", "logprobs.parquet", "scales.parquet"):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "traces", ignore_errors=True)
    if not existed:
        shutil.rmtree(out, ignore_errors=True)


def read_facts(model: Path | None, base: Plan | None) -> ModelFacts:
    """From the folder given, else from the run's checkpoint if it is still there."""
    if model is not None:
        return _facts(model / "config.json")
    if base is not None and base.model.path:
        file = Path(base.model.path) / "config.json"
        if file.is_file():
            return _facts(file)
    return ModelFacts()


def _facts(file: Path) -> ModelFacts:
    from minite_diag.checkpoints import reader

    try:
        config = reader.read_json(file)
    except CheckpointError as error:
        raise UsageError(error.message, "give the checkpoint's folder with --model") from error
    heads = _count(file, config, "num_attention_heads")
    groups = _count(file, config, "num_key_value_heads") or heads
    head_dim = _count(file, config, "head_dim")
    if not head_dim and heads:
        head_dim = _count(file, config, "hidden_size") // heads
    architectures = config.get("architectures")
    return ModelFacts(
        name=file.resolve().parent.name,
        architecture=str(architectures[0]) if isinstance(architectures, list) else "unknown",
        vocab_size=_count(file, config, "vocab_size"),
        num_layers=_count(file, config, "num_hidden_layers"),
        counts=HeadCounts(heads, groups, head_dim),
    )


def _count(file: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key) or 0
    if type(value) is not int or value < 0:
        raise UsageError(f"{file}: {key} is {json.dumps(value)}", "give an integer")
    return value
