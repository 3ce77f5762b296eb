"""What an alignment is: data that names settings and functions, never code that runs by itself.

Knows no engine library and no torch. Invariant: an alignment that patches nothing in an engine that
it names is an error, and every patch is named in the engine's evidence.

Third parties add theirs under the entry-point group `minite_diag.alignments`: the value is a
"module:attribute" that holds an Alignment.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from minite_diag.engines.base import Evidence
from minite_diag.errors import EngineError, UsageError

ENTRY_POINT_GROUP: Final = "minite_diag.alignments"
ENVIRONMENT: Final = "MINITE_DIAG_ALIGN"
"""Comma list of alignments that the plugins apply in a user's own processes."""


EXPORT: Final = "{export}"
"""As the value of an option: the NVFP4 checkpoint that the sampler loads."""

Needs = Literal["", "quantized", "linears", "experts", "moe"]


@dataclass(frozen=True)
class Application:
    """What an alignment does in one engine of `versions` on `device` (cpu, cuda; empty: both).

    `environment` is set before the engine's library is imported; `options` override the plan's
    options of the engine; `replacements` are (op, "module:function"): the function takes the
    engine's model (or None before it exists) and returns the names of what it patched. `plugin` are
    the replacements that stand for `options` in a user's own process, where no plan gives any.
    """

    versions: str = ""
    device: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    replacements: tuple[tuple[str, str], ...] = ()
    plugin: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Alignment:
    """A named alignment.

    `export` overrides the export's recipe or layout; `kernels` says whether it puts our ops into
    the engines (False: settings that users can deploy today). `in_ladder` alignments are climbed
    without being named. `needs` is what the model must have for them to change anything: a
    quantized linear, a dense one (`linears`), one of an expert (`experts`), or a router (`moe`).
    `superseded_by`: those that the model can have, together, leave it nothing to do.
    """

    name: str
    title: str
    engines: dict[str, Application]
    export: dict[str, str] = field(default_factory=dict)
    kernels: bool = False
    in_ladder: bool = True
    needs: Needs = ""
    superseded_by: tuple[str, ...] = ()


def load_object(target: str) -> Any:
    """The object of "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def known_alignments() -> dict[str, Alignment]:
    """Every alignment by name, in ladder order; third-party ones come last."""
    from minite_diag.alignments.catalog import ALIGNMENTS

    found = dict(ALIGNMENTS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, load_object(point.value))
    return found


def resolve_alignments(names: Sequence[str]) -> tuple[str, ...]:
    """Names in ladder order; `all` stands for all. Raises UsageError with near matches."""
    known = known_alignments()
    if "all" in names:
        return tuple(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"no alignment is called {name!r}",
                f"did you mean {near[0]!r}?" if near else f"one of: all, {', '.join(known)}",
            )
    return tuple(name for name in known if name in names)


def parts_of(quantized: Iterable[str], *, is_moe: bool) -> frozenset[str]:
    """What a model has of that which alignments need (`Alignment.needs`)."""
    found = {"experts" if ".experts." in fqn else "linears" for fqn in quantized}
    return frozenset(found | ({"quantized"} if found else set()) | ({"moe"} if is_moe else set()))


def check_needs(names: Sequence[str], parts: frozenset[str]) -> None:
    """Raise UsageError for an alignment that needs what the model does not have."""
    missing = {
        "quantized": "nothing of this model is quantized",
        "linears": "no dense linear of this model is quantized",
        "experts": "no expert of this model is quantized",
        "moe": "this model has no experts",
    }
    for name in names:
        needs = known_alignments()[name].needs
        if needs and needs not in parts:
            raise UsageError(
                f"alignment {name!r} patches nothing: {missing[needs]}", "leave it out"
            )


def without_superseded(names: Sequence[str], parts: frozenset[str]) -> tuple[str, ...]:
    """The alignments that still do something beside the others, in a model with these parts."""
    known = known_alignments()

    def others(name: str) -> set[str]:
        return {n for n in known[name].superseded_by if known[n].needs in ("", *parts)}

    return tuple(n for n in names if not others(n) or not others(n) <= set(names))


def check_superseded(names: Sequence[str], parts: frozenset[str]) -> None:
    """Raise UsageError for an alignment to which the others leave nothing to do."""
    kept = without_superseded(names, parts)
    for name in names:
        if name not in kept:
            others = [n for n in known_alignments()[name].superseded_by if n in names]
            raise UsageError(
                f"alignment {name!r} patches nothing beside {' and '.join(map(repr, others))}",
                "leave one of them out",
            )


def application(name: str, engine: str) -> Application | None:
    """What an alignment does in an engine; None where the engine's own op is kept.

    Raises UsageError for a name that this installation lacks, as a plan of another one may have.
    """
    known = known_alignments()
    if name not in known:
        raise UsageError(
            f"no alignment is called {name!r} in this installation",
            "the plan is of another version, or what brings the alignment is not installed here",
        )
    return known[name].engines.get(engine)


def names_in_environment() -> list[str]:
    """What MINITE_DIAG_ALIGN of this process asks for."""
    return [name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",") if name.strip()]


def apply_environment(engine: str, names: Sequence[str]) -> dict[str, str]:
    """Set the variables of the named alignments in this process; returns what was set.

    To be called before the engine's library is imported: some read them then. MINITE_DIAG_ALIGN of
    the user's shell is dropped: in our own processes the plan alone says what is aligned.
    """
    os.environ.pop(ENVIRONMENT, None)
    wanted: dict[str, str] = {}
    for name in names:
        found = application(name, engine)
        wanted |= found.environment if found else {}
    os.environ.update(wanted)
    return wanted


def check_device(engine: str, names: Sequence[str], device: str) -> None:
    """Raise EngineError for an alignment that is for another kind of device than `device`."""
    kind = "cpu" if device == "cpu" else "cuda"
    for name in names:
        found = application(name, engine)
        if found is not None and found.device not in ("", kind):
            raise EngineError(
                f"alignment {name!r} does nothing in {engine} on {kind}: it is for {found.device}",
                "leave it out",
            )


def bundled_ops(engine: str, names: Sequence[str]) -> set[str]:
    """Ops that the named alignments replace by our functions, which note that they ran."""
    found = [application(name, engine) or Application() for name in names]
    pairs = [pair for how in found for pair in how.replacements]
    return {op for op, target in pairs if target.startswith("minite_diag.")}


def apply_replacements(
    engine: str, names: Sequence[str], model: Any, *, in_plugin: bool = False
) -> dict[str, list[str]]:
    """Run every replacement of the named alignments: op -> names of what was patched.

    `in_plugin` in a user's own process. Raises EngineError for a replacement that found nothing to
    patch.
    """
    patched: dict[str, list[str]] = {}
    for name in names:
        found = application(name, engine) or Application()
        for op, target in (*(found.plugin if in_plugin else ()), *found.replacements):
            changed = list(load_object(target)(model))
            if not changed:
                raise EngineError(
                    f"alignment {name!r} patched nothing in {engine} ({target})",
                    "leave it out, or check that the model has this op",
                )
            patched.setdefault(op, []).extend(changed)
    return patched


def with_replaced(
    evidence: Iterable[Evidence], patched: Mapping[str, Sequence[str]]
) -> tuple[Evidence, ...]:
    """Evidence in which the patched ops are `replaced`, naming what was patched."""
    found = list(evidence)
    kept = [item for item in found if item.op not in patched]
    own = {item.op: ", ".join(filter(None, (item.impl, item.note))) for item in found}
    ours = [
        Evidence(
            op,
            "replaced",
            f"minite_kernels.invariant ({op})",
            f"{len(names)} patched, first {names[0]}",
            own.get(op, ""),
        )
        for op, names in patched.items()
    ]
    return (*kept, *ours)
