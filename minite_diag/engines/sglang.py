"""Engine `sglang`: SGLang's scheduler and model in this process, eager, radix cache off.

With `sglang_plugin` the only code that imports SGLang, always inside functions. Invariant: the
weights come through SGLang's own loader and scale fusion, and what was asked for and didn't get
installed is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from minite_diag.alignments.base import ENVIRONMENT as ALIGN_VARIABLE
from minite_diag.alignments.base import with_replaced
from minite_diag.capture.recorder import Recorder
from minite_diag.capture.shards import gather_into, whole_layout
from minite_diag.engines.base import (
    Diagnosis,
    Engine,
    EngineInfo,
    Evidence,
    Layout,
    ScoredTokens,
    TokenSequence,
)
from minite_diag.engines.sglang_plugin import nvfp4, readback, statics
from minite_diag.engines.sglang_plugin.hooks import Observer, Running, is_nvfp4
from minite_diag.engines.sglang_plugin.in_process import (
    Generated,
    GenerateRequest,
    InProcessScheduler,
)
from minite_diag.engines.sglang_plugin.layout import build_layout, expert_layers, linear_modules
from minite_diag.engines.sglang_plugin.shards import shard_rules
from minite_diag.engines.sglang_plugin.tensor_parallel import Preparation
from minite_diag.errors import (
    EngineError,
    EngineUnavailable,
    MiniteDiagError,
    UsageError,
    root_cause,
)
from minite_diag.plan import EngineSpec, Plan

INSTALL: Final = "minite-diag env create sglang"

ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1"}
"""Set before SGLang is imported: no network."""

DEFAULT_ENVIRONMENT: Final = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
"""Set unless the user did. SGLang must be told that a machine without a GPU is meant."""

OPTIONS: Final = {
    "dtype": "overrides the plan's dtype",
    "max_model_len": "longest sequence; default: what the probes need",
    "max_num_seqs": "requests that run together; default 8",
    "chunked_prefill_size": "tokens of a prefill step; default: a prompt is one step",
    "nvfp4_recipe": "auto (what SGLang's kernels compute, modelled on CPU), or another "
    f"arithmetic: {', '.join(nvfp4.MODELLED_RECIPES)}",
    "nvfp4_linear_recipe": "as nvfp4_recipe, of dense linears alone",
    "nvfp4_expert_recipe": "as nvfp4_recipe, of experts alone",
    "attention_backend": "SGLang's attention backend; default torch_native",
    "tp_size": "tensor-parallel ranks, each a process on this machine; default 1",
    "seed": "overrides the plan's seed",
    "production": "true: radix cache and chunked prefill as a server has them; no hooks",
}

RECIPE_OPTIONS: Final = ("nvfp4_recipe", "nvfp4_linear_recipe", "nvfp4_expert_recipe")
NVFP4_RECIPES: Final = ("auto", *nvfp4.MODELLED_RECIPES, *nvfp4.ALIGNED_RECIPES)

QUANTIZATIONS: Final = {
    "nvfp4-modelopt": "modelopt_fp4",
    "nvfp4-compressed-tensors": "compressed-tensors",
}
"""Checkpoint format -> the name under which SGLang must have loaded it."""

MOE_SCALES: Final = "flashinfer_cutlass"
"""Whose fusion of ModelOpt's expert scales runs: one activation scale for all experts."""


class SglangEngine(Engine):
    """SGLang, in-process; score by input logprobs, sample by its own sampler."""

    name: ClassVar[str] = "sglang"
    production_options: ClassVar[dict[str, str]] = {"production": "true"}

    @classmethod
    def diagnose(cls) -> Diagnosis:
        """The SGLang of this environment, and what would compute NVFP4 on CPU."""
        sglang = _import_sglang()
        note = "SGLang has no NVFP4 kernel for a CPU; its loader and scale fusion are its own"
        kernels = tuple(
            Evidence(op, "replaced", "minite_kernels.nvfp4", note)
            for op in ("nvfp4_linear", "experts")
        )
        return Diagnosis("sglang", sglang.__version__, "cpu", kernels)

    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Load `spec.checkpoint` through SGLang's loader and read back what it installed."""
        _check_options(spec)
        self.plan, self.spec = plan, spec
        self._running: dict[str, Running] = {}
        self._count = 0
        self.in_production = spec.options.get("production", "false") == "true"
        sglang = _import_sglang()
        config = _read_config(Path(spec.checkpoint))
        _check_architecture(config)
        _check_format(config, spec)
        preparation = Preparation(_nvfp4_recipes(spec), spec.align)
        self.patched = preparation.apply()
        try:
            self.engine = InProcessScheduler(self._arguments(config), preparation)
        except MiniteDiagError:
            raise
        except Exception as error:
            raise EngineError(
                f"sglang can't load {spec.checkpoint}: {root_cause(error)}",
                "see the engine's log for SGLang's own messages",
            ) from error
        self.runner = self.engine.runner
        self.model: nn.Module = self.runner.model
        layout = build_layout(self.model)
        if self._ranks > 1:
            layout = whole_layout(layout, shard_rules(self.model), self._ranks)
        self._check_installed(layout)
        return self._info(sglang.__version__, layout)

    @property
    def _ranks(self) -> int:
        return int(self.engine.arguments.tp_size)

    def _arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        options = self.spec.options
        length = int(options.get("max_model_len", self._needed_length()))
        sequences = int(options.get("max_num_seqs", 8))
        arguments: dict[str, Any] = {
            "model_path": self.spec.checkpoint,
            "dtype": options.get("dtype", self.plan.dtype),
            "device": "cpu",
            "attention_backend": options.get("attention_backend", "torch_native"),
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "context_length": length,
            "max_total_tokens": sequences * (length + 1),
            "max_running_requests": sequences,
            "chunked_prefill_size": int(options.get("chunked_prefill_size", -1)),
            "max_prefill_tokens": sequences * length,
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "disable_radix_cache": True,
            "tp_size": int(options.get("tp_size", 1)),
            "mem_fraction_static": 0.3,
            "log_level": "warning",
            "random_seed": int(options.get("seed", self.plan.seed)),
        }
        if self.in_production:
            for name in ("disable_radix_cache", "chunked_prefill_size", "max_prefill_tokens"):
                del arguments[name]
        if self.spec.checkpoint_format in QUANTIZATIONS:
            quantization = QUANTIZATIONS[self.spec.checkpoint_format]
            arguments["quantization"] = quantization
            if quantization == "modelopt_fp4" and any(
                config.get(key) for key in ("num_experts", "num_local_experts")
            ):
                arguments["moe_runner_backend"] = MOE_SCALES
        return arguments

    def _needed_length(self) -> int:
        longest = max((len(probe.token_ids) for probe in self.plan.probes), default=1)
        prompts = max((probe.prompt_length for probe in self.plan.probes), default=1)
        # SGLang wants room for one token more than it generates.
        return max(longest + 1, prompts + self.plan.sample_tokens) + 8

    def _check_installed(self, layout: Layout) -> None:
        """Raise EngineError where SGLang's dtype or quantization isn't what the plan says."""
        config = self.runner.model_config
        wanted = self.spec.options.get("dtype", self.plan.dtype)
        if str(config.dtype).removeprefix("torch.") != wanted:
            raise EngineError(
                f"sglang runs {config.dtype}, the plan says {wanted}", "choose another dtype"
            )
        if config.quantization != QUANTIZATIONS.get(self.spec.checkpoint_format):
            raise EngineError(
                f"sglang loaded {self.spec.checkpoint} as quantization={config.quantization}, "
                f"the plan says {self.spec.checkpoint_format}",
                "export the checkpoint again",
            )
        if self.spec.checkpoint_format in QUANTIZATIONS:
            self._check_quantized(layout)

    def _check_quantized(self, layout: Layout) -> None:
        found = set()
        for name, module in linear_modules(self.model):
            if is_nvfp4(module):
                found |= {part.fqn for part in layout.parts.get(name, ())} or {name}
        for layer in expert_layers(self.model):
            if is_nvfp4(layer.experts):
                for fused in ("w13", "w2"):
                    found |= {part.fqn for part in layout.parts[f"{layer.name}.{fused}"]}
        wanted = set(self.plan.quantized)
        if found != wanted:
            odd = sorted(found ^ wanted)
            raise EngineError(
                f"sglang quantized {len(found)} linears, the plan says {len(wanted)} "
                f"(first difference: {odd[0]})",
                "export the checkpoint again",
            )

    def _info(self, version: str, layout: Layout) -> EngineInfo:
        scheduler = self.engine.scheduler
        if "experts" in self.patched and not any(
            is_nvfp4(layer.experts) for layer in expert_layers(self.model)
        ):
            raise EngineError(
                "alignment 'experts' patched nothing in sglang: no experts are NVFP4",
                "leave it out",
            )
        evidence = with_replaced(readback.read_evidence(scheduler), self.patched)
        device = next(self.model.parameters()).device
        return EngineInfo(
            label=_label({item.status for item in evidence}),
            version=version,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(self.runner.model_config.dtype).removeprefix("torch."),
            layout=layout,
            evidence=evidence,
            settings=readback.read_settings(scheduler),
        )

    def observe(self, recorder: Recorder) -> None:
        """Write the weights as the engine holds them, then hook every module."""
        if self.in_production:
            raise EngineError(
                "sglang in production settings reuses cached prefixes: they can't be observed",
                "leave the option production out",
            )
        if self._ranks > 1:
            group = self.engine.scheduler.tp_group.cpu_group
            rules = shard_rules(self.model)
            gather_into(recorder, rules, group, engine="sglang", option="tp_size")

        def write() -> None:
            statics.write(self.model, recorder)
            Observer(self.model, self.runner, self._running, recorder).attach()

        self.engine.observe(write, recorder)

    def score(self, sequence: TokenSequence) -> ScoredTokens:
        """Input logprobs of the whole sequence, alone in the batch."""
        return self.score_batch([sequence])[0]

    def score_batch(self, sequences: Sequence[TokenSequence]) -> list[ScoredTokens]:
        """Input logprobs of requests that are queued together, before the first step."""
        results = self._generate([(s, s.token_ids) for s in sequences], 1, 0.0, score=True)
        return [_scored(s, result) for s, result in zip(sequences, results, strict=True)]

    def score_chunked(self, sequence: TokenSequence, chunk_tokens: int) -> ScoredTokens:
        """As `score`, with a scheduler that prefills `chunk_tokens` a step."""
        before = self.engine.scheduler.chunked_prefill_size
        self.engine.chunk(chunk_tokens)
        try:
            return self.score(sequence)
        finally:
            self.engine.chunk(before)

    def sample(self, sequence: TokenSequence, num_tokens: int, seed: int) -> ScoredTokens:
        """Continue the prompt at temperature 1 without truncation."""
        return self.sample_batch([sequence], num_tokens, seed)[0]

    def sample_batch(
        self, sequences: Sequence[TokenSequence], num_tokens: int, seed: int
    ) -> list[ScoredTokens]:
        """Requests that are queued together; they share the process's generator."""
        # A seed for each request exists in SGLang's deterministic mode only, which
        # refuses the CPU's attention backend.
        self.engine.seed(seed)
        requests = [(s, s.token_ids[: s.prompt_length]) for s in sequences]
        results = self._generate(requests, num_tokens, 1.0, score=False)
        return [_sampled(s, result) for s, result in zip(sequences, results, strict=True)]

    def _generate(
        self,
        requests: Sequence[tuple[TokenSequence, tuple[int, ...]]],
        num_tokens: int,
        temperature: float,
        *,
        score: bool,
    ) -> list[Generated]:
        """Run requests (sequence, prompt) together; results in their order."""
        for sequence, prompt in requests:
            self._check_request(sequence, prompt, num_tokens)
        batch = []
        for sequence, prompt in requests:
            self._count += 1
            id = f"minite-{self._count}"
            self._running[id] = Running(sequence, len(prompt))
            top_k = self.plan.capture.top_k
            batch.append(GenerateRequest(id, prompt, num_tokens, temperature, top_k, score))
        names = ", ".join(repr(sequence.probe) for sequence, _ in requests)
        try:
            return self.engine.run(batch)
        except MiniteDiagError:
            raise
        except Exception as error:
            raise EngineError(
                f"sglang failed on probe {names}: {root_cause(error)}",
                "see the engine's log for SGLang's own messages",
            ) from error
        finally:
            self._running.clear()

    def _check_request(
        self, sequence: TokenSequence, prompt: Sequence[int], num_tokens: int
    ) -> None:
        config = self.runner.model_config
        outside = next((i for i in prompt if not 0 <= i < config.vocab_size), None)
        if outside is not None:
            raise EngineError(
                f"probe {sequence.probe!r}: token id {outside} is outside of the vocabulary "
                f"(0..{config.vocab_size - 1})",
                "use ids of this checkpoint's tokenizer",
            )
        needed, limit = len(prompt) + num_tokens, self.engine.scheduler.max_req_len
        if needed > limit:
            raise EngineError(
                f"probe {sequence.probe!r} needs {needed} positions, max_model_len allows {limit}",
                f"set the option max_model_len={needed + 8}",
            )

    def close(self) -> None:
        """End the other ranks and free the model."""
        if hasattr(self, "engine"):
            self.engine.close()
            del self.engine, self.runner, self.model


def _scored(sequence: TokenSequence, result: Generated) -> ScoredTokens:
    length = len(sequence.token_ids)
    if len(result.prompt) != length:
        raise EngineError(
            f"sglang returned {len(result.prompt)} input logprobs for {length} tokens "
            f"of probe {sequence.probe!r}",
            "report it",
        )
    top = result.prompt_top or [((), ())] * length
    return ScoredTokens(
        sequence,
        (None, *result.prompt[1:]),
        ("prefill",) * length,
        tuple(ids for ids, _ in top),
        tuple(values for _, values in top),
    )


def _sampled(sequence: TokenSequence, result: Generated) -> ScoredTokens:
    prompt = sequence.token_ids[: sequence.prompt_length]
    new, padding = tuple(result.token_ids), len(prompt)
    top = result.output_top or [((), ())] * len(new)
    return ScoredTokens(
        TokenSequence("sample", sequence.source, sequence.probe, prompt + new, padding),
        (None,) * padding + tuple(result.output),
        ("prefill",) * (padding + 1) + ("decode",) * (len(new) - 1),
        ((),) * padding + tuple(ids for ids, _ in top),
        ((),) * padding + tuple(values for _, values in top),
    )


def _nvfp4_recipes(spec: EngineSpec) -> tuple[str, str] | None:
    """The recipes of dense linears and of experts; None where nothing is NVFP4."""
    if spec.checkpoint_format not in QUANTIZATIONS:
        return None
    every, linears, experts = (spec.options.get(option) for option in RECIPE_OPTIONS)
    native = nvfp4.NATIVE_RECIPES[spec.checkpoint_format]
    first, second = (
        native if recipe in (None, "auto") else str(recipe)
        for recipe in (linears or every, experts or every)
    )
    return first, second


def _label(statuses: set[str]) -> str:
    return "sglang-modelled" if statuses & {"modelled", "replaced"} else "sglang"


def _check_options(spec: EngineSpec) -> None:
    unknown = sorted(set(spec.options) - set(OPTIONS))
    if unknown:
        raise UsageError(
            f"engine 'sglang' has no option {unknown[0]!r}", f"one of: {', '.join(OPTIONS)}"
        )
    for option in RECIPE_OPTIONS:
        recipe = spec.options.get(option, "auto")
        if recipe not in NVFP4_RECIPES:
            raise UsageError(
                f"engine 'sglang' can't run {option}={recipe}",
                f"one of: {', '.join(NVFP4_RECIPES)}",
            )
        if recipe != "auto" and spec.checkpoint_format not in QUANTIZATIONS:
            raise UsageError(
                f"{option}={recipe}, but sglang loads a {spec.checkpoint_format} checkpoint",
                "leave the option out, or quantize something",
            )


def _import_sglang() -> Any:
    os.environ.update(ENVIRONMENT)
    # Our plugin is for processes that the tool doesn't run; here the plan says what is aligned.
    os.environ.pop(ALIGN_VARIABLE, None)
    for key, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        import sglang
        import sglang.srt.managers.scheduler
    except ImportError as error:
        raise EngineUnavailable(f"sglang can't be imported: {error}", INSTALL) from error
    except Exception as error:
        raise EngineUnavailable(
            f"sglang is installed but fails to import: {root_cause(error)}",
            f"in a fresh environment: {INSTALL}",
        ) from error
    return sglang


def _read_config(checkpoint: Path) -> dict[str, Any]:
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"sglang: no readable config.json in {checkpoint}: {error}", "give a checkpoint folder"
        ) from error
    if not isinstance(config, dict):
        raise EngineError(f"{checkpoint / 'config.json'} is not an object", "restore the file")
    return config


def _check_architecture(config: dict[str, Any]) -> None:
    from sglang.srt.models.registry import ModelRegistry

    names = config.get("architectures") or []
    known = ModelRegistry.get_supported_archs()
    if not any(name in known for name in names):
        raise EngineError(
            f"sglang knows no architecture {', '.join(map(repr, names)) or '(none in config.json)'}",
            "use another sampler, or an SGLang version that has it",
        )


def _check_format(config: dict[str, Any], spec: EngineSpec) -> None:
    """SGLang would load high-precision weights under an NVFP4 name, and leave them as they are."""
    beside = (Path(spec.checkpoint) / "hf_quant_config.json").exists()
    quantized = beside or bool(config.get("quantization_config"))
    if quantized != (spec.checkpoint_format in QUANTIZATIONS):
        raise EngineError(
            f"the configuration in {spec.checkpoint} describes {'a' if quantized else 'no'} quantization, "
            f"the plan says {spec.checkpoint_format}",
            "export the checkpoint again",
        )
