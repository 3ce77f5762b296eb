"""The dependency rule of the architecture, checked in fresh interpreters and in the sources."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_FREE = [
    "minite_diag.cli",
    "minite_diag.config",
    "minite_diag.gate",
    "minite_diag.plan",
    "minite_diag.probe",
    "minite_diag.site",
    "minite_diag.summary",
    "minite_diag.report.html",
    "minite_diag.report.console",
    "minite_diag.trace.schema",
    "minite_diag.trace.manifest",
    "minite_diag.attribute.first_divergence",
    "minite_diag.capture.runner",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_kernels_import_nothing_of_the_tool() -> None:
    for file in (ROOT / "minite_kernels").rglob("*.py"):
        assert not any(name.startswith("minite_diag") for name in imports_of(file)), file


def test_engine_libraries_are_imported_by_their_engine_only() -> None:
    owners = {
        "vllm": ("engines/vllm.py", "engines/vllm_plugin/", "alignments/"),
        "sglang": ("engines/sglang.py", "engines/sglang_plugin/", "alignments/"),
        "transformer_engine": ("engines/te.py", "engines/te_emu.py"),
    }
    for file in (ROOT / "minite_diag").rglob("*.py"):
        inside = file.relative_to(ROOT / "minite_diag").as_posix()
        for name in imports_of(file):
            allowed = owners.get(name.split(".")[0])
            assert allowed is None or inside.startswith(allowed), f"{inside} imports {name}"


def test_every_package_is_in_the_wheel() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for package in ("minite_diag", "minite_kernels", "probes")
        for file in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found


def test_no_rooms_without_a_noun() -> None:
    refused = {"utils", "common", "helpers", "core", "manager"}
    for package in ("minite_diag", "minite_kernels"):
        names = {p.stem for p in (ROOT / package).rglob("*") if p.suffix == ".py" or p.is_dir()}
        assert not names & refused
