"""nn.Module hooks that write to a Recorder, and hand on what an intervention puts in its place.

Knows torch; no engine. Invariant: without an intervention a hook never changes what the module
computes; it copies the input before the forward, because some engines overwrite it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minite_diag.capture.interventions import IntervenedRecorder
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


def pass_on(
    recorder: Recorder,
    native: str,
    kind: str,
    tensor: torch.Tensor,
    row_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Record `tensor` and return what the engine goes on with: itself, unless it is replaced.

    The first dimension is the call's rows (or those of `row_index`), or the first two are batch
    and tokens.
    """
    rows = flatten_rows(tensor)
    recorder.tensor(native, kind, rows, row_index)
    if not isinstance(recorder, IntervenedRecorder):
        return tensor
    replaced = recorder.replacement(native, kind, rows, row_index)
    return tensor if replaced is None else replaced.reshape(tensor.shape)


def substitute(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """`value` with the tensor `old` (the same object) replaced, in tuples, lists and dicts too."""
    if value is old:
        return new
    if isinstance(value, tuple):
        items = [substitute(item, old, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [substitute(item, old, new) for item in value]
    if isinstance(value, dict):
        return {key: substitute(item, old, new) for key, item in value.items()}
    return value


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

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensor = pick_input((*args, *kwargs.values())) if recorder.active else None
            if tensor is None:
                return None
            new = pass_on(recorder, native, input_kind, tensor)
            if new is tensor:
                return None
            return substitute(args, tensor, new), substitute(kwargs, tensor, new)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if output_kind is not None:
        recorder.promise(native, output_kind)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            tensor = pick_output(output) if recorder.active else None
            if tensor is None:
                return None
            new = pass_on(recorder, native, output_kind, tensor)
            return None if new is tensor else substitute(output, tensor, new)

        handles.append(module.register_forward_hook(after))
    return handles
