"""`--quantize` patterns on the shipped mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from minite_diag.checkpoints import Checkpoint, fused_group, is_expert, is_router, quantized_names
from minite_diag.checkpoints.demo import open_demo_moe
from minite_diag.checkpoints.model import open_checkpoint
from minite_diag.errors import UsageError


@pytest.fixture(scope="module")
def moe() -> Checkpoint:
    return open_demo_moe()


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("default", 4 * (4 + 48)),
        ("none", 0),
        ("experts", 4 * 48),
        ("attention", 4 * 4),
        ("mlp", 4 * 48),
        ("all-but-last:1", 3 * 52),
        ("all-but-first:3", 52),
        ("default,!*.layers.0.*", 3 * 52),
        ("!*.self_attn.*", 4 * 48),
        ("*.self_attn.o_proj", 4),
        ("experts,model.layers.2.self_attn.*_proj", 4 * 48 + 4),
        (" attention , !model.layers.3.* ", 3 * 4),
    ],
)
def test_pattern_selects(moe: Checkpoint, pattern: str, count: int) -> None:
    names = quantized_names(moe, pattern)
    assert len(names) == len(set(names)) == count
    assert not any(is_router(name) or name == "lm_head" for name in names)


def test_default_is_all_but_lm_head_and_routers_in_natural_order(moe: Checkpoint) -> None:
    kept = set(moe.linear_names()) - set(quantized_names(moe, "default"))
    assert kept == {"lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(4))}
    experts = [n for n in quantized_names(moe, "experts") if n.startswith("model.layers.0.")]
    assert [n.split(".")[5] for n in experts] == [str(e) for e in range(16) for _ in range(3)]


@pytest.mark.parametrize(
    ("pattern", "message", "hint"),
    [
        ("modle.layers.*", "matches no linear of demo-moe", "model.layers.0"),
        ("experst", "matches no linear", "presets: default"),
        ("default,!*.layers.9.*", "matches no linear", "near"),
        ("attention,!experts", "takes nothing out", "drop"),
        ("attention,!attention", "leaves no linear", "none"),
        ("", "is empty", "none"),
        ("*.q_proj", "qkv_proj as one module", "all of its parts or none"),
        ("experts,!*.experts.3.*", "experts as one module", "all of its parts or none"),
        ("*.mlp.gate", "stays in high precision", "!*.gate"),
        ("*", "selects lm_head", "!lm_head"),
        ("all-but-last:4", "needs a number of layers from 1 to 3", "all-but-last:1"),
        ("all-but-first:x", "needs a number of layers", "all-but-first:1"),
    ],
)
def test_meaningless_patterns_are_errors_with_a_next_step(
    moe: Checkpoint, pattern: str, message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message.replace("*", r"\*")) as caught:
        quantized_names(moe, pattern)
    assert hint in caught.value.hint


def test_experts_of_a_dense_model_are_an_error(dense: Path) -> None:
    with pytest.raises(UsageError, match="'experts' matches no linear"):
        quantized_names(open_checkpoint(dense), "experts")


def test_names() -> None:
    assert fused_group("model.layers.1.self_attn.k_proj") == "model.layers.1.self_attn.qkv_proj"
    expert = "model.layers.1.mlp.experts.12"
    assert fused_group(f"{expert}.up_proj") == fused_group(f"{expert}.gate_proj")
    assert fused_group(f"{expert}.down_proj") == f"{expert}.down_proj"
    assert is_expert(f"{expert}.down_proj")
    assert is_router("model.layers.1.mlp.gate")
    assert not is_router("model.layers.1.mlp.gate_proj")
