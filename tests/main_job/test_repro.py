"""Repro bundles: what the script shows is what the run's own comparison counted."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import ROOT, minite

from minite_diag.repro import write_bundle

SITES = [
    "model.layers.0.self_attn.q_proj:weight_codes",
    "model.layers.0.self_attn.q_proj:weight_block_scale",
    "model.layers.0.self_attn.q_proj:act_codes",
    "model.layers.0.self_attn.q_proj:act_block_scale",
    "model.layers.1.self_attn.o_proj:output",
    "model.layers.1.post_attention_layernorm:output",
    "model.layers.1.mlp.gate:router_logits",
    "model.layers.1.mlp.experts:topk_ids",
    "lm_head:logits",
]


def reproduce(folder: Path) -> subprocess.CompletedProcess[str]:
    """The script as someone else runs it: from its folder, without minite_diag."""
    blocked = (
        "import sys, runpy; sys.modules['minite_diag'] = None; sys.argv = ['reproduce.py'];"
        "runpy.run_path('reproduce.py', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", blocked],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def smallest(rows: Any, site: str) -> tuple[int, int]:
    """(mismatches, elements) of the smallest differing row that the comparison holds."""
    fqn, _, kind = site.rpartition(":")
    own = rows[(rows["fqn"] == fqn) & (rows["kind"] == kind) & (rows["bitwise_fraction"] < 1.0)]
    own = own.assign(sampled=own["mode"] == "sample")
    row = own.sort_values(["sampled", "elements", "probe"], kind="stable").iloc[0]
    return round(row["elements"] * (1 - row["bitwise_fraction"])), int(row["elements"])


@pytest.mark.parametrize("site", SITES)
def test_the_script_sees_the_runs_own_mismatch(te_vs_vllm: Any, tmp_path: Path, site: str) -> None:
    out = tmp_path / "bundle"
    write_bundle(te_vs_vllm.run, site, out, redact=False)
    mismatches, elements = smallest(te_vs_vllm.rows, site)
    shown = reproduce(out)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert f"{site}: {mismatches} of {elements} elements differ" in shown.stdout
    if not site.endswith("topk_ids"):
        bundle = json.loads((out / "bundle.json").read_text())
        assert bundle["learner"]["unreproduced"] == 0
        assert bundle["learner"]["step"] is not None


def test_quantizers_are_told_apart_on_equal_operands(te_vs_vllm: Any, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    site = "model.layers.0.self_attn.q_proj:weight_codes"
    assert minite("repro", str(te_vs_vllm.run), "--site", site, "-o", str(out)).returncode == 0
    said = reproduce(out).stdout
    assert "quantize('te', role='weight') and quantize('modelopt', role='weight') differ in" in said


def test_the_default_site_is_where_the_bits_part(te_vs_vllm: Any, tmp_path: Path) -> None:
    done = minite("repro", str(te_vs_vllm.run), "-o", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "b")
    first = te_vs_vllm.summary["pairs"][0]["first_divergence"]
    bundle = json.loads((tmp_path / "b" / "bundle.json").read_text())
    assert bundle["site"] == f"{first['site']}:{first['kind']}"
    again = minite("repro", str(te_vs_vllm.run), "-o", str(tmp_path / "b"))
    assert again.returncode == 2
    assert "holds a bundle already" in again.stderr


def test_a_script_that_sees_something_else_fails(te_vs_vllm: Any, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    assert minite("repro", str(te_vs_vllm.run), "--site", SITES[0], "-o", str(out)).returncode == 0
    with np.load(out / "operands.npz") as stored:
        arrays = {name: stored[name].copy() for name in stored.files}
    bundle = json.loads((out / "bundle.json").read_text())
    arrays[bundle["tensors"]["learner.value"]["array"]][0] ^= 0x11
    np.savez(out / "operands.npz", **arrays)
    assert reproduce(out).returncode == 1


def test_redacted_bundles_name_no_prompt_and_no_path(te_vs_vllm: Any, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    minite("repro", str(te_vs_vllm.run), "--site", SITES[2], "-o", str(out), "--redact")
    plan = json.loads((te_vs_vllm.run / "plan.json").read_text())
    text = (out / "bundle.json").read_text() + (out / "README.md").read_text()
    for word in (*(probe["id"] for probe in plan["probes"]), plan["model"]["name"], str(tmp_path)):
        assert word not in text
    assert reproduce(out).returncode == 0


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("model.layers.0.self_attn.q_poj:output", "did you mean"),
        ("model.layers.0.input_layernorm:output", "bitwise equal in every sequence"),
        ("model.layers.1.mlp.experts:topk_weights", "topk_ids"),
    ],
)
def test_sites_that_show_nothing(te_vs_vllm: Any, tmp_path: Path, site: str, said: str) -> None:
    done = minite("repro", str(te_vs_vllm.run), "--site", site, "-o", str(tmp_path / "b"))
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "b").exists()


def test_the_script_imports_torch_numpy_and_the_kernels_only() -> None:
    file = ROOT / "minite_diag" / "repro" / "reproduce.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"torch", "numpy", "minite_kernels"}
