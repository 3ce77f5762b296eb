"""What a cause is worth, when it is noise, and which fixes an engine of a version has."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from minite_diag.alignments.base import known_alignments
from minite_diag.attribute.causes import CAUSES
from minite_diag.attribute.effects import add_effects
from minite_diag.attribute.fixes import FIXES, KINDS, fixes_for


def finding(code: str, where: str = "x") -> dict[str, Any]:
    return {"code": code, "where": where, "evidence": {}}


def leg(name: str, mean_abs: float, engine: str = "a", code: str | None = None) -> dict[str, Any]:
    return {
        "engine": engine,
        "leg": name,
        "status": "measured",
        "note": "note",
        "mean_abs": mean_abs,
        "max_abs": 2 * mean_abs,
        "tokens": 10,
        "equal": 4,
        "code": code,
    }


def share(name: str, closed: float) -> dict[str, Any]:
    return {"name": name, "closed": closed}


def live(*legs: dict[str, Any], gap: float = 0.5) -> dict[str, Any]:
    ends = {"baseline": "a", "target": "b"}
    return {
        "legs": list(legs),
        "causal": [
            {
                **ends,
                "gap": {"mean_abs": gap},
                "ops": [share("norm", 0.2), share("linear", 0.6), share("rope", 0.001)],
                "operands": [share("weights", 0.4)],
            }
        ],
        "routing": [{**ends, "closed": 0.1, "nats": 0.05}],
    }


def pair(*findings: dict[str, Any]) -> dict[str, Any]:
    return {"baseline": "a", "target": "b", "findings": list(findings)}


def test_a_cause_gets_the_share_of_the_op_in_which_it_acts() -> None:
    found = pair(
        finding("MD201"),
        finding("MD102", "weight quantizer"),
        finding("MD601"),
        finding("MD101", "activation quantizer"),
    )
    add_effects(found, live(leg("repeat", 0.0)))
    norm, weights, routing, activation = (f["effect"] for f in found["findings"])
    assert norm == [{"op": "norm", "closed": 0.2, "nats": 0.1}]
    assert [(e["op"], e["closed"]) for e in weights] == [("weights", 0.4)]
    assert [(e["op"], e["closed"]) for e in activation] == [("linear", 0.6)]
    assert routing == [{"op": "routing", "closed": 0.1, "nats": 0.05}]
    assert found["noise"] == 0.0
    assert not any(f["below_noise"] for f in found["findings"])


def test_what_is_below_the_engines_own_noise_is_noise() -> None:
    found = pair(finding("MD201"), finding("MD202"), finding("MD210"), finding("MD401"))
    add_effects(found, live(leg("repeat", 0.01), leg("observer", 0.002, "b")))
    assert [f["below_noise"] for f in found["findings"]] == [False, True, False, False]
    whole = pair(finding("MD201"), finding("MD210"))
    add_effects(whole, live(leg("repeat", 0.6)))
    assert [f["below_noise"] for f in whole["findings"]] == [True, True]


def test_legs_of_other_conditions_are_no_noise_and_every_broken_leg_is_a_finding() -> None:
    found = pair()
    other = leg("repeat", 9.0, "c", "MD502")
    add_effects(found, live(leg("repeat", 0.0), leg("batch-4", 0.3, "b", "MD503"), other))
    assert found["noise"] == 0.0
    (batch,) = found["findings"]
    assert (batch["code"], batch["where"]) == ("MD503", "b")
    assert "6 of 10" in batch["text"]
    assert batch["effect"][0]["nats"] == 0.3
    add_effects(found, live(leg("batch-4", 0.3, "b", "MD503")))
    assert len(found["findings"]) == 1, "not added twice"
    assert found["noise"] is None


@pytest.mark.parametrize("code", FIXES)
def test_fixes_are_well_formed(code: str) -> None:
    assert code in CAUSES
    for fix in FIXES[code]:
        assert fix.kind in KINDS
        SpecifierSet(fix.versions)
        assert not fix.alignment or fix.alignment in known_alignments()
        if fix.kind == "environment":
            assert re.fullmatch(r"(?:[A-Z0-9_]+=\S+ ?)+", fix.line), fix.line


def test_every_cause_of_arithmetic_has_a_fix_or_a_page_that_says_what_to_correct() -> None:
    none = {code for code in CAUSES if not FIXES.get(code)}
    assert {c for c in none if c.startswith(("MD1", "MD2"))} == {"MD116", "MD199", "MD209"}


def test_only_the_run_s_engines_and_versions_count() -> None:
    te = {"engine": "te", "version": "models TE 2.20.2"}
    vllm = {"engine": "vllm", "version": "0.32.0"}
    lines = [fix["line"] for fix in fixes_for("MD106", [te, vllm])]
    assert "NVTE_USE_FAST_MATH=0" in lines
    assert len([f for f in fixes_for("MD106", [te, vllm]) if f["engine"] == "sglang"]) == 0
    old = {"engine": "te", "version": "2.1"}
    assert "NVTE_USE_FAST_MATH=0" not in [f["line"] for f in fixes_for("MD106", [old])]
    assert fixes_for("MD102", []) == [f for f in fixes_for("MD102", [vllm]) if f["engine"] == "any"]


def test_names_exist_in_the_vllm_that_is_installed() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    source = "".join(
        (root / file).read_text()
        for file in ("envs.py", "engine/arg_utils.py", "entrypoints/llm.py")
    )
    attention = "".join(file.read_text() for file in (root / "v1/attention").rglob("*.py"))
    for fixes in FIXES.values():
        for fix in fixes:
            if fix.engine != "vllm":
                continue
            for name in re.findall(r"\b(VLLM_[A-Z_]+|[a-z_]+(?==)|reset_\w+)", fix.line):
                assert re.search(rf"\b{name}\b", source + attention), name
