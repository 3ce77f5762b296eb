"""Static activation scales as engines use them: direction, fused groups, experts of a layer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minite_diag.checkpoints import export, open_checkpoint, open_demo_moe, quantized_names
from minite_diag.checkpoints.input_scales import read_input_scales
from minite_diag.errors import CheckpointError


def exported(folder: Path, layout: str, **options: str):
    """The dense linears of demo-moe, each calibrated to another amax."""
    source = open_demo_moe()
    names = list(quantized_names(source, "attention"))
    amax = {fqn: 1.0 + i for i, fqn in enumerate(names)}
    return export(source, "pow2", layout, folder / layout, "attention", amax, **options), names


@pytest.mark.parametrize(
    ("layout", "suffix", "direction"),
    [
        ("modelopt", ".input_scale", "decode"),
        ("compressed-tensors", ".input_global_scale", "encode"),
    ],
)
def test_scales_are_the_file_s_numbers_in_the_file_s_direction(tmp_path, layout, suffix, direction):
    checkpoint, names = exported(tmp_path, layout)
    scales = read_input_scales(checkpoint, names)
    assert list(scales) == list(names)
    for fqn, scale in scales.items():
        assert scale.direction == direction
        assert torch.equal(scale.value, checkpoint.read(fqn + suffix).reshape(()))
    q, k = (scales[f"model.layers.0.self_attn.{part}_proj"].value for part in "qk")
    assert torch.equal(q, k)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_experts_of_a_layer_get_the_largest_amax_of_all(tmp_path, layout):
    source = open_demo_moe()
    names = quantized_names(source, "default")
    amax = dict.fromkeys(names, 1.0)
    loudest = "model.layers.1.mlp.experts.2.down_proj"
    amax[loudest] = 64.0
    checkpoint = export(source, "pow2", layout, tmp_path / "out", calibration=amax)
    scales = read_input_scales(checkpoint, names)
    own = float(scales[loudest].value)
    for fqn, scale in scales.items():
        same = fqn.startswith("model.layers.1.mlp.experts.") and fqn.endswith("down_proj")
        assert (float(scale.value) == own) is same, fqn


def test_a_weight_only_checkpoint_has_none(tmp_path):
    checkpoint, names = exported(tmp_path, "modelopt", activations="none")
    with pytest.raises(CheckpointError, match="no static activation scale"):
        read_input_scales(checkpoint, names)


def test_a_fused_group_with_two_scales_is_refused(tmp_path):
    checkpoint, names = exported(tmp_path, "modelopt")
    file = checkpoint.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="_proj and its fused group"):
        read_input_scales(open_checkpoint(checkpoint.path), names)
