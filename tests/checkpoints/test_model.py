"""A Checkpoint holds what its config promises, or there is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minite_diag.checkpoints import resolve
from minite_diag.checkpoints.model import open_checkpoint
from minite_diag.errors import CheckpointError, MiniteDiagError

from .conftest import DENSE_CONFIG, dense_weights, write_folder, write_sharded


def test_dense_checkpoint_names_and_shapes(dense: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(dense), tmp_path)
    assert (checkpoint.format, checkpoint.architecture) == ("bf16", "LlamaForCausalLM")
    assert (checkpoint.num_layers, checkpoint.vocab_size) == (2, 96)
    assert not checkpoint.is_moe
    assert not checkpoint.is_quantized
    assert checkpoint.linear_names()[0] == "lm_head"
    assert len(checkpoint.linear_names()) == 1 + 2 * 7
    assert checkpoint.shape("model.layers.1.mlp.down_proj") == (64, 96)
    weight = checkpoint.read_weight("model.layers.1.mlp.down_proj")
    assert weight.equal(dense_weights()["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(("dtype", "format"), [(torch.float16, "fp16"), (torch.float32, "fp32")])
def test_other_dtypes_are_named_and_a_lying_config_is_noted(
    tmp_path: Path, dtype: torch.dtype, format: str
) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", dense_weights(dtype)))
    assert checkpoint.format == format
    assert checkpoint.notes == (
        f"config.json says bfloat16, the weights are {str(dtype).removeprefix('torch.')}",
    )


def test_tied_lm_head_is_a_linear_with_the_embedding_as_weight(tmp_path: Path) -> None:
    weights = dense_weights()
    del weights["lm_head.weight"]
    folder = write_folder(tmp_path / "m", weights, DENSE_CONFIG | {"tie_word_embeddings": True})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.is_tied
    assert "lm_head" in checkpoint.linear_names()
    assert checkpoint.shape("lm_head") == (96, 64)
    assert checkpoint.read_weight("lm_head").equal(weights["model.embed_tokens.weight"])


def test_fingerprint_ignores_sharding_and_sees_one_bit(tmp_path: Path) -> None:
    weights = dense_weights()
    one = open_checkpoint(write_folder(tmp_path / "one", weights)).fingerprint
    assert open_checkpoint(write_sharded(tmp_path / "three", weights)).fingerprint == one
    changed = weights["model.layers.1.mlp.up_proj.weight"].view(torch.int16)
    changed[40, 40] ^= 1
    assert open_checkpoint(write_folder(tmp_path / "bit", weights)).fingerprint != one


def test_fingerprint_of_a_large_checkpoint_sees_the_edges_of_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minite_diag.checkpoints import model

    monkeypatch.setattr(model, "FINGERPRINT_ALL_BYTES", 0)
    monkeypatch.setattr(model, "FINGERPRINT_EDGE_BYTES", 64)
    weights = dense_weights()
    one = open_checkpoint(write_folder(tmp_path / "one", weights)).fingerprint
    weights["lm_head.weight"][-1, -1] += 1
    assert open_checkpoint(write_folder(tmp_path / "two", weights)).fingerprint != one


def _without(weights: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (_without(dense_weights(), "layers.1."), {}, "lacks layer 1"),
        (dense_weights(), {"num_hidden_layers": 1}, "unexpected layer 1"),
        (_without(dense_weights(), "layers.1.self_attn.v_proj"), {}, "layer 1 has 3 attention"),
        (_without(dense_weights(), "embed_tokens"), {}, "no model.embed_tokens.weight"),
        (_without(dense_weights(), "lm_head"), {}, "no lm_head.weight"),
        (dense_weights(), {"intermediate_size": 128}, "config.json implies"),
        (dense_weights(), {"vocab_size": 97}, "lm_head has shape"),
        (dense_weights(), {"num_key_value_heads": 4}, "k_proj has shape"),
        (dense_weights(), {"num_experts": 8}, "has 8 experts by its config"),
        (dense_weights(), {"architectures": []}, "names no architecture"),
        (dense_weights(), {"hidden_size": "64"}, "hidden_size is '64'"),
        (dense_weights(), {"quantization_config": {"quant_method": "gptq"}}, "quantized as gptq"),
        (
            dense_weights(),
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            r"has no tensor \*\.weight_scale_2",
        ),
    ],
)
def test_contradictions_between_config_and_weights_are_errors(
    tmp_path: Path, weights: dict[str, torch.Tensor], config: dict[str, object], message: str
) -> None:
    folder = write_folder(tmp_path / "m", weights, DENSE_CONFIG | config)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in caught.value.message
    assert caught.value.hint


def test_mixed_and_integer_weights_are_errors(tmp_path: Path) -> None:
    weights = dense_weights()
    weights["lm_head.weight"] = weights["lm_head.weight"].float()
    with pytest.raises(CheckpointError, match="dtype BF16, F32"):
        open_checkpoint(write_folder(tmp_path / "mixed", weights))
    weights["lm_head.weight"] = torch.zeros(96, 64, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="dtype BF16, U8"):
        open_checkpoint(write_folder(tmp_path / "codes", weights))


def test_missing_folder_and_missing_config(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        resolve(tmp_path / "absent", tmp_path)
    (dense / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve(dense, tmp_path)
    (dense / "config.json").write_text("not json")
    with pytest.raises(CheckpointError, match=r"can't read .*config\.json"):
        resolve(dense, tmp_path)
    assert issubclass(CheckpointError, MiniteDiagError)


def test_moe_with_an_incomplete_expert_is_an_error(
    tmp_path: Path, edit_config: Callable[..., None]
) -> None:
    from safetensors.torch import load_file

    from minite_diag.checkpoints.demo import DEMO_MOE_FOLDER

    config = json.loads((DEMO_MOE_FOLDER / "config.json").read_text())
    weights = load_file(DEMO_MOE_FOLDER / "model.safetensors")
    del weights["model.layers.2.mlp.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts holds 47 projections"):
        open_checkpoint(write_folder(tmp_path / "moe", weights, config))


def test_unknown_names_come_with_near_ones(dense: Path) -> None:
    checkpoint = open_checkpoint(dense)
    with pytest.raises(CheckpointError, match="no linear") as caught:
        checkpoint.shape("model.layers.0.self_attn.qq_proj")
    assert "model.layers.0.self_attn.q_proj" in caught.value.hint
    with pytest.raises(CheckpointError, match="no tensor"):
        checkpoint.read("model.norm.wait")
