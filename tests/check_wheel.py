"""`python tests/check_wheel.py DIST`: install the wheel alone into a folder and use it from there."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEEDED = (
    "probes/default.jsonl",
    "probes/smollm2.jsonl",
    "probes/demo-moe.jsonl",
    "minite_diag/report/templates/base.html.j2",
    "minite_diag/report/templates/macros.html.j2",
    "minite_diag/report/templates/report.css.j2",
    "minite_diag/report/templates/report.html.j2",
    "minite_diag/report/templates/report.js.j2",
    "minite_diag/checkpoints/demo_moe/model.safetensors",
    "minite_diag/checkpoints/demo_moe/config.json",
    "minite_diag/environments/sglang.txt",
    "minite_diag/environments/sglang_stubs/sgl_kernel.py",
    "minite_diag/environments/sglang_stubs/torchvision.py",
    "minite_diag/py.typed",
    "minite_kernels/nvfp4/recipe.py",
)
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import minite_diag, minite_kernels, pathlib
assert pathlib.Path(minite_diag.__file__).is_relative_to(sys.argv[1]), minite_diag.__file__
from minite_diag.probe import load_probes, shipped_probe_file
assert load_probes(shipped_probe_file("demo-moe"), 10**6)
from minite_diag.report.html import _template
_template()
from minite_diag.engines.registry import BUILT_IN, load_engine_class
for name in BUILT_IN:
    load_engine_class(name)
from minite_diag.cli import app
app(["compare", "--learner", "toy", "--sampler", "toy:fault=up_proj_gain", "--model", "demo-moe",
     "--num-probes", "2", "--out", sys.argv[2], "--quiet"], standalone_mode=False)
"""


def main() -> None:
    """Fail loudly if the wheel lacks a file or can't run the main job with the toy engine."""
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if name not in names]
    assert not missing, f"{wheel.name} lacks {missing}"
    strange = [n for n in names if not n.startswith(("minite_", "probes/"))]
    assert not strange, f"{wheel.name} holds {strange}"
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        environment = {"PYTHONPATH": folder}
        import os

        subprocess.run(
            [sys.executable, "-c", USE, folder, f"{folder}/run"],
            check=True,
            cwd=folder,
            env=os.environ | environment,
        )
    print(f"{wheel.name}: {len(names)} files, complete, and the main job runs from it")


if __name__ == "__main__":
    main()
