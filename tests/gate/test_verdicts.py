"""Gate decisions on runs whose truth is known: pass, fail, too few tokens, noise, outliers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_runs import cause, judge, leg, rounding, site, write_run

from minite_diag.errors import UsageError
from minite_diag.gate import PROFILES
from minite_diag.gate.statistics import tail_index

# sigma 0.02 means mean|r| 0.016, KL 2e-4; 0.06 means 0.048, 1.8e-3; 0.2 means 0.16, 2e-2.


def check(gate: dict, metric: str, mode: str = "sample") -> dict:
    return next(c for c in gate["checks"] if c["metric"] == metric and c["mode"] == mode)


def test_a_small_gap_passes_on_its_upper_bound(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.02, 24, 60)))
    assert gate["verdict"] == "pass"
    found = check(gate, "mean_abs")
    assert found["low"] < 0.016 < found["high"] < found["limit"] == 0.048
    assert check(gate, "mult_prob_error")["estimate"] == pytest.approx(1.016, abs=0.004)


def test_a_large_gap_fails_on_its_lower_bound(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.2, 24, 60)))
    assert gate["verdict"] == "fail"
    assert all(c["verdict"] == "fail" for c in gate["checks"])
    assert check(gate, "mean_abs")["low"] > 0.08
    assert "mean_abs" in gate["reasons"][0]


def test_the_warning_band_of_nvfp4_is_inconclusive(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.08, 200, 100, spread=0.1)))
    found = check(gate, "mean_abs")
    assert found["low"] > 0.048
    assert found["high"] < 0.08
    assert gate["verdict"] == "inconclusive"
    assert found["reason"] == "in the warning band"


def test_the_estimate_alone_decides_nothing(run: Path) -> None:
    """The mean lies below the limit; too few tokens to say so."""
    gate = judge(write_run(run, rounding(0.053, 4, 4, spread=0.8)))
    found = check(gate, "mean_abs")
    assert found["estimate"] < found["limit"] < found["high"]
    assert gate["verdict"] == "inconclusive"
    assert "tokens decide" in found["reason"]


def test_what_would_decide(run: Path) -> None:
    """Noise calls for tokens; a clear estimate of few sequences calls for sequences."""
    noisy = judge(write_run(run / "a", rounding(0.058, 12, 8)), "nvfp4", "mean_abs=0.048")
    reason = check(noisy, "mean_abs")["reason"]
    needed = float(re.search(r"about (\S+) tokens decide", reason)[1])
    assert needed > 96
    few = judge(write_run(run / "b", rounding(0.03, 4, 4, spread=0.6)), "nvfp4", "mean_abs=0.06")
    assert check(few, "mean_abs")["reason"].endswith("4 sequences are few")


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_few_sequences_have_no_interval(run: Path, sequences: int) -> None:
    gate = judge(write_run(run, rounding(0.001, sequences, 500)))
    assert gate["verdict"] == "inconclusive"
    assert f"{sequences} sequences have no interval" in check(gate, "mean_abs")["reason"]


def test_the_power_note_says_how_many_tokens_would_do(run: Path) -> None:
    """Half the width needs four times the tokens."""
    few = judge(write_run(run / "few", rounding(0.05, 50, 20, spread=0.0)))
    power = few["statistics"][0]["power"]
    assert power["tokens"] == pytest.approx(1000 * (power["half_width"] / 1e-4) ** 2, rel=0.01)
    many = judge(write_run(run / "many", rounding(0.05, 200, 20, spread=0.0)))
    half = many["statistics"][0]["power"]["half_width"]
    assert half == pytest.approx(power["half_width"] / 2, rel=0.2)
    assert any("tokens to see 0.0001" in note for note in few["notes"])


def test_outliers_are_told_from_rounding(run: Path) -> None:
    values = rounding(0.02, 24, 100)
    values[3][7] = 5.0
    gate = judge(write_run(run / "outlier", values))
    found = gate["statistics"][0]
    assert found["tail_index"] > 100
    assert found["tail"].startswith("outliers, not rounding")
    assert found["outliers"][0] | {"difference": 5.0} == {
        "probe": "probe-3",
        "position": 8,
        "token_id": 7,
        "difference": 5.0,
    }
    assert found["median_abs"] < 0.02
    assert found["trimmed_abs"] < 0.02
    clean = judge(write_run(run / "clean", rounding(0.02, 24, 100)))
    assert clean["statistics"][0]["tail"].startswith("rounding-like")


def test_one_outlier_cannot_be_called_a_pass(run: Path) -> None:
    """The mean is far below the limit; the interval knows that one sequence made it."""
    values = rounding(0.02, 24, 100)
    values[3][7] = 5.0
    gate = judge(write_run(run, values))
    assert check(gate, "k3_kl")["verdict"] != "pass"
    assert gate["verdict"] == "inconclusive"


@pytest.mark.parametrize(("scale", "low", "high"), [(0.01, 0.8, 1.25), (0.1, 0.8, 1.25)])
def test_the_tail_index_of_a_normal_is_one(scale: float, low: float, high: float) -> None:
    r = np.random.default_rng(1).normal(-scale * scale / 2, scale, 200_000)
    assert low < tail_index(r) < high


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda g: g.laplace(0, 0.02, 500_000), 1.4),
        (lambda g: 0.02 * g.standard_t(3, 500_000), 2.0),
    ],
)
def test_the_tail_index_of_heavier_tails(draw: Any, expected: float) -> None:
    """The figures that docs/metrics.md gives."""
    assert tail_index(draw(np.random.default_rng(0))) == pytest.approx(expected, rel=0.25)


def test_the_tail_index_of_equal_tokens() -> None:
    assert tail_index(np.zeros(100)) is None
    assert tail_index(np.array([0.0] * 99 + [1.0])) is None


def test_nothing_fails_below_the_noise_floor(run: Path) -> None:
    """The engine repeats itself within 0.2: a gap of 0.16 is not the other engine's fault."""
    values = rounding(0.2, 24, 60)
    quiet = [leg(0.0, "repeat"), leg(0.0)]
    assert judge(write_run(run / "quiet", values, legs=quiet))["verdict"] == "fail"
    noisy = judge(write_run(run / "noisy", values, legs=[leg(0.2, "repeat"), leg(0.0)]))
    assert noisy["verdict"] == "inconclusive"
    reason = check(noisy, "mean_abs")["reason"]
    assert "below the noise floor 0.2" in reason
    assert "repeat" in reason


def test_an_engine_that_depends_on_its_batch_is_no_excuse_for_a_gap(run: Path) -> None:
    """Other batches are another condition: the gap under this one is measured, and fails."""
    gate = judge(write_run(run, rounding(0.2, 24, 60), legs=[leg(0.0, "repeat"), leg(0.3)]))
    assert gate["verdict"] == "fail"


def test_no_limit_is_passed_below_what_other_batches_change(run: Path) -> None:
    written = write_run(run, rounding(0.02, 24, 60), legs=[leg(0.0, "repeat"), leg(0.3)])
    gate = judge(written)
    assert gate["verdict"] == "inconclusive"
    assert "holds for this batch only" in check(gate, "mean_abs")["reason"]
    assert judge(write_run(run, rounding(0.02, 24, 60), legs=[leg(0.001)]))["verdict"] == "pass"


def test_a_gap_that_may_be_noise_is_not_called_one(run: Path) -> None:
    """The estimate is above the floor, its lower bound is not."""
    values = rounding(0.2, 12, 20)
    gate = judge(write_run(run, values, legs=[leg(0.15, "observer")]))
    found = check(gate, "mean_abs")
    assert found["low"] < 0.15 < found["estimate"]
    assert found["verdict"] == "inconclusive"
    assert "noise floor 0.15" in found["reason"]


def test_a_gap_above_the_noise_fails(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.2, 24, 60), legs=[leg(0.02)]))
    assert check(gate, "mean_abs")["verdict"] == "fail"


def test_the_noise_floor_of_bitwise(run: Path) -> None:
    values = [np.full(10, 1e-4)] * 4
    assert judge(write_run(run / "a", values), "bitwise")["verdict"] == "fail"
    noisy = judge(write_run(run / "b", values, legs=[leg(1e-3, "repeat")]), "bitwise")
    assert noisy["verdict"] == "inconclusive"


def test_bitwise_at_one_batch_size_is_not_bitwise(run: Path) -> None:
    equal = [np.zeros(10)] * 4
    assert judge(write_run(run / "a", equal, legs=[leg(0.0)]), "bitwise")["verdict"] == "pass"
    gate = judge(write_run(run / "b", equal, legs=[leg(1e-3)]), "bitwise")
    assert gate["verdict"] == "inconclusive"


def test_bitwise_needs_every_token_and_no_interval(run: Path) -> None:
    assert judge(write_run(run / "a", [np.zeros(10)]), "bitwise")["verdict"] == "pass"
    one = np.zeros(10)
    one[9] = 1e-7
    assert judge(write_run(run / "b", [np.zeros(10), one]), "bitwise")["verdict"] == "fail"


def test_bitwise_looks_at_scored_tokens_too(run: Path) -> None:
    write_run(run, [np.full(10, 1e-3)], mode="score")
    assert judge(run, "bitwise")["verdict"] == "fail"


def test_kl_is_judged_on_sampled_tokens_only(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.02, 24, 60), mode="score"))
    assert {c["metric"] for c in gate["checks"]} == {"mean_abs", "mult_prob_error"}
    assert gate["verdict"] == "pass"
    assert any(note.startswith("k3_kl is not judged") for note in gate["notes"])


def test_a_run_without_tokens_never_passes(run: Path) -> None:
    rows = [site("a", "output", "p", rel_l2=0.0, bitwise_fraction=1.0)]
    gate = judge(write_run(run, [], sites=rows))
    assert gate["verdict"] == "inconclusive"
    assert "no token" in gate["reasons"][0]


def test_a_failed_engine_is_an_error(run: Path) -> None:
    gate = judge(write_run(run, rounding(0.001, 24, 60), status="error"))
    assert gate["verdict"] == "error"
    assert "it broke" in gate["reasons"][0]


def test_sides_that_are_not_comparable_get_no_verdict(run: Path) -> None:
    written = write_run(
        run, rounding(0.001, 24, 60), comparable=False, causes=[cause("MD401", "logprobs")]
    )
    gate = judge(written)
    assert gate["verdict"] == "inconclusive"
    assert "not comparable" in gate["reasons"][0]


def test_a_limit_replaces_the_profiles(run: Path) -> None:
    write_run(run, rounding(0.02, 24, 60))
    assert judge(run, "nvfp4", "mean_abs=0.005")["verdict"] == "fail"
    assert judge(run, "nvfp4", "mean_abs=0.005..0.03")["verdict"] == "inconclusive"
    assert judge(run, "bf16-dense")["verdict"] != "pass"
    assert judge(run, "bf16-dense", "mean_abs=0.03", "k3_kl=1e-3")["verdict"] == "pass"


@pytest.mark.parametrize("metric", ["median_abs", "trimmed_abs", "p99_abs", "max_abs"])
def test_robust_metrics_can_be_judged(run: Path, metric: str) -> None:
    write_run(run, rounding(0.02, 24, 60))
    loose = check(judge(run, "nvfp4", f"{metric}=0.2"), metric)
    assert loose["verdict"] == "pass"
    assert loose["low"] <= loose["estimate"] <= loose["high"]
    assert check(judge(run, "nvfp4", f"{metric}=0.001"), metric)["verdict"] == "fail"


SITES = [
    site(f"layers.{layer}.mlp", "output", f"p{p}", rel_l2=0.01 * (layer + 1), bitwise_fraction=0.5)
    for layer in range(3)
    for p in range(6)
]


def test_a_limit_on_sites_names_the_worst(run: Path) -> None:
    write_run(run, rounding(0.02, 24, 60), sites=SITES)
    gate = judge(run, "nvfp4", "rel_l2=0.025@layers.*.mlp:output")
    assert gate["verdict"] == "fail"
    found = next(c for c in gate["checks"] if c["site"])
    assert found["worst"] == "layers.2.mlp:output"
    assert judge(run, "nvfp4", "rel_l2=0.025@layers.[01].mlp:output")["verdict"] == "pass"
    assert judge(run, "nvfp4", "rel_l2=0.04@*")["verdict"] == "pass"


def test_a_limit_from_below(run: Path) -> None:
    write_run(run, rounding(0.02, 24, 60), sites=SITES)
    assert judge(run, "nvfp4", "bitwise_fraction=0.4@*")["verdict"] == "pass"
    assert judge(run, "nvfp4", "bitwise_fraction=0.6@*")["verdict"] == "fail"
    assert judge(run, "nvfp4", "bitwise_fraction=1@*")["verdict"] == "fail"


def test_weights_need_no_sequences(run: Path) -> None:
    rows = [site("a", "weight_codes", "", mismatch_rate=0.25)]
    write_run(run, rounding(0.02, 24, 60), sites=rows)
    assert judge(run, "nvfp4", "mismatch_rate=0.3@*")["verdict"] == "pass"
    assert judge(run, "nvfp4", "mismatch_rate=0.2@*")["verdict"] == "fail"


def test_sites_that_were_skipped_are_no_pass(run: Path) -> None:
    write_run(run, rounding(0.02, 24, 60), sites=[site("a", "output", f"p{i}") for i in range(5)])
    gate = judge(run, "nvfp4", "rel_l2=1@a:output")
    assert gate["verdict"] == "inconclusive"
    assert "none of 5 matching tensors" in gate["reasons"][0]


def test_a_glob_that_matches_nothing_is_an_error(run: Path) -> None:
    write_run(run, rounding(0.02, 24, 60), sites=SITES)
    with pytest.raises(UsageError, match="no site") as error:
        judge(run, "nvfp4", "rel_l2=1@layers.*.mpl:output")
    assert "layers.*.mlp:output" in error.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("mean_ab=1", "mean_abs"),
        ("mean_abs", "METRIC=VALUE"),
        ("mean_abs=x", "METRIC=VALUE"),
        ("mean_abs=-1", "from 0 up"),
        ("mean_abs=nan", "from 0 up"),
        ("mean_abs=2..1", "METRIC=VALUE"),
        ("rel_l2=1", "rel_l2=1@*"),
        ("mean_abs=1@*", "of sites are"),
    ],
)
def test_limits_that_mean_nothing(text: str, hint: str) -> None:
    from minite_diag.gate import parse_limit

    with pytest.raises(UsageError) as error:
        parse_limit(text)
    assert hint in error.value.hint


def test_profiles_are_what_the_docs_say() -> None:
    table = {
        name: {limit.metric: (limit.value, limit.warn) for limit in profile.limits}
        for name, profile in PROFILES.items()
    }
    assert table == {
        "bitwise": {"mean_abs": (0.0, None)},
        "bf16-dense": {"mean_abs": (0.012, None), "k3_kl": (2e-4, None)},
        "bf16-moe": {"mean_abs": (0.025, None), "k3_kl": (1e-3, None)},
        "fp8": {"mean_abs": (0.025, None), "k3_kl": (1e-3, None)},
        "nvfp4": {
            "mean_abs": (0.048, 0.08),
            "k3_kl": (1.8e-3, 5e-3),
            "mult_prob_error": (1.05, 1.085),
        },
    }


def test_the_gate_is_a_json_object_and_repeats_itself(run: Path) -> None:
    from minite_diag.outputs.json_object import to_json

    write_run(run, rounding(0.05, 4, 3, spread=2.0))
    first, second = to_json(judge(run)), to_json(judge(run))
    assert first == second
    assert json.loads(first)["checks"]


def test_infinite_bounds_do_not_pass(run: Path) -> None:
    values = rounding(0.001, 4, 3)
    values[0][0] = 40.0
    gate = judge(write_run(run, values))
    found = check(gate, "k3_kl")
    assert found["high"] is None or math.isinf(found["high"]) or found["high"] > 1e6
    assert gate["verdict"] != "pass"
