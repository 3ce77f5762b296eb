"""Waivers: they cover what they name, until their day, with a reason."""

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from gate_runs import cause, judge, rounding, site, write_run

from minite_diag.errors import UsageError
from minite_diag.gate.waivers import read_waivers

TODAY = dt.date(2026, 12, 1)


def waivers(**item: Any) -> tuple:
    item = {"reason": "known", "expires": dt.date(2027, 1, 1)} | item
    return tuple(read_waivers([item], "minite.toml"))


def test_a_waived_failure_passes_and_stays_visible(run: Path) -> None:
    write_run(run, rounding(0.2, 24, 60))
    limits = ("k3_kl=1", "mult_prob_error=9")
    assert judge(run, "nvfp4", *limits)["verdict"] == "fail"
    gate = judge(run, "nvfp4", *limits, waivers=waivers(metric="mean_abs"))
    assert gate["verdict"] == "pass"
    found = next(c for c in gate["checks"] if c["metric"] == "mean_abs")
    assert found["verdict"] == "fail"
    assert found["waived"] == {"reason": "known", "expires": "2027-01-01"}
    assert gate["waivers"][0]["state"] == "used"


def test_other_failures_still_fail(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.2, 24, 60)), waivers=waivers(metric="mean_abs"))
    assert gate["verdict"] == "fail"
    assert not any("mean_abs" in reason for reason in gate["reasons"])


@pytest.mark.parametrize("day", [TODAY - dt.timedelta(1), "2026-11-30", dt.datetime(2026, 11, 30)])
def test_an_expired_waiver_fails_with_a_clear_message(run: Path, day: Any) -> None:
    """Even where there is nothing left to waive."""
    write_run(run, rounding(0.001, 24, 60))
    gate = judge(run, waivers=waivers(metric="mean_abs", expires=day))
    assert gate["verdict"] == "fail"
    assert gate["reasons"][0] == (
        "the waiver of metric mean_abs (known) expired on 2026-11-30: renew or remove it"
    )


def test_a_waiver_holds_on_its_last_day(run: Path) -> None:
    write_run(run, rounding(0.001, 24, 60))
    assert judge(run, waivers=waivers(metric="mean_abs", expires=TODAY))["verdict"] == "pass"


def test_a_waiver_that_matches_nothing_is_told(run: Path) -> None:
    write_run(run, rounding(0.001, 24, 60))
    gate = judge(run, waivers=waivers(metric="mean_abs"))
    assert gate["verdict"] == "pass"
    assert any("matches nothing: remove it" in note for note in gate["notes"])


def test_a_waiver_of_a_cause_needs_that_cause(run: Path) -> None:
    both = waivers(metric="mean_abs", cause="MD102")
    limits = ("k3_kl=1", "mult_prob_error=9")
    write_run(run / "a", rounding(0.2, 24, 60), causes=[cause("MD102")])
    assert judge(run / "a", "nvfp4", *limits, waivers=both)["verdict"] == "pass"
    write_run(run / "b", rounding(0.2, 24, 60), causes=[cause("MD101")])
    assert judge(run / "b", "nvfp4", *limits, waivers=both)["verdict"] == "fail"


def test_a_cause_alone_waives_the_finding_not_the_gap(run: Path) -> None:
    write_run(run, rounding(0.2, 24, 60), causes=[cause("MD102")])
    gate = judge(run, waivers=waivers(cause="md102"))
    assert gate["verdict"] == "fail"
    assert gate["waived_causes"] == ["MD102"]
    assert gate["waivers"][0]["state"] == "used"


def test_a_waiver_of_a_site(run: Path) -> None:
    rows = [
        site(f"layers.{n}.mlp", "output", f"p{p}", rel_l2=0.5 * n) for n in (0, 1) for p in range(5)
    ]
    write_run(run, rounding(0.001, 24, 60), sites=rows)
    limit = "rel_l2=0.1@layers.*"
    assert judge(run, "nvfp4", limit)["verdict"] == "fail"
    assert judge(run, "nvfp4", limit, waivers=waivers(site="layers.1.*"))["verdict"] == "pass"
    other = waivers(site="layers.1.*:input")
    assert judge(run, "nvfp4", limit, waivers=other)["verdict"] == "fail"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"metric": "mean_abs", "expires": "2027-01-01"}, "has no reason"),
        ({"metric": "mean_abs", "reason": "x"}, "has no end"),
        ({"metric": "mean_abs", "reason": "x", "expires": "soon"}, "no date"),
        ({"reason": "x", "expires": "2027-01-01"}, "waives nothing"),
        ({"metric": "mean_bas", "reason": "x", "expires": "2027-01-01"}, "mean_bas"),
        ({"cause": "MD999", "reason": "x", "expires": "2027-01-01"}, "MD999"),
        ({"metrc": "mean_abs", "reason": "x", "expires": "2027-01-01"}, "unknown key 'metrc'"),
        ("mean_abs", "is no table"),
    ],
)
def test_waivers_that_mean_nothing(item: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_waivers([item], "pyproject.toml")
