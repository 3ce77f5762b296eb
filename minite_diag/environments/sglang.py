"""Builds the environment of engine `sglang`: real SGLang on CPU, pinned, without what it can't use.

SGLang's own dependencies are 11 GB of CUDA packages that don't start without a GPU driver. Here it
is installed without them, with what it imports on CPU; two modules stand in for the packages that
have no CPU build (`sglang_stubs`), and raise when a kernel of theirs is called. Invariant: no file
of SGLang is changed, and a build that stopped halfway is built again.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Final

import minite_diag
from minite_diag.errors import EngineUnavailable

REQUIREMENTS: Final = Path(__file__).with_name("sglang.txt")
STUBS: Final = Path(__file__).with_name("sglang_stubs")
STUB_MODULES: Final = ("sgl_kernel", "torchvision")
OWN_PACKAGES: Final = ("minite_diag", "minite_kernels", "probes")
DISTRIBUTION: Final = "minite-diag"
READY: Final = "minite-diag-ready.txt"

Say = Callable[[str], None]


def create(folder: Path, say: Say) -> Path:
    """Build the environment in `folder` (replaced if it is another version's); its interpreter.

    Needs a package index and nothing else. Raises EngineUnavailable with pip's last lines.
    """
    python = folder / "bin" / "python"
    if not is_ready(folder):
        say(f"building {folder}: {len(_pins())} pinned packages, some minutes")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise EngineUnavailable(
                f"can't create a virtual environment in {folder}: {error}",
                "give another folder: minite-diag env create sglang --out FOLDER",
            ) from error
        _install(python, folder)
    site = _site_packages(python)
    for name in STUB_MODULES:
        shutil.copyfile(STUBS / f"{name}.py", site / f"{name}.py")
    _link_this_package(site)
    (folder / READY).write_text(REQUIREMENTS.read_text(encoding="utf-8"), encoding="utf-8")
    say(f"ready: {python}")
    return python


def is_ready(folder: Path) -> bool:
    """Whether `folder` holds a finished environment with these pins."""
    try:
        built = (folder / READY).read_text(encoding="utf-8")
    except OSError:
        return False
    return built == REQUIREMENTS.read_text(encoding="utf-8")


def _pins() -> list[str]:
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _install(python: Path, folder: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--no-deps", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "-q", "-r", str(REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:]
        raise EngineUnavailable(
            f"pip can't fill {folder}: {(last or done.stderr.splitlines()[-1:] or ['?'])[0]}",
            "see that a package index with a CPU build of torch is reachable "
            "(PIP_EXTRA_INDEX_URL names another one), then run it again",
        )


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _link_this_package(site: Path) -> None:
    """Make this package importable there, with its entry points: SGLang finds the plugin by them."""
    root = Path(minite_diag.__file__).parents[1]
    for name in OWN_PACKAGES:
        link = site / name
        link.unlink(missing_ok=True)
        link.symlink_to(root / name, target_is_directory=True)
    try:
        own = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineUnavailable(
            f"{DISTRIBUTION} runs from {root} without being installed",
            f"{sys.executable} -m pip install --no-deps -e {root}",
        ) from error
    for old in site.glob("minite_diag-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"minite_diag-{own.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(own.read_text(name) or "", encoding="utf-8")
