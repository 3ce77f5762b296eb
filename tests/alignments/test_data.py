"""Alignments as data: order, names, settings, and that patching nothing is an error."""

from pathlib import Path

import pytest

from minite_diag.alignments import base
from minite_diag.alignments.base import (
    Alignment,
    Application,
    apply_replacements,
    known_alignments,
    resolve_alignments,
)
from minite_diag.errors import EngineError, UsageError
from minite_diag.prepare import CompareRequest, EngineRequest, with_alignments


def request(*align: str, learner: str = "te", sampler: str = "vllm") -> CompareRequest:
    return CompareRequest(EngineRequest(learner), (EngineRequest(sampler),), align=align)


def test_names_come_in_ladder_order_and_near_misses_are_named() -> None:
    assert resolve_alignments(["rope", "weights"]) == ("weights", "rope")
    assert resolve_alignments(["all"]) == tuple(known_alignments())
    with pytest.raises(UsageError, match="did you mean 'attention'"):
        resolve_alignments(["atention"])


def test_settings_reach_both_engines_and_the_export() -> None:
    found = with_alignments(request("weights", "pow2-scale", "nvfp4-linear"))
    assert found.learner.options["recipe"] == "pow2-row-scaled"
    assert found.samplers[0].options["nvfp4_recipe"] == "pow2-row-scaled"
    assert found.export_recipe == "pow2"
    assert with_alignments(request()).export_recipe == "modelopt"


def test_an_alignment_for_other_engines_is_an_error() -> None:
    with pytest.raises(UsageError, match="does nothing in toy"):
        with_alignments(request("norm", learner="toy", sampler="toy"))


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
