"""The doctor: which engines run here, in which interpreter, with which kernels, and what to correct.

Each engine is looked at by a process of its own interpreter, which imports it for real. Knows no
engine library. Invariant: what could not be imported is a problem with a next step, never a guess.

The object::

    schema   1
    verdict  pass | error
    engines  [{engine, python, status: ok | problem | missing, label, version, device, kernels:
              [{op, status, impl, note}], versions, problems: [{text, fix}]}]
    environment  [{name, value, sides, engines}]
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Final

from minite_diag.capture.runner import worker_environment
from minite_diag.engines.registry import check_engine_name, engine_targets
from minite_diag.environments import engine_python
from minite_diag.errors import EngineUnavailable

DOCTOR_SCHEMA: Final = 1
TIMEOUT_S: Final = 180.0
SIDES: Final = {
    "NVTE_": "learner",
    "VLLM_": "sampler",
    "SGLANG_": "sampler",
    "SGL_": "sampler",
    "FLASHINFER_": "sampler",
    "TRTLLM_": "sampler",
}
"""Prefix of a variable -> the side whose bits it changes; all others change both."""

Say = Callable[[str], None]


def examine(engines: Sequence[str], pythons: dict[str, str], say: Say) -> dict[str, Any]:
    """Look at engines (all known ones if none is named); raises UsageError for an unknown name."""
    names = [check_engine_name(name) for name in engines] or list(engine_targets())
    found = []
    for name in names:
        say(f"looking at {name}")
        try:
            python = pythons.get(name) or engine_python(name)
        except EngineUnavailable as error:
            found.append(_record(name, "") | _problem(error.message, error.hint))
            continue
        found.append(_examine(name, python))
    bad = [one for one in found if one["status"] != "ok"]
    return {
        "schema": DOCTOR_SCHEMA,
        "verdict": "error" if bad else "pass",
        "engines": found,
        "environment": _environment(found),
    }


def _record(name: str, python: str) -> dict[str, Any]:
    return {
        "engine": name,
        "python": python,
        "status": "missing",
        "label": None,
        "version": None,
        "device": None,
        "kernels": [],
        "versions": {},
        "variables": {},
        "problems": [],
    }


def _examine(name: str, python: str) -> dict[str, Any]:
    record = _record(name, python)
    try:
        done = subprocess.run(
            [python, "-m", "minite_diag.doctor.probe", name],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=worker_environment(),
            check=False,
        )
    except OSError as error:
        return record | _problem(f"{python} can't be started: {error.strerror}", _install(name))
    except subprocess.TimeoutExpired:
        return record | _problem(
            f"no answer after {TIMEOUT_S:.0f} s", "try again on a quiet machine"
        )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return record | answer
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return record | _problem(f"the interpreter fails: {last}", _install(name))


def _problem(text: str, fix: str) -> dict[str, Any]:
    return {"problems": [{"text": text, "fix": fix}]}


def _install(name: str) -> str:
    if name == "sglang":
        return "minite-diag env create sglang"
    return f"pip install 'minite-diag[{name}]'"


def _environment(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every variable that can change bits, with the engines in whose processes it is set."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in found:
        for name, value in one["variables"].items():
            rows.setdefault((name, value), []).append(one["engine"])
    return [
        {
            "name": name,
            "value": value,
            "side": next((s for prefix, s in SIDES.items() if name.startswith(prefix)), "both"),
            "engines": engines,
        }
        for (name, value), engines in sorted(rows.items())
    ]
