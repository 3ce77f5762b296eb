"""Runs with more than one sampler, limits of disk, and engines that fail on the way."""

import dataclasses

import pytest

from minite_diag.attribute.live import attribute_live
from minite_diag.plan import read_plan, write_plan


def ignore(spec, event):
    pass


@pytest.fixture(scope="module")
def captured(here, tmp_path_factory):
    """A learner, an equal sampler and one with a fault."""
    run = tmp_path_factory.mktemp("three")
    here.capture(run, here.plan(None, None, "norm_eps"))
    return run


@pytest.fixture(scope="module")
def found(here, captured):
    return attribute_live(captured, ignore, open_session=here.open_session)


def test_each_pair_has_its_own_records(found):
    verdicts = {record["target"]: record["verdict"] for record in found["causal"]}
    assert verdicts == {"sampler-1": "equal", "sampler-2": "attributed"}
    assert {record["baseline"] for record in found["causal"]} == {"learner-0"}
    assert {row["target"] for row in found["local"]} == {"sampler-1", "sampler-2"}
    assert {row["engine"] for row in found["legs"]} == {"learner-0", "sampler-1", "sampler-2"}


def test_a_sampler_is_only_judged_on_probes_and_on_what_it_drew_itself(found):
    for record in found["causal"]:
        assert record["sequences"] == 4
        assert record["sampled_tokens"] == 2 * 6


def test_engines_limits_the_samplers(here, captured):
    only = attribute_live(captured, ignore, engines=["sampler-2"], open_session=here.open_session)
    assert [record["target"] for record in only["causal"]] == ["sampler-2"]
    assert {row["engine"] for row in only["legs"]} == {"learner-0", "sampler-2"}


def test_a_local_trace_that_passes_the_disk_budget_is_an_error(here, tmp_path):
    here.capture(tmp_path, here.plan(None, "norm_eps"))
    plan = read_plan(tmp_path)
    small = dataclasses.replace(plan.capture, max_disk=20_000)
    write_plan(dataclasses.replace(plan, capture=small), tmp_path)
    found = attribute_live(tmp_path, ignore, open_session=here.open_session)
    (error,) = found["errors"]
    assert error["engine"] == "sampler-1"
    assert "20000 bytes" in error["message"]
    assert (found["local"], found["causal"]) == ([], [])
    assert {row["engine"] for row in found["legs"]} == {"learner-0", "sampler-1"}
    assert not list((tmp_path / "live").glob("*/*-trace"))


def test_the_local_trace_is_deleted_and_the_results_are_kept(captured, found):
    assert found["forwards"]["by_step"]["local"] > 0
    assert not list((captured / "live").glob("*/*-trace"))
    assert len(list((captured / "live").glob("*/*-local-learner-0.json"))) >= 2
