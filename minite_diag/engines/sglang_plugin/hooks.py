"""Hooks on a running SGLang model: which rows a forward pass holds, and every tensor of it.

Knows torch, SGLang's module classes and the Recorder; no file, no metric. Invariant: nothing is
computed here that the model didn't compute; tensors are written when a hook sees them, because
SGLang works in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from minite_diag.capture.hooks import attach, pass_on, substitute
from minite_diag.capture.interventions import IntervenedRecorder
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import TokenSequence
from minite_diag.engines.sglang_plugin.layout import ExpertLayer, expert_layers, linear_modules
from minite_diag.errors import EngineError
from minite_diag.trace.store import Row
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


@dataclass(frozen=True)
class Running:
    """One running request: its tokens and how many of them are the prompt."""

    sequence: TokenSequence
    prompt_tokens: int


def batch_rows(
    positions: Sequence[int],
    lengths: Sequence[int],
    request_ids: Sequence[str],
    running: dict[str, Running],
) -> list[tuple[Row, Running]]:
    """The token of each row of a flat batch, and the request that it belongs to.

    Request i owns the next `lengths[i]` rows. Raises EngineError for a padded batch or an unknown
    request.
    """
    if sum(lengths) != len(positions) or len(lengths) != len(request_ids):
        raise EngineError(
            f"SGLang ran {len(positions)} rows for {len(request_ids)} requests of "
            f"{list(lengths)} tokens: the batch is padded",
            "run eager, without data parallelism",
        )
    rows: list[tuple[Row, Running]] = []
    for length, request_id in zip(lengths, request_ids, strict=True):
        request = running.get(request_id)
        if request is None:
            raise EngineError(f"SGLang runs an unknown request {request_id!r}", "report this")
        sequence = request.sequence
        for _ in range(length):
            position = int(positions[len(rows)])
            phase = "prefill" if position < request.prompt_tokens else "decode"
            token = Row(sequence.mode, sequence.source, sequence.probe, position, phase)
            rows.append((token, request))
    return rows


class Observer:
    """Attaches to every module of an SGLang model and feeds the recorder."""

    def __init__(
        self, model: nn.Module, runner: Any, running: dict[str, Running], recorder: Recorder
    ) -> None:
        self.model, self.runner, self.running, self.recorder = model, runner, running, recorder
        self._rows: list[tuple[Row, Running]] = []
        self._count = 0
        self._head_rows: list[int] = []
        self._shard: tuple[torch.Tensor, torch.Tensor] | None = None

    def attach(self) -> None:
        """Hook the model; every site is promised to the recorder unless routing decides it."""
        self._watch_forward()
        for name, module in self.model.named_modules():
            self._attach_module(name, module)
        for name, module in linear_modules(self.model):
            if is_nvfp4(module):
                self._promise(name, "act_codes", "act_block_scale")
                module.minite_tap = self._linear_tap(name)
        layers = expert_layers(self.model)
        for layer in layers:
            self._attach_experts(layer)
        unquantized = [layer for layer in layers if not is_nvfp4(layer.experts)]
        if unquantized:
            ExpertLoop(self.recorder, unquantized).attach()

    def _watch_forward(self) -> None:
        forward = self.runner.forward

        def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.active:
                self._begin(forward_batch)
            return forward(forward_batch, *args, **kwargs)

        self.runner.forward = watched

    def _begin(self, batch: Any) -> None:
        lengths = [1] * len(batch.rids)
        if batch.forward_mode.is_extend():
            lengths = list(batch.extend_seq_lens_cpu)
        self._rows = batch_rows(batch.positions.tolist(), lengths, batch.rids, self.running)
        self._count = len(self._rows)
        self.recorder.begin_call([row for row, _ in self._rows])

    def _attach_module(self, name: str, module: nn.Module) -> None:
        from sglang.srt.layers.activation import SiluAndMul
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.logits_processor import LogitsProcessor
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        if isinstance(module, LinearBase):
            is_router = name.endswith(".gate")
            attach(
                module, name, self.recorder, output_kind="router_logits" if is_router else "output"
            )
        elif isinstance(module, SiluAndMul):
            attach(module, name, self.recorder, input_kind=None)
        elif isinstance(module, RadixAttention):
            self._attach_attention(name, module)
        elif isinstance(module, LogitsProcessor):
            self._attach_head(module)
        elif isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            attach(module, name, self.recorder, input_kind=None)
        elif "RMSNorm" in type(module).__name__:
            self._attach_norm(name, module)

    def _record(self, native: str, kind: str, tensor: torch.Tensor) -> None:
        if self.recorder.active:
            self.recorder.tensor(native, kind, tensor.reshape(self._count, -1))

    def _pass_on(self, native: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Record; the same object, unless an intervention replaces it."""
        if not self.recorder.active:
            return tensor
        rows = tensor.reshape(self._count, -1)
        new = pass_on(self.recorder, native, kind, rows)
        return tensor if new is rows else new.reshape(tensor.shape)

    def _promise(self, native: str, *kinds: str) -> None:
        for kind in kinds:
            self.recorder.promise(native, kind)

    def _attach_norm(self, name: str, module: nn.Module) -> None:
        self._promise(name, "input", "output")
        finished = finished_layer(name, self.model)
        if finished is not None:
            self._promise(finished, "output")

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.recorder.active:
                return None
            hidden, residual = args[0], args[1] if len(args) > 1 else kwargs.get("residual")
            if residual is None:
                new = self._pass_on(name, "input", hidden)
                return substitute(args, hidden, new), kwargs
            total = self._replaced_layer(finished, hidden, residual)
            if total is None:
                return None
            zero = torch.zeros_like(hidden)
            args = substitute(args, hidden, zero)
            return substitute(args, residual, total), substitute(kwargs, residual, total)

        def after(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            if not self.recorder.active:
                return None
            # A fused add and norm gets its two addends from the ops before it, replaced or not;
            # what is put in the place of the sum that it returns is the next one's addend.
            if not isinstance(output, tuple):
                return self._pass_on(name, "output", output)
            normal, residual = output
            if finished is not None:
                self._record(finished, "output", residual)
            residual = self._pass_on(name, "input", residual)
            return self._pass_on(name, "output", normal), residual

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _replaced_layer(
        self, finished: str | None, hidden: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """What replaces a layer's output, to be normalized with zero as the other addend."""
        recorder = self.recorder
        if finished is None or not isinstance(recorder, IntervenedRecorder):
            return None
        total = (hidden.float() + residual.float()).to(residual.dtype)
        new = recorder.replacement(finished, "output", total.reshape(self._count, -1))
        return None if new is None else new.reshape(residual.shape)

    def _attach_attention(self, name: str, module: nn.Module) -> None:
        parent = name.rpartition(".")[0]
        self._promise(f"{parent}.q_rope", "output")
        self._promise(f"{parent}.k_rope", "output")

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.recorder.active:
                return None
            for site, old in zip(("q_rope", "k_rope"), (*args, *kwargs.values())[:2], strict=True):
                new = self._pass_on(f"{parent}.{site}", "output", old)
                args, kwargs = substitute(args, old, new), substitute(kwargs, old, new)
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        attach(module, name, self.recorder, input_kind=None)

    def _attach_head(self, module: Any) -> None:
        self._promise("lm_head", "input", "logits")
        prune, multiply = module._get_pruned_states, module._compute_lm_head

        def pruned(hidden: torch.Tensor, before_norm: Any, aux: Any, metadata: Any) -> Any:
            result = prune(hidden, before_norm, aux, metadata)
            if self.recorder.active:
                # SGLang's own choice of rows, made once more on their numbers.
                numbers = torch.arange(len(hidden))[:, None]
                self._head_rows = prune(numbers, None, None, metadata)[0][:, 0].tolist()
            return result

        def head(hidden: torch.Tensor, lm_head: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.recorder.active:
                return cast("torch.Tensor", multiply(hidden, lm_head, *args, **kwargs))
            rows, kept = self._take_head_rows(len(hidden))
            hidden = self._pass_rows("input", hidden, rows, kept, hidden.shape[-1])
            logits = multiply(hidden, lm_head, *args, **kwargs)
            if module.do_tensor_parallel_all_gather:
                self._shard = (rows, kept)
                return cast("torch.Tensor", logits)
            return self._pass_rows("logits", logits, rows, kept, module.vocab_size)

        module._get_pruned_states, module._compute_lm_head = pruned, head
        if module.do_tensor_parallel_all_gather:
            self._attach_gathered_head(module)

    def _attach_gathered_head(self, module: Any) -> None:
        """The logits of all ranks: one rank's product is a slice of the vocabulary."""
        gather = module._get_logits

        def gathered(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._shard = None
            logits: torch.Tensor = gather(hidden, *args, **kwargs)
            if self._shard is not None:
                # SGLang stores FP32; the bits are those of the model's dtype.
                shown = logits[:, : module.vocab_size].to(hidden.dtype)
                rows, kept = self._shard
                self.recorder.tensor("lm_head", "logits", shown[kept], rows[kept])
            return logits

        module._get_logits = gathered

    def _take_head_rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the call that the next `count` rows of lm_head are, int64 [R]; which ones count.

        In a chunk that ends before the prompt does SGLang discards the logits of its last row,
        unless they are those of a prompt log-probability.
        """
        rows, self._head_rows = self._head_rows[:count], self._head_rows[count:]
        if len(rows) != count:
            raise EngineError(
                f"lm_head got {count} rows where SGLang chose {len(rows)}",
                "run without speculative decoding",
            )
        owners = [self._rows[row] for row in rows]
        kept = [r.mode == "score" or r.position >= q.prompt_tokens - 1 for r, q in owners]
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(kept, dtype=torch.bool)

    def _pass_rows(
        self, kind: str, tensor: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Pass on the kept rows [R, width]; SGLang pads its vocabulary, and cuts it after this."""
        if not bool(kept.any()):
            return tensor
        given = tensor[kept][:, :width]
        new = pass_on(self.recorder, "lm_head", kind, given, rows[kept])
        if new is given:
            return tensor
        changed = tensor.to(new.dtype, copy=True)
        changed[kept, :width] = new
        return changed

    def _linear_tap(self, name: str) -> Callable[..., Any]:
        def tap(stage: str, _expert: int, _rows: torch.Tensor | None, value: Any) -> Any:
            if self.recorder.active and stage == "quantized":
                for kind, tensor in quantized_kinds(value):
                    self.recorder.tensor(name, kind, tensor)
            return value

        return tap

    def _attach_experts(self, layer: ExpertLayer) -> None:
        attach(layer.experts, layer.name, self.recorder)
        if layer.topk is not None:
            self._attach_router(layer)
        if is_nvfp4(layer.experts):
            layer.experts.minite_tap = self._expert_tap(layer.name)

    def _attach_router(self, layer: ExpertLayer) -> None:
        self._promise(layer.name, "topk_ids", "topk_weights")

        def after(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            if not self.recorder.active:
                return None
            self._record(layer.name, "topk_ids", output.topk_ids)
            self._record(layer.name, "topk_weights", output.topk_weights)
            if not isinstance(self.recorder, IntervenedRecorder):
                return None
            routed = self.recorder.route(layer.name, output.topk_ids, output.topk_weights)
            if routed is None:
                return None
            return output._replace(topk_ids=routed[0], topk_weights=routed[1])

        layer.topk.register_forward_hook(after)

    def _expert_tap(self, name: str) -> Callable[..., Any]:
        given: list[tuple[str, torch.Tensor]] = []
        leaves = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

        def tap(stage: str, expert: int, rows: torch.Tensor | None, value: Any) -> Any:
            if not self.recorder.active:
                return value
            if stage == "input":
                x, quantized = value
                given[:] = [("input", x[rows]), *quantized_kinds(quantized)]
            elif stage == "quantized":
                for kind, tensor in quantized_kinds(value):
                    self.recorder.tensor(f"{name}.{expert}.down_proj", kind, tensor, rows)
            elif stage == "activation":
                return pass_on(self.recorder, f"{name}.{expert}.down_proj", "input", value, rows)
            else:
                site = f"{name}.{expert}.{leaves[stage]}"
                for kind, tensor in given if stage != "down" else ():
                    self.recorder.tensor(site, kind, tensor, rows)
                return pass_on(self.recorder, site, "output", value, rows)
            return value

        return tap


class ShardObserver(Observer):
    """The same hooks in a rank that is not the first: it knows no request and has no logits."""

    def _begin(self, batch: Any) -> None:
        self._count = len(batch.positions)

    def _attach_head(self, module: Any) -> None:
        pass


class ExpertLoop:
    """Looks into SGLang's torch loop over unquantized experts, by its calls of `linear`.

    The loop calls torch.nn.functional twice an expert, in the order of the experts, on rows that it
    sorted by expert; the same sort is made here to know which rows they are.
    """

    def __init__(self, recorder: Recorder, layers: Sequence[ExpertLayer]) -> None:
        self.recorder, self.layers = recorder, layers
        self._weights: dict[int, tuple[ExpertLayer, str, int]] = {}
        self._sorted: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def attach(self) -> None:
        """Stand where the loop's module has torch.nn.functional."""
        from sglang.srt.layers.moe import fused_moe_native

        for layer in self.layers:
            for fused in ("w13", "w2"):
                weight = getattr(layer.experts, f"{fused}_weight")
                for expert in range(layer.num_experts):
                    self._weights[weight[expert].data_ptr()] = (layer, fused, expert)
            layer.experts.register_forward_pre_hook(self._begin, with_kwargs=True)
        fused_moe_native.F = _Functional(self._linear)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.recorder.active:
            return
        routing = args[1] if len(args) > 1 else kwargs["topk_output"]
        ids = routing.topk_ids
        self._sorted = ids.reshape(-1).argsort() // ids.shape[1]

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
        found = self._weights.get(weight.data_ptr())
        if not self.recorder.active or found is None or self._sorted is None:
            return nn.functional.linear(x, weight, *args)
        layer, fused, expert = found
        name = f"{layer.name}.{expert}"
        if fused == "w2":
            x = pass_on(self.recorder, f"{name}.down_proj", "input", x, self._rows)
            out = nn.functional.linear(x, weight, *args)
            return pass_on(self.recorder, f"{name}.down_proj", "output", out, self._rows)
        self._rows, self._sorted = self._sorted[: len(x)], self._sorted[len(x) :]
        for leaf in layer.halves:
            x = pass_on(self.recorder, f"{name}.{leaf}", "input", x, self._rows)
        out = nn.functional.linear(x, weight, *args)
        halves = out.chunk(2, -1)
        new = [
            pass_on(self.recorder, f"{name}.{leaf}", "output", half, self._rows)
            for leaf, half in zip(layer.halves, halves, strict=True)
        ]
        changed = any(a is not b for a, b in zip(new, halves, strict=True))
        return torch.cat(new, -1) if changed else out


class _Functional:
    """torch.nn.functional with one function watched."""

    def __init__(self, linear: Callable[..., torch.Tensor]) -> None:
        self.linear = linear

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)


def quantized_kinds(quantized: Nvfp4Tensor) -> list[tuple[str, torch.Tensor]]:
    """The site kinds of a quantized activation; a scale for each token is one of them."""
    kinds = [("act_codes", quantized.codes), ("act_block_scale", quantized.block_scale)]
    if quantized.global_decode_scale.dim():
        kinds.append(("act_global_decode_scale", quantized.global_decode_scale))
    return kinds


def is_nvfp4(module: Any) -> bool:
    """Whether a linear or a layer of experts runs this package's NVFP4 methods."""
    return getattr(module, "minite_nvfp4", None) is not None


def finished_layer(norm: str, model: nn.Module) -> str | None:
    """The decoder layer whose output a norm sees as its residual sum; None if it is another norm.

    SGLang's layers leave the residual addition to the next layer's first norm.
    """
    match = re.fullmatch(r"(.*\.layers\.)(\d+)\.input_layernorm", norm)
    if match:
        number = int(match.group(2))
        return f"{match.group(1)}{number - 1}" if number else None
    parent = norm.rpartition(".")[0]
    layers = getattr(model.get_submodule(parent), "layers", None) if parent else None
    if isinstance(layers, nn.ModuleList) and len(layers):
        return f"{parent}.layers.{len(layers) - 1}"
    return None
