"""Asserts on ``checks.py`` where there is a CUDA device; elsewhere there is nothing to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ("quantizer", "fused", "batches", "experts", "invariant"))
def test_no_byte_differs(name: str) -> None:
    import checks

    assert checks.CHECKS[name]()["wrong"] == 0


def test_the_shipped_reciprocal_table_is_this_gpu() -> None:
    import checks

    result = checks.check_reciprocal()
    assert result == {"mantissas_wrong": 0, "special_values_wrong": 0}


def test_exact_sums_give_the_same_bits_for_every_tile() -> None:
    import checks

    for name, case in checks.check_tiles().items():
        if name.startswith("normal"):
            assert not any(case["not_exact"].values()), name


def test_published_peers_multiply_what_they_are_timed_for() -> None:
    import checks

    result = checks.check_peers()
    assert "not installed" in result or max(result.values()) < 0.02
