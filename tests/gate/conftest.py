from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where a synthetic run goes."""
    return tmp_path / "run"
