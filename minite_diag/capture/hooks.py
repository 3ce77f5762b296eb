"""nn.Module hooks that write to a Recorder.

Knows torch; no engine. Invariant: a hook never changes what the module computes; it copies the
input before the forward, because some engines overwrite it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minite_diag.capture.recorder import Recorder

Pick = Callable[[Any], torch.Tensor | None]


def first_tensor(value: Any) -> torch.Tensor | None:
    """The value itself, or the first tensor of a tuple or list."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)):
        return next((item for item in value if isinstance(item, torch.Tensor)), None)
    return None


def flatten_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, ...] as [rows, features]; a matrix stays as it is."""
    return tensor.flatten(0, 1).flatten(1) if tensor.dim() > 2 else tensor


def attach(
    module: nn.Module,
    native: str,
    recorder: Recorder,
    *,
    input_kind: str | None = "input",
    output_kind: str | None = "output",
    pick_input: Pick = first_tensor,
    pick_output: Pick = first_tensor,
) -> list[Any]:
    """Record a module's input and output; returns the hook handles.

    `pick_input` takes the positional arguments followed by the keyword values (a tuple),
    `pick_output` the module's return value.
    """
    handles: list[Any] = []
    if input_kind is not None:
        recorder.promise(native, input_kind)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if recorder.active:
                _record(recorder, native, input_kind, pick_input((*args, *kwargs.values())))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if output_kind is not None:
        recorder.promise(native, output_kind)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if recorder.active:
                _record(recorder, native, output_kind, pick_output(output))

        handles.append(module.register_forward_hook(after))
    return handles


def _record(recorder: Recorder, native: str, kind: str, tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        recorder.tensor(native, kind, flatten_rows(tensor))
