"""The HTML report: one self-contained file, rendered from a stored run without torch.

Knows the summary object and stored tables. Invariant: every name that comes from a model, probe or
engine is escaped (autoescape is on) and without effect (the content policy allows one script, by
its hash), the file fetches nothing, and the same run gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from pathlib import Path
from typing import Any, Final

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from minite_diag import __version__
from minite_diag.attribute.record import read_attribution
from minite_diag.plan import read_plan
from minite_diag.report import html_causes, html_run, html_scales, html_sites, html_tokens, words
from minite_diag.trace.manifest import read_manifests

Json = dict[str, Any]

SIGNS: Final = {"measured": "●", "pass": "✓", "fail": "✗", "inconclusive": "?", "error": "!"}


def write_report(run: Path, summary: Json, out: Path | None) -> Path:
    """Render `RUN/report.html` (or `out`) atomically; returns the file."""
    file = out or run / "report.html"
    text = render_report(run, summary)
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
    return file


def to_html(summary: Json) -> str:
    """The report of the run that `summary` is of; it ends with a newline."""
    return f"{render_report(Path(summary['run']), summary)}\n"


def render_report(run: Path, summary: Json) -> str:
    """The whole page; raises TraceError if the run's tables can't be read."""
    sites, tokens = html_sites.read_sites(run), html_tokens.read_tokens(run)
    ladder = html_run.read_ladder(run)
    stored = read_attribution(run) or {}
    pairs = [
        _pair(run, summary, pair, f"p{i}", (sites, tokens), ladder, stored)
        for i, pair in enumerate(summary["pairs"], start=1)
    ]
    return render_page(
        "report.html.j2",
        title=f"minite-diag: {words.visible(summary['model']['name'])}",
        summary=summary,
        pairs=pairs,
        engines=html_run.engines_of(summary),
        evidence=html_run.evidence_table(summary),
        ladder=html_run.ladder_of(ladder, "ladder") if ladder else None,
        gate=html_run.gate_table(summary["gate"]) if summary.get("gate") else None,
        next=html_run.next_command(summary, ladder),
        methods=html_run.METHODS.items(),
        statuses=[
            (html_run.STATUS_SIGNS[name], name, meaning)
            for name, meaning in html_run.STATUS_WORDS.items()
        ],
        sign=SIGNS.get(summary["verdict"], "?"),
        verdict=verdict_text(summary, pairs),
    )


def render_page(template: str, **values: Any) -> str:
    """A page of the report's look: styles, script and content policy around a template's body."""
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _template(template).render(
        words=words, policy=policy, script=script, version=__version__, **values
    )


def _script() -> str:
    folder = importlib.resources.files("minite_diag.report") / "templates"
    return (folder / "report.js.j2").read_text(encoding="utf-8")


def _template(name: str = "report.html.j2") -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("minite_diag.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = words.number
    environment.filters["visible"] = lambda value: words.visible(str(value))
    environment.filters["prose"] = _prose
    return environment.get_template(name)


def _prose(text: str) -> Markup:
    """Escaped text in which what stands between backticks is code."""
    parts = [
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)


def _pair(
    run: Path,
    summary: Json,
    pair: Json,
    key: str,
    frames: tuple[pd.DataFrame, pd.DataFrame],
    ladder: Json | None,
    stored: Json,
) -> Json:
    ends = (pair["learner"]["id"], pair["sampler"]["id"])
    sites, tokens = (_of(frame, ends) for frame in frames)
    live = pair["live"]
    found = html_sites.sites_of(sites, key, live["local"] if live else ())
    gaps = html_tokens.gap_of(tokens, ends[1])
    causes = html_causes.causes_of(pair, summary["run"], html_run.gains_of(ladder), found.href)
    first = pair["first_divergence"]
    routing = next(
        (
            one.get("routing")
            for one in stored.get("pairs", [])
            if (one["baseline"], one["target"]) == ends
        ),
        None,
    )
    manifests = read_manifests(run, read_plan(run))
    return {
        **pair,
        "key": key,
        "title": _title(pair, several=len(summary["pairs"]) > 1),
        "gaps": [{**gap, "text": html_tokens.interval_text(gap)} for gap in gaps],
        "numbers": html_tokens.numbers_table(gaps, key),
        "tails": html_tokens.tails(gaps),
        "token_figures": html_tokens.token_figures(tokens, ends[1], key),
        "largest": html_tokens.largest_table(tokens, ends[1], key) if gaps else None,
        "sequences": html_tokens.sequence_table(tokens, ends[1], key) if gaps else None,
        "site_views": found,
        "first_href": found.href(first["site"], first["kind"]) if first else "",
        "cause_list": causes,
        "first_cause": html_causes.first_cause(causes),
        "hidden_causes": len(pair["causes"] or []) - len(causes),
        "contract_table": html_causes.contracts_table(pair, key),
        "causal": html_causes.causal_figures(live, key) if live else [],
        "local_table": html_causes.local_table(live, key, found.href) if live else None,
        "legs_table": html_causes.legs_table(live, key) if live else None,
        "live_lines": words.live_lines(live) if live else [],
        "routing_views": html_causes.routing_of(routing, key, found.href),
        "scales": html_scales.scales_of(run, ends, key),
        "environment": html_run.environment_of(manifests, pair, key),
    }


def _title(pair: Json, *, several: bool) -> str:
    """Both engines by what ran; with their ids where there are other pairs to confuse them with."""
    names = [
        f"{pair[role]['id']} ({words.name_of(pair[role])})"
        if several
        else words.name_of(pair[role])
        for role in ("learner", "sampler")
    ]
    return " and ".join(names)


def _of(frame: pd.DataFrame, ends: tuple[str, str]) -> pd.DataFrame:
    return frame[(frame["baseline"] == ends[0]) & (frame["target"] == ends[1])]


def verdict_text(summary: Json, pairs: list[Json]) -> str:
    """The verdict and what it rests on, in a sentence."""
    headline = words.headline(summary)
    if headline != "measured":
        return headline
    told = []
    for pair in pairs:
        names = f"{pair['learner']['label']} and {pair['sampler']['label']}"
        if not pair["gaps"]:
            told.append(f"{names} have no common log-probabilities")
            continue
        gap = pair["gaps"][0]
        kind = "sampled" if gap["mode"] == "sample" else "given"
        if gap["equal"] == gap["tokens"]:
            told.append(f"{names} agree bit for bit on all {gap['tokens']} {kind} tokens")
        else:
            told.append(
                f"{names} differ by {words.number(gap['estimate'])} nats on average over "
                f"{gap['tokens']} {kind} tokens"
            )
    return "Measured: " + "; ".join(told)
