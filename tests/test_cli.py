"""Manners of the command line: light, quiet, colourless where asked, legible, suggesting."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, minite
from gate_runs import cause, rounding, site, write_run
from rich.console import Console

from minite_diag.report.console import print_gate, print_summary
from minite_diag.stored_summary import read_summary

HEAVY = ("torch", "pandas", "numpy", "pyarrow", "matplotlib", "jinja2", "transformers", "vllm")
ESCAPE = "\x1b["


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A failing run with causes."""
    rows = [
        site(f"model.layers.{n}.mlp.down_proj", "output", f"p{p}", rel_l2=0.1, bitwise_fraction=0.1)
        for n in range(3)
        for p in range(4)
    ]
    return write_run(tmp_path / "run", rounding(0.3, 20, 20), sites=rows, causes=[cause()])


def imported(*arguments: str) -> set[str]:
    """Names of the modules that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "minite_diag.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize("arguments", [("--help",), ("compare", "--help"), ("--version",)])
def test_help_imports_little(arguments: tuple[str, ...]) -> None:
    """Modules are counted, not seconds: a busy machine has slow seconds."""
    names = imported(*arguments)
    assert not {name.split(".")[0] for name in names} & set(HEAVY)
    assert len(names) < 330, len(names)


def test_the_gate_imports_no_torch_and_no_pandas(stored: Path) -> None:
    """The second time: the first one keeps the summary."""
    read_summary(stored)
    for extra in ((), ("--limit", "rel_l2=1@*"), ("--format", "sarif"), ("--format", "junit")):
        names = {name.split(".")[0] for name in imported("gate", str(stored), *extra)}
        assert "pyarrow" in names
        assert not names & {"torch", "pandas", "matplotlib", "jinja2"}, extra


def test_reports_and_changes_import_no_torch(stored: Path) -> None:
    run = str(stored)
    for arguments in (("report", run), ("report", run, run), ("report", run, "--format", "text")):
        assert "torch" not in {name.split(".")[0] for name in imported(*arguments)}, arguments


def test_a_kept_summary_is_made_anew_when_a_file_changes(stored: Path) -> None:
    first = read_summary(stored)
    write_run(stored, rounding(0.001, 20, 20))
    second = read_summary(stored)
    assert second["pairs"][0]["causes"] == []
    assert first["pairs"][0]["causes"]
    assert second["pairs"][0]["logprob"] != first["pairs"][0]["logprob"]


def test_a_moved_run_says_where_it_is(stored: Path, tmp_path: Path) -> None:
    read_summary(stored)
    moved = tmp_path / "elsewhere"
    stored.rename(moved)
    summary = read_summary(moved)
    assert summary["run"] == str(moved)
    assert str(stored) not in json.dumps(summary)


def test_quiet_prints_data_and_errors_only(stored: Path) -> None:
    done = minite("gate", str(stored), "--quiet", "--json")
    assert done.returncode == 1
    assert done.stderr == ""
    assert json.loads(done.stdout)["verdict"] == "fail"
    done = minite("--quiet", "gate", str(stored / "nothing"))
    assert done.returncode == 3
    assert done.stderr.startswith("error:")
    assert "\nnext:" in done.stderr


def test_no_progress_leaves_the_result(stored: Path, tmp_path: Path) -> None:
    command = ("gate", str(stored), "-o", str(tmp_path / "a.md"))
    assert "wrote " in minite(*command).stderr
    for arguments in ((*command, "--no-progress"), ("--no-progress", *command)):
        done = minite(*arguments)
        assert "wrote " not in done.stderr
        assert done.stderr.startswith("fail")
    assert "wrote " not in minite(*command, MINITE_DIAG_NO_PROGRESS="1").stderr


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command prints where stderr is a terminal."""
    parent, child = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    process = subprocess.Popen(
        [sys.executable, "-m", "minite_diag.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=child,
        cwd=ROOT,
        env={**clean, "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    said = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:
            break
        if not part:
            break
        said += part
    process.wait(timeout=60)
    os.close(parent)
    return said.decode()


def colours(text: str) -> bool:
    """Whether there is a colour among the escapes; bold and dim are none."""
    return bool(re.search(r"\x1b\[(?:\d;)*(?:3[0-7]|9[0-7]|38)", text))


def test_colour_on_a_terminal_and_not_elsewhere(stored: Path) -> None:
    run = str(stored)
    assert colours(on_a_terminal("gate", run))
    assert not colours(on_a_terminal("gate", run, NO_COLOR="1"))
    assert not colours(on_a_terminal("gate", run, "--color", "never"))
    assert colours(on_a_terminal("gate", run, "--color", "always", NO_COLOR="1"))
    assert ESCAPE not in minite("gate", run).stderr
    assert colours(minite("gate", run, "--color", "always", TERM="xterm").stderr)
    assert ESCAPE not in minite("gate", run, "--color", "never", FORCE_COLOR="1").stderr
    assert "did you mean 'never'?" in minite("gate", run, "--color", "nevr").stderr


def test_a_closed_pipe_is_silent(stored: Path) -> None:
    command = f"{sys.executable} -m minite_diag.cli gate {stored} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r[red]x[/]\nnext: rm -rf"
    run = write_run(tmp_path / "run", rounding(0.3, 9, 9), version=hostile, causes=[cause()])
    for command in (("gate", str(run)), ("report", str(run), "--format", "text")):
        done = minite(*command)
        for said in (done.stdout, done.stderr):
            assert not set(said) & set("\x1b\x07\r")
            assert not any(line.startswith("next: rm") for line in said.splitlines())
    assert "\\x1b[2J" in minite("report", str(run), "--format", "text").stdout
    done = minite("gate", str(tmp_path / hostile))
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("width", [40, 60, 100])
def test_narrow_terminals_are_legible(stored: Path, width: int) -> None:
    """Text is wrapped at spaces; only a word longer than a line, such as a path, goes beyond."""
    from gate_runs import judge

    from minite_diag.gate import with_gate

    summary = read_summary(stored)
    for show, what in ((print_summary, summary), (print_gate, with_gate(summary, judge(stored)))):
        stream = io.StringIO()
        show(what, Console(file=stream, width=width, color_system=None))
        text = stream.getvalue()
        assert text.startswith(what["verdict"])
        if width < 60:
            for line in text.splitlines():
                longest = max(map(len, line.split()), default=0)
                assert len(line) <= width or len(line) <= longest + 2, line
            assert "model.layers.0.mlp.down_proj:output" in text or show is print_gate


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("comapre",), "'compare'"),
        (("gate", "x", "--profle", "fp8"), "--profile"),
        (("explain", "MD1O2"), "MD102"),
        (("gate", "{run}", "--profile", "nvpf4"), "did you mean 'nvfp4'?"),
        (("gate", "{run}", "--limit", "mean-bas=1"), "did you mean 'mean_abs'?"),
        (("gate", "{run}", "--limit", "rel_l2=1@*.mpl.*"), "did you mean '*.mlp.*'?"),
        (("gate", "{run}", "--format", "jnuit"), "did you mean 'junit'?"),
        (("gate", "{run}", "--update-baseline"), "--baseline FILE"),
        (("report", "{run}", "{run}", "--format", "sarif"), "one of: text, json, markdown"),
        (("report", "{run}/nothing"), "minite-diag compare"),
        (("align", "{run}", "--align", "nrom"), "did you mean 'norm'?"),
    ],
)
def test_near_misses_get_a_suggestion(stored: Path, arguments: tuple[str, ...], said: str) -> None:
    done = minite(*(argument.format(run=stored) for argument in arguments))
    assert done.returncode in (2, 3)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def complete(words: str, shell: str = "bash") -> list[str]:
    """What the shell is offered for the last word."""
    count = len(words.split(" ")) - 1
    variables = {"_MINITE_DIAG_COMPLETE": f"complete_{shell}", "COMP_WORDS": words}
    done = subprocess.run(
        [sys.executable, "-c", _MAIN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables, "COMP_CWORD": str(count)},
        timeout=60,
    )
    return done.stdout.split()


_MAIN = "import sys; sys.argv = ['minite-diag']; from minite_diag.cli import main; main()"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("minite-diag rep", ["report", "repro"]),
        ("minite-diag gate --profile bf", ["bf16-dense", "bf16-moe"]),
        ("minite-diag gate --format s", ["sarif"]),
        ("minite-diag explain MD40", ["MD401", "MD402", "MD403", "MD404", "MD405", "MD406"]),
        ("minite-diag compare --learner to", ["toy"]),
        ("minite-diag compare --align pow", ["pow2-scale"]),
    ],
)
def test_shells_complete_names(words: str, offered: list[str]) -> None:
    assert complete(words) == offered


def settings(tmp_path: Path, text: str, name: str = "minite.toml") -> None:
    (tmp_path / name).write_text(text)


def test_each_setting_says_where_it_comes_from(tmp_path: Path) -> None:
    settings(tmp_path, '[compare]\nlearner = "toy"\nnum-probes = 3\n')
    shown = minite(
        "compare", "--show-config", "--dtype", "float32", cwd=tmp_path, MINITE_DIAG_COMPARE_SEED="7"
    ).stdout.splitlines()
    assert f"learner = 'toy'  ({tmp_path / 'minite.toml'})" in shown
    assert "num-probes = 3  (" + str(tmp_path / "minite.toml") + ")" in shown
    assert "seed = 7  (MINITE_DIAG_COMPARE_SEED)" in shown
    assert "dtype = 'float32'  (command line)" in shown
    assert "modes = 'score,sample'  (default)" in shown


def test_the_order_of_precedence(tmp_path: Path) -> None:
    settings(tmp_path, "[compare]\nseed = 1\n")
    for arguments, environment, value in (
        ((), {}, 1),
        ((), {"MINITE_DIAG_COMPARE_SEED": "2"}, 2),
        (("--seed", "3"), {"MINITE_DIAG_COMPARE_SEED": "2"}, 3),
    ):
        shown = minite("compare", "--show-config", *arguments, cwd=tmp_path, **environment).stdout
        assert f"\nseed = {value}  (" in shown


def test_a_project_file_holds_settings_and_waivers(tmp_path: Path, stored: Path) -> None:
    text = '[tool.minite-diag.gate]\nprofile = "fp8"\nlimit = ["mean_abs=0.5", "k3_kl=0.5"]\n'
    settings(tmp_path, text, "pyproject.toml")
    shown = minite("gate", str(stored), "--show-config", cwd=tmp_path).stdout
    assert "profile = 'fp8'" in shown
    assert minite("gate", str(stored), cwd=tmp_path).returncode == 0
    text += (
        '[[tool.minite-diag.waivers]]\nmetric = "mean_abs"\nreason = "r"\nexpires = 2020-01-01\n'
    )
    settings(tmp_path, text, "pyproject.toml")
    done = minite("gate", str(stored), cwd=tmp_path)
    assert done.returncode == 1
    assert "expired on 2020-01-01" in done.stderr
    settings(tmp_path, text.replace("tool.minite-diag.", "").replace("2020", "2099"))
    assert minite("gate", str(stored), cwd=tmp_path).returncode == 0, "minite.toml comes first"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[compare]\nnum-probess = 3\n", "did you mean 'num-probes'?"),
        ("[compar]\nseed = 3\n", "did you mean 'compare'?"),
        ("[[waiver]]\nreason = 'x'\n", "did you mean 'waivers'?"),
        ("[compare\n", "can't read"),
    ],
)
def test_unknown_settings_are_errors(tmp_path: Path, text: str, said: str) -> None:
    settings(tmp_path, text)
    done = minite("compare", "--show-config", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "minite.toml" in done.stderr


def test_unknown_variables_are_told(tmp_path: Path) -> None:
    done = minite("explain", cwd=tmp_path, MINITE_DIAG_COMPARE_SEDE="1")
    assert done.returncode == 0
    assert "did you mean MINITE_DIAG_COMPARE_SEED?" in done.stderr
    known = {"MINITE_DIAG_COMPARE_SEED": "1", "MINITE_DIAG_BENCH_CAPTURE_TOKENS": "9"}
    assert minite("explain", cwd=tmp_path, **known).stderr == ""


def test_errors_are_one_message_in_every_command(stored: Path) -> None:
    for arguments in (("gate", "nothing"), ("bench", "compare", "nothing"), ("repro", "nothing")):
        done = minite(*arguments)
        assert done.returncode in (2, 3), arguments
        lines = done.stderr.strip().splitlines()
        assert lines[0].startswith("error: "), arguments
        assert lines[1].startswith("next:  "), arguments
        assert len(lines) == 2


def test_one_gate_writes_several_outputs(stored: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.xml", "b.sarif", "c.md", "d.json", "e.txt")]
    done = minite("gate", str(stored), *(f"-o{file}" for file in files), "--format", "github")
    assert done.returncode == 2, "six formats, five files"
    done = minite("gate", str(stored), *(f"-o{file}" for file in files))
    assert done.returncode == 1
    assert done.stdout == ""
    assert all(file.stat().st_size for file in files)
    assert done.stderr.count("wrote ") == 5
    assert json.loads((tmp_path / "d.json").read_text())["verdict"] == "fail"


def test_a_stored_run_is_reported_without_a_gate(stored: Path) -> None:
    done = minite("report", str(stored), "--format", "markdown")
    assert done.returncode == 0
    assert done.stdout.startswith("## minite-diag: measured")
