"""The HTML report as a file: self-contained, escaped, the same twice, bounded in size."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from gate_runs import rounding, site, write_run

from minite_diag.report import figures, tables
from minite_diag.report.html import write_report
from minite_diag.report.html_scales import e4m3_value
from minite_diag.report.html_sites import place_of
from minite_diag.stored_summary import read_summary

MEBIBYTE = 1 << 20
VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """Elements and attributes of a page; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.found.append((tag, {k: v or "" for k, v in attributes}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.found.append((tag, {k: v or "" for k, v in attributes}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, (tag, self._open[-3:], self.getpos())
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(whole_report: Path) -> Page:
    return Page(whole_report.read_text(encoding="utf-8"))


def test_ids_are_unique_and_every_link_leads_somewhere(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in page.found if tag in ("a", "use") and "href" in a]
    assert [link for link in links if not link.startswith("#") or link[1:] not in ids] == []
    assert any(link.startswith("#p1-s") for link in links)
    places = [a["data-go"] for _, a in page.found if "data-go" in a]
    assert places
    assert set(places) <= set(ids)


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    for tag, attributes in page.found:
        for name in ("src", "srcset", "action", "data", "poster"):
            assert name not in attributes, (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert [link["href"] for link in page.all("link")] == ["data:,"]


def test_the_policy_allows_this_script_and_no_other(whole_report: Path, page: Page) -> None:
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv")]
    (script,) = re.findall(r"<script>(.*?)</script>", whole_report.read_text(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_every_figure_has_its_numbers(page: Page) -> None:
    """Margins share the table of the figure before them."""
    plots = [a["aria-label"] for a in page.all("div") if a.get("role") == "img"]
    assert len(plots) >= 12
    assert [label for label in plots if "numbers are in the table" not in label] == [
        "Routing margins against the noise of the logits"
    ]


def test_what_a_person_asks_first_is_at_the_top(whole_report: Path) -> None:
    text = whole_report.read_text()
    top = text[: text.index("<nav")]
    for said in ("fail (profile nvfp4)", "What ran", "Gap, sampled tokens", "MD102", "Its fix"):
        assert said in top
    assert "minite-diag export MODEL -o DIR --recipe te" in top
    assert "--profile bitwise" in top


def test_each_section_is_there(page: Page) -> None:
    ids = {attributes.get("id") for _, attributes in page.found}
    for name in ("causes", "gap", "layers", "born", "codes", "router", "all", "environment"):
        assert f"p1-{name}" in ids
    assert {"gate", "align", "methods", "p1-position", "p1-sizes", "p1-bits", "p1-rel"} <= ids
    assert {"p1-local", "p1-causal0-ops", "p1-weight-scales", "p1-act-scales"} <= ids


def test_hostile_names_are_text(hostile_report: Path) -> None:
    text = hostile_report.read_text(encoding="utf-8")
    page = Page(text)
    assert page.all("img") == []
    assert text.count("<script") == text.count("</script>") == 1
    assert text.count("<style") == 1
    assert "boom()" in "".join(page.text)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_same_run_gives_the_same_bytes(whole_report: Path, tmp_path: Path) -> None:
    run = whole_report.parent
    summary = read_summary(run)
    first = write_report(run, summary, tmp_path / "a.html").read_bytes()
    assert write_report(run, summary, tmp_path / "b.html").read_bytes() == first


def test_size_does_not_grow_with_experts(large_report: Path) -> None:
    text = large_report.read_text(encoding="utf-8")
    assert len(text.encode()) < 5 * MEBIBYTE
    assert text.count("<tr") < 8000
    assert "128 experts" in text


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    sites = [
        site(f"m{i}", "output", "p", rel_l2=0.1, bitwise_fraction=0.5) | {"order": i}
        for i in range(1600)
    ]
    run = write_run(tmp_path / "run", rounding(0.05, 4, 20), sites=sites)
    text = write_report(run, read_summary(run), None).read_text()
    assert "the first 1500 of 1600 rows; the rest is in comparison.parquet" in text
    assert "the worst 60 of 1600 outputs that differ" in text


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounding(0.05, 4, 20))
    text = write_report(run, read_summary(run), None).read_text()
    for said in (
        "Block scales were not counted when this run was compared",
        "were not measured: <code>minite-diag attribute",
        "No ladder was climbed",
        "The run was not judged",
        "No output inside of a layer was compared",
    ):
        assert said in text


def test_a_run_that_failed_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounding(0.05, 4, 20), status="error")
    text = write_report(run, read_summary(run), None).read_text()
    assert "could not measure: learner-toy: it broke" in text
    assert "mend it" in text


def test_an_equal_run_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [values * 0 for values in rounding(0.05, 4, 20)])
    text = write_report(run, read_summary(run), None).read_text()
    assert "agree bit for bit on all 80 sampled tokens" in text


def test_a_moved_run_is_rendered_where_it_lies(whole_report: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole_report.parent, tmp_path / "moved")
    text = write_report(run, read_summary(run), None).read_text()
    assert f"minite-diag explain CODE --run {run}" in text


@pytest.mark.parametrize(
    ("fqn", "place"),
    [
        ("model.layers.3.mlp.experts.17.down_proj", "mlp.experts.*.down_proj"),
        ("model.layers.12.self_attn.q_proj", "self_attn.q_proj"),
        ("model.layers.0", "(layer)"),
        ("lm_head", "lm_head"),
        ("model.layers.1.mlp.experts", "mlp.experts"),
    ],
)
def test_place_of_a_site(fqn: str, place: str) -> None:
    assert place_of(fqn) == place


def test_e4m3_bytes() -> None:
    torch = pytest.importorskip("torch")
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for code, value in enumerate(every.tolist()):
        found = e4m3_value(code)
        assert found == value or (found != found and value != value)


def test_figures_keep_numbers_as_they_are() -> None:
    """Coordinates are shortened, labels never."""
    svg = figures.bar_chart("k", ["0.00012345"], [("s", [0.00012345])], label="x")
    assert svg.count("0.00012345") == 1
    assert "0.0001234" in svg
    assert "<style" not in svg
    assert "http" not in svg


def test_names_in_figures_are_no_formulas() -> None:
    svg = figures.bar_chart("k", [r"$\frac{1}{0$ <b>"], [("s", [1.0])], label="x")
    assert r"$\frac{1}{0$ &lt;b&gt;" in svg


def test_a_share_that_rounds_to_all_is_not_all() -> None:
    assert tables.share(0.99999).text == "<100%"
    assert tables.share(1.0, marked=True).text == "100.00% ="
    assert tables.share(float("nan")).text == "-"


def test_numbers_of_a_figure_are_those_of_the_run(whole_report: Path) -> None:
    """The first heat map's cell and its table say what comparison.parquet holds."""
    import pandas as pd

    rows = pd.read_parquet(whole_report.parent / "comparison.parquet")
    own = rows[(rows.fqn == "model.layers.2.self_attn.q_proj") & (rows.kind == "output")]
    shown = f"{own.rel_l2.mean():.4g}"
    text = whole_report.read_text()
    assert f"<title>layer 2, self_attn.q_proj: {shown}</title>" in text
    assert f">{shown}</td>" in text
    assert f">{shown}</a></td>" in text


def test_gains_come_from_the_ladder(whole_report: Path) -> None:
    ladder = json.loads((whole_report.parent / "align.json").read_text())
    assert ladder["ladder"][1]["closed"]["score"] == 0.5
    assert "measured here: closes 50.0% of the score gap" in whole_report.read_text()


def test_the_change_between_two_runs(tmp_path: Path) -> None:
    from minite_diag.change import compare_runs
    from minite_diag.outputs.change import render_change

    bad = "<img src=x onerror=boom()>"
    runs = [
        write_run(tmp_path / n, rounding(s, 10, 20), name=f"m{bad}", version=f"{n}{bad}")
        for n, s in (("a", 0.05), ("b", 0.01))
    ]
    text = render_change(compare_runs(*runs), "html")
    page = Page(text)
    assert page.all("img") == []
    assert "Better: sample mean_abs" in "".join(page.text)
    assert render_change(compare_runs(*runs), "html") == text


def test_the_gate_writes_a_report_with_its_checks(whole_report: Path, tmp_path: Path) -> None:
    from command import minite

    file = tmp_path / "gate.html"
    done = minite("gate", str(whole_report.parent), "-o", str(file))
    assert done.returncode == 1, done.stderr
    text = file.read_text()
    assert 'id="gate-checks"' in text
    assert "✗ fail" in text
