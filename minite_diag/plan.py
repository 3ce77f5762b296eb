"""The plan: all that decides what will run, as data in `run/plan.json`.

Knows no torch and no engine. Invariant: `Plan.from_json(plan.to_json()) == plan`, and a worker
needs nothing but the run directory to do its part.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minite_diag.errors import TraceError
from minite_diag.probe import Probe

PLAN_SCHEMA: Final = 1
PLAN_FILE: Final = "plan.json"


@dataclass(frozen=True)
class EngineSpec:
    """One engine of the plan.

    `id` names its folder under `traces/`; `engine` is the registry name; `python` the interpreter
    of its worker; `checkpoint` the folder that it loads; `options` are the engine's own settings.
    """

    id: str
    role: str
    engine: str
    python: str
    checkpoint: str
    checkpoint_format: str
    options: dict[str, str] = field(default_factory=dict)
    align: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelRef:
    """The master checkpoint that every engine's weights come from."""

    name: str
    path: str
    format: str
    architecture: str
    fingerprint: str
    vocab_size: int
    num_layers: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaptureSpec:
    """What is kept: `sites` are globs, `tokens` bounds the positions, sizes are in bytes."""

    sites: tuple[str, ...] = ("*",)
    tokens: int | None = None
    stats_only: bool = False
    sample_tensors: bool = False
    top_k: int = 20
    max_disk: int | None = None
    expected_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What will run, in which engines, on which tokens."""

    model: ModelRef
    engines: tuple[EngineSpec, ...]
    probes: tuple[Probe, ...]
    dtype: str
    quantize: str
    quantized: tuple[str, ...]
    export_recipe: str
    modes: tuple[str, ...] = ("score", "sample")
    sample_tokens: int = 16
    seed: int = 0
    timeout_s: float = 1800.0
    capture: CaptureSpec = field(default_factory=CaptureSpec)
    version: str = ""
    schema: int = PLAN_SCHEMA

    def engine(self, id: str) -> EngineSpec:
        """The engine with that id; KeyError if there is none."""
        return next(spec for spec in self.engines if spec.id == id)

    @property
    def learner(self) -> EngineSpec:
        """The one learner."""
        return next(spec for spec in self.engines if spec.role == "learner")

    @property
    def samplers(self) -> tuple[EngineSpec, ...]:
        """The samplers, in the order asked for."""
        return tuple(spec for spec in self.engines if spec.role == "sampler")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(baseline, target) ids: learner with each sampler, then the samplers pairwise."""
        samplers = [spec.id for spec in self.samplers]
        pairs = [(self.learner.id, sampler) for sampler in samplers]
        return pairs + list(itertools.combinations(samplers, 2))

    def to_json(self) -> str:
        """Stable, indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; raises TraceError for another schema or missing keys."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["schema"] != PLAN_SCHEMA:
                raise TraceError(
                    f"plan.json has schema {data['schema']}, this version reads {PLAN_SCHEMA}",
                    "run compare again with this version",
                )
            return cls(
                **{
                    **data,
                    "model": ModelRef(**_tuples(data["model"])),
                    "engines": tuple(EngineSpec(**_tuples(e)) for e in data["engines"]),
                    "probes": tuple(Probe(**_tuples(p)) for p in data["probes"]),
                    "capture": CaptureSpec(**_tuples(data["capture"])),
                    "quantized": tuple(data["quantized"]),
                    "modes": tuple(data["modes"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"plan.json can't be read: {error}", "the run is damaged: run compare again"
            ) from error


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}


def write_plan(plan: Plan, run: Path) -> None:
    """Write `run/plan.json`."""
    (run / PLAN_FILE).write_text(plan.to_json(), encoding="utf-8")


def read_plan(run: Path) -> Plan:
    """Read `run/plan.json`; raises TraceError if `run` is no run directory."""
    try:
        text = (run / PLAN_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(
            f"{run} is no run directory: {error.strerror or error} ({PLAN_FILE})",
            "give the folder that `minite-diag compare` printed",
        ) from error
    return Plan.from_json(text)
