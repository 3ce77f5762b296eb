"""The change between two runs: paired where it can be, called only where it is seen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import minite
from gate_runs import cause, leg, rounding, site, write_run

from minite_diag.change import compare_runs
from minite_diag.outputs.change import FORMATS, render_change


def metric(change: dict[str, Any], name: str) -> dict[str, Any]:
    return next(m for m in change["pairs"][0]["metrics"] if m["metric"] == name)


def sites(size: float) -> list[dict[str, Any]]:
    return [
        site(f"layers.{n}.mlp", "output", f"p{p}", rel_l2=size * (n + 1), bitwise_fraction=0.5)
        for n in range(3)
        for p in range(3)
    ]


def test_better_worse_and_no_change(tmp_path: Path) -> None:
    runs = {
        name: write_run(tmp_path / name, rounding(sigma, 30, 40, seed=seed))
        for name, sigma, seed in (("a", 0.05, 0), ("b", 0.02, 1), ("c", 0.05, 2))
    }
    assert metric(compare_runs(runs["a"], runs["b"]), "mean_abs")["verdict"] == "better"
    assert metric(compare_runs(runs["b"], runs["a"]), "mean_abs")["verdict"] == "worse"
    assert metric(compare_runs(runs["a"], runs["c"]), "mean_abs")["verdict"] == "no change seen"


def test_a_run_against_itself_changes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", rounding(0.05, 10, 20), sites=sites(0.1), causes=[cause()])
    change = compare_runs(run, run)
    for row in change["pairs"][0]["metrics"]:
        assert (row["change"], row["low"], row["high"], row["paired"]) == (0.0, 0.0, 0.0, True)
    assert change["pairs"][0]["sites"] == []
    assert change["environment"] == []
    assert [c["code"] for c in change["pairs"][0]["causes"]["kept"]] == ["MD102"]


def test_equal_tokens_are_paired_whatever_their_order(tmp_path: Path) -> None:
    """A common shift of one per cent, invisible beside the spread of the sequences."""
    values = [np.abs(v) for v in rounding(0.05, 12, 20, spread=1.0)]
    before = write_run(tmp_path / "a", values, mode="score")
    after = write_run(tmp_path / "b", [v * 1.01 for v in values], mode="score")
    found = metric(compare_runs(before, after), "mean_abs")
    assert found["paired"]
    assert found["verdict"] == "worse"
    other = write_run(tmp_path / "c", [v[:-1] * 1.01 for v in values], mode="score")
    found = metric(compare_runs(before, other), "mean_abs")
    assert not found["paired"]
    assert found["verdict"] == "no change seen"


def test_few_sequences_say_so(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / n, rounding(s, 2, 50)) for n, s in (("a", 0.1), ("b", 0.001))]
    assert metric(compare_runs(*runs), "mean_abs")["verdict"] == "fewer than 4 sequences"


def test_causes_sites_and_versions(tmp_path: Path) -> None:
    before = write_run(
        tmp_path / "a",
        rounding(0.05, 10, 20),
        sites=sites(0.1),
        causes=[cause("MD101"), cause("MD102")],
    )
    after = write_run(
        tmp_path / "b",
        rounding(0.05, 10, 20),
        sites=sites(0.2),
        causes=[cause("MD102"), cause("MD203", "attention")],
        version="2.0",
    )
    change = compare_runs(before, after)
    causes = change["pairs"][0]["causes"]
    assert [[c["code"] for c in causes[k]] for k in ("new", "gone", "kept")] == [
        ["MD203"],
        ["MD101"],
        ["MD102"],
    ]
    first = change["pairs"][0]["sites"][0]
    assert first["site"] == "layers.2.mlp:output"
    assert (first["before"], first["after"]) == (pytest.approx(0.3), pytest.approx(0.6))
    assert {(e["key"], e["before"], e["after"]) for e in change["environment"]} == {
        ("version", "1.0", "2.0")
    }


def test_what_was_not_looked_for_is_not_gone(tmp_path: Path) -> None:
    """Legs are measured by the live half, which one of the runs lacks."""
    batch = cause("MD503", "sampler-toy")
    live = write_run(tmp_path / "a", rounding(0.05, 5, 5), legs=[leg(0.1)], causes=[batch])
    plain = write_run(tmp_path / "b", rounding(0.05, 5, 5))
    assert compare_runs(live, plain)["pairs"][0]["causes"]["gone"] == []
    both = write_run(tmp_path / "c", rounding(0.05, 5, 5), legs=[leg(0.0)])
    assert [c["code"] for c in compare_runs(live, both)["pairs"][0]["causes"]["gone"]] == ["MD503"]


def test_runs_of_other_models_are_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / n, rounding(0.05, 5, 5), name=n) for n in ("a", "b")]
    assert compare_runs(*runs)["notes"] == ["the runs are of another model: a, then b"]


def test_a_run_without_attribution_has_no_causes_to_compare(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / n, rounding(0.05, 5, 5), causes=[cause()]) for n in ("a", "b")]
    (runs[1] / "attribution.json").unlink()
    change = compare_runs(*runs)
    assert change["pairs"][0]["causes"] is None
    assert "causes not compared" in render_change(change, "text")


@pytest.mark.parametrize("name", FORMATS)
def test_each_format(tmp_path: Path, name: str) -> None:
    hostile = "<b>|`x`\n</b>"
    runs = [
        write_run(
            tmp_path / n, rounding(s, 10, 20), version=n + hostile, sites=sites(s), causes=[cause()]
        )
        for n, s in (("a", 0.05), ("b", 0.01))
    ]
    text = render_change(compare_runs(*runs), name)
    assert "better" in text
    if name == "json":
        assert json.loads(text)["schema"] == 1
    if name == "markdown":
        assert "<b>" not in text
        assert "&lt;b&gt;" in text


def test_the_command_prints_the_change(tmp_path: Path) -> None:
    runs = [
        str(write_run(tmp_path / n, rounding(s, 10, 20))) for n, s in (("a", 0.05), ("b", 0.01))
    ]
    done = minite("report", *runs)
    assert done.returncode == 0
    assert "better" in done.stdout
    assert json.loads(minite("report", *runs, "--json").stdout)["pairs"]
    file = tmp_path / "change.md"
    assert minite("report", *runs, "-o", str(file)).returncode == 0
    assert file.read_text().startswith("## minite-diag: change")
