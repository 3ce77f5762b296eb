"""Alignments as data: order, names, settings, and that patching nothing is an error."""

from pathlib import Path

import pytest

from minite_diag.alignments import base
from minite_diag.alignments.base import (
    Alignment,
    Application,
    application,
    apply_environment,
    apply_replacements,
    known_alignments,
    parts_of,
    resolve_alignments,
    without_superseded,
)
from minite_diag.errors import EngineError, UsageError
from minite_diag.plan import Plan
from minite_diag.prepare import CompareRequest, EngineRequest, with_alignments

REPORTS = Path(__file__).parents[2] / "reports"


def request(*align: str, learner: str = "te", sampler: str = "vllm") -> CompareRequest:
    return CompareRequest(EngineRequest(learner), (EngineRequest(sampler),), align=align)


def test_names_come_in_ladder_order_and_near_misses_are_named() -> None:
    assert resolve_alignments(["rope", "weights"]) == ("weights", "rope")
    assert resolve_alignments(["all"]) == tuple(known_alignments())
    with pytest.raises(UsageError, match="did you mean 'attention'"):
        resolve_alignments(["atention"])


def test_settings_reach_both_engines_and_the_export() -> None:
    found = with_alignments(request("weights", "pow2-scale", "nvfp4-linear"))
    assert found.learner.options == {"recipe": "pow2", "linear_recipe": "pow2-row-scaled"}
    assert found.samplers[0].options == {"nvfp4_linear_recipe": "pow2-row-scaled"}
    assert found.export_recipe == "pow2"
    assert with_alignments(request()).export_recipe == "modelopt"


def test_linears_and_experts_are_aligned_apart() -> None:
    found = with_alignments(request("nvfp4-moe", sampler="sglang"))
    assert found.learner.options == {"expert_recipe": "pow2-row-scaled"}
    assert found.samplers[0].options == {"nvfp4_expert_recipe": "pow2-row-scaled"}
    both = with_alignments(request("nvfp4-moe", "nvfp4-linear"))
    assert set(both.learner.options) == {"linear_recipe", "expert_recipe"}


DENSE = parts_of(["model.layers.0.mlp.up_proj"], is_moe=False)
EXPERTS = parts_of(["model.layers.0.mlp.experts.3.up_proj"], is_moe=True)


def test_what_the_model_lacks_is_an_error_where_it_was_asked_for() -> None:
    for name, parts in (
        ("nvfp4-moe", DENSE),
        ("experts", DENSE),
        ("router", DENSE),
        ("nvfp4-linear", EXPERTS),
        ("static-scale", parts_of([], is_moe=True)),
        ("experts", parts_of([], is_moe=True)),
    ):
        with pytest.raises(UsageError, match=f"'{name}' patches nothing"):
            with_alignments(request(name), parts)
    # BF16 experts are routed too.
    assert with_alignments(request("router"), parts_of([], is_moe=True)).align == ("router",)


def test_what_the_model_lacks_is_passed_over_in_all() -> None:
    dense = with_alignments(request("all"), DENSE).align
    assert not {"nvfp4-moe", "experts", "router"} & set(dense)
    assert "nvfp4-linear" in dense
    experts = with_alignments(request("all"), EXPERTS).align
    assert {"nvfp4-moe", "experts", "router"} <= set(experts)
    assert "nvfp4-linear" not in experts


def test_a_scale_for_each_token_leaves_static_scales_nothing_to_do() -> None:
    with pytest.raises(UsageError, match="'static-scale' patches nothing beside 'nvfp4-linear'"):
        with_alignments(request("static-scale", "nvfp4-linear"), DENSE)
    mixed = parts_of(["a.mlp.up_proj", "a.mlp.experts.0.up_proj"], is_moe=True)
    names = ("static-scale", "nvfp4-linear")
    assert with_alignments(request(*names), mixed).align == names
    assert "static-scale" not in with_alignments(request("all"), mixed).align
    assert without_superseded((*names, "nvfp4-moe"), mixed) == ("nvfp4-linear", "nvfp4-moe")


def test_the_ladder_begins_with_settings_and_ends_with_what_may_stay_native() -> None:
    known = known_alignments()
    kernels = [alignment.kernels for alignment in known.values()]
    assert kernels == sorted(kernels)
    order = list(known)
    assert order.index("nvfp4-linear") > order.index("experts")


def test_an_alignment_for_other_engines_is_an_error() -> None:
    with pytest.raises(UsageError, match="does nothing in toy"):
        with_alignments(request("norm", learner="toy", sampler="toy"))


def test_a_plan_of_another_installation_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="no alignment is called 'of-tomorrow' in this install"):
        apply_environment("vllm", ["of-tomorrow"])


@pytest.mark.parametrize("file", sorted(REPORTS.glob("*/plan*.json")), ids=str)
def test_published_plans_can_be_run_still(file: Path) -> None:
    plan = Plan.from_json(file.read_text())
    for spec in plan.engines:
        for name in spec.align:
            assert application(name, spec.engine) is not None


def nothing(_: object) -> list[str]:
    return []


def test_patching_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Alignment(
        "empty", "", {"hf": Application(replacements=(("norm", "alignments.test_data:nothing"),))}
    )
    monkeypatch.setattr(base, "known_alignments", lambda: {"empty": empty})
    monkeypatch.setattr(base, "load_object", lambda _: nothing)
    with pytest.raises(EngineError, match="'empty' patched nothing in hf"):
        apply_replacements("hf", ["empty"], None)


def test_third_parties_add_theirs_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third_party.py").write_text(
        "from minite_diag.alignments.base import Alignment, Application\n"
        "MINE = Alignment('mine', 'theirs', {'toy': Application()})\n"
    )
    info = tmp_path / "third_party-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[minite_diag.alignments]\nmine = third_party:MINE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert known_alignments()["mine"].title == "theirs"
    # The bundled ones can't be replaced, and keep their places.
    assert next(iter(known_alignments())) == "exact-fp4-math"
