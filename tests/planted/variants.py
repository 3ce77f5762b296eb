"""Checkpoints that differ from a base in one thing: a stale, swapped or scaled weight, a config key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minite_kernels.nvfp4.layout import swizzle_scale

Tensors = dict[str, torch.Tensor]


def variant(base: Path, out: Path, edit: Callable[[Tensors], None] | None = None, **config) -> Path:
    """A copy of `base` with edited tensors and config keys."""
    shutil.copytree(base, out)
    if edit is not None:
        (file,) = out.glob("*.safetensors")
        tensors = load_file(file)
        edit(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"format": "pt"})
    if config:
        found = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(found | config))
    return out


def swap_gate_and_up(tensors: Tensors) -> None:
    """In every expert of layer 1 and in all that belongs to it: codes, scales."""
    for name in [n for n in tensors if ".layers.1." in n and ".gate_proj." in n]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def stale(name: str, size: float = 0.02) -> Callable[[Tensors], None]:
    """One weight of an earlier step: every element off by about `size` of its own."""

    def edit(tensors: Tensors) -> None:
        g = torch.Generator().manual_seed(0)
        w = tensors[name].float()
        tensors[name] = (w * (1 + size * torch.randn(w.shape, generator=g))).to(tensors[name].dtype)

    return edit


def other_weight(name: str) -> Callable[[Tensors], None]:
    """One quantized weight that is another one altogether."""

    def edit(tensors: Tensors) -> None:
        g = torch.Generator().manual_seed(0)
        rows = torch.randperm(tensors[name].shape[0], generator=g)
        tensors[name] = tensors[name][rows].flip(-1)

    return edit


def permute_heads(head_dim: int) -> Callable[[Tensors], None]:
    """The first two query heads of layer 1 change places."""

    def edit(tensors: Tensors) -> None:
        name = "model.layers.1.self_attn.q_proj.weight"
        w = tensors[name].clone()
        first, second = w[:head_dim].clone(), w[head_dim : 2 * head_dim].clone()
        w[:head_dim], w[head_dim : 2 * head_dim] = second, first
        tensors[name] = w

    return edit


def scale(pattern: str, factor: float) -> Callable[[Tensors], None]:
    """Multiply every tensor whose name ends so."""

    def edit(tensors: Tensors) -> None:
        found = [name for name in tensors if name.endswith(pattern)]
        assert found, pattern
        for name in found:
            tensors[name] = tensors[name] * factor

    return edit


def drop_biases(layer: int) -> Callable[[Tensors], None]:
    """Biases of one layer are zero."""

    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if f".layers.{layer}." in n and n.endswith(".bias")]:
            tensors[name] = torch.zeros_like(tensors[name])

    return edit


def qwen2(out: Path) -> Path:
    """A small dense model of random weights with q/k/v biases and a tied head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_sliding_window=False,
        layer_types=["full_attention"] * 2,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(out)
    return out


def untie(tensors: Tensors) -> None:
    """A head of its own for a tied model, of an earlier step."""
    g = torch.Generator().manual_seed(0)
    w = tensors["model.embed_tokens.weight"].float()
    tensors["lm_head.weight"] = (w * (1 + 0.02 * torch.randn(w.shape, generator=g))).bfloat16()


def swizzled(name: str) -> Callable[[Tensors], None]:
    """Block scales in the layout of tensor cores, written to a checkpoint that is read as linear."""

    def edit(tensors: Tensors) -> None:
        scale = tensors[name]
        tensors[name] = swizzle_scale(scale, "128x4").reshape(scale.shape)

    return edit
