"""A transformers model in one process with its layers on several devices, by accelerate.

`device_map` is what transformers takes (auto, balanced, balanced_low_0, sequential, or one device),
`max_memory` bounds a device: `max_memory=0:20GiB/1:20GiB/cpu:100GiB`. What fits nowhere goes to a
temporary folder.

Knows accelerate's hooks; no recorder. Invariant: where a module is said to be is read from its
parameters and its hook, never from the option.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

from minite_diag.errors import EngineUnavailable, UsageError
from minite_diag.plan import EngineSpec

OPTIONS: Final = frozenset({"device_map", "max_memory"})
MAPS: Final = ("auto", "balanced", "balanced_low_0", "sequential")
_UNITS: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class DeviceMap:
    """Where accelerate may put layers, and the folder for what it offloads."""

    def __init__(self, spec: EngineSpec) -> None:
        self.asked = spec.options.get("device_map", "auto")
        if self.asked not in MAPS and not re.fullmatch(r"cpu|cuda(:\d+)?", self.asked):
            raise UsageError(
                f"hf: device_map={self.asked} is unknown", f"one of: {', '.join(MAPS)}, cpu, cuda:0"
            )
        if "device" in spec.options:
            raise UsageError("hf: device and device_map are two answers", "leave device out")
        self.max_memory = parse_max_memory(spec.options.get("max_memory", ""))
        self._folder = tempfile.TemporaryDirectory(prefix="minite-diag-offload-")

    def load(self, read: Callable[..., Any]) -> Any:
        """The model, dispatched; raises EngineUnavailable without accelerate."""
        try:
            import accelerate  # noqa: F401
        except ImportError as error:
            raise EngineUnavailable(
                f"hf: device_map needs accelerate: {error}", "pip install 'minite-diag[hf]'"
            ) from error
        several = self.asked in MAPS
        placement: dict[str, Any] = {
            "device_map": self.asked if several else {"": self.asked},
            "offload_folder": self._folder.name,
        }
        if self.max_memory:
            placement["max_memory"] = self.max_memory
        return read(**placement)

    def settings(self, model: Any) -> dict[str, str]:
        """Where each part of the model is and computes."""
        return {"device_map": describe(model)}

    def close(self) -> None:
        """Delete what was offloaded."""
        self._folder.cleanup()


def parse_max_memory(text: str) -> dict[int | str, int]:
    """`0:20GiB/cpu:100GiB` as accelerate wants it; raises UsageError for anything else."""
    found: dict[int | str, int] = {}
    for part in filter(None, text.split("/")):
        match = re.fullmatch(r"(\d+|cpu|disk):(\d+(?:\.\d+)?)([KMGT]iB)", part)
        if match is None:
            raise UsageError(
                f"hf: max_memory has {part!r}", "DEVICE:SIZE, as in max_memory=0:20GiB/cpu:100GiB"
            )
        device, size, unit = match.groups()
        found[int(device) if device.isdigit() else device] = int(float(size) * _UNITS[unit.upper()])
    return found


def input_device(model: Any) -> torch.device:
    """The device on which the embedding of the token ids computes."""
    embedding = model.get_input_embeddings()
    return _computes_on(embedding) or next(embedding.parameters()).device


def at_hand(module: nn.Module) -> AbstractContextManager[None]:
    """Within it, the module's own parameters are in memory, offloaded or not."""
    from accelerate.utils import align_module_device

    return align_module_device(module)  # type: ignore[no-any-return]


def describe(model: Any) -> str:
    """Runs of modules with one place: `model.embed_tokens..model.layers.3: cuda:0`."""
    runs: list[list[str]] = []
    for name, module in _placed(model):
        place = _place(module, str(_map_of(model)[name]))
        if runs and runs[-1][2] == place:
            runs[-1][1] = name
        else:
            runs.append([name, name, place])
    return "; ".join(
        f"{first or 'model'}{f'..{last}' if last != first else ''}: {place}"
        for first, last, place in runs
    )


def _placed(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules that accelerate placed, in the model's order."""
    return [(n, m) for n, m in model.named_modules() if n in _map_of(model)]


def _map_of(model: Any) -> dict[str, Any]:
    """Module -> place, as dispatched; a model on one device isn't."""
    return getattr(model, "hf_device_map", None) or {"": model.device}


def _place(module: nn.Module, stored: str) -> str:
    tensors = [*module.parameters(), *module.buffers()]
    held = sorted({str(tensor.device) for tensor in tensors} - {"meta"})
    if not any(tensor.is_meta for tensor in tensors):
        return ", ".join(held)
    return f"{stored}, computes on {_computes_on(module)}"


def _computes_on(module: nn.Module) -> torch.device | None:
    for child in module.modules():
        device = getattr(getattr(child, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None
