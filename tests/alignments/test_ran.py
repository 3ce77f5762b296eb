"""A patch that nothing called has replaced nothing, and the record says so."""

from types import SimpleNamespace
from typing import Any

import pytest

from minite_diag.alignments import ran
from minite_diag.capture.worker import Capture

PATCHED = {"norm": ["a.norm"], "lm_head": ["a.head"], "theirs": ["b"]}


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ran, "_ran", set())
    evidence = [
        {
            "op": op,
            "status": "replaced",
            "impl": "ours",
            "note": f"1 patched, first {names[0]}",
            "instead_of": f"their.{op}",
        }
        for op, names in PATCHED.items()
    ]
    evidence.append({"op": "linear", "status": "native", "impl": "F.linear", "note": ""})
    spec = SimpleNamespace(engine="vllm", align=("norm", "lm-head"))
    return SimpleNamespace(record={"evidence": evidence, "silent_hooks": []}, spec=spec)


def test_a_replacement_that_never_ran_is_not_evidence(capture: Any) -> None:
    ran.note("norm")
    Capture._correct_evidence(capture, SimpleNamespace(patched=PATCHED))  # type: ignore[arg-type]
    found = {item["op"]: item for item in capture.record["evidence"]}
    assert found["norm"]["status"] == "replaced"
    assert found["lm_head"]["status"] == "native"
    assert found["lm_head"]["impl"] == "their.lm_head"
    assert "a.head" in found["lm_head"]["note"]
    assert "never called" in found["lm_head"]["note"]
    # Third parties' functions don't note: nothing is said of them.
    assert found["theirs"]["status"] == "replaced"
    assert found["linear"]["impl"] == "F.linear"
    assert capture.record["silent_hooks"] == ["alignment of lm_head: never called"]
