"""Engine `hf`: a transformers causal LM, in high precision; the base that `te` builds on.

The only file (with te.py) that imports transformers. Every op is transformers' own (`native`);
expert matmuls are seen by watching `torch.nn.functional.linear` inside the experts module, whose
weights are one fused tensor, so nothing that runs is replaced.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn
from torch.overrides import TorchFunctionMode

from minite_diag.alignments.base import application, apply_replacements, with_replaced
from minite_diag.capture.hooks import attach, pass_on, substitute
from minite_diag.capture.interventions import IntervenedRecorder
from minite_diag.capture.recorder import Recorder
from minite_diag.engines import hf_device_map, hf_parallel
from minite_diag.engines.base import (
    Diagnosis,
    Engine,
    EngineInfo,
    Evidence,
    Layout,
    Part,
    ScoredTokens,
    TokenSequence,
)
from minite_diag.errors import EngineError, EngineUnavailable, UsageError
from minite_diag.plan import EngineSpec, Plan
from minite_diag.trace.store import Row

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
OPTIONS: Final = frozenset({"dtype", "device", "attention"})
PLACEMENT_OPTIONS: Final = hf_parallel.OPTIONS | hf_device_map.OPTIONS
"""Options that put one model on several devices."""
KNOWN_TRANSFORMERS: Final = SpecifierSet(">=5.12,<5.20")
LOGPROB_ROWS: Final = 256
"""Rows of logits turned into FP32 log-probabilities at a time."""


class HfEngine(Engine):
    """transformers, teacher-forced with one forward pass, sampled with its KV cache."""

    name: ClassVar[str] = "hf"
    label: ClassVar[str] = "hf"
    options: ClassVar[frozenset[str]] = OPTIONS | PLACEMENT_OPTIONS
    recorder: Recorder | None = None
    parallel: hf_parallel.Parallel | None = None
    device_map: hf_device_map.DeviceMap | None = None

    @classmethod
    def ranks(cls, options: dict[str, str]) -> int:
        """The `world_size` of `parallel`; 1 without it."""
        cls._check_options(options)
        return hf_parallel.asked_ranks(options)

    @classmethod
    def _check_options(cls, options: dict[str, str]) -> None:
        unknown = sorted(set(options) - cls.options)
        if not unknown:
            return
        reason = ": it runs on one device" if unknown[0] in PLACEMENT_OPTIONS else ""
        raise UsageError(
            f"engine {cls.name!r} has no option {unknown[0]!r}{reason}",
            f"one of: {', '.join(sorted(cls.options))}",
        )

    @classmethod
    def diagnose(cls) -> Diagnosis:
        """The transformers that is installed, and whether its hooks are known here."""
        transformers = _import_transformers(cls.name)
        version, known = transformers.__version__, KNOWN_TRANSFORMERS
        text = f"the hooks were written for transformers {known}, this is {version}"
        problems = (
            () if Version(version) in known else ((text, f"pip install 'transformers{known}'"),)
        )
        device = _device_name(torch.device(_default_device()))
        if torch.cuda.device_count() > 1 and cls.options >= PLACEMENT_OPTIONS:
            device = f"{torch.cuda.device_count()} x {device}"
        return Diagnosis(cls.label, version, device, problems=problems)

    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Load the checkpoint in `dtype` on `device` with the `attention` implementation."""
        self._check_options(spec.options)
        if spec.checkpoint_format.startswith("nvfp4"):
            raise UsageError(
                f"engine {self.name!r} loads high-precision checkpoints, "
                f"{spec.checkpoint} is {spec.checkpoint_format}",
                "give the BF16 master weights to the learner",
            )
        self.plan = plan
        self.dtype = _dtype(spec.options.get("dtype", plan.dtype))
        self.device = torch.device(spec.options.get("device") or _default_device())
        self.attention = spec.options.get("attention", "sdpa")
        self._place(spec)
        self.model = self._load_model(Path(spec.checkpoint))
        self.patched = apply_replacements(self.name, spec.align, self.model)
        self.attention = str(self.model.config._attn_implementation)
        if self.parallel:
            self.parallel.watch(self.model)
        return EngineInfo(
            label=self.label,
            version=importlib.metadata.version("transformers"),
            device=_device_name(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            layout=Layout(_expert_parts(self.model)),
            evidence=with_replaced(self._placed_evidence(), self.patched),
            invisible=self.invisible(),
            settings={
                "attention": str(self.model.config._attn_implementation),
                "experts": str(getattr(self.model.config, "_experts_implementation", None)),
                "threads": str(torch.get_num_threads()),
            }
            | (self.parallel.settings(self.model) if self.parallel else {})
            | (self.device_map.settings(self.model) if self.device_map else {}),
        )

    def _place(self, spec: EngineSpec) -> None:
        """Choose the devices, before anything is loaded."""
        given = sorted(PLACEMENT_OPTIONS & set(spec.options))
        for name in spec.align if given else ():
            found = application(name, self.name)
            if found is not None and found.replacements:
                raise UsageError(
                    f"{self.name}: alignment {name!r} replaces modules whose weights "
                    f"{given[0]} puts on several devices",
                    "leave one of them out",
                )
        if "parallel" in spec.options and hf_device_map.OPTIONS & set(spec.options):
            raise UsageError(
                f"engine {self.name!r} takes one of parallel and device_map", "leave one out"
            )
        if "parallel" in spec.options:
            self.parallel = hf_parallel.Parallel(spec, self.plan, self.device)
            self.device = self.parallel.device
        elif hf_device_map.OPTIONS & set(spec.options):
            self.device_map = hf_device_map.DeviceMap(spec)

    def _placed_evidence(self) -> Iterator[Evidence]:
        """With what the ranks do in each op."""
        for item in self.evidence():
            note = self.parallel.note(self.model, item.op) if self.parallel else ""
            notes = "; ".join(filter(None, (item.note, note)))
            yield dataclasses.replace(item, note=notes)
        if self.parallel:
            yield self.parallel.evidence()

    def _load_model(self, folder: Path) -> Any:
        transformers = _import_transformers(self.name)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

        def read(**placement: Any) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=self.dtype,
                attn_implementation=self.attention,
                local_files_only=True,
                **placement,
            )

        try:
            model = self._on_devices(read)
        except (ValueError, KeyError, OSError) as error:
            raise EngineError(
                f"{self.name}: transformers can't load {folder}: {error}",
                "check that transformers knows the architecture in config.json",
            ) from error
        self.has_experts = bool(_expert_modules(model))
        if self.has_experts:
            model.set_experts_implementation("eager")
        return model.eval()

    def _on_devices(self, read: Callable[..., Any]) -> Any:
        if self.parallel is not None:
            return self.parallel.load(read)
        if self.device_map is not None:
            model = self.device_map.load(read)
            self.device = hf_device_map.input_device(model)
            return model
        return read().to(self.device)

    def evidence(self) -> Iterator[Evidence]:
        """Every op is transformers' own."""
        for op, impl in (
            ("linear", "torch.nn.functional.linear"),
            (
                "norm",
                type(self.model.model.norm).__module__ + "." + type(self.model.model.norm).__name__,
            ),
            ("rope", "transformers apply_rotary_pos_emb"),
            ("attention", f"transformers {self.attention}"),
            ("activation", "transformers ACT2FN"),
            ("lm_head", "torch.nn.functional.linear"),
            ("logprobs", "torch.log_softmax in float32"),
        ):
            yield Evidence(op, "native", impl)
        if self.has_experts:
            yield Evidence("router", "native", "transformers top-k router")
            yield Evidence("experts", "native", "transformers eager experts")

    def invisible(self) -> dict[str, str]:
        """Kinds that don't exist here."""
        reason = "this engine computes in high precision"
        return {"*:act_*": reason, "*:weight_codes": reason, "*:weight_*scale": reason}

    def observe(self, recorder: Recorder) -> None:
        """Hook every linear, norm, router, expert, attention and layer; write the weights."""
        self.recorder = recorder
        if self.parallel is not None:
            self.parallel.gather_into(self.model, recorder)
        for name, module in self.model.named_modules():
            with hf_device_map.at_hand(module) if self.device_map else nullcontext():
                self._write_weights(name, module, recorder)
            self._observe_module(name, module, recorder)
        _observe_attention(self.model, self.attention, recorder)

    def _write_weights(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(bias, torch.Tensor):
            _write_static(recorder, name, "bias", bias)
        if isinstance(weight, torch.Tensor):
            _write_static(recorder, name, "weight", weight)
        elif _is_experts(module):
            for leaf in ("gate_up_proj", "down_proj"):
                _write_static(recorder, f"{name}.{leaf}", "weight", getattr(module, leaf))

    def _observe_module(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        kind = type(module).__name__
        if name == "lm_head":
            attach(module, name, recorder, output_kind="logits")
        elif _is_experts(module):
            _observe_experts(name, module, recorder)
        elif kind.endswith("Router"):
            _observe_router(name, module, recorder)
        elif isinstance(module, nn.Linear) or "Norm" in kind:
            if name.endswith("mlp.down_proj"):
                # Before the linear's own hook, which may hand on another input.
                attach(
                    module,
                    name.removesuffix("down_proj") + "act_fn",
                    recorder,
                    input_kind="output",
                    output_kind=None,
                )
            attach(module, name, recorder)
        elif isinstance(module, nn.Embedding) or re.fullmatch(r".*layers\.\d+", name):
            attach(module, name, recorder, input_kind=None)

    def score(self, sequence: TokenSequence) -> ScoredTokens:
        """One forward pass over the sequence alone."""
        self._begin(sequence, 0, len(sequence.token_ids), "prefill")
        ids = torch.tensor([sequence.token_ids], device=self.device)
        with torch.inference_mode():
            return self._scored(sequence, self.model(input_ids=ids, use_cache=False).logits[0])

    def score_batch(self, sequences: Sequence[TokenSequence]) -> list[ScoredTokens]:
        """One forward pass over right-padded sequences."""
        longest = max(len(s.token_ids) for s in sequences)
        rows = [s.token_ids + (0,) * (longest - len(s.token_ids)) for s in sequences]
        real = [[1] * len(s.token_ids) + [0] * (longest - len(s.token_ids)) for s in sequences]
        ids = torch.tensor(rows, device=self.device)
        mask = torch.tensor(real, device=self.device)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            return [
                self._scored(s, logits_TV[: len(s.token_ids)])
                for s, logits_TV in zip(sequences, logits, strict=True)
            ]

    def score_chunked(self, sequence: TokenSequence, chunk_tokens: int) -> ScoredTokens:
        """Forward passes over chunks with the KV cache."""
        ids = torch.tensor([sequence.token_ids], device=self.device)
        parts, cache = [], None
        with torch.inference_mode():
            for chunk in ids.split(chunk_tokens, 1):
                output = self.model(input_ids=chunk, use_cache=True, past_key_values=cache)
                cache = output.past_key_values
                parts.append(output.logits[0])
            return self._scored(sequence, torch.cat(parts))

    def _scored(self, sequence: TokenSequence, logits_TV: torch.Tensor) -> ScoredTokens:
        ids_T = torch.tensor(sequence.token_ids, device=logits_TV.device)
        logprobs, top_ids, top_logprobs = _gather(
            logits_TV[:-1], ids_T[1:], self.plan.capture.top_k
        )
        return ScoredTokens(
            sequence,
            (None, *logprobs),
            ("prefill",) * len(sequence.token_ids),
            ((), *top_ids),
            ((), *top_logprobs),
        )

    def sample(self, sequence: TokenSequence, num_tokens: int, seed: int) -> ScoredTokens:
        """Prefill the prompt, then decode one token at a time with the KV cache."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        prompt = list(sequence.token_ids[: sequence.prompt_length])
        ids, cache = list(prompt), None
        logprobs: list[float | None] = [None] * len(prompt)
        top_ids: list[tuple[int, ...]] = [()] * len(prompt)
        top_logprobs: list[tuple[float, ...]] = [()] * len(prompt)
        step = torch.tensor([prompt], device=self.device)
        with torch.inference_mode():
            for number in range(num_tokens):
                phase = "decode" if number else "prefill"
                self._begin(sequence, len(ids) - step.shape[1], len(ids), phase)
                output = self.model(input_ids=step, use_cache=True, past_key_values=cache)
                cache = output.past_key_values
                row_V = output.logits[0, -1:]
                token = torch.multinomial(row_V[0].float().softmax(-1), 1, generator=generator)
                found = _gather(row_V, token, self.plan.capture.top_k)
                logprobs += found[0]
                top_ids += found[1]
                top_logprobs += found[2]
                ids.append(int(token))
                step = token[None]
        done = TokenSequence("sample", sequence.source, sequence.probe, tuple(ids), len(prompt))
        phases = ["prefill"] * (len(prompt) + 1) + ["decode"] * (num_tokens - 1)
        return ScoredTokens(
            done, tuple(logprobs), tuple(phases), tuple(top_ids), tuple(top_logprobs)
        )

    def _begin(self, sequence: TokenSequence, start: int, stop: int, phase: str) -> None:
        if self.recorder is not None:
            self.recorder.begin_call(
                [
                    Row(sequence.mode, sequence.source, sequence.probe, position, phase)
                    for position in range(start, stop)
                ]
            )

    def close(self) -> None:
        """Drop the model."""
        del self.model
        if self.device_map is not None:
            self.device_map.close()


def _import_transformers(engine: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EngineUnavailable(
            f"engine {engine!r} needs transformers: {error}", "pip install 'minite-diag[hf]'"
        ) from error
    return transformers


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}", f"one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def log_softmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of FP32 logits; the alignment `logprobs` puts another one here."""
    return logits_TV.log_softmax(-1)


def _gather(
    logits_TV: torch.Tensor, ids_T: torch.Tensor, k: int
) -> tuple[list[float | None], list[tuple[int, ...]], list[tuple[float, ...]]]:
    """Log p of `ids_T` and the top k per row, in FP32, a bounded number of rows at a time."""
    logprobs: list[float | None] = []
    top_ids: list[tuple[int, ...]] = []
    top_logprobs: list[tuple[float, ...]] = []
    for rows_TV, ids in zip(logits_TV.split(LOGPROB_ROWS), ids_T.split(LOGPROB_ROWS), strict=True):
        all_TV = log_softmax(rows_TV.float())
        logprobs += all_TV.gather(1, ids[:, None])[:, 0].tolist()
        if k:
            values, indices = all_TV.topk(min(k, all_TV.shape[1]))
            top_ids += [tuple(row) for row in indices.tolist()]
            top_logprobs += [tuple(row) for row in values.tolist()]
        else:
            top_ids += [()] * len(ids)
            top_logprobs += [()] * len(ids)
    return logprobs, top_ids, top_logprobs


def _write_static(recorder: Recorder, native: str, kind: str, tensor: torch.Tensor) -> None:
    if recorder.wants(native, kind):
        recorder.static(native, kind, hf_parallel.whole(tensor.detach()))


def _is_experts(module: nn.Module) -> bool:
    gate_up = getattr(module, "gate_up_proj", None)
    return isinstance(gate_up, torch.Tensor) and gate_up.dim() == 3


def _expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if _is_experts(m)}


def _expert_parts(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    parts: dict[str, tuple[Part, ...]] = {}
    for name, module in _expert_modules(model).items():
        gate_up = module.gate_up_proj
        assert isinstance(gate_up, torch.Tensor)
        experts, twice = gate_up.shape[:2]
        parts[f"{name}.gate_up_proj"] = tuple(
            Part(f"{name}.{e}.{part}", start, start + twice // 2, e)
            for e in range(experts)
            for part, start in (("gate_proj", 0), ("up_proj", twice // 2))
        )
        parts[f"{name}.down_proj"] = tuple(
            Part(f"{name}.{e}.down_proj", expert=e) for e in range(experts)
        )
    return parts


def _observe_router(name: str, module: nn.Module, recorder: Recorder) -> None:
    """A top-k router returns (logits [T, E], weights [T, k], ids [T, k])."""
    experts = name.removesuffix("gate") + "experts"
    attach(module, name, recorder, output_kind="router_logits")
    for kind in ("topk_weights", "topk_ids"):
        recorder.promise(experts, kind)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not recorder.active:
            return None
        logits, weights, ids = output
        recorder.tensor(experts, "topk_weights", weights)
        recorder.tensor(experts, "topk_ids", ids)
        if isinstance(recorder, IntervenedRecorder):
            replaced = recorder.route(experts, ids, weights)
            ids, weights = replaced if replaced is not None else (ids, weights)
        return logits, weights, ids

    module.register_forward_hook(after)


class _ExpertWatcher(TorchFunctionMode):
    """Sees the two linears of each expert inside an experts module's forward."""

    def __init__(
        self, name: str, module: nn.Module, ids_TK: torch.Tensor, recorder: Recorder
    ) -> None:
        super().__init__()
        self.name, self.module, self.recorder = name, module, recorder
        self.ids_TK = ids_TK

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.linear:
            return self._linear(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, func: Callable[..., Any], x: Any, weight: Any, *rest: Any, **kw: Any) -> Any:
        for fused, parts in (
            (self.module.gate_up_proj, ("gate_proj", "up_proj")),
            (self.module.down_proj, ("down_proj",)),
        ):
            assert isinstance(fused, torch.Tensor)
            if weight.untyped_storage().data_ptr() != fused.untyped_storage().data_ptr():
                continue
            expert = (weight.storage_offset() - fused.storage_offset()) // fused.stride(0)
            # The order in which the module's torch.where lists an expert's tokens.
            rows = (self.ids_TK == expert).T.nonzero()[:, 1]
            sites = [f"{self.name}.{expert}.{part}" for part in parts]
            given = x
            for site in sites:
                x = pass_on(self.recorder, site, "input", given, rows)
            y = func(x, weight, *rest, **kw)
            outputs = y.chunk(len(parts), -1)
            new = [
                pass_on(self.recorder, site, "output", out, rows)
                for site, out in zip(sites, outputs, strict=True)
            ]
            changed = any(a is not b for a, b in zip(new, outputs, strict=True))
            return torch.cat(new, -1) if changed else y
        return func(x, weight, *rest, **kw)


def _observe_experts(name: str, module: nn.Module, recorder: Recorder) -> None:
    attach(module, name, recorder)
    inner = module.forward

    def watched(hidden_states: torch.Tensor, top_k_index: torch.Tensor, *rest: Any) -> Any:
        if not recorder.active:
            return inner(hidden_states, top_k_index, *rest)
        with _ExpertWatcher(name, module, top_k_index, recorder):
            return inner(hidden_states, top_k_index, *rest)

    module.forward = watched


def _pass_heads(recorder: Recorder, site: str, tensor: torch.Tensor) -> torch.Tensor:
    """Pass [batch, heads, tokens, dim] on as rows of tokens."""
    rows = tensor.transpose(1, 2)
    new = pass_on(recorder, site, "output", rows)
    return tensor if new is rows else new.transpose(1, 2)


def _observe_attention(model: Any, implementation: str, recorder: Recorder) -> None:
    """Record q and k after RoPE and the attention output through the attention registry."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modeling = importlib.import_module(type(model).__module__)
    # Eager attention is a function of the model's own module until someone registers another.
    own = getattr(modeling, "eager_attention_forward", None) if implementation == "eager" else None
    native = own or ALL_ATTENTION_FUNCTIONS.get(implementation)
    if native is None:
        raise EngineError(
            f"{modeling.__name__} has no attention function called {implementation!r}",
            "choose another with the option attention=",
        )
    names = {
        id(module): name for name, module in model.named_modules() if hasattr(module, "layer_idx")
    }

    def observed(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kw: Any):  # type: ignore[no-untyped-def]  # noqa: ANN202
        name = names.get(id(module))
        if name is None or not recorder.active:
            return native(module, query, key, *args, **kw)
        query = _pass_heads(recorder, f"{name}.q_rope", query)
        new = key[:, :, -query.shape[2] :]
        rotated = _pass_heads(recorder, f"{name}.k_rope", new)
        if rotated is not new:
            key = torch.cat((key[:, :, : -query.shape[2]], rotated), 2)
        output = native(module, query, key, *args, **kw)
        mixed = pass_on(recorder, f"{name}.attn", "output", output[0])
        return output if mixed is output[0] else substitute(output, output[0], mixed)

    for name in names.values():
        for site in ("q_rope", "k_rope", "attn"):
            recorder.promise(f"{name}.{site}", "output")
    ALL_ATTENTION_FUNCTIONS[implementation] = observed
