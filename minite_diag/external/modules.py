"""What a foreign module is in checkpoint terms: its names, how it is fused and how it is sharded.

Knows names and sizes; no file and no tensor. Invariant: a width that the model's head counts can't
explain is an error, never a guess: a wrong interleave would look like a numeric difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from minite_diag.engines.base import Part
from minite_diag.errors import UsageError

PARALLEL: Final = ("replicated", "column", "row", "vocab", "heads")
"""How tensor-parallel ranks hold a module (see `join`)."""

SPLITS: Final = ("none", "qkv-interleaved", "qkv", "halves", "alternating")
"""How the parts of a fused module lie among its output features, after the ranks are joined.

qkv-interleaved: for each query group its query heads, its key head, its value head (Megatron).
qkv: each rank holds its query rows, then its key rows, then its value rows (SGLang, vLLM).
halves: each rank holds its share of each part, one after the other (gate, then up).
alternating: one row of each part in turn.
"""

_QKV: Final = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class HeadCounts:
    """Of the whole model; 0 where it isn't known. `groups` are key-value heads."""

    heads: int = 0
    groups: int = 0
    head_dim: int = 0

    @property
    def is_known(self) -> bool:
        """Whether a fused qkv can be taken apart."""
        return self.heads > 0 and self.groups > 0 and self.head_dim > 0


@dataclass(frozen=True)
class ModuleRule:
    """One kind of module; `native` and `fqns` may hold {layer} and {expert}.

    `partial`: the output of a row-parallel module was dumped before the ranks' sums were added;
    `may_be_partial`: it may have been, and then no rank has the output.
    `sequence_parallel`: rows are spread over the tensor ranks where Megatron spreads them.
    """

    native: str
    fqns: tuple[str, ...]
    parallel: str = "replicated"
    split: str = "none"
    sequence_parallel: bool = False
    partial: bool = False
    may_be_partial: bool = False


@dataclass(frozen=True)
class Module:
    """A native module that a rule names; `native` has the model's own layer and expert numbers."""

    native: str
    fqns: tuple[str, ...]
    rule: ModuleRule
    place: tuple[int, int, int, int]
    """Sorts modules as they run: before, in or after the layers, layer, rule, expert."""

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert of a mixture."""
        return "{expert}" in self.rule.native


def output_kind(module: Module) -> str:
    """What a module returns: a linear's output, or what it is called where it scores."""
    if module.fqns == ("lm_head",):
        return "logits"
    return "router_logits" if module.fqns[0].endswith(".mlp.gate") else "output"


class ModuleTable:
    """Rules in the order in which a layer runs them."""

    def __init__(self, rules: Sequence[ModuleRule], *, sanitized: bool = False) -> None:
        self.rules = tuple(rules)
        self._patterns = [_pattern(rule.native, sanitized=sanitized) for rule in self.rules]
        layered = [i for i, rule in enumerate(self.rules) if "{layer}" in rule.native]
        self._first, self._last = (layered[0], layered[-1]) if layered else (0, -1)

    def find(self, native: str, layer_offset: int = 0, first_expert: int = 0) -> Module | None:
        """The module of a native name, or None where no rule names it.

        `layer_offset` and `first_expert` turn a rank's own numbers into the model's.
        """
        for number, (rule, pattern) in enumerate(zip(self.rules, self._patterns, strict=True)):
            match = pattern.fullmatch(native)
            if match is None:
                continue
            groups = match.groupdict()
            layer = int(groups["layer"]) + layer_offset if "layer" in groups else 0
            expert = int(groups["expert"]) + first_expert if "expert" in groups else 0
            section = 0 if number < self._first else 2 if number > self._last else 1
            return Module(
                _fill(rule.native, layer, expert),
                tuple(_fill(fqn, layer, expert) for fqn in rule.fqns),
                rule,
                (section, layer, number, expert),
            )
        return None


def _fill(template: str, layer: int, expert: int) -> str:
    return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _pattern(template: str, *, sanitized: bool) -> re.Pattern[str]:
    """A native name, behind the wrappers of a training framework (`module.`, `model.`).

    `sanitized`: as Transformer Engine writes it into a file name, `_` for each dot.
    """
    dot = "_" if sanitized else "."
    text = re.escape(template.replace(".", dot))
    for name in ("layer", "expert"):
        text = text.replace(re.escape("{" + name + "}"), rf"(?P<{name}>\d{{1,6}})")
    wrapper = rf"(?:(?:module|model|language_model){re.escape(dot)})*"
    return re.compile(wrapper + text, re.ASCII)


def parts_of(
    module: Module, width: int, counts: HeadCounts, tensor_ranks: int, where: str
) -> tuple[Part, ...]:
    """The parts of a module with `width` output features; raises UsageError if they can't be.

    `tensor_ranks` is the number of ranks whose outputs were joined.
    """
    split, fqns = module.rule.split, module.fqns
    if split == "none":
        return (Part(fqns[0]),)
    if split in ("qkv", "qkv-interleaved"):
        return _qkv(module, width, counts, tensor_ranks if split == "qkv" else 0, where)
    ranks = tensor_ranks if split == "halves" else 1
    if width % (len(fqns) * ranks):
        raise UsageError(
            f"{where}: {module.native} has {width} output features, which are not {len(fqns)} "
            f"equal parts on {ranks} tensor ranks",
            "correct `fqn` or `split` of that module, or the ranks' `tensor`",
        )
    if split == "alternating":
        return tuple(Part(fqn, i, i + 1, None, len(fqns)) for i, fqn in enumerate(fqns))
    return _periods(fqns, [width // (len(fqns) * ranks)] * len(fqns))


def _qkv(
    module: Module, width: int, counts: HeadCounts, ranks: int, where: str
) -> tuple[Part, ...]:
    """Periods are query groups, or ranks where `ranks` is not 0."""
    if not counts.is_known:
        raise UsageError(
            f"{where}: {module.native} fuses query, key and value, and the head counts are unknown",
            "give the checkpoint's folder with --model, or `model` in manifest.json",
        )
    expected = (counts.heads + 2 * counts.groups) * counts.head_dim
    if width != expected:
        raise UsageError(
            f"{where}: {module.native} has {width} output features; {counts.heads} heads and "
            f"{counts.groups} query groups of {counts.head_dim} are {expected}",
            "correct the head counts in `model`, or add the shard that is missing",
        )
    periods = ranks or counts.groups
    if counts.groups % periods or counts.heads % counts.groups:
        raise UsageError(
            f"{where}: {counts.heads} heads and {counts.groups} query groups don't divide over "
            f"{periods} tensor ranks",
            "dump with fewer tensor ranks: repeated key-value heads can't be joined",
        )
    groups = counts.groups // periods
    query = counts.heads // counts.groups * groups
    return _periods(module.fqns, [n * counts.head_dim for n in (query, groups, groups)])


def _periods(fqns: Sequence[str], sizes: Sequence[int]) -> tuple[Part, ...]:
    period, start, parts = sum(sizes), 0, []
    for fqn, size in zip(fqns, sizes, strict=True):
        parts.append(Part(fqn, start, start + size, None, period))
        start += size
    return tuple(parts)


def _layer(native: str, fqn: str | Sequence[str], parallel: str, split: str = "none") -> ModuleRule:
    """A rule inside of a decoder layer; `fqn` is the name in it, empty for the layer itself."""
    names = [fqn] if isinstance(fqn, str) else list(fqn)
    fqns = tuple(".".join(filter(None, ("model.layers.{layer}", name))) for name in names)
    return ModuleRule(native, fqns, parallel, split)


_SELF: Final = "decoder.layers.{layer}.self_attention"
_MLP: Final = "decoder.layers.{layer}.mlp"
_LOCAL: Final = f"{_MLP}.experts.local_experts.{{expert}}"
_GROUPED: Final = f"{_MLP}.experts"
_SHARED: Final = f"{_MLP}.shared_experts"


def _gate_up(parent: str) -> list[str]:
    return [f"{parent}.gate_proj", f"{parent}.up_proj"]


MEGATRON: Final = (
    ModuleRule("embedding.word_embeddings", ("model.embed_tokens",), "vocab"),
    _layer("decoder.layers.{layer}.input_layernorm", "input_layernorm", "replicated"),
    _layer(f"{_SELF}.linear_qkv", [f"self_attn.{n}" for n in _QKV], "column", "qkv-interleaved"),
    _layer(f"{_SELF}.q_layernorm", "self_attn.q_norm", "heads"),
    _layer(f"{_SELF}.k_layernorm", "self_attn.k_norm", "heads"),
    _layer(f"{_SELF}.q_rope", "self_attn.q_rope", "heads"),
    _layer(f"{_SELF}.k_rope", "self_attn.k_rope", "heads"),
    _layer(f"{_SELF}.core_attention", "self_attn.attn", "heads"),
    _layer(f"{_SELF}.linear_proj", "self_attn.o_proj", "row"),
    _layer("decoder.layers.{layer}.pre_mlp_layernorm", "post_attention_layernorm", "replicated"),
    _layer(f"{_MLP}.linear_fc1", _gate_up("mlp"), "column", "halves"),
    _layer(f"{_MLP}.activation", "mlp.act_fn", "heads"),
    _layer(f"{_MLP}.linear_fc2", "mlp.down_proj", "row"),
    _layer(f"{_MLP}.router", "mlp.gate", "replicated"),
    _layer(f"{_LOCAL}.linear_fc1", _gate_up("mlp.experts.{expert}"), "column", "halves"),
    _layer(f"{_LOCAL}.linear_fc2", "mlp.experts.{expert}.down_proj", "row"),
    _layer(
        f"{_GROUPED}.linear_fc1.gemm_{{expert}}",
        _gate_up("mlp.experts.{expert}"),
        "column",
        "halves",
    ),
    _layer(f"{_GROUPED}.linear_fc2.gemm_{{expert}}", "mlp.experts.{expert}.down_proj", "row"),
    _layer(_GROUPED, "mlp.experts", "replicated"),
    _layer(f"{_SHARED}.linear_fc1", _gate_up("mlp.shared_expert"), "column", "halves"),
    _layer(f"{_SHARED}.linear_fc2", "mlp.shared_expert.down_proj", "row"),
    _layer("decoder.layers.{layer}", "", "replicated"),
    ModuleRule("decoder.final_layernorm", ("model.norm",)),
    ModuleRule("output_layer", ("lm_head",), "column"),
)
"""Megatron-Core's GPTModel, with Transformer Engine's modules or its own."""

_HF: Final = "model.layers.{layer}"
_HF_EXPERT: Final = f"{_HF}.mlp.experts.{{expert}}"

HUGGING_FACE: Final = (
    ModuleRule("model.embed_tokens", ("model.embed_tokens",), "vocab"),
    _layer(f"{_HF}.input_layernorm", "input_layernorm", "replicated"),
    _layer(f"{_HF}.self_attn.qkv_proj", [f"self_attn.{n}" for n in _QKV], "column", "qkv"),
    *(_layer(f"{_HF}.self_attn.{n}", f"self_attn.{n}", "column") for n in _QKV),
    *(
        _layer(f"{_HF}.self_attn.{n}", f"self_attn.{n}", "heads")
        for n in ("q_norm", "k_norm", "q_rope", "k_rope", "attn")
    ),
    _layer(f"{_HF}.self_attn.o_proj", "self_attn.o_proj", "row"),
    _layer(f"{_HF}.post_attention_layernorm", "post_attention_layernorm", "replicated"),
    _layer(f"{_HF}.mlp.gate_up_proj", _gate_up("mlp"), "column", "halves"),
    *(_layer(f"{_HF}.mlp.{n}", f"mlp.{n}", "column") for n in ("gate_proj", "up_proj")),
    _layer(f"{_HF}.mlp.act_fn", "mlp.act_fn", "heads"),
    _layer(f"{_HF}.mlp.down_proj", "mlp.down_proj", "row"),
    _layer(f"{_HF}.mlp.gate", "mlp.gate", "replicated"),
    *(
        _layer(f"{_HF_EXPERT}.{n}", f"mlp.experts.{{expert}}.{n}", "column")
        for n in ("gate_proj", "up_proj")
    ),
    _layer(f"{_HF_EXPERT}.down_proj", "mlp.experts.{expert}.down_proj", "row"),
    _layer(f"{_HF}.mlp.experts", "mlp.experts", "replicated"),
    _layer(_HF, "", "replicated"),
    ModuleRule("model.norm", ("model.norm",)),
    ModuleRule("lm_head", ("lm_head",), "column"),
)
"""A Hugging Face decoder, or SGLang's and vLLM's of the same names."""


TABLES: Final = {"megatron": MEGATRON, "hugging-face": HUGGING_FACE}
"""Tables that a manifest may name instead of listing modules."""
