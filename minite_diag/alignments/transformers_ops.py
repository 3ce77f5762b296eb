"""Replacements in a transformers model: each returns the names of what it patched.

The ops are minite_kernels' invariant ones; vllm_ops puts the same into vLLM. Weights are shared with
the module that is replaced, never copied or changed, and gradients are those of the op in torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minite_diag.alignments.gradients import with_gradient
from minite_diag.alignments.ran import note
from minite_diag.errors import EngineError
from minite_kernels.invariant.attention import paged_attention
from minite_kernels.invariant.matmul import PreparedWeight, matmul
from minite_kernels.invariant.rms_norm import rms_norm
from minite_kernels.invariant.rope import rope, rope_tables
from minite_kernels.invariant.router import route_logits
from minite_kernels.invariant.silu_mul import silu_mul

ATTENTION_NAME = "minite_aligned"


class AlignedRMSNorm(nn.Module):
    """RMSNorm over the last dim, in FP32, rounded before the weight as transformers does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.variance_epsilon = float(module.variance_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        note("norm")
        return with_gradient(self._ours, self._in_torch, hidden_states, self.weight)

    def _ours(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.variance_epsilon)

    def _in_torch(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return weight * wide.to(x.dtype)


def align_norm(model: Any) -> Iterator[str]:
    """Replace every RMSNorm."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, AlignedRMSNorm(module))
            yield name


class AlignedRotary(nn.Module):
    """Tables in FP32, [B, T, D/2], from FP64 angles."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.inv_freq = module.inv_freq

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [B, T] -> cos, sin."""
        cos, sin = rope_tables(position_ids.flatten(), self.inv_freq)
        shape = (*position_ids.shape, -1)
        return cos.reshape(shape), sin.reshape(shape)


def align_rope(model: Any) -> Iterator[str]:
    """Replace the rotary tables and the function that applies them in the model's own module."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            if getattr(module, "rope_type", "default") != "default":
                raise EngineError(
                    f"{name}: RoPE of type {module.rope_type!r} has no aligned form",
                    "leave the alignment 'rope' out",
                )
            model.set_submodule(name, AlignedRotary(module))
            yield name
    modeling = importlib.import_module(type(model).__module__)
    if hasattr(modeling, "apply_rotary_pos_emb"):
        modeling.apply_rotary_pos_emb = _apply_rotary  # type: ignore[attr-defined]
        yield f"{modeling.__name__}.apply_rotary_pos_emb"


def _apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, H, T, D]; cos, sin [B, T, D/2]."""
    note("rope")
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, dim = x.shape
    # One row of positions serves a whole batch.
    cos, sin = (table.expand(batch, -1, -1) for table in (cos, sin))

    def ours(x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2).reshape(batch * tokens, heads, dim)
        turned = rope(rows, cos.flatten(0, 1), sin.flatten(0, 1))
        return turned.view(batch, tokens, heads, dim).transpose(1, 2)

    def in_torch(x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return with_gradient(ours, in_torch, x)


def align_attention(model: Any) -> Iterator[str]:
    """Register the attention and select it in the configuration."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if getattr(model.config, "sliding_window", None) and getattr(
        model.config, "use_sliding_window", True
    ):
        raise EngineError("attention with a sliding window has no aligned form", "leave it out")
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, aligned_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)
    model.config._attn_implementation = ATTENTION_NAME
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            yield name


def aligned_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Q [B, H, T, D] over k, v [B, Hkv, L, D], causal: [B, T, H, D].

    A batch has to be padded on the right: real tokens then never see padding, and a padded row's
    result is nobody's. Each sequence gets the bits that it has alone.
    """
    note("attention")
    batch, tokens, dim = query.shape[0], query.shape[2], query.shape[3]
    if attention_mask is not None and not _is_right_padded(attention_mask):
        raise EngineError(
            "aligned attention takes batches that are padded on the right only",
            "set the tokenizer's padding_side to 'right', or score the sequences one by one",
        )
    scale = scaling if scaling is not None else dim**-0.5
    device = query.device

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        k_BLHD, v_BLHD = key.transpose(1, 2), value.transpose(1, 2)
        out = paged_attention(
            query.transpose(1, 2).flatten(0, 1),
            k_BLHD,
            v_BLHD,
            torch.arange(batch, dtype=torch.int32, device=device)[:, None],
            torch.arange(batch + 1, device=device) * tokens,
            torch.full((batch,), k_BLHD.shape[1], dtype=torch.int32, device=device),
            scale=scale,
        )
        return out.unflatten(0, (batch, tokens))

    def in_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = key.shape[2]
        seen = torch.ones(tokens, length, dtype=torch.bool, device=device).tril(length - tokens)
        groups = query.shape[1] != key.shape[1]
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=groups
        ).transpose(1, 2)

    return with_gradient(ours, in_torch, query, key, value), None


def _is_right_padded(mask: torch.Tensor) -> bool:
    """Whether every query of a mask [B, 1, T, L] sees the first key (bool, or additive)."""
    first = mask[:, 0, :, 0]
    seen = first if first.dtype == torch.bool else first == 0
    return bool(seen.all())


class AlignedSiLU(nn.Module):
    """SiLU from a fixed sequence of FP32 operations, rounded; the product with `up` is exact IEEE."""

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., I]."""
        note("activation")
        return silu_mul(torch.cat((gate, torch.ones_like(gate)), -1))


def align_activation(model: Any) -> Iterator[str]:
    """Replace the SiLU of every MLP and of the experts."""
    for name, module in list(model.named_modules()):
        act = getattr(module, "act_fn", None)
        if act is None:
            continue
        if type(act).__name__ not in ("SiLU", "SiLUActivation"):
            raise EngineError(
                f"{name}.act_fn is {type(act).__name__}: only SiLU has an aligned form",
                "leave the alignment 'activation' out",
            )
        module.act_fn = AlignedSiLU()
        yield f"{name}.act_fn"


def align_router(model: Any) -> Iterator[str]:
    """Route on the router's own logits by the common rule; weights stay in FP32."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = _Router(module)
            yield name


class _Router:
    """The logits are the module's own linear; what follows them is replaced.

    On CUDA the linear too: cuBLAS chooses its kernel by the number of tokens, and a decoded token
    would get other logits than the same token in a prefill.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> logits [T, E], weights FP32 [T, k], ids [T, k]."""
        note("router")
        module = self.module
        rows = hidden_states.reshape(-1, module.hidden_dim)
        if rows.device.type == "cuda":
            logits = with_gradient(matmul, nn.functional.linear, rows, module.weight)
        else:
            logits = nn.functional.linear(rows, module.weight)
        renormalize = module.norm_topk_prob
        chosen, ids = route_logits(logits.detach(), module.top_k, renormalize=renormalize)

        def in_torch(logits: torch.Tensor) -> torch.Tensor:
            probabilities = logits.float().softmax(-1).gather(-1, ids)
            if not renormalize:
                return probabilities
            return probabilities / probabilities.sum(-1, keepdim=True)

        return logits, with_gradient(lambda _: chosen, in_torch, logits), ids


def align_experts(model: Any) -> Iterator[str]:
    """Sum the experts in slot order; needs te-ref's experts, which run one by one."""
    for name, module in model.named_modules():
        if hasattr(module, "combine_in_slot_order"):
            module.combine_in_slot_order = True
            yield name


class AlignedHead(nn.Module):
    """lm_head with an FP32 sum that no other row changes, rounded to the model's dtype."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self._kept = PreparedWeight(module.weight.detach())
        self._version = self.weight._version

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V]."""
        note("lm_head")
        return with_gradient(self._ours, nn.functional.linear, hidden_states, self.weight)

    def _ours(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Optimizers write to weights, some through .data, which no version counts.
        fixed = torch.is_inference_mode_enabled() and self._version == self.weight._version
        return matmul(x, self._kept if fixed else PreparedWeight(weight.detach()))


def align_lm_head(model: Any) -> Iterator[str]:
    """Replace lm_head."""
    model.set_submodule("lm_head", AlignedHead(model.lm_head))
    yield "lm_head"


def align_logprobs(model: Any) -> Iterator[str]:
    """Replace the log-softmax with which the engine turns logits into log-probabilities."""
    from minite_diag.engines import hf
    from minite_kernels.invariant.log_softmax import log_softmax

    def compute(logits: torch.Tensor) -> torch.Tensor:
        note("logprobs")
        return log_softmax(logits)

    setattr(hf, "log_softmax", compute)  # noqa: B010  a module is patched by name
    yield "minite_diag.engines.hf.log_softmax"
