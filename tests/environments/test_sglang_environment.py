"""The environment of engine sglang: where it is looked for, what is in it, how building it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from minite_diag import environments
from minite_diag.environments import (
    create,
    engine_python,
    environment_folder,
    interpreter,
    sglang,
)
from minite_diag.errors import EngineUnavailable, UsageError


def quiet(_: str) -> None:
    pass


def test_the_folder_is_named_by_the_variable_then_by_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINITE_DIAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINITE_DIAG_ENVIRONMENTS", str(tmp_path / "own"))
    assert environment_folder("sglang") == tmp_path / "own" / "sglang"
    monkeypatch.delenv("MINITE_DIAG_ENVIRONMENTS")
    assert environment_folder("sglang") == tmp_path / "cache" / "environments" / "sglang"
    monkeypatch.delenv("MINITE_DIAG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment_folder("sglang") == tmp_path / "minite-diag" / "environments" / "sglang"


def test_an_engine_without_its_environment_is_unavailable_and_says_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINITE_DIAG_ENVIRONMENTS", str(tmp_path))
    assert engine_python("vllm") == sys.executable
    with pytest.raises(EngineUnavailable, match="no environment in") as raised:
        engine_python("sglang")
    assert raised.value.hint.startswith("minite-diag env create sglang")
    python = interpreter(tmp_path / "sglang")
    python.parent.mkdir(parents=True)
    python.touch()
    assert engine_python("sglang") == str(python)


def test_an_engine_that_is_installed_here_runs_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINITE_DIAG_ENVIRONMENTS", str(tmp_path))
    monkeypatch.setattr(environments, "_installed_here", lambda engine: engine == "sglang")
    assert engine_python("sglang") == sys.executable


def test_engines_that_need_none_are_refused() -> None:
    with pytest.raises(UsageError, match="needs no environment"):
        create("vllm", None, quiet)


def test_every_requirement_is_pinned() -> None:
    lines = sglang.REQUIREMENTS.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 80
    assert all(line.count("==") == 1 for line in pins)
    assert "sglang==0.5.23" in pins
    assert "torch==2.13.0" in pins


def test_a_build_that_fails_says_what_pip_said_and_is_not_taken_for_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(EngineUnavailable, match="No matching distribution") as raised:
        create("sglang", tmp_path / "sglang", quiet)
    assert "package index" in raised.value.hint
    assert not sglang.is_ready(tmp_path / "sglang")


def test_other_pins_are_another_environment(tmp_path: Path) -> None:
    (tmp_path / sglang.READY).write_text("sglang==0.5.22\n")
    assert not sglang.is_ready(tmp_path)
    (tmp_path / sglang.READY).write_text(sglang.REQUIREMENTS.read_text())
    assert sglang.is_ready(tmp_path)


def run_there(code: str) -> str:
    done = subprocess.run(
        [engine_python("sglang"), "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_what_stands_in_for_missing_packages_raises_when_it_is_used() -> None:
    code = """
import sgl_kernel, torchvision
from sgl_kernel.mamba import causal_conv1d_update_cpu
from torchvision.transforms import InterpolationMode, Resize
def refuses(call):
    try:
        call()
    except NotImplementedError as error:
        return str(error)
print(InterpolationMode.BICUBIC.value, hasattr(sgl_kernel, "rmsnorm"))
print(refuses(lambda: sgl_kernel.rmsnorm_cpu(1)))
print(refuses(causal_conv1d_update_cpu))
print(refuses(Resize))
"""
    first, *refused = run_there(code).splitlines()
    assert first == "bicubic False"
    assert refused == [
        "sgl_kernel.rmsnorm_cpu has no CPU build in this environment",
        "sgl_kernel.mamba.causal_conv1d_update_cpu has no CPU build in this environment",
        "torchvision.Resize is not in this environment",
    ]


def test_this_package_is_the_one_that_runs_there() -> None:
    import minite_diag

    code = "import minite_diag, pathlib; print(pathlib.Path(minite_diag.__file__).resolve())"
    assert run_there(code) == str(Path(minite_diag.__file__).resolve())
