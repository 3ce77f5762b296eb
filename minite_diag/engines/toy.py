"""Engine `toy`: a two-layer decoder in plain torch, with faults that can be planted.

The self-test of the product, and the template for a new engine. Weights come from a fixed seed, so
two toys are equal bit for bit unless a fault is planted: `toy:fault=up_proj_gain` (see FAULTS).
It reads no checkpoint; only the vocabulary size is the model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final

import torch
from torch import nn
from torch.nn import functional

from minite_diag import __version__
from minite_diag.capture.hooks import attach
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import (
    Engine,
    EngineInfo,
    Evidence,
    Layout,
    ScoredTokens,
    TokenSequence,
)
from minite_diag.errors import UsageError
from minite_diag.plan import EngineSpec, Plan
from minite_diag.trace.store import Row

HIDDEN: Final = 64
HEADS: Final = 4
LAYERS: Final = 2
WEIGHT_SEED: Final = 1


class ToyNorm(nn.Module):
    """RMSNorm; `cast_first` rounds before the weight is applied (another engine's order)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self.cast_first = True

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        wide = x_TH.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.cast_first:
            return normal.to(x_TH.dtype) * self.weight.to(x_TH.dtype)
        return (normal * self.weight.float()).to(x_TH.dtype)


class ToyAttention(nn.Module):
    """Causal attention with rotary positions, one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = _linear(HIDDEN), _linear(HIDDEN)
        self.v_proj, self.o_proj = _linear(HIDDEN), _linear(HIDDEN)
        self.table_dtype = torch.float32

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        q, k, v = (
            p(x_TH).unflatten(-1, (HEADS, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (self._rope(t).transpose(0, 1) for t in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v.transpose(0, 1), is_causal=True)
        return self.o_proj(mixed.transpose(0, 1).flatten(1))

    def _rope(self, x_THD: torch.Tensor) -> torch.Tensor:
        half = x_THD.shape[-1] // 2
        angle = torch.arange(len(x_THD))[:, None] * 1e4 ** -(torch.arange(half) / half)
        cos, sin = (f(angle).to(self.table_dtype).float()[:, None] for f in (torch.cos, torch.sin))
        a, b = x_THD.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_THD.dtype)


class ToyMlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(2 * HIDDEN), _linear(2 * HIDDEN)
        self.down_proj = _linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x_TH)) * self.up_proj(x_TH))


class ToyLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = ToyNorm(), ToyAttention()
        self.post_attention_layernorm, self.mlp = ToyNorm(), ToyMlp()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH))
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH))


class ToyModel(nn.Module):
    """Embedding, layers, norm: named as Hugging Face names them."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(ToyLayer() for _ in range(LAYERS))
        self.norm = ToyNorm()


class ToyCausalLM(nn.Module):
    """Token ids [T] -> logits [T, V]."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = ToyModel(vocab_size)
        self.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, V]."""
        x_TH = self.model.embed_tokens(ids_T)
        for layer in self.model.layers:
            x_TH = layer(x_TH)
        return self.lm_head(self.model.norm(x_TH))


def _linear(out_features: int, in_features: int = HIDDEN) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=True)


def _gain(model: ToyCausalLM) -> None:
    model.model.layers[1].mlp.up_proj.weight.data *= 1.25  # type: ignore[union-attr, operator]


def _swap(model: ToyCausalLM) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj  # type: ignore[union-attr]


def _norm_order(model: ToyCausalLM) -> None:
    model.model.layers[1].input_layernorm.cast_first = False  # type: ignore[union-attr]


def _rope_table(model: ToyCausalLM) -> None:
    model.model.layers[0].self_attn.table_dtype = torch.bfloat16  # type: ignore[union-attr]


def _drop_bias(model: ToyCausalLM) -> None:
    model.model.layers[0].self_attn.o_proj.bias.data.zero_()  # type: ignore[union-attr, operator]


def _stale_weight(model: ToyCausalLM) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.mul_(0.98)  # type: ignore[union-attr, operator]


FAULTS: Final[dict[str, Callable[[ToyCausalLM], None]]] = {
    "up_proj_gain": _gain,
    "gate_up_swapped": _swap,
    "norm_cast_order": _norm_order,
    "rope_table_bf16": _rope_table,
    "bias_dropped": _drop_bias,
    "stale_weight": _stale_weight,
}
"""Planted faults: each changes one thing that real engines get wrong."""


class ToyEngine(Engine):
    """The toy model, scored and sampled by whole forward passes."""

    name: ClassVar[str] = "toy"

    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Build the model from its seed and plant `fault`, if any."""
        fault = spec.options.get("fault")
        if fault is not None and fault not in FAULTS:
            raise UsageError(f"toy has no fault {fault!r}", f"one of: {', '.join(FAULTS)}")
        self.dtype = getattr(torch, plan.dtype)
        self.top_k = plan.capture.top_k
        torch.manual_seed(WEIGHT_SEED)
        self.model = ToyCausalLM(plan.model.vocab_size).to(self.dtype).eval()
        if fault is not None:
            FAULTS[fault](self.model)
        self.recorder: Recorder | None = None
        return EngineInfo(
            label="toy",
            version=__version__,
            device="cpu",
            dtype=plan.dtype,
            layout=Layout(),
            evidence=(Evidence("all", "native", "minite_diag.engines.toy.ToyCausalLM"),),
            settings={"fault": fault or "none"},
        )

    def observe(self, recorder: Recorder) -> None:
        """Hook every module that has a name of its own."""
        self.recorder = recorder
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, ToyNorm, nn.Embedding)):
                recorder.static(name, "weight", module.weight)
                attach(
                    module,
                    name,
                    recorder,
                    input_kind=None if isinstance(module, nn.Embedding) else "input",
                    output_kind="logits" if name == "lm_head" else "output",
                )

    def score(self, sequence: TokenSequence) -> ScoredTokens:
        """One forward pass."""
        return self._score(sequence, ("prefill",) * len(sequence.token_ids))

    def sample(self, sequence: TokenSequence, num_tokens: int, seed: int) -> ScoredTokens:
        """Decode by repeating the whole forward pass."""
        generator = torch.Generator().manual_seed(seed)
        ids = list(sequence.token_ids[: sequence.prompt_length])
        with self._unobserved():
            for _ in range(num_tokens):
                probabilities = self._logprobs(ids)[-1].exp()
                ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        prompt = sequence.prompt_length
        whole = TokenSequence("sample", sequence.source, sequence.probe, tuple(ids), prompt)
        phases = ("prefill",) * (prompt + 1) + ("decode",) * (num_tokens - 1)
        return self._score(whole, phases)

    @contextlib.contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Forward passes that aren't recorded: the last one, over all tokens, is."""
        before = self.recorder.active if self.recorder is not None else False
        if self.recorder is not None:
            self.recorder.active = False
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.active = before

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor(ids)).float().log_softmax(-1)

    def _score(self, sequence: TokenSequence, phases: tuple[str, ...]) -> ScoredTokens:
        if self.recorder is not None:
            key = (sequence.mode, sequence.source, sequence.probe)
            self.recorder.begin_call(
                [Row(*key, i, "prefill") for i in range(len(sequence.token_ids))]
            )
        all_TV = self._logprobs(list(sequence.token_ids))[:-1]
        chosen = all_TV.gather(1, torch.tensor(sequence.token_ids[1:])[:, None])[:, 0]
        top = all_TV.topk(min(self.top_k, all_TV.shape[1])) if self.top_k else None
        return ScoredTokens(
            sequence,
            (None, *chosen.tolist()),
            phases,
            ((), *map(tuple, top.indices.tolist())) if top else (),
            ((), *map(tuple, top.values.tolist())) if top else (),
        )
