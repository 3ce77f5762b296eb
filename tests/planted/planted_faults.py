"""Faults of ops, planted in real engines the way a third party adds alignments: by entry point.

Each is one Alignment that touches one engine; `minite-diag compare --sampler hf:align=NAME` plants
it on one side alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from minite_diag.alignments.base import Alignment, Application

ROWS_KEPT = 24
TEMPERATURE = 0.7


def _replace_forward(model: Any, name: str, forward: Any) -> Iterator[str]:
    module = model.get_submodule(name)
    module.forward = forward(module)
    yield name


def norm_casts_last(model: Any) -> Iterator[str]:
    """RMSNorm that multiplies by its weight in FP32 and rounds once."""

    def forward(module: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return (wide * scale * module.weight.float()).to(x.dtype)

        return run

    return _replace_forward(model, "model.layers.1.input_layernorm", forward)


def rope_in_bf16(model: Any) -> Iterator[str]:
    """Rotary tables from angles that were rounded to BF16."""

    def forward(module: Any) -> Any:
        def run(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angle = position_ids[0, :, None].float() * module.inv_freq[None].float()
            angle = torch.cat((angle, angle), -1).bfloat16()[None]
            return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        return run

    return _replace_forward(model, "model.rotary_emb", forward)


def router_in_bf16(model: Any) -> Iterator[str]:
    """The router's softmax in BF16 instead of FP32."""

    def forward(module: Any) -> Any:
        def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = functional.linear(x.reshape(-1, module.hidden_dim), module.weight)
            weights, ids = logits.bfloat16().softmax(-1).topk(module.top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(logits.dtype), ids

        return run

    return _replace_forward(model, "model.layers.2.mlp.gate", forward)


def zeroed_rows(model: Any) -> Iterator[str]:
    """A linear whose rows past a tile's edge are zero, for long enough inputs."""

    def forward(module: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = functional.linear(x, module.weight, module.bias)
            if y.shape[-2] > ROWS_KEPT:
                y = y.clone()
                y[..., ROWS_KEPT:, :] = 0
            return y

        return run

    return _replace_forward(model, "model.layers.1.self_attn.o_proj", forward)


def head_in_bf16(model: Any) -> Iterator[str]:
    """lm_head in BF16 in an FP32 model."""

    def forward(module: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x.bfloat16(), module.weight.bfloat16()).to(x.dtype)

        return run

    return _replace_forward(model, "lm_head", forward)


def experts_drop_the_last(model: Any) -> Iterator[str]:
    """Experts that lose the smallest of the chosen, as a full buffer does."""
    module = model.get_submodule("model.layers.0.mlp.experts")
    original = module.forward

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        kept = weights.clone()
        kept.scatter_(-1, weights.argmin(-1, keepdim=True), 0)
        return original(x, ids, kept)

    module.forward = run
    yield "model.layers.0.mlp.experts"


def _wrap_in_hf(name: str, wrapper: Any) -> Iterator[str]:
    from minite_diag.engines import hf

    setattr(hf, name, wrapper(getattr(hf, name)))
    yield f"{hf.__name__}.{name}"


def other_temperature(_: Any) -> Iterator[str]:
    """Log-probabilities of logits that were divided by a temperature."""
    return _wrap_in_hf("log_softmax", lambda original: lambda x: original(x / TEMPERATURE))


def divided_logprobs(_: Any) -> Iterator[str]:
    """Log-probabilities that were divided, not the logits."""
    return _wrap_in_hf("log_softmax", lambda original: lambda x: original(x) / TEMPERATURE)


def raw_logits(_: Any) -> Iterator[str]:
    """Logits in the place of log-probabilities."""
    return _wrap_in_hf("log_softmax", lambda original: lambda x: x)


def renormalized(_: Any) -> Iterator[str]:
    """Log-probabilities over the ten most probable tokens."""

    def wrapper(original: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            return x - x.topk(10, -1).values.logsumexp(-1, keepdim=True)

        return run

    return _wrap_in_hf("log_softmax", wrapper)


def shifted(_: Any) -> Iterator[str]:
    """Each token gets its predecessor's log-probability."""

    def wrapper(original: Any) -> Any:
        def run(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Any:
            logprobs, top_ids, top = original(logits, ids, k)
            return [logprobs[0], *logprobs[:-1]], top_ids, top

        return run

    return _wrap_in_hf("_gather", wrapper)


def stale_cache(model: Any) -> Iterator[str]:
    """Decoding that goes on from the first layer's keys of the first request."""
    original = model.forward
    kept: list[torch.Tensor] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        fresh = kwargs.get("use_cache") and kwargs.get("past_key_values") is None
        output = original(*args, **kwargs)
        if fresh:
            layer = output.past_key_values.layers[0]
            if kept:
                rows = min(kept[0].shape[-2], layer.keys.shape[-2])
                layer.keys = layer.keys.clone()
                layer.keys[..., :rows, :] = kept[0][..., :rows, :]
            else:
                kept.append(layer.keys.clone())
        return output

    model.forward = run
    yield "model.forward"


FAULTS = {
    "norm-casts-last": ("norm", norm_casts_last),
    "rope-in-bf16": ("rope", rope_in_bf16),
    "router-in-bf16": ("router", router_in_bf16),
    "zeroed-rows": ("linear", zeroed_rows),
    "head-in-bf16": ("lm_head", head_in_bf16),
    "experts-drop-the-last": ("experts", experts_drop_the_last),
    "other-temperature": ("logprobs", other_temperature),
    "divided-logprobs": ("logprobs", divided_logprobs),
    "raw-logits": ("logprobs", raw_logits),
    "renormalized": ("logprobs", renormalized),
    "shifted": ("logprobs", shifted),
    "stale-cache": ("attention", stale_cache),
}


def _alignment(name: str, op: str, function: Any) -> Alignment:
    target = f"{__name__}:{function.__name__}"
    application = Application("any", replacements=((op, target),))
    return Alignment(f"fault-{name}", function.__doc__, {"hf": application}, kernels=True)


ALIGNMENTS = {name: _alignment(name, op, function) for name, (op, function) in FAULTS.items()}
globals().update({f"fault_{name.replace('-', '_')}": a for name, a in ALIGNMENTS.items()})
