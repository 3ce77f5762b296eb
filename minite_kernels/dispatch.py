"""Which implementation a call runs: resolved in one place, recorded, never silently another.

Knows names of implementations and devices, no op. Invariant: an explicit ``impl`` runs or raises
``ImplementationUnavailableError``; only ``auto`` chooses, and what it chose is in ``choices()``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from types import ModuleType
from typing import Final, Literal

import torch

Impl = Literal["auto", "ref", "triton", "native"]
IMPLS: Final = ("auto", "ref", "triton", "native")

_choices: Counter[tuple[str, str, str, str]] = Counter()


class ImplementationUnavailableError(RuntimeError):
    """The implementation that was asked for cannot run here; the message says why."""


def select(
    op: str,
    package: str,
    impl: Impl,
    device: torch.device,
    limits: Mapping[str, str | None] | None = None,
) -> ModuleType:
    """Return the module ``package._<impl>`` that runs ``op`` on ``device``.

    ``limits`` names, for an implementation, what in this call it does not support (None: nothing).
    ``auto`` takes triton where it can run and ref otherwise; native only when asked for.
    """
    if impl not in IMPLS:
        raise ValueError(f"unknown impl {impl!r} for {op}; one of {', '.join(IMPLS)}")
    limits = limits or {}
    if impl == "auto":
        reason = None if device.type == "cuda" else "not on CUDA"
        reason = reason or _obstacle(package, "triton", device) or limits.get("triton")
        chosen = "ref" if reason else "triton"
    else:
        chosen = impl
        reason = _obstacle(package, chosen, device) or limits.get(chosen)
        if reason:
            raise ImplementationUnavailableError(f"{op} cannot run as {impl!r}: {reason}")
    _choices[op, impl, chosen, device.type] += 1
    return importlib.import_module(f"{package}._{chosen}")


def choices() -> dict[tuple[str, str, str, str], int]:
    """Calls so far by (op, requested impl, impl that ran, device type)."""
    return dict(_choices)


def reset_choices() -> None:
    """Forget the recorded choices, so that the next ``choices()`` describes what follows."""
    _choices.clear()


def beyond_device(device: torch.device, major: int) -> str | None:
    """Say that a CUDA device is older than compute capability ``major``, None if it is not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= major:
        return None
    found = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"it needs compute capability {major} or higher, this is {found}"


def is_interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter (a test's doing, never a user's)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _obstacle(package: str, impl: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(f"{package}._{impl}") is None:
        return f"no such implementation in {package}"
    if impl == "ref":
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if impl == "triton" and device.type != "cuda" and not is_interpreted():
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if impl == "native":
        return _native_obstacle(device)
    return None


def _native_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    return beyond_device(device, 10)
