"""Calibration against amax values found another way, on real transformers models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from minite_diag.checkpoints import calibrate, export, open_checkpoint, quantized_names
from minite_diag.checkpoints.demo import open_demo_moe
from minite_diag.errors import CheckpointError, UsageError

SEQUENCES = [[5, 9, 2, 40, 77, 31, 8], [90, 3, 3, 12]]
TEXT = list(b"def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i)\n")


def test_dense_amax_is_the_largest_input_over_all_sequences(dense: Path) -> None:
    checkpoint = open_checkpoint(dense)
    names = quantized_names(checkpoint, "default")
    amax = calibrate(checkpoint, SEQUENCES, names)
    assert list(amax) == names
    assert amax.fallbacks == {}
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    down, normed = [], []
    layer = model.model.layers[1]
    layer.mlp.act_fn.register_forward_hook(lambda m, a, out: down.append(out))
    layer.mlp.up_proj.register_forward_hook(lambda m, a, out: down.append(out))
    layer.post_attention_layernorm.register_forward_hook(lambda m, a, out: normed.append(out))
    with torch.no_grad():
        for sequence in SEQUENCES:
            model(torch.tensor([sequence]))
    products = [down[i] * down[i + 1] for i in range(0, len(down), 2)]
    largest = lambda values: max(v.abs().max().item() for v in values)  # noqa: E731
    assert amax["model.layers.1.mlp.down_proj"] == largest(products)
    assert amax["model.layers.1.mlp.gate_proj"] == amax["model.layers.1.mlp.up_proj"]
    assert amax["model.layers.1.mlp.up_proj"] == largest(normed)


def test_expert_amax_is_over_the_tokens_routed_to_it() -> None:
    moe = open_demo_moe()
    names = quantized_names(moe, "experts")
    amax = calibrate(moe, [TEXT], names)
    model = transformers.AutoModelForCausalLM.from_pretrained(moe.path, dtype=torch.bfloat16)
    block = model.model.layers[2].mlp
    seen: list[torch.Tensor] = []
    block.register_forward_pre_hook(lambda m, a: seen.append(a[0][0]))
    with torch.no_grad():
        logits = model(torch.tensor([TEXT]), output_router_logits=True).router_logits[2]
    hidden, prefix = seen[0], "model.layers.2.mlp.experts"
    routed = torch.zeros_like(logits).scatter(1, logits.float().topk(4).indices, 1).bool()
    assert routed.any(0).sum() > 8
    for expert in routed.any(0).nonzero().flatten().tolist():
        x = hidden[routed[:, expert]]
        gate = moe.read_weight(f"{prefix}.{expert}.gate_proj")
        up = moe.read_weight(f"{prefix}.{expert}.up_proj")
        h = F.silu(F.linear(x, gate)) * F.linear(x, up)
        assert amax[f"{prefix}.{expert}.gate_proj"] == x.abs().max().item()
        # A GEMM over gate and up at once may round an element the other way.
        want = pytest.approx(h.abs().max().item(), rel=2**-7)
        assert amax[f"{prefix}.{expert}.down_proj"] == want


def test_experts_without_tokens_borrow_their_layers_largest_and_say_so(tmp_path: Path) -> None:
    moe = open_demo_moe()
    names = quantized_names(moe, "experts")
    amax = calibrate(moe, [TEXT[:2]], names)
    assert list(amax) == names
    first = [name for name in names if ".layers.0." in name and name.endswith("down_proj")]
    borrowed = [name for name in first if name in amax.fallbacks]
    measured = [amax[name] for name in first if name not in amax.fallbacks]
    assert len(borrowed) >= 16 - 2 * 4
    assert {amax[name] for name in borrowed} == {max(measured)}
    assert "saw no token" in amax.fallbacks[borrowed[0]]
    exported = export(moe, "te", "modelopt", tmp_path / "out", "experts", amax)
    assert borrowed[0] in (exported.path / "minite_export.json").read_text()


def test_unusable_sequences_and_quantized_checkpoints_are_errors(
    dense: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(dense)
    names = quantized_names(checkpoint, "default")
    for sequences, message in (
        ([], "at least one"),
        ([[]], "at least one"),
        ([[1, 96]], "token id 96 is outside"),
        ([[-1]], "token id -1 is outside"),
        ([[1] * 129], "exceeds"),
    ):
        with pytest.raises(UsageError, match=message):
            calibrate(checkpoint, sequences, names)
    exported = export(checkpoint, "te", "modelopt", tmp_path / "out", activations="none")
    with pytest.raises(CheckpointError, match="quantized already"):
        calibrate(exported, SEQUENCES, names)


def test_a_name_that_never_fires_is_an_error(dense: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.mlp\.up_proj"):
        calibrate(open_checkpoint(dense), SEQUENCES, ["model.layers.7.mlp.up_proj"])
