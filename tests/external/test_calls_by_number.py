"""A manifest names a dump's calls by numbers that the dump has."""

import pytest

from minite_diag.errors import UsageError
from minite_diag.external.manifest import Manifest, calls_by_number
from minite_diag.external.sequences import Call


def manifest(*names: str) -> Manifest:
    return Manifest("manifest.json", "te-dumps", calls=tuple(Call(name, ()) for name in names))


def test_calls_are_found_by_their_numbers_in_any_order() -> None:
    assert calls_by_number(manifest("7", "000002"), {2, 5, 7}, "step") == {7: 0, 2: 1}


@pytest.mark.parametrize("name", ("6", "-2", "first", ""))
def test_a_call_that_the_dump_has_not_is_named_with_those_it_has(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        calls_by_number(manifest("2", name), {7, 2}, "iteration")
    assert caught.value.message == f"manifest.json: calls[1]: no iteration {name!r} in the dump"
    assert caught.value.hint == "name calls by the iterations: 2, 7"
