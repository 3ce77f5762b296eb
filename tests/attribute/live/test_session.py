"""Jobs of one live engine: what they refuse, and what a patched value does to the result."""

import dataclasses
import json

import pytest
import torch

from minite_diag.attribute.gap import live_logprobs, stored_logprobs
from minite_diag.capture.interventions import _reroute, corrected
from minite_diag.capture.live import Job, LiveSession, Patch, run_live, sequences_of
from minite_diag.errors import EngineError, MiniteDiagError, UsageError
from minite_diag.trace.store import Trace

LEARNER, SAMPLER = "learner-0", "sampler-1"
KEYS = [("score", "", "p0"), ("score", "", "p1")]


def ignore(spec, event):
    pass


@pytest.fixture(scope="module")
def captured(here, tmp_path_factory):
    run = tmp_path_factory.mktemp("session")
    here.capture(run, here.plan(None, "attention_scale"))
    return run


@pytest.fixture(scope="module")
def sequences(captured):
    return tuple(sequences_of(captured, KEYS))


@pytest.fixture(scope="module")
def session(here, captured):
    with here.open_session(captured, SAMPLER, ignore) as found:
        yield found


def logprobs(result):
    return live_logprobs(result.scored)


def baseline(run):
    tokens = Trace(run / "traces" / LEARNER).tokens
    found = stored_logprobs(tokens[tokens["mode"] == "score"])
    return {key: found[key] for key in KEYS}


def test_jobs_and_results_survive_json(sequences):
    patch = Patch(LEARNER, "correction", ("lm_head:logits",), "/folder")
    job = Job("a", sequences, patch=(patch,), record=("*",), size=3, neighbours=sequences[:1])
    assert Job.from_json(job.to_json()) == job
    assert dataclasses.replace(job, action="batch", size=4).forwards == 8
    assert json.loads(job.to_json())["name"] == "a"


def test_the_baseline_s_logits_give_the_baseline_s_log_probabilities(captured, session, sequences):
    bare = session.run(Job("unpatched", sequences))
    assert logprobs(bare) != baseline(captured)
    patch = Patch(LEARNER, sites=("lm_head:logits",))
    result = session.run(Job("logits", sequences, patch=(patch,)))
    assert logprobs(result) == baseline(captured)
    assert (result.patched, result.patched_sites, result.forwards) == (2, 1, 2)


def test_a_value_brings_in_everything_upstream_of_it(captured, session, sequences):
    """The final norm has no error of its own here, and its value closes the whole gap."""
    for site in ("model.norm:output", "lm_head:input", "model.layers.1.mlp.down_proj:output"):
        result = session.run(Job(site, sequences, patch=(Patch(LEARNER, sites=(site,)),)))
        closes = logprobs(result) == baseline(captured)
        assert closes is (site != "model.layers.1.mlp.down_proj:output")


def test_the_value_of_the_faulty_op_closes_the_gap(captured, session, sequences):
    site = "model.layers.1.self_attn.attn:output"
    result = session.run(Job("attn", sequences, patch=(Patch(LEARNER, sites=(site,)),)))
    assert logprobs(result) == baseline(captured)


def test_a_patch_that_hits_nothing_is_an_error_and_the_session_goes_on(session, sequences):
    patch = Patch(LEARNER, sites=("model.layers.7.mlp.down_proj:output",))
    with pytest.raises(MiniteDiagError, match="patched nothing"):
        session.run(Job("nothing", sequences, patch=(patch,)))
    assert session.run(Job("after", sequences)).patched == 0


def test_a_bare_job_after_a_hooked_one_is_refused(session, sequences):
    session.run(Job("hooked", sequences))
    with pytest.raises(UsageError, match="bare"):
        session.run(Job("bare", sequences, hooked=False))


def test_a_real_process_serves_jobs_and_reports_their_errors(captured, sequences):
    events = []
    with LiveSession(captured, SAMPLER, lambda spec, event: events.append(event)) as live:
        bare = live.run(Job("bare", sequences, hooked=False))
        nothing = Patch(LEARNER, sites=("no.such.site:output",))
        with pytest.raises(EngineError, match=r"sampler-1, wrong: .*patched nothing"):
            live.run(Job("wrong", sequences, patch=(nothing,)))
        again = live.run(Job("hooked", sequences))
    assert logprobs(bare) == logprobs(again)
    assert events[0]["label"] == "toy"
    assert len(list((captured / "live" / SAMPLER).glob("*-bare.json"))) >= 1


def test_an_engine_that_can_t_start_says_why(captured, tmp_path):
    (tmp_path / "plan.json").write_text(
        (captured / "plan.json").read_text().replace("attention_scale", "no_such_fault")
    )
    with pytest.raises(EngineError, match="toy has no fault 'no_such_fault'"):
        run_live(tmp_path, SAMPLER, [], ignore)
    with pytest.raises(UsageError, match="no engine 'nobody'"):
        run_live(captured, "nobody", [], ignore)


def test_a_worker_that_dies_is_an_error_with_its_log(captured, sequences):
    with LiveSession(captured, SAMPLER, ignore) as live:
        live._process.kill()
        live._process.wait()
        with pytest.raises(EngineError, match="the worker died") as caught:
            live.run(Job("late", sequences))
    assert "live-sampler-1.log" in caught.value.hint


def test_correction_is_exact_where_the_op_did_what_it_does_on_the_baseline_s_input():
    generator = torch.Generator().manual_seed(0)
    baseline, local, own = (
        torch.randn(64, 32, generator=generator).to(torch.bfloat16) for _ in range(3)
    )
    assert torch.equal(corrected(local, baseline, local).to(torch.bfloat16), baseline)
    expected = own.double() + baseline.double() - local.double()
    assert torch.allclose(corrected(own, baseline, local), expected, rtol=0, atol=1e-15)
    assert torch.equal(corrected(own, local, local), own.double())


def test_rerouting_changes_only_what_the_router_itself_decides():
    base = (
        torch.tensor([[1, 2], [3, 4], [5, 6]]),
        torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]]),
    )
    # Row 0: the same set in another order; row 1: another set; row 2: equal.
    local = (
        torch.tensor([[2, 1], [3, 7], [5, 6]]),
        torch.tensor([[0.3, 0.5], [0.6, 0.4], [0.5, 0.5]]),
    )
    own = torch.tensor([[2, 1], [3, 7], [8, 9]]), torch.tensor([[0.3, 0.5], [0.6, 0.4], [0.9, 0.1]])
    ids, weights = _reroute(own, base, local)
    assert ids.tolist() == [[2, 1], [3, 4], [8, 9]]
    assert torch.allclose(weights, torch.tensor([[0.4, 0.6], [0.7, 0.3], [0.9, 0.1]]))
    ids, weights = _reroute(own, base, None)
    assert torch.equal(ids, base[0])
    assert torch.equal(weights, base[1])
