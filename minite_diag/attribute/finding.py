"""One finding: a cause, where it was found, what it was measured on.

Knows no torch. Invariant: every finding carries the numbers that it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from minite_diag.attribute.causes import CAUSES

STRENGTHS: Final = ("proved", "measured", "hint")
"""proved: bytes reproduced or input equal and output not. measured: a fit or a rate. hint: fits."""


@dataclass(frozen=True)
class Finding:
    """`code` of the cause, `site` or op class where it shows, a sentence, and the evidence.

    `basis` is the least native arithmetic that the evidence rests on: native, emulated, modelled
    or replaced.
    """

    code: str
    where: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)
    strength: str = "proved"
    basis: str = "native"

    def __post_init__(self) -> None:
        assert self.code in CAUSES, self.code
        assert self.strength in STRENGTHS, self.strength

    def as_dict(self) -> dict[str, Any]:
        """For JSON and the `attribution` table."""
        return {
            "code": self.code,
            "title": CAUSES[self.code].title,
            "where": self.where,
            "text": self.text,
            "strength": self.strength,
            "basis": self.basis,
            "evidence": self.evidence,
        }
