"""Decoding an NVFP4 checkpoint gives the values that its codes stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minite_diag.checkpoints import (
    dequantize_checkpoint,
    export,
    open_checkpoint,
    quantized_names,
)
from minite_diag.errors import CheckpointError
from minite_kernels.nvfp4.quantize import dequantize, quantize


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_decoded_weights_are_those_of_the_recipe(dense: Path, tmp_path: Path, layout: Any) -> None:
    master = open_checkpoint(dense)
    nvfp4 = export(master, "te", layout, tmp_path / "nvfp4", activations="none")
    for dtype, tolerance in (("fp32", 2**-21), ("bf16", 2**-8)):
        decoded = dequantize_checkpoint(nvfp4, tmp_path / dtype, dtype)  # type: ignore[arg-type]
        assert decoded.format == dtype
        assert not decoded.is_quantized
        assert decoded.tensors.keys() == master.tensors.keys()
        assert any("decoded from NVFP4" in note for note in decoded.notes)
        for fqn in master.linear_names():
            weight = decoded.read_weight(fqn).float()
            if fqn not in quantized_names(master, "default"):
                assert weight.equal(master.read_weight(fqn).float())
            elif fqn.endswith(("o_proj", "down_proj")):
                want = dequantize(quantize(master.read_weight(fqn), "te", role="weight"))
                assert torch.allclose(weight, want, rtol=tolerance, atol=0)


def test_quantizing_decoded_weights_again_changes_no_code(dense: Path, tmp_path: Path) -> None:
    from minite_diag.checkpoints import read_quantized

    master = open_checkpoint(dense)
    once = export(master, "te-1d", "modelopt", tmp_path / "once", activations="none")
    decoded = dequantize_checkpoint(once, tmp_path / "decoded", "fp32")
    twice = export(decoded, "te-1d", "modelopt", tmp_path / "twice", activations="none")
    for fqn in once.quantized_linear_names():
        a, b = read_quantized(once, fqn), read_quantized(twice, fqn)
        # The block scale of a block without a 6 moves, so compare where both scales are equal.
        same = (a.block_scale == b.block_scale).repeat_interleave(8, 1)
        assert same.float().mean() > 0.8
        assert a.codes[same].equal(b.codes[same])


def test_sharded_output_and_refusals(dense: Path, tmp_path: Path) -> None:
    master = open_checkpoint(dense)
    with pytest.raises(CheckpointError, match="holds no NVFP4 codes"):
        dequantize_checkpoint(master, tmp_path / "out")
    nvfp4 = export(master, "te", "modelopt", tmp_path / "nvfp4", activations="none")
    decoded = dequantize_checkpoint(nvfp4, tmp_path / "out", shard_bytes=20_000)
    assert len(list(decoded.path.glob("model-*.safetensors"))) > 3
    with pytest.raises(CheckpointError, match="exists already"):
        dequantize_checkpoint(nvfp4, tmp_path / "out")
