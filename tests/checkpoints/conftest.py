"""Small checkpoints, written by the safetensors library and not by our own writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

DENSE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def dense_weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random weights of DENSE_CONFIG; each linear has another magnitude, so each amax differs."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"model.embed_tokens": (96, 64), "lm_head": (96, 64)}
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.q_proj": (64, 64), f"{attention}.o_proj": (64, 64)}
        shapes |= {f"{attention}.k_proj": (32, 64), f"{attention}.v_proj": (32, 64)}
        shapes |= {f"{mlp}.gate_proj": (96, 64), f"{mlp}.up_proj": (96, 64)}
        shapes |= {f"{mlp}.down_proj": (64, 96)}
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * (0.05 + 0.01 * index)
        for index, (name, shape) in enumerate(shapes.items())
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights |= {f"model.layers.{i}.{name}.weight": torch.ones(64) for i in range(2)}
    weights["model.norm.weight"] = torch.ones(64)
    return {name: value.to(dtype) for name, value in weights.items()}


def write_folder(
    folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any] = DENSE_CONFIG
) -> Path:
    """A checkpoint folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(folder: Path, weights: dict[str, torch.Tensor], num_shards: int = 3) -> Path:
    """The same as shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        part = {name: weights[name] for name in names[shard::num_shards]}
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(DENSE_CONFIG))
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "dense", dense_weights())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "sharded", dense_weights())


@pytest.fixture
def edit_config() -> Callable[..., None]:
    def edit(folder: Path, **changes: Any) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    # Tiny GEMMs spend their time in barriers: two threads on busy cores are 30 times slower.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
