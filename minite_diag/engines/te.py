"""Engine `te`: Transformer Engine's NVFP4 linears inside a transformers model.

As `te-ref`, the bit-exact model of TE 2.20's arithmetic (recipe `te`: weights 16x16, activations
1x16, per-tensor dynamic amax, FP32 epilogue) from minite_kernels, on any device; its bytes are
tested against the Python reference that TE's wheel ships. With real TE modules as `te-emu`
(compute capability 8.9 and up) or `te` (10 and up), see te_emu. Everything that TE leaves outside
of `te.autocast` (norms, attention, router, embeddings, lm_head) is transformers' own.

Invariant: the label says what ran. What is asked for by `impl` and can't run is refused, never
imitated.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from minite_diag.alignments.ran import note
from minite_diag.capture.hooks import pass_on
from minite_diag.capture.recorder import Recorder
from minite_diag.checkpoints import fused_group
from minite_diag.engines.base import Diagnosis, EngineInfo, Evidence
from minite_diag.engines.hf import OPTIONS, HfEngine, _default_device, _is_experts
from minite_diag.engines.te_arithmetic import OPTIONS as ARITHMETIC_OPTIONS
from minite_diag.engines.te_arithmetic import TeArithmetic, read_arithmetic, recipe_names
from minite_diag.errors import UsageError
from minite_diag.plan import EngineSpec, Plan
from minite_kernels.nvfp4.gemm import PreparedOperand, gemm, prepare
from minite_kernels.nvfp4.grouped_gemm import combine_slots
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.recipe import Recipe
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

TE_VERSION: Final = "2.20.2"
TE_OPTIONS: Final = ARITHMETIC_OPTIONS | {"fused_weights", "impl"}
IMPLS: Final = ("auto", "ref", "emu", "native")
LABELS: Final = {"ref": "te-ref", "emu": "te-emu", "native": "te"}


class TeEngine(HfEngine):
    """transformers with every quantized linear replaced by TE's arithmetic."""

    name: ClassVar[str] = "te"
    label: ClassVar[str] = "te-ref"
    options: ClassVar[frozenset[str]] = OPTIONS | TE_OPTIONS

    @classmethod
    def diagnose(cls) -> Diagnosis:
        """Which of te, te-emu and te-ref this machine can run, and what computes NVFP4 then."""
        found = super().diagnose()
        label = best_label()
        computed = {
            "te": ("native", "Transformer Engine NVFP4 kernels"),
            "te-emu": ("emulated", "Transformer Engine modules, its NVFP4 Python reference"),
            "te-ref": ("modelled", "minite_kernels.nvfp4"),
        }
        status, impl = computed[label]
        note = f"a bit-exact model of TE {TE_VERSION}" if label == "te-ref" else ""
        kernels = (Evidence("nvfp4_linear", status, impl, note),)
        return dataclasses.replace(found, label=label, kernels=kernels)

    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Load the master weights and quantize the plan's linears under `recipe`."""
        from minite_diag.engines import te_emu

        asked = spec.options.get("impl", "auto")
        if asked not in IMPLS:
            raise UsageError(f"te: impl={asked} is unknown", f"one of: {', '.join(IMPLS)}")
        device = torch.device(spec.options.get("device") or _default_device())
        self.impl, names = te_emu.choose_for(
            asked, recipe_names(spec.options), device, static="input_scales" in spec.options
        )
        self.label = LABELS[self.impl]  # type: ignore[misc]
        self.arithmetic = read_arithmetic(spec.options, *names, plan.quantized)
        self.recipe = self.arithmetic.linears
        self.fused_weights = _flag(spec.options.get("fused_weights", "true"), "fused_weights")
        self.quantized = frozenset(plan.quantized)
        info = super().load(spec, plan)
        return EngineInfo(
            **{
                **info.__dict__,
                "version": f"models TE {TE_VERSION}" if self.impl == "ref" else te_emu.version(),
                "settings": info.settings
                | {
                    "impl": self.impl,
                    "recipe": self.recipe.name,
                    "expert_recipe": self.arithmetic.experts.name,
                    "static_input_scales": str(len(self.arithmetic.input_scales)),
                    "fused_weights": str(self.fused_weights).lower(),
                    "transformers": info.version,
                },
            }
        )

    def _load_model(self, folder: Path) -> Any:
        model = super()._load_model(folder)
        self.linears: dict[str, QuantizedSite] = {}
        for name, module in list(model.named_modules()):
            if _is_experts(module):
                self._replace_experts(model, name, module)
        self._replace_linears(model)
        missing = self.quantized - set(self.linears)
        if missing:
            raise UsageError(
                f"te: {len(missing)} linears of the plan are not in the model, "
                f"such as {sorted(missing)[0]}",
                "check --quantize and the architecture",
            )
        return model

    def _replace_linears(self, model: Any) -> None:
        groups: dict[str, list[str]] = defaultdict(list)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name in self.quantized:
                groups[fused_group(name) if self.fused_weights else name].append(name)
        for names in groups.values():
            modules = [model.get_submodule(name) for name in names]
            if self.impl != "ref":
                self._replace_by_te(model, names, modules)
                continue
            shared = SharedInput(self.arithmetic, names[0])
            weights = quantize_group([m.weight.detach() for m in modules], self.recipe)
            for name, module, weight in zip(names, modules, weights, strict=True):
                self.linears[name] = QuantizedSite(name, weight)
                linear = TeRefLinear(shared, self.linears[name], module.bias, self.dtype)
                model.set_submodule(name, linear)

    def _replace_by_te(self, model: Any, names: list[str], modules: list[Any]) -> None:
        from minite_diag.engines import te_emu

        linears = te_emu.linear_modules(names, modules, self.recipe, self.impl)
        for name, linear in zip(names, linears, strict=True):
            self.linears[name] = linear.site
            model.set_submodule(name, linear)

    def _replace_experts(self, model: Any, name: str, module: nn.Module) -> None:
        from minite_diag.engines import te_emu

        arguments = (name, module, self.arithmetic, self.quantized, self.dtype)
        if self.impl == "ref":
            experts = TeRefExperts(*arguments)
        else:
            experts = te_emu.TeModuleExperts(self.impl, *arguments)
        model.set_submodule(name, experts)
        self.linears.update(experts.linears)

    def evidence(self) -> Iterator[Evidence]:
        """The quantized linears are modelled, emulated or native; all else is transformers' own."""
        for item in super().evidence():
            if item.op == "linear" and self.linears:
                yield from self._linear_evidence()
            elif item.op == "experts" and any(".experts." in name for name in self.linears):
                yield self._expert_evidence()
            else:
                yield item

    def _linear_evidence(self) -> Iterator[Evidence]:
        from minite_diag.engines import te_emu

        note = f"{self.arithmetic.note()}, {len(self.linears)} linears"
        status, quantizer, product = {
            "ref": ("modelled", "minite_kernels.nvfp4.quantize", "minite_kernels.nvfp4.gemm"),
            "emu": (
                "emulated",
                "transformer_engine NVFP4QuantizerRef.quantize",
                "transformer_engine.pytorch.Linear, NVFP4QuantizerRef.qgemm",
            ),
            "native": (
                "native",
                "transformer_engine NVFP4Quantizer",
                "transformer_engine.pytorch.Linear",
            ),
        }[self.impl]
        if self.impl == "emu" and self.recipe.name in te_emu.ALIGNED_RECIPES:
            status, quantizer = "replaced", "minite_kernels.nvfp4.quantize in a TE CustomRecipe"
            product = "transformer_engine.pytorch.Linear, minite_kernels.nvfp4.gemm"
        yield Evidence("nvfp4_quantize", status, quantizer, note)
        yield Evidence("nvfp4_linear", status, product, note)

    def _expert_evidence(self) -> Evidence:
        note = (
            f"recipe {self.arithmetic.experts.name}, activation scale: "
            f"{self.arithmetic.expert_scope()}; combined as transformers does"
        )
        if self.impl == "ref":
            impl = "minite_diag.engines.te.TeRefExperts"
            return Evidence("experts", "modelled", impl, f"TE GroupedLinear: {note}")
        status = "emulated" if self.impl == "emu" else "native"
        impl = "transformer_engine.pytorch.Linear"
        return Evidence("experts", status, impl, f"two for each expert, {note}")

    def invisible(self) -> dict[str, str]:
        """Kinds that a quantized linear doesn't have."""
        if not self.linears:
            return super().invisible()
        return {"*:weight": "held as NVFP4 codes", "*:act_*": "this module is not quantized"}

    def observe(self, recorder: Recorder) -> None:
        """As transformers, plus codes and scales of every quantized linear."""
        super().observe(recorder)
        for site in self.linears.values():
            site.observe(recorder)

    def _write_weights(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        if isinstance(module, TeRefExperts):
            module.write_unquantized(recorder)
        elif isinstance(module, TeRefLinear):
            if module.bias_value is not None:
                recorder.static(name, "bias", module.bias_value)
        else:
            super()._write_weights(name, module, recorder)

    def _observe_module(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        if isinstance(module, TeRefExperts):
            module.observe(recorder)
        else:
            super()._observe_module(name, module, recorder)


def best_label() -> str:
    """What runs under TE's default recipe here: te (native), te-emu or te-ref."""
    from minite_diag.engines import te_emu

    return LABELS[te_emu.choose("auto", None, torch.device(_default_device()))[0]]


def _flag(text: str, name: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"te: {name} is {text!r}", "give true or false")
    return text == "true"


def quantize_group(weights: list[torch.Tensor], recipe: Recipe) -> list[Nvfp4Tensor]:
    """Quantize weights [N_i, K] as one fused weight [sum N_i, K]: one amax, shared 16x16 tiles."""
    sizes = [weight.shape[0] for weight in weights]
    fused = quantize(torch.cat(weights) if len(weights) > 1 else weights[0], recipe, role="weight")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        fused.rows(slice(start, start + size)) if len(weights) > 1 else fused
        for start, size in zip(starts, sizes, strict=True)
    ]


class SharedInput:
    """Quantizes the input of a fused module once for all of its parts."""

    def __init__(self, arithmetic: TeArithmetic, name: str) -> None:
        """`name` is any part's."""
        self.arithmetic, self.name = arithmetic, name
        self._source: torch.Tensor | None = None
        self._quantized: Nvfp4Tensor | None = None

    def quantize(self, x_TK: torch.Tensor, source: torch.Tensor) -> Nvfp4Tensor:
        """The quantized `x_TK`, a view of `source`; kept while `source` is the same tensor."""
        if self._source is not source or self._quantized is None:
            self._quantized = self.arithmetic.quantize_input(self.name, x_TK)
            self._source = source
        return self._quantized


class QuantizedSite:
    """One quantized linear as observation sees it: its weight, its name, where to write."""

    def __init__(self, name: str, weight_q: Nvfp4Tensor) -> None:
        self.name = name
        self.weight_q = weight_q
        self.recorder: Recorder | None = None

    def observe(self, recorder: Recorder) -> None:
        """Write the weight now, and the quantized activations from now on."""
        self.recorder = recorder
        recorder.static(self.name, "weight_codes", self.weight_q.codes)
        recorder.static(self.name, "weight_block_scale", self.weight_q.block_scale)
        recorder.static(self.name, "weight_global_decode_scale", self.weight_q.global_decode_scale)
        if ".experts." not in self.name:
            for kind in ("act_codes", "act_block_scale", "act_global_decode_scale"):
                recorder.promise(self.name, kind)

    def record(self, q: Nvfp4Tensor, rows: torch.Tensor | None = None) -> None:
        """Write one quantized activation; `rows` are the call's rows of a routed one."""
        if self.recorder is None or not self.recorder.active:
            return
        self.recorder.tensor(self.name, "act_codes", q.codes, rows)
        self.recorder.tensor(self.name, "act_block_scale", q.block_scale, rows)
        per_call = q.global_decode_scale.dim() == 0
        self.recorder.tensor(
            self.name,
            "act_global_decode_scale",
            q.global_decode_scale,
            None if per_call else rows,
            per_call=per_call,
        )


class TeRefLinear(nn.Linear):
    """TE's NVFP4 forward GEMM: quantize the input, multiply, one output cast, then the bias.

    TE adds the bias in the FP32 epilogue; a linear with a bias therefore casts once, after it.
    """

    def __init__(
        self,
        shared: SharedInput,
        site: QuantizedSite,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = site.weight_q.shape
        self.shared = shared
        self.site = site
        self.operand: PreparedOperand = prepare(site.weight_q)
        self.register_parameter("bias", None)
        self.bias_value = bias.detach() if bias is not None else None
        self.dtype = dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the model's dtype."""
        q = self.shared.quantize(input.reshape(-1, input.shape[-1]), input)
        self.site.record(q)
        if self.bias_value is None:
            y = gemm(q, self.operand, out_dtype=self.dtype)
        else:
            wide = gemm(q, self.operand, out_dtype=torch.float32)
            y = (wide + self.bias_value.float()).to(self.dtype)
        return y.reshape(*input.shape[:-1], self.out_features)


class TeRefExperts(nn.Module):
    """TE GroupedLinear semantics: every expert quantizes its own weights and its own tokens.

    fc1 is gate and up as one weight (one amax, one input), fc2 is down. Experts that the plan
    leaves unquantized keep `torch.nn.functional.linear`. Combination is transformers' eager one:
    weighted expert outputs are added in ascending expert order.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        arithmetic: TeArithmetic,
        quantized: frozenset[str],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        gate_up, down = module.gate_up_proj, module.down_proj
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        self.name, self.dtype = name, dtype
        self.arithmetic, self.recipe = arithmetic, arithmetic.experts
        self.num_experts = gate_up.shape[0]
        self.act_fn = module.act_fn
        self.linears: dict[str, QuantizedSite] = {}
        self._operands: dict[str, PreparedOperand] = {}
        self._plain: dict[str, torch.Tensor] = {}
        for expert in range(self.num_experts):
            half = gate_up.shape[1] // 2
            fc1 = {"gate_proj": gate_up[expert, :half], "up_proj": gate_up[expert, half:]}
            self._add(expert, fc1, quantized)
            self._add(expert, {"down_proj": down[expert]}, quantized)
        self.recorder: Recorder | None = None
        self.combine_in_slot_order = False

    def _add(self, expert: int, parts: dict[str, torch.Tensor], quantized: frozenset[str]) -> None:
        names = [f"{self.name}.{expert}.{part}" for part in parts]
        chosen = [name in quantized for name in names]
        if any(chosen) and not all(chosen):
            raise UsageError(
                f"te: {names[0]} and {names[-1]} are one fused weight in Transformer Engine",
                "quantize gate_proj and up_proj together",
            )
        weights = [weight.detach() for weight in parts.values()]
        if not all(chosen):
            self._plain.update(zip(names, weights, strict=True))
            return
        self._keep(names, weights)

    def _keep(self, names: list[str], weights: list[torch.Tensor]) -> None:
        """Quantize one fused weight."""
        for name, q in zip(names, quantize_group(weights, self.recipe), strict=True):
            self.linears[name] = QuantizedSite(name, q)
            self._operands[name] = prepare(q)

    def write_unquantized(self, recorder: Recorder) -> None:
        """Write the weights that stay in high precision."""
        for name, weight in self._plain.items():
            recorder.static(name, "weight", weight)

    def observe(self, recorder: Recorder) -> None:
        """Record inputs and outputs from now on."""
        self.recorder = recorder
        recorder.promise(self.name, "input")
        recorder.promise(self.name, "output")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """X [T, H], ids [T, k], weights [T, k] -> [T, H]."""
        hidden_states = self._pass_on(self.name, "input", hidden_states, None)
        out_TH = torch.zeros_like(hidden_states)
        slots_TKH = hidden_states.new_zeros(
            *top_k_index.shape, hidden_states.shape[-1], dtype=torch.float32
        )
        for expert in range(self.num_experts):
            slots, tokens = torch.where((top_k_index == expert).T)
            if len(tokens):
                y = self._expert(expert, hidden_states[tokens], tokens)
                weight = top_k_weights[tokens, slots, None]
                if self.combine_in_slot_order:
                    slots_TKH[tokens, slots] = y.float() * weight
                else:
                    out_TH.index_add_(0, tokens, (y * weight).to(out_TH.dtype))
        if self.combine_in_slot_order:
            note("experts")
            out_TH = combine_slots(slots_TKH).to(hidden_states.dtype)
        return self._pass_on(self.name, "output", out_TH, None)

    def _expert(self, expert: int, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        prefix = f"{self.name}.{expert}."
        gate, up = self._linears([prefix + "gate_proj", prefix + "up_proj"], x, tokens)
        hidden = self.act_fn(gate) * up  # type: ignore[operator]
        return self._linears([prefix + "down_proj"], hidden, tokens)[0]

    def _linears(
        self, names: list[str], x: torch.Tensor, tokens: torch.Tensor
    ) -> list[torch.Tensor]:
        given = x
        for name in names:
            x = self._pass_on(name, "input", given, tokens)
        products, q = self._multiply(names, x)
        outputs = []
        for name, y in zip(names, products, strict=True):
            if q is not None:
                self.linears[name].record(q, tokens)
            outputs.append(self._pass_on(name, "output", y, tokens))
        return outputs

    def _multiply(
        self, names: list[str], x: torch.Tensor
    ) -> tuple[list[torch.Tensor], Nvfp4Tensor | None]:
        """The products of one fused weight, and the quantized input (None: not quantized)."""
        if names[0] not in self._operands:
            return [nn.functional.linear(x, self._plain[name]) for name in names], None
        q = self.arithmetic.quantize_input(names[0], x)
        return [gemm(q, self._operands[name], out_dtype=self.dtype) for name in names], q

    def _pass_on(
        self, site: str, kind: str, tensor: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        if self.recorder is None or not self.recorder.active:
            return tensor
        return pass_on(self.recorder, site, kind, tensor, rows)
