"""Whole runs through the command line, each made once for all tests that read it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command import minite


@dataclass(frozen=True)
class Finished:
    """One finished command."""

    code: int
    stdout: str
    stderr: str
    run: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    @property
    def rows(self) -> pd.DataFrame:
        return pd.read_parquet(self.run / "comparison.parquet")


@pytest.fixture(scope="session")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`compare(name, *arguments)` runs `minite-diag compare --json` once per name."""
    done: dict[str, Finished] = {}

    def run(name: str, *arguments: str) -> Finished:
        if name not in done:
            folder = tmp_path_factory.mktemp(name) / "run"
            found = minite("compare", *arguments, "--out", str(folder), "--json")
            done[name] = Finished(found.returncode, found.stdout, found.stderr, folder)
        return done[name]

    return run


@pytest.fixture(scope="session")
def te_vs_vllm(compare: Any) -> Finished:
    return compare(
        "te-vllm",
        "--learner",
        "te",
        "--sampler",
        "vllm",
        "--model",
        "demo-moe",
        "--num-probes",
        "2",
        "--sample-tokens",
        "6",
        "--capture-sample",
    )
