"""Engine `toy`: a two-layer decoder in plain torch, with faults that can be planted.

The self-test of the product, and the template for a new engine. Weights come from a fixed seed, so
two toys are equal bit for bit unless a fault is planted: `toy:fault=up_proj_gain` (see FAULTS).
It reads no checkpoint; only the vocabulary size is the model's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

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
        self.eps = 1e-5

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        wide = x_TH.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.cast_first:
            return normal.to(x_TH.dtype) * self.weight.to(x_TH.dtype)
        return (normal * self.weight.float()).to(x_TH.dtype)


class ToyRope(nn.Module):
    """Rotary positions of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table_dtype = torch.float32
        self.first_position = 0

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        x_THD = x_TH.unflatten(-1, (HEADS, -1))
        half = x_THD.shape[-1] // 2
        positions = torch.arange(len(x_THD)) + self.first_position
        angle = positions[:, None] * 1e4 ** -(torch.arange(half) / half)
        cos, sin = (f(angle).to(self.table_dtype).float()[:, None] for f in (torch.cos, torch.sin))
        a, b = x_THD.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_TH.dtype).flatten(1)


class ToyMixer(nn.Module):
    """Causal softmax attention over heads, one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = (HIDDEN // HEADS) ** -0.5
        self.diagonal = 0
        self.head_order = list(range(HEADS))
        self.zero_rows_from: int | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Three [T, H] -> [T, H]."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in (q, k, v))
        mask = torch.ones(len(q[0]), len(q[0]), dtype=torch.bool).tril(self.diagonal)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        mixed = mixed.transpose(0, 1)[:, self.head_order].flatten(1)
        if self.zero_rows_from is not None:
            mixed = mixed * (torch.arange(len(mixed)) < self.zero_rows_from)[:, None]
        return mixed


class ToyAttention(nn.Module):
    """Causal attention with rotary positions, one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = _linear(HIDDEN), _linear(HIDDEN)
        self.v_proj, self.o_proj = _linear(HIDDEN), _linear(HIDDEN)
        self.q_rope, self.k_rope, self.attn = ToyRope(), ToyRope(), ToyMixer()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        q, k = self.q_rope(self.q_proj(x_TH)), self.k_rope(self.k_proj(x_TH))
        return self.o_proj(self.attn(q, k, self.v_proj(x_TH)))


class ToyActivation(nn.Module):
    """SwiGLU's product; `rounds_twice` rounds SiLU to the model's dtype before it."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds_twice = False

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Two [T, I] -> [T, I]."""
        if self.rounds_twice:
            return functional.silu(gate) * up
        return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


class ToyMlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(2 * HIDDEN), _linear(2 * HIDDEN)
        self.act_fn = ToyActivation()
        self.down_proj = _linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(self.act_fn(self.gate_proj(x_TH), self.up_proj(x_TH)))


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


class ToyEmbedding(nn.Embedding):
    """Token embedding times `gain`."""

    gain = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        return super().forward(input) * self.gain


class ToyHead(nn.Linear):
    """lm_head; `wide` computes FP32 logits."""

    wide = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, V]."""
        if self.wide:
            return functional.linear(input.float(), self.weight.float())
        return super().forward(input)


class ToyModel(nn.Module):
    """Embedding, layers, norm: named as Hugging Face names them."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = ToyEmbedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(ToyLayer() for _ in range(LAYERS))
        self.norm = ToyNorm()


class ToyCausalLM(nn.Module):
    """Token ids [T] -> logits [T, V]."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = ToyModel(vocab_size)
        self.lm_head = ToyHead(HIDDEN, vocab_size, bias=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, V]."""
        x_TH = self.model.embed_tokens(ids_T)
        for layer in self.model.layers:
            x_TH = layer(x_TH)
        return self.lm_head(self.model.norm(x_TH))


def _linear(out_features: int, in_features: int = HIDDEN) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=True)


def _scaled(path: str, factor: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        model.get_parameter(path).data.mul_(factor)

    return plant


def _set(path: str, attribute: str, value: Any) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        setattr(model.get_submodule(path), attribute, value)

    return plant


def _swap(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


FAULTS: Final[dict[str, Callable[[Any], None]]] = {
    "up_proj_gain": _scaled("model.layers.1.mlp.up_proj.weight", 1.25),
    "gate_up_swapped": _swap,
    "norm_cast_order": _set("model.layers.1.input_layernorm", "cast_first", False),
    "norm_eps": _set("model.layers.0.post_attention_layernorm", "eps", 1e-3),
    "final_norm_cast_order": _set("model.norm", "cast_first", False),
    "rope_table_bf16": _set("model.layers.0.self_attn.q_rope", "table_dtype", torch.bfloat16),
    "rope_shifted": _set("model.layers.1.self_attn.k_rope", "first_position", 1),
    "attention_scale": _set("model.layers.1.self_attn.attn", "scale", 0.3),
    "causal_mask_off_by_one": _set("model.layers.0.self_attn.attn", "diagonal", 1),
    "heads_permuted": _set("model.layers.1.self_attn.attn", "head_order", [1, 0, 2, 3]),
    "rows_zeroed": _set("model.layers.0.self_attn.attn", "zero_rows_from", 24),
    "activation_rounds_twice": _set("model.layers.0.mlp.act_fn", "rounds_twice", True),
    "lm_head_bf16": _set("lm_head", "wide", False),
    "embedding_scaled": _set("model.embed_tokens", "gain", 1.02),
    "bias_dropped": _scaled("model.layers.0.self_attn.o_proj.bias", 0.0),
    "stale_weight": _scaled("model.layers.1.mlp.down_proj.weight", 0.98),
}
"""Planted faults of one op or weight: each changes one thing that real engines get wrong."""

RUN_FAULTS: Final = (
    "temperature",
    "retokenized",
    "stale_cache",
    "not_repeatable",
    "sees_hooks",
    "depends_on_batch",
    "depends_on_chunks",
    "decode_differs",
)
"""Planted faults of how a run is done: each breaks one leg, or the log-probabilities' meaning."""


class ToyEngine(Engine):
    """The toy model, scored and sampled by whole forward passes."""

    name: ClassVar[str] = "toy"

    def load(self, spec: EngineSpec, plan: Plan) -> EngineInfo:
        """Build the model from its seed and plant `fault`, if any."""
        unknown = sorted(set(spec.options) - {"fault"})
        if unknown:
            raise UsageError(f"toy has no option {unknown[0]!r}", "it has fault=NAME only")
        fault = spec.options.get("fault")
        known = (*FAULTS, *RUN_FAULTS)
        if fault is not None and fault not in known:
            raise UsageError(f"toy has no fault {fault!r}", f"one of: {', '.join(known)}")
        self.fault = fault
        self.passes = 0
        self.requests = 0
        self.dtype = getattr(torch, plan.dtype)
        self.top_k = plan.capture.top_k
        torch.manual_seed(WEIGHT_SEED)
        self.model = ToyCausalLM(plan.model.vocab_size).to(self.dtype).eval()
        if fault in FAULTS:
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
        """Hook every op that has a name of its own."""
        self.recorder = recorder
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, ToyNorm, nn.Embedding)):
                recorder.static(name, "weight", module.weight)
                if isinstance(getattr(module, "bias", None), torch.Tensor):
                    recorder.static(name, "bias", module.bias)  # type: ignore[arg-type]
                attach(
                    module,
                    name,
                    recorder,
                    input_kind=None if isinstance(module, nn.Embedding) else "input",
                    output_kind="logits" if name == "lm_head" else "output",
                )
            elif isinstance(module, (ToyRope, ToyMixer, ToyActivation)):
                attach(module, name, recorder, input_kind=None)

    def score(self, sequence: TokenSequence) -> ScoredTokens:
        """One forward pass."""
        if self.fault == "retokenized":
            ids = sequence.token_ids
            sequence = dataclasses.replace(sequence, token_ids=(*ids[:-1], ids[-1] ^ 1))
        return self._score(sequence, ("prefill",) * len(sequence.token_ids))

    def score_batch(self, sequences: Sequence[TokenSequence]) -> list[ScoredTokens]:
        """One forward pass per sequence: a batch has no influence, unless planted."""
        with self._planted("depends_on_batch", len(sequences) > 1):
            return [self.score(sequence) for sequence in sequences]

    def sample_batch(
        self, sequences: Sequence[TokenSequence], num_tokens: int, seed: int
    ) -> list[ScoredTokens]:
        """One after the other, as `score_batch`."""
        with self._planted("depends_on_batch", len(sequences) > 1):
            return [self.sample(sequence, num_tokens, seed) for sequence in sequences]

    def score_chunked(self, sequence: TokenSequence, chunk_tokens: int) -> ScoredTokens:
        """The whole sequence is computed again for each chunk, whose rows are kept."""
        ids = list(sequence.token_ids)
        starts = range(0, len(ids), chunk_tokens)
        with self._planted("depends_on_chunks", len(starts) > 1), self._unobserved():
            parts = [self._logprobs(ids)[start : start + chunk_tokens] for start in starts]
        return self._gather(sequence, torch.cat(parts), ("prefill",) * len(ids))

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
        self.requests += 1
        stale = self._planted("stale_cache", self.requests > 1)
        with self._planted("decode_differs", True), stale:
            return self._score(whole, phases)

    @contextlib.contextmanager
    def _planted(self, fault: str, condition: bool) -> Iterator[None]:
        """The final norm in another order while a fault of the run applies."""
        norm = self.model.model.norm
        before = norm.cast_first
        norm.cast_first = before and not (condition and self.fault == fault)
        try:
            yield
        finally:
            norm.cast_first = before

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
        self.passes += 1
        with (
            torch.inference_mode(),
            self._planted("not_repeatable", self.passes % 3 == 0),
            self._planted("sees_hooks", self.recorder is not None),
        ):
            logits_TV = self.model(torch.tensor(ids)).float()
            return (logits_TV / (1.5 if self.fault == "temperature" else 1.0)).log_softmax(-1)

    def _score(self, sequence: TokenSequence, phases: tuple[str, ...]) -> ScoredTokens:
        if self.recorder is not None:
            key = (sequence.mode, sequence.source, sequence.probe)
            self.recorder.begin_call(
                [Row(*key, i, "prefill") for i in range(len(sequence.token_ids))]
            )
        return self._gather(sequence, self._logprobs(list(sequence.token_ids)), phases)

    def _gather(
        self, sequence: TokenSequence, logprobs_TV: torch.Tensor, phases: tuple[str, ...]
    ) -> ScoredTokens:
        all_TV = logprobs_TV[:-1]
        chosen = all_TV.gather(1, torch.tensor(sequence.token_ids[1:])[:, None])[:, 0]
        top = all_TV.topk(min(self.top_k, all_TV.shape[1])) if self.top_k else None
        return ScoredTokens(
            sequence,
            (None, *chosen.tolist()),
            phases,
            ((), *map(tuple, top.indices.tolist())) if top else (),
            ((), *map(tuple, top.values.tolist())) if top else (),
        )
