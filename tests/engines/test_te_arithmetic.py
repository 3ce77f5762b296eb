"""Recipes of dense linears and experts apart; static activation scales of an export."""

import pytest
import torch
from torch import nn

from minite_diag.checkpoints import export, open_demo_moe, quantized_names
from minite_diag.engines import te_emu
from minite_diag.engines.te import SharedInput, TeRefExperts
from minite_diag.engines.te_arithmetic import TeArithmetic, read_arithmetic, recipe_names
from minite_diag.errors import UsageError
from minite_kernels.nvfp4.recipe import get_recipe

DENSE = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.{}.gate_proj"


@pytest.fixture(scope="module")
def static(tmp_path_factory) -> tuple[dict[str, str], list[str]]:
    """Options of te with the scales of an export of demo-moe, and its quantized linears."""
    source = open_demo_moe()
    names = list(quantized_names(source, "default"))
    folder = tmp_path_factory.mktemp("static") / "out"
    amax = {fqn: 3.0 + i % 7 for i, fqn in enumerate(names)}
    export(source, "pow2", "modelopt", folder, calibration=amax)
    return {"input_scales": str(folder)}, names


def rows(loudest: float) -> torch.Tensor:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[4] *= loudest
    return x


@pytest.mark.parametrize("recipe", ["te", "te-1d", "pow2"])
def test_a_row_s_codes_are_the_same_alone_and_in_any_batch(static, recipe):
    options, names = static
    fixed = read_arithmetic(options, recipe, recipe, names)
    dynamic = read_arithmetic({}, recipe, recipe, names)
    x = rows(loudest=1000.0)

    def codes(arithmetic: TeArithmetic, name: str, batch: torch.Tensor) -> list[torch.Tensor]:
        q = arithmetic.quantize_input(name, batch)
        return [q.codes[:1], q.block_scale[:1].view(torch.uint8), q.global_decode_scale]

    for name in (DENSE, EXPERT.format(3)):
        alone, batched = codes(fixed, name, x[:1]), codes(fixed, name, x)
        assert all(torch.equal(a, b) for a, b in zip(alone, batched, strict=True))
        # Its own amax, which the fifth row moves.
        alone, batched = codes(dynamic, name, x[:1]), codes(dynamic, name, x)
        assert not torch.equal(alone[1], batched[1])


def test_experts_share_a_scale_as_the_samplers_do(static):
    options, names = static
    arithmetic = read_arithmetic(options, "pow2", "pow2", names)
    found = {float(arithmetic.input_scales[EXPERT.format(e)].value) for e in range(16)}
    assert len(found) == 1
    assert arithmetic.expert_scope() == "static, one for all experts of a layer"


def test_modules_quantize_by_their_names(static):
    options, names = static
    arithmetic = read_arithmetic(options, "te", "pow2", names)
    x = rows(loudest=1.0)
    q = SharedInput(arithmetic, DENSE).quantize(x, x)
    assert q.recipe.name == "te"
    assert q.global_decode_scale == arithmetic.input_scales[DENSE].value
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.randn(1, 64, 64).bfloat16())
    module.down_proj = nn.Parameter(torch.randn(1, 64, 32).bfloat16())
    module.act_fn = nn.SiLU()
    prefix = "model.layers.0.mlp.experts"
    experts = TeRefExperts(prefix, module, arithmetic, frozenset(names), torch.bfloat16)
    _, q = experts._multiply([f"{prefix}.0.gate_proj", f"{prefix}.0.up_proj"], x)
    assert q is not None
    assert q.recipe.name == "pow2"
    assert q.global_decode_scale == arithmetic.input_scales[EXPERT.format(0)].value


def test_a_part_s_recipe_overrides_the_common_one():
    assert recipe_names({}) == (None, None)
    assert recipe_names({"recipe": "pow2"}) == ("pow2", "pow2")
    assert recipe_names({"recipe": "pow2", "expert_recipe": "te-1d"}) == ("pow2", "te-1d")


def test_static_scales_that_no_linear_uses_are_an_error(static):
    options, names = static
    with pytest.raises(UsageError, match="change nothing: every recipe gives each token"):
        read_arithmetic(options, "pow2-row-scaled", "pow2-row-scaled", names)
    with pytest.raises(UsageError, match="change nothing: nothing quantized"):
        read_arithmetic(options, "te", "te", [])
    # Only the linears that take them.
    mixed = read_arithmetic(options, "pow2-row-scaled", "pow2", names)
    assert mixed.input_scales
    assert all(".experts." in name for name in mixed.input_scales)
    with pytest.raises(UsageError, match="unknown recipe"):
        read_arithmetic({}, "te", "tee", names)


def test_one_impl_runs_both_recipes_and_static_scales_are_te_ref_s(monkeypatch):
    monkeypatch.setattr(te_emu, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(te_emu, "is_installed", lambda: True)
    gpu = torch.device("cuda")
    own = ("te-python-cuda", "te-python-cuda")
    assert te_emu.choose_for("auto", (None, None), gpu, static=False) == ("emu", own)
    mixed = te_emu.choose_for("auto", (None, "pow2"), gpu, static=False)
    assert mixed == ("ref", ("te", "pow2"))
    assert te_emu.choose_for("auto", (None, None), gpu, static=True) == ("ref", ("te", "te"))
    with pytest.raises(UsageError, match="impl=emu takes the amax of each call"):
        te_emu.choose_for("emu", (None, None), gpu, static=True)
    assert get_recipe("te").activation.amax_scope == "tensor"
