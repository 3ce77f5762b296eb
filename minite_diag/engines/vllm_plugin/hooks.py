"""Hooks on a running vLLM model: which rows a forward pass holds, and every tensor of it.

Knows torch, vLLM's module classes and the Recorder; no file, no metric. Invariant: nothing is
computed here that the model didn't compute; tensors are written when a hook sees them, because
vLLM normalizes and rotates in place.
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
from minite_diag.engines.vllm_plugin import nvfp4_modelled
from minite_diag.engines.vllm_plugin.layout import ExpertLayer, expert_layers, linear_modules
from minite_diag.engines.vllm_plugin.nvfp4_cpu import emulation_module
from minite_diag.errors import EngineError
from minite_diag.trace.store import Row

_BITS_0_5, _BITS_0_75, _BITS_6 = 0x3F000000, 0x3F400000, 0x40C00000


@dataclass(frozen=True)
class Request:
    """One running request: its tokens and how many of them are the prompt."""

    sequence: TokenSequence
    prompt_tokens: int


def batch_rows(
    positions: Sequence[int],
    starts: Sequence[int],
    request_ids: Sequence[str],
    requests: dict[str, Request],
) -> list[tuple[Row, Request]]:
    """The token of each row of a flat batch, and the request that it belongs to.

    Request i owns rows starts[i]:starts[i + 1]; vLLM appends a suffix to the ids it was given.
    Raises EngineError for a padded batch or an unknown request.
    """
    if not starts or starts[-1] != len(positions) or len(starts) != len(request_ids) + 1:
        raise EngineError(
            f"vLLM ran {len(positions)} rows for {len(request_ids)} requests that end at "
            f"{list(starts)}: the batch is padded",
            "run eager, without data parallelism",
        )
    rows: list[tuple[Row, Request]] = []
    for number, request_id in enumerate(request_ids):
        request = requests.get(request_id) or requests.get(request_id.rpartition("-")[0])
        if request is None:
            raise EngineError(f"vLLM runs an unknown request {request_id!r}", "report this")
        sequence = request.sequence
        for row in range(starts[number], starts[number + 1]):
            position = int(positions[row])
            phase = "prefill" if position < request.prompt_tokens else "decode"
            token = Row(sequence.mode, sequence.source, sequence.probe, position, phase)
            rows.append((token, request))
    return rows


class Observer:
    """Attaches to every module of a vLLM model and feeds the recorder."""

    def __init__(
        self, model: nn.Module, runner: Any, requests: dict[str, Request], recorder: Recorder
    ) -> None:
        self.model, self.runner, self.requests, self.recorder = model, runner, requests, recorder
        self._starts: list[int] = []
        self._rows: list[tuple[Row, Request]] = []
        self._hidden: torch.Tensor | None = None
        self._site: str | None = None
        self._quantized: list[tuple[str, torch.Tensor]] = []

    def attach(self) -> None:
        """Hook the model; every site is promised to the recorder unless routing decides it."""
        self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.model.register_forward_hook(self._keep_hidden)
        for name, module in self.model.named_modules():
            self._attach_module(name, module)
        for name, module in linear_modules(self.model):
            if is_nvfp4(module) and hidden_quantizer(module) is None:
                self._attach_quantized(name, module)
        for layer in expert_layers(self.model):
            self._attach_experts(layer)
        self._watch_quantizer()

    def _attach_module(self, name: str, module: nn.Module) -> None:
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        is_router = name.endswith(".gate")
        if isinstance(module, LinearBase):
            attach(
                module, name, self.recorder, output_kind="router_logits" if is_router else "output"
            )
        elif isinstance(module, SiluAndMul):
            attach(module, name, self.recorder, input_kind=None)
        elif isinstance(module, Attention):
            self._attach_attention(name, module)
        elif isinstance(module, LogitsProcessor):
            self._attach_head(module)
        elif isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            attach(module, name, self.recorder, input_kind=None)
        elif "RMSNorm" in type(module).__name__:
            self._attach_norm(name, module)

    def _begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.recorder.active:
            return
        from vllm.forward_context import get_forward_context

        metadata: Any = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = next(iter(metadata.values()))
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        if positions is None or positions.dim() != 1 or not hasattr(metadata, "query_start_loc"):
            raise EngineError(
                f"vLLM's {type(metadata).__name__} gives no row boundaries for this model",
                "use an attention backend with query_start_loc",
            )
        request_ids = list(self.runner.input_batch.req_ids)
        self._starts = metadata.query_start_loc.tolist()
        self._rows = batch_rows(positions.tolist(), self._starts, request_ids, self.requests)
        self.recorder.begin_call([row for row, _ in self._rows])

    def _keep_hidden(self, _: nn.Module, _args: Any, output: Any) -> None:
        self._hidden = output if self.recorder.active else None

    def _record(self, native: str, kind: str, tensor: torch.Tensor) -> None:
        if self.recorder.active:
            self.recorder.tensor(native, kind, tensor.reshape(len(self._rows), -1))

    def _pass_on(self, native: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Record; the same object, unless an intervention replaces it."""
        if not self.recorder.active:
            return tensor
        rows = tensor.reshape(len(self._rows), -1)
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
            hidden, *rest = (*args, *kwargs.values())
            residual = rest[0] if rest else None
            if residual is None:
                new = self._pass_on(name, "input", hidden)
                return substitute(args, hidden, new), substitute(kwargs, hidden, new)
            total = self._replaced_layer(finished, hidden, residual)
            if total is None:
                return None
            zero = torch.zeros_like(hidden)
            args, kwargs = substitute(args, hidden, zero), substitute(kwargs, hidden, zero)
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
        new = recorder.replacement(finished, "output", total.reshape(len(self._rows), -1))
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

    def _attach_head(self, module: nn.Module) -> None:
        self._promise("lm_head", "input", "logits")

        where: list[tuple[torch.Tensor, torch.Tensor]] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            where.clear()
            if not self.recorder.active:
                return None
            hidden = (*args, *kwargs.values())[1]
            rows, predicts = self._logits_rows(hidden)
            if not predicts.any():
                return None
            where.append((rows, predicts))
            given = hidden[predicts]
            new = pass_on(self.recorder, "lm_head", "input", given, rows[predicts])
            if new is given:
                return None
            changed = hidden.clone()
            changed[predicts] = new
            return substitute(args, hidden, changed), substitute(kwargs, hidden, changed)

        def after(_: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
            if not where:
                return None
            rows, predicts = where.pop()
            given = out[predicts]
            new = pass_on(self.recorder, "lm_head", "logits", given, rows[predicts])
            if new is given:
                return None
            changed = out.to(new.dtype, copy=True)
            changed[predicts] = new
            return changed

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _logits_rows(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows of the call `hidden` [R, H] holds, int64 [R], and which of them count.

        Prompt logprobs come from a slice of the model's output, the next token from the last row
        of each request. In a chunk that ends before the prompt does vLLM discards that token, and
        the row comes again as a prompt logprob where those were asked for.
        """
        root = self._hidden
        assert root is not None
        if hidden.untyped_storage().data_ptr() == root.untyped_storage().data_ptr():
            first = (hidden.storage_offset() - root.storage_offset()) // root.stride(0)
            rows = torch.arange(first, first + hidden.shape[0])
            predicts = torch.ones(len(rows), dtype=torch.bool)
        else:
            rows = torch.tensor(self._starts[1:]) - 1
            owners = [self._rows[row] for row in rows.tolist()]
            predicts = torch.tensor([r.position >= q.prompt_tokens - 1 for r, q in owners])
        if len(rows) != len(hidden) or not torch.equal(root[rows.to(root.device)], hidden):
            raise EngineError(
                f"lm_head got {hidden.shape[0]} rows that aren't rows of the model's output",
                "run without speculative decoding",
            )
        return rows, predicts

    def _attach_quantized(self, name: str, module: nn.Module) -> None:
        self._promise(name, "act_codes", "act_block_scale")

        def before(*_: Any) -> None:
            self._site = name

        def after(*_: Any) -> None:
            self._site = None

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _watch_quantizer(self) -> None:
        """Look at what the quantizers return to the kernels; results are passed on untouched."""
        emulation, modelled = emulation_module(), cast("Any", nvfp4_modelled)
        emulated, model = emulation.ref_nvfp4_quant, modelled.quantize_activation

        def watched_emulation(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values, block_scale = emulated(x, *args, **kwargs)
            if self.recorder.active and self._wants_codes():
                self._saw_codes(pack_e2m1(values), block_scale.to(torch.float8_e4m3fn))
            return values, block_scale

        def watched_model(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            quantized = model(x, *args, **kwargs)
            if self.recorder.active:
                scale = quantized.global_decode_scale
                self._saw_codes(
                    quantized.codes, quantized.block_scale, scale if scale.dim() else None
                )
            return quantized

        emulation.ref_nvfp4_quant = watched_emulation
        modelled.quantize_activation = watched_model

    def _wants_codes(self) -> bool:
        # Without a site the experts are running: which one isn't known yet.
        return self._site is None or any(
            self.recorder.wants(self._site, kind) for kind in ("act_codes", "act_block_scale")
        )

    def _saw_codes(
        self,
        codes: torch.Tensor,
        block_scale: torch.Tensor,
        token_scale: torch.Tensor | None = None,
    ) -> None:
        self._quantized = [("act_codes", codes), ("act_block_scale", block_scale)]
        if token_scale is not None:
            self._quantized.append(("act_global_decode_scale", token_scale))
        if self._site is not None:
            for kind, tensor in self._quantized:
                self.recorder.tensor(self._site, kind, tensor)

    def _attach_experts(self, layer: ExpertLayer) -> None:
        attach(layer.runner, layer.name, self.recorder)
        self._attach_router(layer)
        experts = fused_experts(layer)
        if hasattr(experts, "tap"):
            experts.tap = self._expert_tap(layer.name)

    def _attach_router(self, layer: ExpertLayer) -> None:
        if layer.is_monolithic:
            return
        self._promise(layer.name, "topk_ids", "topk_weights")
        router = layer.router
        select: Callable[..., Any] = router.select_experts

        def watched(*args: Any, **kwargs: Any) -> Any:
            weights, ids = select(*args, **kwargs)
            self._record(layer.name, "topk_ids", ids)
            self._record(layer.name, "topk_weights", weights)
            if isinstance(self.recorder, IntervenedRecorder):
                ids, weights = self.recorder.route(layer.name, ids, weights) or (ids, weights)
            return weights, ids

        router.select_experts = watched

    def _expert_tap(self, name: str) -> Callable[..., torch.Tensor]:
        shared: list[tuple[str, torch.Tensor]] = []

        def codes() -> list[tuple[str, torch.Tensor]]:
            return list(self._quantized)

        def write(expert: int, part: str, kind: str, tensor: torch.Tensor, rows: Any) -> None:
            self.recorder.tensor(f"{name}.{expert}.{part}", kind, tensor, rows)

        def gate_up(expert: int, tensor: torch.Tensor, rows: Any) -> torch.Tensor:
            outputs, new = tensor.chunk(2, -1), []
            for part, out in zip(("gate_proj", "up_proj"), outputs, strict=True):
                for kind, whole in shared:
                    write(expert, part, kind, whole[rows], rows)
                site = f"{name}.{expert}.{part}"
                new.append(pass_on(self.recorder, site, "output", out, rows))
            changed = any(a is not b for a, b in zip(new, outputs, strict=True))
            return torch.cat(new, -1) if changed else tensor

        def tap(
            stage: str, expert: int, rows: torch.Tensor | None, tensor: torch.Tensor
        ) -> torch.Tensor:
            if not self.recorder.active:
                return tensor
            site = f"{name}.{expert}.down_proj"
            if stage == "input":
                shared[:] = [("input", tensor), *codes()]
            elif stage == "gate_up":
                return gate_up(expert, tensor, rows)
            elif stage == "activation":
                return pass_on(self.recorder, site, "input", tensor, rows)
            elif stage == "quantized":
                for kind, found in codes():
                    write(expert, "down_proj", kind, found, rows)
            elif stage == "down":
                return pass_on(self.recorder, site, "output", tensor, rows)
            return tensor

        return tap


def fused_experts(layer: ExpertLayer) -> Any:
    """The object that runs the experts (None where vLLM's method has no modular kernel)."""
    kernel = getattr(layer.weights.quant_method, "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


def is_nvfp4(module: Any) -> bool:
    """Whether a linear holds packed E2M1 weights with a static activation scale."""
    return hasattr(module, "weight_global_scale") and hasattr(module, "input_global_scale_inv")


def hidden_quantizer(module: Any) -> str | None:
    """Why a quantized linear shows no codes of its activations; None where it shows them."""
    kernel = kernel_object(module)
    name = type(kernel).__name__
    if getattr(kernel, "recipe", None) is not None:
        return None
    if is_weight_only(module):
        return f"{name} computes W4A16: activations are not quantized"
    on_cpu = next(module.parameters()).device.type == "cpu"
    if on_cpu and "Emulation" in name:
        return None
    return f"{name} quantizes its activations inside a kernel"


def is_weight_only(module: Any) -> bool:
    """Whether a quantized linear multiplies activations that are not quantized (W4A16)."""
    return "Marlin" in type(kernel_object(module)).__name__


def kernel_object(module: Any) -> Any:
    """The kernel that a linear's scheme or quant method chose; None where there is none."""
    for holder in (getattr(module, "scheme", None), module.quant_method):
        kernel = getattr(holder, "kernel", None)
        if kernel is not None:
            return kernel
    return None


def finished_layer(norm: str, model: nn.Module) -> str | None:
    """The decoder layer whose output a norm sees as its residual sum; None if it is another norm.

    vLLM's layers return (hidden, residual); the next layer's first norm adds them.
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


def pack_e2m1(values_TK: torch.Tensor) -> torch.Tensor:
    """E2M1 grid values (any float dtype) as codes, uint8 [T, K/2], even element in the low nibble.

    Read from the FP32 bits: from 1 on, the exponent and the first mantissa bit are the code plus
    252. Only lossless values are accepted: ValueError for one that isn't on the grid.
    """
    bits = values_TK.float().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    codes = ((magnitude >> 22) - 252).clamp_(1, 7).mul_(magnitude != 0)
    on_grid = (magnitude & 0x3FFFFF == 0) & (magnitude != _BITS_0_75)
    on_grid &= (magnitude == 0) | (magnitude >= _BITS_0_5)
    if values_TK.numel() and not (bool(on_grid.all()) and int(magnitude.max()) <= _BITS_6):
        raise ValueError("the quantizer returned values that are not on the E2M1 grid")
    codes = (codes | ((bits >> 28) & 8)).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
