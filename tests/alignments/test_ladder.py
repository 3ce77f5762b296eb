"""Which rungs are climbed, where they are kept, what they say; names that do nothing."""

import dataclasses
import sys
from pathlib import Path

import pytest

from minite_diag.align import ladder
from minite_diag.align.ladder import _chosen, folder_of
from minite_diag.align.rung import backward_of, changes_of, recipe_of, sides_of
from minite_diag.alignments.base import known_alignments, parts_of
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, write_plan
from minite_diag.prepare import CompareRequest, EngineRequest, write_request
from minite_diag.report import words

DENSE = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.0.up_proj"


def plan_of(
    *quantized: str, learner: str = "te", sampler: str = "vllm", **options: str
) -> tuple[Plan, dict]:
    """A plan, and the part of a summary that says on which device each engine ran."""
    engines = tuple(
        EngineSpec(
            id=f"{role}-{name}",
            role=role,
            engine=name,
            python=sys.executable,
            checkpoint="export",
            checkpoint_format="bf16" if role == "learner" else "nvfp4-modelopt",
            options=options if role == "learner" else {},
        )
        for role, name in (("learner", learner), ("sampler", sampler))
    )
    model = ModelRef("m", "m", "bf16", "A", "f", 10, 1, ())
    plan = Plan(
        model=model,
        engines=engines,
        probes=(),
        dtype="bfloat16",
        quantize="default",
        quantized=quantized,
        export_recipe="modelopt",
        modes=("score",),
        sample_tokens=1,
        seed=0,
        timeout_s=1.0,
        capture=CaptureSpec(),
        version="0",
    )
    return plan, {"engines": [{"id": spec.id, "device": "cpu"} for spec in engines]}


def chosen(names: list[str], *quantized: str, is_moe: bool = False, **engines: str) -> list[str]:
    plan, before = plan_of(*quantized, **engines)
    return _chosen(names, plan, before, parts_of(quantized, is_moe=is_moe))


def test_the_ladder_passes_over_what_does_nothing_here() -> None:
    dense = chosen([], DENSE)
    assert dense[:3] == ["weights", "pow2-scale", "static-scale"]
    assert "nvfp4-linear" in dense
    assert not {"nvfp4-moe", "router", "experts", "batch-invariant", "row-scale"} & set(dense)
    moe = chosen(["all"], DENSE, EXPERT, is_moe=True)
    assert {"nvfp4-moe", "nvfp4-linear", "router", "experts"} <= set(moe)
    # BF16: nothing to do for anything that quantizes.
    bf16 = chosen([], is_moe=True)
    assert not {"static-scale", "nvfp4-linear", "nvfp4-moe", "experts"} & set(bf16)
    assert "router" in bf16


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nvfp4-moe", "'nvfp4-moe' patches nothing: no expert of this model is quantized"),
        ("batch-invariant", "'batch-invariant' is for cuda, this run is on cpu"),
        ("nrom", "did you mean 'norm'"),
    ],
)
def test_a_named_alignment_that_does_nothing_is_an_error(name: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as error:
        chosen([name], DENSE)
    assert "did you mean" in match or error.value.hint == "leave it out"


def test_static_scales_are_the_learner_s_and_hf_has_none() -> None:
    with pytest.raises(UsageError, match="'static-scale' does nothing in hf, vllm"):
        chosen(["static-scale"], DENSE, learner="hf")


def test_a_rung_of_another_set_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "2-norm"
    assert folder_of(folder, ("weights", "norm")) == folder
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    request = CompareRequest(EngineRequest("te"), (EngineRequest("vllm"),))
    write_request(dataclasses.replace(request, align=("norm", "weights")), folder)
    assert folder_of(folder, ("weights", "norm")) == folder
    other = folder_of(folder, ("pow2-scale", "norm"))
    assert other != folder
    assert other.name.startswith("2-norm-")


def test_a_rung_says_side_change_and_backward() -> None:
    known = known_alignments()
    plan, _ = plan_of(DENSE, EXPERT, recipe="pow2")
    assert sides_of(known["static-scale"], plan) == ["learner"]
    assert sides_of(known["weights"], plan) == ["learner", "sampler"]
    assert sides_of(known["norm"], plan) == ["learner", "sampler"]
    assert changes_of(known["norm"], plan) == ["learner and sampler: op norm"]
    assert changes_of(known["pow2-scale"], plan) == ["learner: recipe=pow2", "export: recipe=pow2"]
    assert changes_of(known["nvfp4-moe"], plan) == [
        "learner: expert_recipe=pow2-row-scaled",
        "sampler: nvfp4_expert_recipe=pow2-row-scaled",
        "export: recipe=pow2",
    ]
    assert backward_of(plan) == "W4A4 dgrad and wgrad, rne gradients"
    mixed, _ = plan_of(DENSE, EXPERT, recipe="te", expert_recipe="pow2", input_scales="a/export-1")
    assert recipe_of(mixed.learner) == "te, experts pow2, static scales of export-1"
    assert backward_of(mixed) == (
        "linears: W4A4 dgrad and wgrad, stochastic gradients, wgrad after RHT; "
        "experts: W4A4 dgrad and wgrad, rne gradients"
    )
    assert backward_of(plan_of()[0]) is None


def rung(name: str, kernels: bool, *ours: str) -> dict:
    return {
        "rung": name,
        "kernels": kernels,
        "logprob": {"score": {"mean_abs": 0.5}},
        "sites": {"compared": 2, "bitwise_equal": 2},
        "ops": [{"engine": "learner-te"}, {"engine": "sampler-vllm", "replaced": list(ours)}],
    }


def test_the_last_native_rung_is_before_the_first_op_of_ours() -> None:
    rungs = [
        rung("as it is", False, "experts"),
        rung("+ static-scale", False, "experts"),
        rung("+ norm", True, "experts", "norm"),
    ]
    text = words.last_native(rungs)
    assert text.startswith("settings only, engines' own ops: + static-scale (score |dlogp| 0.5)")
    # What stands in for an engine's own from the start is said.
    assert text.endswith("ours in every rung: learner-te: none; sampler-vllm: experts")


def test_a_run_in_which_an_engine_failed_is_nothing_to_climb_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = plan_of(DENSE)
    write_plan(plan, tmp_path)
    write_request(CompareRequest(EngineRequest("te"), (EngineRequest("vllm"),)), tmp_path)
    monkeypatch.setattr(ladder, "summarize", lambda _: {"verdict": "error"})
    with pytest.raises(EngineError, match="holds no measurement to climb from") as error:
        ladder.align(tmp_path, [], lambda _: None, lambda *_: None)
    assert error.value.hint == f"minite-diag compare --resume {tmp_path}"
