"""Each output against its schema, with hostile names, from runs of every verdict."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xmlschema
from gate_runs import SAMPLER, cause, judge, leg, rounding, site, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from minite_diag.gate import with_gate
from minite_diag.gate.waivers import read_waivers
from minite_diag.outputs import FORMATS, plan_outputs, render, write_output
from minite_diag.stored_summary import read_summary

DATA = Path(__file__).parents[1] / "data"
SUMMARY = json.loads((DATA.parents[1] / "docs" / "summary.schema.json").read_text())
HOSTILE = "<script>alert(1)</script>\n::error::x|`]]>&\x00\ud83d\ude00%0A".encode(
    "utf-16", "surrogatepass"
).decode("utf-16")
EXPIRED = {"metric": "mean_abs", "reason": "old", "expires": "2026-01-01"}
VALID = {"metric": "k3_kl", "reason": HOSTILE, "expires": "2027-01-01"}


def summary_of(run: Path, verdict: str) -> dict[str, Any]:
    """A run with that verdict whose every name is hostile."""
    sigma = {"pass": 0.001, "inconclusive": 0.05}.get(verdict, 0.3)
    sequences = 4 if verdict == "inconclusive" else 20
    write_run(
        run,
        rounding(sigma, sequences, 30),
        name=HOSTILE.replace("\x00", ""),
        version=HOSTILE,
        status="error" if verdict == "error" else "ok",
        causes=[cause("MD102"), cause("MD601", HOSTILE)],
        legs=[leg(0.0)],
        sites=[site(HOSTILE, "output", f"p{i}", rel_l2=0.5) for i in range(5)],
    )
    waivers = tuple(read_waivers([VALID] + ([EXPIRED] if verdict == "fail" else []), "x"))
    limits = ["rel_l2=0.1@*"] if verdict == "fail" else []
    gate = judge(run, "nvfp4", *limits, waivers=waivers)
    assert gate["verdict"] == verdict, gate["reasons"]
    return with_gate(read_summary(run), gate)


VERDICTS = ["pass", "fail", "inconclusive", "error"]


@pytest.fixture(params=VERDICTS)
def summary(request: Any, tmp_path: Path) -> dict[str, Any]:
    return summary_of(tmp_path / "run", request.param)


def test_junit_is_valid_and_counts(summary: dict[str, Any]) -> None:
    text = render(summary, "junit")
    xmlschema.validate(text, str(DATA / "junit-4.xsd"))
    root = ET.fromstring(text)
    bad = {kind: sum(int(s.get(kind, 0)) for s in root) for kind in ("failures", "errors")}
    assert len(root.findall(".//failure")) == bad["failures"]
    assert len(root.findall(".//error")) == bad["errors"]
    assert (sum(bad.values()) == 0) is (summary["verdict"] == "pass")
    assert bool(bad["failures"]) is (summary["verdict"] in ("fail", "error"))
    assert not root.findall(".//skipped"), "viewers show a skipped case as green"


def test_sarif_is_valid_and_names_the_causes(summary: dict[str, Any]) -> None:
    log = json.loads(render(summary, "sarif"))
    jsonschema.validate(log, json.loads((DATA / "sarif-2.1.0.json").read_text()))
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert {"MD102", "MD601"} <= set(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    (page,) = [rule for rule in run["tool"]["driver"]["rules"] if rule["id"] == "MD102"]
    assert "## Fix" in page["help"]["markdown"]
    assert run["invocations"][0]["exitCode"] == {"pass": 0, "fail": 1}.get(summary["verdict"], 3)
    levels = {r["level"] for r in run["results"] if not r["ruleId"].startswith("MD")}
    assert ("error" in levels) is (summary["verdict"] in ("fail", "error"))


def test_sarif_fingerprints_follow_a_finding(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", rounding(0.3, 20, 30), causes=[cause()])
    other = write_run(tmp_path / "b", rounding(0.4, 20, 30), causes=[cause()])
    found = [
        [
            result["partialFingerprints"]
            for result in json.loads(render(read_summary(run), "sarif"))["runs"][0]["results"]
        ]
        for run in (one, other)
    ]
    assert found[0] == found[1] != []


def test_waived_results_are_suppressed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounding(0.3, 20, 30), causes=[cause("MD102")])
    items = [{"metric": m, "reason": "r", "expires": "2027-01-01"} for m in ("mean_abs", "k3_kl")]
    items += [{"cause": "MD102", "reason": "r", "expires": "2027-01-01"}]
    gate = judge(run, waivers=tuple(read_waivers(items, "x")))
    results = json.loads(render(with_gate(read_summary(run), gate), "sarif"))["runs"][0]["results"]
    suppressed = {r["ruleId"] for r in results if "suppressions" in r}
    assert suppressed == {"gate-mean_abs", "gate-k3_kl", "MD102"}


_COMMAND = re.compile(r"::(error|warning|notice) title=[^,\r\n]*::[^\r\n]*")


def test_github_commands_hold_their_data(summary: dict[str, Any]) -> None:
    lines = render(summary, "github").rstrip("\n").split("\n")
    for line in lines:
        assert _COMMAND.fullmatch(line) or line.endswith("are left out"), line
    assert sum(line.startswith("::error") for line in lines) <= 10
    assert lines[0].startswith("::notice" if summary["verdict"] == "pass" else "::error")


def test_github_keeps_to_ten_annotations(tmp_path: Path) -> None:
    causes = [cause("MD102", f"site {i}") for i in range(30)]
    run = write_run(tmp_path / "run", rounding(0.3, 20, 30), causes=causes)
    lines = render(with_gate(read_summary(run), judge(run)), "github").splitlines()
    assert sum(line.startswith("::warning") for line in lines) == 10
    assert lines[-1] == "20 more annotations than GitHub shows are left out"


class Page(HTMLParser):
    """The tags of a rendered page, and the text of its table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(MarkdownIt("commonmark").enable("table").render(text))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


SHOWN = " ".join(HOSTILE.split())
OURS = {"h2", "h3", "h4", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
OURS |= {"details", "summary", "b", "code", "strong", "em", "pre"}


def test_markdown_shows_hostile_names_as_text(summary: dict[str, Any]) -> None:
    page = Page(render(summary, "markdown"))
    assert page.tags <= OURS
    assert f"minite-diag: {summary['verdict']}" in render(summary, "markdown").splitlines()[0]
    # CommonMark replaces NUL, which no page may hold.
    shown = SHOWN.replace("\x00", "\ufffd")
    assert any(shown in cell for cell in page.cells), page.cells


def test_json_is_strict(summary: dict[str, Any]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    loaded = json.loads(render(summary, "json"), parse_constant=refuse)
    assert loaded["verdict"] == summary["verdict"]
    jsonschema.validate(loaded, SUMMARY)


def test_text_says_the_verdict(summary: dict[str, Any]) -> None:
    text = render(summary, "text")
    assert text.startswith(summary["verdict"])
    assert "\x1b" not in text


@pytest.mark.parametrize("name", FORMATS)
def test_equal_runs_give_equal_bytes(tmp_path: Path, name: str) -> None:
    texts = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        run = write_run(tmp_path / folder / "run", rounding(0.1, 8, 20), causes=[cause()])
        text = render(with_gate(read_summary(run), judge(run)), name)
        texts.add(text.replace(str(tmp_path / folder), "").replace(f"/{folder}/run", "/run"))
    assert len(texts) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_runs_without_a_gate_or_a_pair_have_outputs_too(tmp_path: Path, name: str) -> None:
    measured = write_run(tmp_path / "a", rounding(0.1, 8, 20))
    assert render(read_summary(measured), name)
    empty = write_run(tmp_path / "b", [np.zeros(0)])
    assert read_summary(empty)["verdict"] == "error"
    text = render(read_summary(empty), name)
    if name == "junit":
        xmlschema.validate(text, str(DATA / "junit-4.xsd"))
    if name == "sarif":
        jsonschema.validate(json.loads(text), json.loads((DATA / "sarif-2.1.0.json").read_text()))


def test_a_failed_sampler_is_in_every_output(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounding(0.1, 8, 20), status="error")
    summary = with_gate(read_summary(run), judge(run))
    for name in FORMATS:
        assert SAMPLER in render(summary, name), name
        assert "it broke" in render(summary, name), name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return summary_of(tmp_path_factory.mktemp("base") / "run", "fail")


JUNIT = xmlschema.XMLSchema(str(DATA / "junit-4.xsd"))
SARIF = jsonschema.Draft7Validator(json.loads((DATA / "sarif-2.1.0.json").read_text()))


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_any_name_is_data_in_every_format(base: dict[str, Any], text: str) -> None:
    summary = json.loads(json.dumps(base))
    summary["model"]["name"] = text
    for pair in summary["pairs"]:
        pair["causes"][0] |= {"where": text, "text": text, "title": text}
        pair["learner"]["label"] = text
    for check in summary["gate"]["checks"]:
        check["worst"] = text
    JUNIT.validate(render(summary, "junit"))
    SARIF.validate(json.loads(render(summary, "sarif")))
    for line in render(summary, "github").rstrip("\n").split("\n"):
        assert _COMMAND.fullmatch(line) or line.endswith("are left out"), line
    assert Page(render(summary, "markdown")).tags <= OURS
    assert json.loads(render(summary, "json"))["model"]["name"] == text
    assert "\x1b" not in text or "\x1b" not in render(summary, "text")


@pytest.mark.parametrize(
    ("formats", "files", "expected"),
    [
        ([], [], []),
        (["sarif"], [], [("sarif", "-")]),
        (
            [],
            ["a.xml", "b.sarif", "c.md"],
            [("junit", "a.xml"), ("sarif", "b.sarif"), ("markdown", "c.md")],
        ),
        (["junit", "json"], ["a", "-"], [("junit", "a"), ("json", "-")]),
    ],
)
def test_formats_and_files_are_paired(formats: list, files: list, expected: list) -> None:
    assert plan_outputs(formats, files) == expected


@pytest.mark.parametrize(
    ("formats", "files", "said"),
    [
        (["serif"], [], "did you mean 'sarif'"),
        ([], ["a.exe"], ".sarif"),
        (["junit", "json"], [], "one -o for each"),
        (["junit", "json"], ["-", "-"], "-o"),
    ],
)
def test_formats_that_do_not_fit(formats: list, files: list, said: str) -> None:
    from minite_diag.errors import UsageError

    with pytest.raises(UsageError) as error:
        plan_outputs(formats, files)
    assert said in error.value.hint


def test_files_are_written_whole(tmp_path: Path) -> None:
    write_output("text", str(tmp_path / "new" / "a.txt"))
    assert (tmp_path / "new" / "a.txt").read_text() == "text"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.txt"]
