"""The plan stage: names on the command line -> a run directory with a complete plan.json.

Resolves the checkpoint, fixes the probes' token ids, exports the NVFP4 checkpoint that samplers
load, and estimates the size of the capture. Invariant: after it nothing depends on the user's
shell; `capture` needs the run directory only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minite_diag import __version__
from minite_diag.alignments.base import (
    EXPORT,
    application,
    check_needs,
    check_superseded,
    known_alignments,
    parts_of,
    resolve_alignments,
    without_superseded,
)
from minite_diag.checkpoints import (
    Checkpoint,
    calibrate,
    dequantize_checkpoint,
    export,
    quantized_names,
    resolve,
)
from minite_diag.checkpoints.stored import LAYOUTS, Layout
from minite_diag.engines.registry import check_engine_name
from minite_diag.environments import engine_python
from minite_diag.errors import CheckpointError, TraceError, UsageError
from minite_diag.plan import (
    CaptureSpec,
    EngineSpec,
    ModelRef,
    Plan,
    write_plan,
)
from minite_diag.probe import Probe, load_probes, shipped_probe_file

DTYPES: Final = ("bfloat16", "float16", "float32")
MODES: Final = ("score", "sample")
SHIPPED_PROBES: Final = {"demo": "smollm2", "demo-moe": "demo-moe"}
HIGH_PRECISION_ENGINES: Final = frozenset({"te", "hf"})
"""Engines that load the BF16 master weights and quantize (or don't) by themselves."""

OWN_CHECKPOINT: Final = "checkpoint"
OWN_ALIGNMENTS: Final = "align"
"""Options of any engine that the plan uses up: another checkpoint folder for this engine alone, and
alignments of this engine alone, joined by `+`."""

REQUEST_FILE: Final = "request.json"
AS_STORED: Final = "as in the checkpoint"

_PLAN_OPTIONS: Final = frozenset({OWN_CHECKPOINT, OWN_ALIGNMENTS})

Say = Callable[[str], None]


@dataclass(frozen=True)
class EngineRequest:
    """`NAME[:key=value,...]` on the command line."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> EngineRequest:
        """Read `te` or `vllm:dtype=float32,max_num_batched_tokens=64`."""
        name, _, rest = text.partition(":")
        options: dict[str, str] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if not equals:
                raise UsageError(
                    f"engine option {item!r} of {text!r} has no value", "write it as key=value"
                )
            options[key.strip()] = value.strip()
        return cls(check_engine_name(name), options)


@dataclass(frozen=True)
class CompareRequest:
    """All that `minite-diag compare` was asked for."""

    learner: EngineRequest
    samplers: tuple[EngineRequest, ...]
    model: str = "demo"
    probes: Path | None = None
    num_probes: int | None = None
    dtype: str = "bfloat16"
    quantize: str = "default"
    export_recipe: str = "modelopt"
    layout: str = "modelopt"
    modes: tuple[str, ...] = MODES
    sample_tokens: int = 16
    seed: int = 0
    timeout_s: float = 1800.0
    capture: CaptureSpec = field(default_factory=CaptureSpec)
    pythons: dict[str, str] = field(default_factory=dict)
    align: tuple[str, ...] = ()


def cache_folder() -> Path:
    """Where converted and exported checkpoints are kept ($MINITE_DIAG_CACHE)."""
    named = os.environ.get("MINITE_DIAG_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minite-diag"


def make_run_folder(out: Path | None, request: CompareRequest) -> Path:
    """Create the run directory; raises UsageError if it holds a run or can't be written."""
    if out is None:
        names = "-".join([request.learner.name, *(s.name for s in request.samplers)])
        stamp = time.strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{stamp}-{names}-{Path(request.model).name}"
    if (out / "plan.json").exists():
        raise UsageError(
            f"{out} holds a run already",
            f"go on with it: minite-diag compare --resume {out}; or give another --out",
        )
    make_writable(out)
    return out


def make_writable(folder: Path) -> None:
    """Create the folder; raises UsageError if it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".write-test").touch()
        (folder / ".write-test").unlink()
    except OSError as error:
        raise UsageError(
            f"can't write to {folder}: {error.strerror}",
            "use a writable run folder; a copy of the run will do",
        ) from error


def prepare(request: CompareRequest, run: Path, say: Say) -> Plan:
    """Build the plan and write it to `run`."""
    write_request(request, run)
    with_alignments(request)
    _check(request)
    cache = cache_folder()
    say(f"model {request.model}")
    checkpoint = resolve(request.model, cache)
    quantized, parts = _parts(request, checkpoint)
    request = with_alignments(request, parts)
    _layout(request.layout)
    probes = _probes(request, checkpoint)
    asked = (request.learner, *request.samplers)
    if checkpoint.is_quantized:
        exported = checkpoint
        needs_master = any(engine.name in HIGH_PRECISION_ENGINES for engine in asked)
        master = _decoded(checkpoint, cache, say) if needs_master else checkpoint
    else:
        master = exported = checkpoint
        if quantized and any(_reads_export(engine) for engine in asked):
            exported = _export(request, checkpoint, quantized, probes, cache, say)
    engines = _engines(request, master, exported, cache)
    plan = Plan(
        model=_model_ref(checkpoint),
        engines=engines,
        probes=tuple(probes),
        dtype=request.dtype,
        quantize=AS_STORED if checkpoint.is_quantized else request.quantize,
        quantized=tuple(quantized),
        export_recipe=AS_STORED if checkpoint.is_quantized else request.export_recipe,
        modes=request.modes,
        sample_tokens=request.sample_tokens,
        seed=request.seed,
        timeout_s=request.timeout_s,
        capture=request.capture,
        version=__version__,
    )
    plan = _with_size(plan, checkpoint)
    _check_disk(plan, run)
    write_plan(plan, run)
    return plan


def write_request(request: CompareRequest, run: Path) -> None:
    """Keep what was asked for, so that `align` can ask for it again."""
    record = dataclasses.asdict(request)
    text = json.dumps(record, indent=1, default=str)
    (run / REQUEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_request(run: Path) -> CompareRequest:
    """What `write_request` kept; raises TraceError if the run has none."""
    try:
        record: dict[str, Any] = json.loads((run / REQUEST_FILE).read_text(encoding="utf-8"))
        capture: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record["capture"].items()
        }
        return CompareRequest(
            **{
                **record,
                "learner": EngineRequest(**record["learner"]),
                "samplers": tuple(EngineRequest(**sampler) for sampler in record["samplers"]),
                "probes": Path(record["probes"]) if record["probes"] else None,
                "modes": tuple(record["modes"]),
                "align": tuple(record["align"]),
                "capture": CaptureSpec(**capture),
            }
        )
    except FileNotFoundError as error:
        raise TraceError(
            f"{run} holds no command of a compare ({REQUEST_FILE} is missing)",
            "align runs the engines again: it needs a run of `minite-diag compare`, no import",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{run / REQUEST_FILE} can't be read: {error}", "run compare again with this version"
        ) from error


def alignable_parts(request: CompareRequest) -> frozenset[str]:
    """What the request's model has of that which alignments need (`Alignment.needs`)."""
    return _parts(request, resolve(request.model, cache_folder()))[1]


def _parts(request: CompareRequest, checkpoint: Checkpoint) -> tuple[list[str], frozenset[str]]:
    """The quantized linears, and what alignments find in the model."""
    quantized = (
        checkpoint.quantized_linear_names()
        if checkpoint.is_quantized
        else quantized_names(checkpoint, request.quantize)
    )
    return list(quantized), parts_of(quantized, is_moe=checkpoint.is_moe)


def with_alignments(request: CompareRequest, parts: frozenset[str] | None = None) -> CompareRequest:
    """The request with the settings of its alignments; later ones in the ladder win.

    `parts` are the model's, where it is known. Raises UsageError for an unknown alignment, one that
    names none of the request's engines, or one that needs what the model does not have.
    """
    names = resolve_alignments(request.align)
    if "all" in request.align:
        names = tuple(name for name in names if _is_for(name, request, parts))
        names = names if parts is None else without_superseded(names, parts)
    if parts is not None:
        engines = (request.learner, *request.samplers)
        wanted = [*names, *(n for e in engines for n in _own_alignments(e))]
        check_needs(wanted, parts)
        check_superseded(wanted, parts)
    exports: dict[str, str] = {}
    for name in names:
        alignment = known_alignments()[name]
        exports |= alignment.export
        asked = {request.learner.name, *(sampler.name for sampler in request.samplers)}
        if not asked & set(alignment.engines):
            raise UsageError(
                f"alignment {name!r} does nothing in {', '.join(sorted(asked))}",
                f"it knows {', '.join(alignment.engines)}",
            )
    return dataclasses.replace(
        request,
        align=names,
        learner=_aligned_engine(request.learner, names),
        samplers=tuple(_aligned_engine(sampler, names) for sampler in request.samplers),
        export_recipe=exports.get("recipe", request.export_recipe),
        layout=exports.get("layout", request.layout),
    )


def _is_for(name: str, request: CompareRequest, parts: frozenset[str] | None) -> bool:
    """Whether `all` stands for this alignment too, with these engines, devices and model."""
    needs = known_alignments()[name].needs
    if needs and parts is not None and needs not in parts:
        return False
    found = [
        (engine, application(name, engine.name)) for engine in (request.learner, *request.samplers)
    ]
    return known_alignments()[name].in_ladder and any(
        how is not None and how.device in ("", _device(engine)) for engine, how in found
    )


def _device(engine: EngineRequest) -> str:
    """Cpu or cuda, as the engines choose: by their option, or by what torch sees here."""
    import torch

    named = engine.options.get("device")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return default if named is None else named.partition(":")[0]


def _own_alignments(engine: EngineRequest) -> tuple[str, ...]:
    """The alignments that this engine alone was asked for."""
    asked = engine.options.get(OWN_ALIGNMENTS, "")
    names = resolve_alignments([name for name in asked.split("+") if name])
    for name in names:
        if application(name, engine.name) is None:
            raise UsageError(
                f"alignment {name!r} does nothing in {engine.name}",
                f"it knows {', '.join(known_alignments()[name].engines)}",
            )
        if known_alignments()[name].export:
            raise UsageError(
                f"alignment {name!r} changes the export, which all engines share",
                f"give it as --align {name}",
            )
    return names


def _aligned_engine(engine: EngineRequest, names: Sequence[str]) -> EngineRequest:
    options = dict(engine.options)
    for name in (*names, *_own_alignments(engine)):
        found = application(name, engine.name)
        options |= found.options if found else {}
    return EngineRequest(engine.name, options)


def _check(request: CompareRequest) -> None:
    for name, value, known in (
        ("--dtype", request.dtype, DTYPES),
        *(("--modes", mode, MODES) for mode in request.modes),
    ):
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            raise UsageError(
                f"{name} {value!r} is unknown",
                f"did you mean {near[0]}?" if near else f"one of: {', '.join(known)}",
            )
    if not request.samplers:
        raise UsageError("no sampler", "give --sampler NAME, such as --sampler vllm")


def _probes(request: CompareRequest, checkpoint: Checkpoint) -> list[Probe]:
    file = request.probes
    if file is None:
        file = shipped_probe_file(SHIPPED_PROBES.get(checkpoint.name, "default"))
    return load_probes(file, checkpoint.vocab_size, _encoder(checkpoint), request.num_probes)


def _encoder(checkpoint: Checkpoint) -> Callable[[str], list[int]]:
    """The checkpoint's own tokenizer, loaded when the first text needs it."""

    @functools.cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.path} has no tokenizer that transformers can load: {error}",
                "give probes with token_ids instead of text",
            ) from error

    def encode(text: str) -> list[int]:
        return list(tokenizer().encode(text, add_special_tokens=False))

    return encode


def _loads_export(request: EngineRequest) -> bool:
    return request.name not in HIGH_PRECISION_ENGINES and request.name != "toy"


def _reads_export(request: EngineRequest) -> bool:
    """Whether the engine needs it: to load, or for the scales in it."""
    return _loads_export(request) or EXPORT in request.options.values()


def _decoded(checkpoint: Checkpoint, cache: Path, say: Say) -> Checkpoint:
    """High-precision weights of an NVFP4 checkpoint, for engines that quantize by themselves."""
    folder = cache / "decoded" / f"{checkpoint.name}-{checkpoint.fingerprint[:16]}"
    if folder.exists():
        return resolve(str(folder), cache)
    say("decoding the NVFP4 checkpoint to BF16 for the learner")
    return dequantize_checkpoint(checkpoint, folder)


def _export(
    request: CompareRequest,
    checkpoint: Checkpoint,
    quantized: Sequence[str],
    probes: Sequence[Probe],
    cache: Path,
    say: Say,
) -> Checkpoint:
    """The refit step: BF16 master weights -> the NVFP4 checkpoint that samplers load, cached."""
    key = hashlib.sha256(
        "\n".join(
            [
                checkpoint.fingerprint,
                request.export_recipe,
                request.layout,
                *quantized,
                *(probe.sha256 for probe in probes),
                __version__,
            ]
        ).encode()
    ).hexdigest()[:16]
    folder = cache / "exports" / f"{checkpoint.name}-{request.export_recipe}-{request.layout}-{key}"
    if folder.exists():
        say(f"NVFP4 export {folder.name} (cached)")
        return resolve(str(folder), cache)
    say("calibrating activation scales on the probes")
    calibration = calibrate(checkpoint, [probe.token_ids for probe in probes], quantized)
    say(f"exporting NVFP4 ({request.export_recipe}, {request.layout} layout)")
    try:
        return export(
            checkpoint,
            request.export_recipe,
            _layout(request.layout),
            folder,
            request.quantize,
            calibration,
        )
    except CheckpointError:
        # Another run made the same export meanwhile: its name says all that it was made from.
        if not folder.exists():
            raise
        return resolve(str(folder), cache)


def _layout(name: str) -> Layout:
    for layout in LAYOUTS:
        if layout == name:
            return layout
    raise UsageError(f"unknown layout {name!r}", f"one of: {', '.join(LAYOUTS)}")


def _engines(
    request: CompareRequest, master: Checkpoint, exported: Checkpoint, cache: Path
) -> tuple[EngineSpec, ...]:
    asked = [("learner", request.learner), *(("sampler", s) for s in request.samplers)]
    specs: list[EngineSpec] = []
    for role, engine in asked:
        loaded = exported if _loads_export(engine) else master
        if OWN_CHECKPOINT in engine.options:
            loaded = _own_checkpoint(engine, master, cache)
        names = (*request.align, *_own_alignments(engine))
        options = {
            key: str(_for_sampler(request, exported, cache).path) if value == EXPORT else value
            for key, value in engine.options.items()
            if key not in _PLAN_OPTIONS
        }
        base = f"{role}-{engine.name}"
        taken = sum(spec.id == base or spec.id.startswith(f"{base}-") for spec in specs)
        specs.append(
            EngineSpec(
                id=f"{base}-{taken + 1}" if taken else base,
                role=role,
                engine=engine.name,
                python=request.pythons.get(engine.name) or engine_python(engine.name),
                checkpoint=str(loaded.path),
                checkpoint_format=loaded.format,
                options=options,
                align=tuple(
                    n for n in known_alignments() if n in names and application(n, engine.name)
                ),
            )
        )
    return tuple(specs)


def _for_sampler(request: CompareRequest, exported: Checkpoint, cache: Path) -> Checkpoint:
    """The NVFP4 checkpoint of the first sampler that loads one, else the export itself."""
    for sampler in request.samplers:
        if _loads_export(sampler) and OWN_CHECKPOINT in sampler.options:
            return _own_checkpoint(sampler, exported, cache)
        if _loads_export(sampler):
            break
    return exported


def _own_checkpoint(engine: EngineRequest, master: Checkpoint, cache: Path) -> Checkpoint:
    """What the engine loads instead: the same model in another state, such as a stale refit."""
    found = resolve(engine.options[OWN_CHECKPOINT], cache)
    for what in ("architecture", "num_layers", "vocab_size"):
        mine, other = getattr(master, what), getattr(found, what)
        if mine != other:
            raise UsageError(
                f"{found.path} is another model than {master.path}: {what} {other}, not {mine}",
                "give a checkpoint of the same architecture",
            )
    return found


def _model_ref(checkpoint: Checkpoint) -> ModelRef:
    return ModelRef(
        name=checkpoint.name,
        path=str(checkpoint.path),
        format=checkpoint.format,
        architecture=checkpoint.architecture,
        fingerprint=checkpoint.fingerprint,
        vocab_size=checkpoint.vocab_size,
        num_layers=checkpoint.num_layers,
        notes=tuple(checkpoint.notes),
    )


def expected_bytes(plan: Plan, checkpoint: Checkpoint) -> int:
    """Upper estimate of what one run writes: the sites' rows for each token, and the weights.

    Counts inputs and outputs of each linear (an expert sees top_k / experts of the tokens), norms
    and the residual stream, RoPE outputs, logits, and one copy of the weights for each engine.
    """
    config = checkpoint.config
    itemsize = 4 if plan.dtype == "float32" else 2
    experts = int(config.get("num_experts") or 1)
    share = int(config.get("num_experts_per_tok") or 1) / experts
    per_token = 0.0
    weights = 0
    for name in checkpoint.linear_names():
        rows, columns = checkpoint.shape(name)
        weights += rows * columns
        routed = share if ".experts." in name else 1.0
        per_token += routed * (rows + columns)
    hidden = int(config["hidden_size"])
    per_token += plan.model.num_layers * hidden * 10 + plan.model.vocab_size
    limit = plan.capture.tokens
    tokens = sum(
        len(probe.token_ids) if limit is None else min(limit, len(probe.token_ids))
        for probe in plan.probes
    )
    if plan.capture.sample_tensors:
        tokens += sum(p.prompt_length + plan.sample_tokens for p in plan.probes)
    if plan.capture.stats_only:
        return 0
    return int(len(plan.engines) * itemsize * (per_token * tokens + weights))


def _with_size(plan: Plan, checkpoint: Checkpoint) -> Plan:
    size = expected_bytes(plan, checkpoint)
    return dataclasses.replace(plan, capture=dataclasses.replace(plan.capture, expected_bytes=size))


def _check_disk(plan: Plan, run: Path) -> None:
    needed, limit = plan.capture.expected_bytes, plan.capture.max_disk
    if limit is not None:
        return
    free = shutil.disk_usage(run).free
    if needed > free:
        raise TraceError(
            f"the capture may need {needed / 1e9:.1f} GB, {run} has {free / 1e9:.1f} GB free",
            "narrow it with --sites or --tokens, keep statistics only with --stats-only, "
            "or bound it with --max-disk",
        )


def export_checkpoint(
    model: str,
    out: Path,
    recipe: str,
    layout: str,
    quantize: str,
    probes: Path | None,
    say: Say,
) -> Path:
    """`minite-diag export`: calibrate on the probes and write the NVFP4 checkpoint to `out`."""
    checkpoint = resolve(model, cache_folder())
    names = quantized_names(checkpoint, quantize)
    file = probes or shipped_probe_file(SHIPPED_PROBES.get(checkpoint.name, "default"))
    sequences = load_probes(file, checkpoint.vocab_size, _encoder(checkpoint))
    say(f"calibrating {len(names)} linears on {len(sequences)} probes")
    calibration = calibrate(checkpoint, [probe.token_ids for probe in sequences], names)
    say(f"writing {out}")
    return export(checkpoint, recipe, _layout(layout), out, quantize, calibration).path
