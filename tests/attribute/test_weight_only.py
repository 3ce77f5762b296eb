"""W4A16 is named where an engine has no activation quantizer, not where its codes can't be seen."""

import pytest

from minite_diag.attribute.contract import Contract, _weight_only


@pytest.mark.parametrize("quantizes", [True, False])
def test_codes_that_are_not_visible_are_not_missing(quantizes: bool) -> None:
    found = object()
    learner = Contract("learner", "modelled", found, found, None)  # type: ignore[arg-type]
    sampler = Contract("sampler", "native", found, None, None, quantizes)  # type: ignore[arg-type]
    codes = [(f.code, f.where) for f in _weight_only(learner, sampler)]
    assert codes == ([] if quantizes else [("MD115", "sampler linears")])
    assert list(_weight_only(learner, learner)) == []


def test_one_weight_only_kernel_beside_a_quantizer_is_named() -> None:
    """Marlin for the dense linears, W4A4 for the experts: codes are found, and not everywhere."""
    found = object()
    learner = Contract("learner", "modelled", found, found, None)  # type: ignore[arg-type]
    mixed = Contract("sampler", "native", found, found, None, True, ("nvfp4_linear",))  # type: ignore[arg-type]
    (finding,) = _weight_only(learner, mixed)
    assert finding.code == "MD115"
    assert "W4A16 in nvfp4_linear" in finding.text
