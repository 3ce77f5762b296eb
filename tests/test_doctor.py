"""`minite-diag doctor` imports each engine in its own interpreter and says what would run."""

import json

import pytest
from command import minite


@pytest.fixture(scope="module")
def found():
    done = minite("doctor", "te", "hf", "vllm", "toy", "--json", VLLM_CPU_ATTN_SPLIT_KV="0")
    return done.returncode, json.loads(done.stdout), done.stderr


def test_what_is_installed_is_fine(found):
    code, answer, _ = found
    assert (code, answer["verdict"]) == (0, "pass")
    assert {e["engine"]: e["status"] for e in answer["engines"]} == dict.fromkeys(
        ("te", "hf", "vllm", "toy"), "ok"
    )


def test_labels_and_kernels_say_what_is_not_native(found):
    engines = {e["engine"]: e for e in found[1]["engines"]}
    assert engines["te"]["label"] == "te-ref"
    assert engines["te"]["kernels"][0]["status"] == "modelled"
    assert engines["vllm"]["label"] == "vllm-emu"
    kernels = {k["op"]: k["status"] for k in engines["vllm"]["kernels"]}
    assert kernels == {"nvfp4_linear": "emulated", "experts": "replaced"}
    assert engines["vllm"]["version"].startswith("0.32.")
    assert "torch" in engines["hf"]["versions"]


def test_variables_that_change_bits_are_named_with_their_side(found):
    rows = {row["name"]: row for row in found[1]["environment"]}
    row = rows["VLLM_CPU_ATTN_SPLIT_KV"]
    assert (row["value"], row["side"]) == ("0", "sampler")
    assert "vllm" in row["engines"]
    assert "VLLM_CPU_ATTN_SPLIT_KV=0" in found[2]


def test_a_missing_interpreter_is_a_problem_with_its_fix(tmp_path):
    done = minite("doctor", "vllm", "--python", f"vllm={tmp_path / 'none'}", "--json")
    (engine,) = json.loads(done.stdout)["engines"]
    assert done.returncode == 3
    assert engine["status"] == "missing"
    assert engine["problems"][0]["fix"] == "pip install 'minite-diag[vllm]'"


def test_an_environment_that_was_not_built_names_the_command(tmp_path):
    done = minite("doctor", "sglang", "--json", MINITE_DIAG_ENVIRONMENTS=str(tmp_path))
    (engine,) = json.loads(done.stdout)["engines"]
    assert done.returncode == 3
    assert "minite-diag env create sglang" in engine["problems"][0]["fix"]


def test_an_interpreter_without_the_package_is_said(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named minite_diag' >&2\nexit 1\n")
    python.chmod(0o755)
    done = minite("doctor", "hf", "--python", f"hf={python}", "--json")
    (engine,) = json.loads(done.stdout)["engines"]
    assert "No module named minite_diag" in engine["problems"][0]["text"]


def test_an_unknown_engine_is_a_usage_error():
    done = minite("doctor", "vlm")
    assert done.returncode == 2
    assert "did you mean 'vllm'" in done.stderr
