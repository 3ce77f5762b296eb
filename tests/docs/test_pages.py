"""The pages say what the code says: schema, metrics, limits, exit codes, settings, the action."""

import datetime as dt
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pyarrow as pa
import pytest
import schema_page
import typer
import yaml
from command import ROOT, minite
from gate_runs import cause, rounding, write_run

from minite_diag import errors
from minite_diag.cli import EXIT_CODES, app
from minite_diag.gate import METRICS, PROFILES
from minite_diag.gate.waivers import read_waivers
from minite_diag.outputs import FORMATS, SUFFIXES
from minite_diag.trace.schema import COMPARISON

DOCS = ROOT / "docs"
DATA = ROOT / "tests" / "data"
ACTION = ROOT / ".github" / "actions" / "minite-diag" / "action.yml"


def cells(text: str) -> list[list[str]]:
    """Rows of all tables of a page."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_the_schema_page_is_the_schema() -> None:
    assert schema_page.FILE.read_text(encoding="utf-8") == schema_page.page(), (
        "write it anew: python tests/docs/schema_page.py"
    )


def test_every_metric_has_its_formula() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    described = {
        name for row in cells(text) for name in re.findall(r"`(\w+)`", row[0]) if len(row) == 3
    }
    numbers = {f.name for f in COMPARISON if f.type == pa.float64()} | {"nonfinite"}
    assert {*METRICS, *numbers} <= described


def test_the_profiles_are_the_codes() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = {row[0].strip("`"): row[1:4] for row in cells(text) if row[0].strip("`") in PROFILES}
    assert list(rows) == list(PROFILES)
    for name, profile in PROFILES.items():
        limits = {limit.metric: limit for limit in profile.limits}
        for cell, metric in zip(rows[name], ("mean_abs", "k3_kl", "mult_prob_error"), strict=True):
            low, _, high = cell.partition(" to ")
            if metric not in limits:
                assert not cell
                continue
            assert float(low) == limits[metric].value
            assert (float(high) if high else None) == limits[metric].warn
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in PROFILES)


@pytest.mark.parametrize("file", [DOCS / "exit-codes.md", ROOT / "README.md"])
def test_the_exit_codes_are_the_codes(file: Path) -> None:
    rows = {
        (row[0], verdict)
        for row in cells(file.read_text())
        for verdict in re.findall(r"\w+", row[1])
    }
    for verdict, code in EXIT_CODES.items():
        if file.name == "exit-codes.md":
            assert (str(code), verdict) in rows
    codes = {row[0] for row in cells(file.read_text(encoding="utf-8"))}
    raised = {
        str(kind.exit_code)
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MiniteDiagError)
    }
    assert raised | {str(code) for code in EXIT_CODES.values()} | {"130"} <= codes


def test_every_output_is_described() -> None:
    text = (DOCS / "ci.md").read_text(encoding="utf-8")
    for name in FORMATS:
        suffix = next((s for s, format in SUFFIXES.items() if format == name), "")
        assert f"--format {name}" in text or f"{suffix}`" in text, name


def test_inline_commands_exist() -> None:
    """`minite-diag gate RUN --profile x` in a sentence: the command and its options are real."""
    group = typer.main.get_command(app)
    count = 0
    for file in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for span in re.findall(r"`minite-diag ([^`\n]+)`", file.read_text(encoding="utf-8")):
            node, words = group, span.split()
            while words and words[0] in getattr(node, "commands", {}):
                node = node.commands[words.pop(0)]  # type: ignore[attr-defined]
            assert node is not group or words[0].startswith("-"), span
            known = {option for parameter in node.params for option in parameter.opts}
            assert {w for w in words if w.startswith("-") and len(w) > 1} <= known, span
            count += 1
    assert count > 3


def fenced(language: str) -> list[tuple[Path, str]]:
    found = []
    for file in [ROOT / "README.md", *DOCS.glob("*.md")]:
        pattern = rf"^```{language}\n(.*?)^```"
        found += [(file, text) for text in re.findall(pattern, file.read_text(), re.M | re.S)]
    return found


def test_settings_in_the_pages_are_accepted(tmp_path: Path) -> None:
    count = 0
    for _, text in fenced("toml"):
        settings = tomllib.loads(text)
        waivers = settings.get("tool", {}).get("minite-diag", {}).get("waivers")
        if waivers:
            assert read_waivers(waivers, "page")[0].expires > dt.date(2026, 12, 1)
            (tmp_path / "pyproject.toml").write_text(text)
        else:
            (tmp_path / "minite.toml").write_text(text)
        done = minite("compare", "--show-config", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        count += 1
    assert count >= 2


def validate(record: object, name: str) -> None:
    jsonschema.validate(record, json.loads((DATA / name).read_text()))


def test_the_workflow_and_the_action_are_valid() -> None:
    (found,) = [text for _, text in fenced("yaml") if "jobs:" in text]
    # YAML 1.1 reads `on` as a boolean.
    workflow = yaml.safe_load(found.replace("\non:", '\n"on":'))
    validate(workflow, "github-workflow.json")
    action = yaml.safe_load(ACTION.read_text())
    validate(action, "github-action.json")
    (step,) = [s for s in workflow["jobs"]["gate"]["steps"] if "minite-diag" in s.get("uses", "")]
    assert (ROOT / step["uses"] / "action.yml").resolve() == ACTION
    assert set(step["with"]) <= set(action["inputs"])
    (script,) = [s["run"] for s in action["runs"]["steps"]]
    assert "${{" not in script, "an input inside of a script would be run by the shell"


def run_action(tmp_path: Path, run: Path, **inputs: str) -> tuple[int, str, str, str]:
    """(exit code, stdout, step summary, outputs) of the action's script."""
    action = yaml.safe_load(ACTION.read_text())
    (step,) = action["runs"]["steps"]
    given = {"run": str(run), "results": str(tmp_path / "results"), **inputs}
    values = {
        name: given.get(re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1])  # type: ignore[index]
        for name, value in step["env"].items()
    }
    defaults = {name.upper(): item.get("default", "") for name, item in action["inputs"].items()}
    command = tmp_path / "bin" / "minite-diag"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m minite_diag.cli "$@"\n')
    command.chmod(0o755)
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    environment = {
        **os.environ,
        **{name: defaults[name] if value is None else value for name, value in values.items()},
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(output),
    }
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    said = summary.read_text() if summary.exists() else ""
    return done.returncode, done.stdout, said, output.read_text()


@pytest.mark.parametrize(
    ("sigma", "sequences", "code", "verdict"),
    [(0.001, 20, 0, "pass"), (0.3, 20, 1, "fail"), (0.05, 4, 3, "inconclusive")],
)
def test_the_action_reports_and_keeps_the_exit_code(
    tmp_path: Path, sigma: float, sequences: int, code: int, verdict: str
) -> None:
    run = write_run(tmp_path / "run", rounding(sigma, sequences, 30), causes=[cause()])
    found, said, summary, output = run_action(tmp_path, run)
    assert found == code
    assert said.startswith(("::notice", "::error"))
    assert f"minite-diag: {verdict}" in summary
    assert f"verdict={verdict}\n" in output
    for name in ("junit.xml", "results.sarif", "summary.md", "gate.json"):
        assert (tmp_path / "results" / name).stat().st_size


def test_the_action_can_let_inconclusive_pass_and_nothing_else(tmp_path: Path) -> None:
    inconclusive = write_run(tmp_path / "a", rounding(0.05, 4, 30))
    assert run_action(tmp_path, inconclusive, inconclusive="warn")[0] == 0
    failing = write_run(tmp_path / "b", rounding(0.3, 20, 30))
    assert run_action(tmp_path, failing, inconclusive="warn")[0] == 1
    code, _, _, output = run_action(tmp_path, tmp_path / "nothing", inconclusive="warn")
    assert code == 3
    assert output.endswith(("verdict=error\n", "junit.xml\n"))
    assert "verdict=error" in output


def test_the_action_takes_limits_by_line_and_runs_none_of_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounding(0.001, 20, 30))
    code, *_ = run_action(tmp_path, run, limits="mean_abs=1e-5\n\nk3_kl=1\n")
    assert code == 1
    code, *_ = run_action(tmp_path, run, limits="mean_abs=$(touch hacked)")
    assert code == 2
    assert not (tmp_path / "hacked").exists()
