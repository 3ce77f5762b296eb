"""Static activation scales: the largest input magnitude of each linear over given tokens.

Knows transformers (imported when called) and names; no recipe: what a scale is made of an amax is
the exporter's business. Invariant: every requested linear gets a positive finite amax, and one
that had to be borrowed says so in `fallbacks`.

The model runs unquantized in the checkpoint's dtype, so the amax is that of clean activations.
It must fit in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minite_diag.checkpoints import names
from minite_diag.checkpoints.model import Checkpoint
from minite_diag.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Calibration(Mapping[str, float]):
    """Input amax by FQN; `fallbacks` says, for each value that was not measured, where it is from.

    Behaves as a read-only dict of the amax.
    """

    amax: dict[str, float]
    fallbacks: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, fqn: str) -> float:
        return self.amax[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self.amax)

    def __len__(self) -> int:
        return len(self.amax)


def calibrate(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    linear_names: Sequence[str],
    *,
    device: str = "cpu",
) -> Calibration:
    """Run the unquantized model over token ids and record each named linear's input amax.

    An expert's amax is over the tokens routed to it. An expert that saw no token gets the largest
    amax of its layer's experts for the same projection, stated in `fallbacks`. Raises UsageError
    for unusable token ids, CheckpointError for a quantized checkpoint or a linear without amax.
    """
    if checkpoint.is_quantized:
        raise CheckpointError(
            f"{checkpoint.name} is quantized already", "calibrate the BF16 checkpoint it came from"
        )
    _check_sequences(checkpoint, sequences)
    model = _load(checkpoint, device)
    recorder = _Recorder(set(linear_names))
    with torch.no_grad(), recorder.attached(model):
        for sequence in sequences:
            model(torch.tensor([list(sequence)], device=device), use_cache=False)
    fallbacks = recorder.fill_unrouted_experts()
    missing = [fqn for fqn in linear_names if not _is_usable(recorder.amax.get(fqn))]
    if missing:
        raise CheckpointError(
            f"{missing[0]} (and {len(missing) - 1} more) got no positive finite input",
            "leave it out of --quantize, or calibrate on other probes",
        )
    return Calibration({fqn: recorder.amax[fqn] for fqn in linear_names}, fallbacks)


def _is_usable(amax: float | None) -> bool:
    return amax is not None and math.isfinite(amax) and amax > 0


def _check_sequences(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> None:
    if not sequences or not all(len(sequence) for sequence in sequences):
        raise UsageError("calibration needs at least one non-empty sequence", "give probes")
    for sequence in sequences:
        outside = [i for i in sequence if not 0 <= i < checkpoint.vocab_size]
        if outside:
            raise UsageError(
                f"token id {outside[0]} is outside of {checkpoint.name}'s vocabulary "
                f"(0..{checkpoint.vocab_size - 1})",
                "use probes made with this checkpoint's tokenizer",
            )
        if len(sequence) > checkpoint.max_positions:
            raise UsageError(
                f"a probe of {len(sequence)} tokens exceeds {checkpoint.name}'s "
                f"{checkpoint.max_positions} positions",
                "shorten it",
            )


def _load(checkpoint: Checkpoint, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype[checkpoint.format], local_files_only=True
        )
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"transformers can't load {checkpoint.path} ({checkpoint.architecture}): "
            f"{str(error).splitlines()[0]}",
            "check the architecture in config.json, or install a transformers that knows it",
        ) from error
    return model.to(device).eval()


class _Recorder:
    """Forward pre-hooks that keep the running amax of each wanted linear's input."""

    def __init__(self, wanted: set[str]) -> None:
        self.amax: dict[str, float] = {}
        self._wanted = wanted
        self._expert_modules = {m for fqn in wanted if (m := names.experts_module(fqn))}
        self._handles: list[Any] = []

    def attached(self, model: nn.Module) -> _Recorder:
        """Hook the model's modules; use as a context manager."""
        for fqn, module in model.named_modules():
            if fqn in self._wanted:
                hook = self._linear_hook(fqn)
            elif fqn in self._expert_modules and isinstance(
                getattr(module, "gate_up_proj", None), nn.Parameter
            ):
                hook = self._experts_hook(fqn)
            else:
                continue
            self._handles.append(module.register_forward_pre_hook(hook))
        return self

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, fqn: str, x: Tensor) -> None:
        if fqn in self._wanted and x.numel():
            self.amax[fqn] = max(self.amax.get(fqn, 0.0), x.detach().abs().max().item())

    def _linear_hook(self, fqn: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self._record(fqn, arguments[0])

        return hook

    def _experts_hook(self, fqn: str) -> Any:
        """Experts whose weights transformers keeps as [E, 2I, H] and [E, H, I]."""

        def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
            hidden, topk_ids = arguments[0].flatten(0, -2), arguments[1].flatten(0, -2)
            for expert in topk_ids.unique().tolist():
                x = hidden[(topk_ids == expert).any(-1)]
                gate, up = F.linear(x, module.gate_up_proj[expert]).chunk(2, dim=-1)
                self._record(f"{fqn}.{expert}.gate_proj", x)
                self._record(f"{fqn}.{expert}.up_proj", x)
                self._record(f"{fqn}.{expert}.down_proj", module.act_fn(gate) * up)

        return hook

    def fill_unrouted_experts(self) -> dict[str, str]:
        """Give experts without tokens their layer's largest amax; returns the reasons by FQN."""
        largest: dict[tuple[str | None, str], float] = {}
        for fqn, value in self.amax.items():
            key = names.experts_module(fqn), names.projection(fqn)
            largest[key] = max(largest.get(key, 0.0), value)
        fallbacks: dict[str, str] = {}
        for fqn in sorted(self._wanted - self.amax.keys(), key=names.natural_key):
            module, last = key = names.experts_module(fqn), names.projection(fqn)
            if module is not None and key in largest:
                fallbacks[fqn] = f"saw no token: largest {last} input of {module}"
                self.amax[fqn] = largest[key]
        return fallbacks
