"""Every cause has a page, every page a cause, and `explain` finds both."""

from pathlib import Path

import pytest

from minite_diag.attribute import causes
from minite_diag.attribute.finding import Finding
from minite_diag.errors import UsageError
from minite_kernels.nvfp4.recipe import GemmRecipe, OperandRecipe

PAGES = Path(causes.__file__).with_name("pages")


def test_pages_and_codes_match() -> None:
    assert {file.stem for file in PAGES.glob("*.md")} == set(causes.CAUSES)


@pytest.mark.parametrize("code", causes.CAUSES)
def test_a_page_says_what_how_and_the_fix(code: str) -> None:
    text = causes.page(code)
    assert text.startswith(f"# {code}: {causes.CAUSES[code].title}\n")
    assert "## Confirm\n" in text
    assert "## Fix\n\n- " in text


def test_every_field_of_a_recipe_that_changes_bytes_has_a_code() -> None:
    fields = set(OperandRecipe.__dataclass_fields__)
    assert fields - set(causes.RECIPE_FIELDS) == {"rounding", "dequantize"}
    # Where the bias enters can't be read off a linear without one.
    assert set(GemmRecipe.__dataclass_fields__) - set(causes.GEMM_FIELDS) == {"bias"}
    codes = {*causes.RECIPE_FIELDS.values(), *causes.GEMM_FIELDS.values(), *causes.OPS.values()}
    assert codes <= set(causes.CAUSES)


def test_unknown_codes_are_usage_errors() -> None:
    assert causes.get_cause("md101").code == "MD101"
    with pytest.raises(UsageError, match="did you mean"):
        causes.get_cause("MD1O1")
    with pytest.raises(AssertionError):
        Finding("MD000", "", "")
