"""Live attribution of real SGLang: interventions reach every op, and its legs are measured."""

import pytest

from minite_diag.attribute.live import attribute_live
from minite_diag.attribute.local_error import born_here


@pytest.fixture(scope="module")
def found(real):
    """Live attribution of BF16 SGLang against transformers on demo-moe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = real(
            "hf-sglang",
            *("--learner", "hf", "--sampler", "sglang", "--quantize", "none"),
            *("--model", "demo-moe", "--num-probes", "1"),
            *("--sample-tokens", "6", "--capture-sample"),
        )
        result = attribute_live(folder, lambda spec, event: None)
    assert result["errors"] == []
    return result


def test_every_op_corrected_leaves_the_arithmetic_of_logprobs_alone(found):
    """SGLang subtracts a maximum and a logsumexp, torch's log_softmax does not: FP32 roundings."""
    (causal,) = found["causal"]
    assert causal["gap"]["mean_abs"] > 1e-4
    assert causal["gap_all"]["tokens"] == causal["gap"]["tokens"]
    assert causal["gap_all"]["max_abs"] < 1e-6
    assert causal["smallest"]["ops"]


def test_three_kinds_of_ops_differ_on_equal_inputs(found):
    assert {row["op"] for row in born_here(found["local"])} == {"norm", "experts", "router"}


def test_the_legs_of_sglang(found):
    legs = {row["leg"]: row for row in found["legs"] if row["engine"] == "sampler-sglang"}
    for leg in ("observer", "repeat", "chunked-prefill", "batch-2", "decode-again"):
        assert legs[leg]["status"] == "measured", leg
    for leg in ("observer", "repeat"):
        assert (legs[leg]["code"], legs[leg]["max_abs"]) == (None, 0.0)
        assert legs[leg]["equal"] == legs[leg]["tokens"] > 0
    # Generated tokens get log(softmax), prompts a logit minus maximum and logsumexp.
    assert legs["prefill-decode"]["tokens"] == 5
    assert 0.0 < legs["prefill-decode"]["max_abs"] < 1e-3
