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
