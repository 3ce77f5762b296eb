"""Runs for the HTML report, written table by table, and a real Chromium to open it in."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_runs import LEARNER, SAMPLER, cause, leg, rounding, site, write_run

from minite_diag.gate import GateRequest, check_gate, with_gate
from minite_diag.report.html import write_report
from minite_diag.stored_summary import read_summary
from minite_diag.trace.schema import SCALES, write_table

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "</script></style></title><img src=x onerror=boom()><b>'\"&${{7*7}}\u202e\x1b[2J"
PLACES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.attn",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate",
)
EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")


def write_whole_run(
    run: Path, *, layers: int = 3, experts: int = 4, probes: int = 6, tail: str = ""
) -> Path:
    """A run with everything that a report can show; `tail` is put behind each name."""
    names = [f"probe-{number}{tail}" for number in range(probes)]
    rng = np.random.default_rng(0)
    write_run(
        run,
        rounding(0.5, probes, 40),
        sites=list(_sites(rng, layers, experts, names, tail)),
        name=f"model{tail}",
    )
    _rename(run, names)
    write_table(run / "scales.parquet", list(_scales(layers)), SCALES)
    _attribution(run, layers, experts, tail)
    _manifests(run, tail)
    (run / "align.json").write_text(json.dumps(_ladder(run, tail)))
    return run


def _rename(run: Path, names: list[str]) -> None:
    """Give the sequences their names, and score what was sampled too."""
    from minite_diag.trace.schema import LOGPROBS, read_table

    rows = read_table(run / "logprobs.parquet", LOGPROBS).to_pylist()
    for row in rows:
        row["probe"] = names[int(row["probe"].removeprefix("probe-"))]
    given = [
        row | {"mode": "score", "source": "", "generated": False, "target_phase": "prefill"}
        for row in rows
    ]
    write_table(run / "logprobs.parquet", [*rows, *given], LOGPROBS)


def _sites(
    rng: np.random.Generator, layers: int, experts: int, probes: list[str], tail: str
) -> Iterator[dict[str, Any]]:
    order = 0
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        linears = [f"{prefix}.{p}" for p in PLACES if p.endswith("_proj")]
        linears += [
            f"{prefix}.mlp.experts.{e}.{name}" for e in range(experts) for name in EXPERT_LINEARS
        ]
        for fqn in linears:
            for kind in ("weight_codes", "weight_block_scale"):
                yield _row(fqn, kind, "", 0, mismatch_rate=rng.uniform(0.2, 0.9))
            yield _row(fqn, "weight_global_decode_scale", "", 0, scale_ratio=1.0)
        for probe in probes:
            for place in PLACES:
                order += 1
                kind = "router_logits" if place == "mlp.gate" else "output"
                yield _row(f"{prefix}.{place}", kind, probe, order, **_values(rng, layer, order))
            for fqn in linears:
                order += 1
                yield _row(fqn, "act_codes", probe, order, mismatch_rate=rng.uniform(0, 0.5))
                yield _row(fqn, "act_block_scale", probe, order, mismatch_rate=rng.uniform(0, 0.5))
                yield _row(fqn, "output", probe, order, **_values(rng, layer, order))
            yield _row(prefix, "output", probe, order + 1, **_values(rng, layer, order))
    yield site(f"model.odd{tail}", "output", probes[0]) | {"reason": f"no partner{tail}"}
    yield _row(f"model.strange{tail}", "output", probes[0], order + 2, **_values(rng, 0, 1))


def _values(rng: np.random.Generator, layer: int, order: int) -> dict[str, float]:
    if order == 1:
        return {"rel_l2": 0.0, "bitwise_fraction": 1.0, "max_abs_diff": 0.0}
    return {
        "rel_l2": float(rng.uniform(0.001, 0.01) * (layer + 1)),
        "bitwise_fraction": float(rng.uniform(0, 0.9)),
        "max_abs_diff": float(rng.uniform(0, 3)),
        "ulp_max": float(rng.integers(1, 900)),
    }


def _row(fqn: str, kind: str, probe: str, order: int, **metrics: float) -> dict[str, Any]:
    parts = fqn.split(".")

    def after(word: str) -> int | None:
        return int(parts[parts.index(word) + 1]) if word in parts[:-1] else None

    metrics.setdefault("bitwise_fraction", 1.0 - metrics.get("mismatch_rate", 0.0))
    found = site(fqn, kind, probe, **metrics)
    expert = after("experts") if ".experts." in fqn else None
    return found | {"order": order, "layer_index": after("layers"), "expert_index": expert}


def _scales(layers: int) -> Iterator[dict[str, Any]]:
    for kind, mode in (("weight_block_scale", "static"), ("act_block_scale", "score")):
        for layer in range(layers):
            for code in range(0x20, 0x7F, 3):
                yield {
                    "baseline": LEARNER,
                    "target": SAMPLER,
                    "mode": mode,
                    "kind": kind,
                    "layer_index": layer,
                    "code": code,
                    "baseline_blocks": 10 * code,
                    "target_blocks": 10 * (0x80 - code),
                }


def _gap(mean: float) -> dict[str, Any]:
    return {"mean_abs": mean, "p99_abs": 5 * mean, "max_abs": 9 * mean, "k3": mean**2, "tokens": 90}


def _shares(*names: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "sites": 8,
            "closed": 0.4 - 0.15 * i,
            "closed_p99": 0.1,
            "closed_k3": None,
            "without": 0.5,
            "patched": 8,
            "changed": 8,
            "gap": _gap(0.02),
        }
        for i, name in enumerate(names)
    ]


def _attribution(run: Path, layers: int, experts: int, tail: str) -> None:
    ends = {"baseline": LEARNER, "target": SAMPLER}
    found = [
        {
            **cause("MD102"),
            "text": f"tile of the weight{tail}",
            "evidence": {"site": f"model.layers.0.self_attn.q_proj{tail}", "changed": 0.123456},
            "effect": [{"op": "weights", "closed": 0.4, "nats": 0.016}],
            "below_noise": False,
        },
        cause("MD601", f"model.layers.0.mlp.experts{tail}"),
        cause("MD201", "model.layers.1.input_layernorm"),
    ]
    record = json.loads((run / "attribution.json").read_text())
    (pair,) = record["pairs"]
    pair["findings"] = found
    pair["contracts"] = [
        {
            "engine": engine,
            "basis": "native",
            "weight": {
                "recipe": f"recipe{tail}",
                "codes": 1.0,
                "scales": 0.99,
                "ties": [],
                "runner_up": None,
                "runner_up_codes": None,
                "tensors": 4,
            },
            "activation": None,
            "gemm": None,
        }
        for engine in (LEARNER, SAMPLER)
    ]
    pair["routing"] = [
        {
            "site": f"model.layers.{layer}.mlp.experts{tail}",
            "tokens": 160,
            "set_agreement": 1.0 - 0.01 * layer,
            "order_agreement": 0.8,
            "flips": layer,
            "flips_within_noise": layer // 2,
            "margin_quantiles": [0.001, 0.01, 0.1, 0.9],
            "noise_median": 0.02,
            "flips_on_equal_logits": False,
        }
        for layer in range(layers)
    ]
    record["live"] = {
        "legs": [leg(0.0, "repeat"), leg(0.01, "batch-4") | {"note": f"in a batch{tail}"}],
        "local": [
            {
                **ends,
                "site": fqn,
                "kind": "output",
                "op": "linear" if "_proj" in fqn else "norm",
                "layer_index": layer,
                "expert_index": None,
                "error_local": 0.01 if "_proj" in fqn else 0.0,
                "bitwise_local": 0.5 if "_proj" in fqn else 1.0,
                "error_total": 0.03,
                "error_inherited": 0.02,
                "input_error": 0.01,
                "amplification": 2.0,
            }
            for layer in range(layers)
            for fqn in [
                *(f"model.layers.{layer}.{place}" for place in PLACES),
                *(
                    f"model.layers.{layer}.mlp.experts.{e}.{n}"
                    for e in range(experts)
                    for n in EXPERT_LINEARS
                ),
            ]
        ],
        "causal": [
            {
                **ends,
                "ops": _shares("linear", "norm", f"op{tail}"),
                "layers": _shares("0", "1-2", "head"),
                "operands": _shares("weights", "activation rule", "gemm rule"),
                "operand_sites": 8,
                "prefix": [{"upto": "0", "closed": 0.3, "gap": _gap(0.03)}],
                "upstream": [],
                "interaction_ops": {"total": 1.0, "sum_of_singles": 0.75, "interaction": 0.25},
                "interaction_layers": None,
                "smallest": None,
                "gap": _gap(0.04),
                "notes": [f"a note{tail}"],
                "verdict": "attributed",
                "reason": "all together close 100%",
            }
        ],
        "routing": [{**ends, "closed": 0.1, "nats": 0.004, "text": f"routing is worth it{tail}"}],
    }
    (run / "attribution.json").write_text(json.dumps(record))


def _manifests(run: Path, tail: str) -> None:
    for engine in (LEARNER, SAMPLER):
        file = run / "traces" / engine / "manifest.json"
        record = json.loads(file.read_text())
        record["label"] = f"toy{tail}"
        record["evidence"][0]["impl"] = f"kernel{tail}"
        record["environment"] = {"A": f"{engine}{tail}", "B": "same"}
        record["versions"] = {"torch": "2.13"}
        file.write_text(json.dumps(record))


def _ladder(run: Path, tail: str) -> dict[str, Any]:
    def rung(name: str, gap: float, closed: float, ours: bool) -> dict[str, Any]:
        return {
            "rung": name,
            "run": f"{run}/align/1",
            "alignments": [name.removeprefix("+ ")],
            "what": f"what it does{tail}",
            "kernels": ours,
            "error": [],
            "logprob": {mode: {"mean_abs": gap} for mode in ("score", "sample")},
            "sites": {"compared": 10, "bitwise_equal": 3},
            "closed": {"score": closed, "sample": closed},
            "ops": [{"engine": LEARNER, "replaced": ["norm"]} if ours else {"engine": LEARNER}],
            "price": [{"engine": LEARNER, "time_ratio": 1.0, "peak_rss_ratio": None}],
        }

    rungs = [
        rung("as it is", 0.04, 0.0, False),
        rung("+ weights", 0.02, 0.5, False),
        rung("+ norm", 0.0, 1.0, True),
    ]
    return {"schema": 1, "ladder": rungs}


def report_of(run: Path) -> Path:
    """The run's report, judged by a profile."""
    summary = read_summary(run)
    return write_report(
        run, with_gate(summary, check_gate(run, summary, GateRequest("nvfp4"))), None
    )


@pytest.fixture(scope="session")
def whole_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(write_whole_run(tmp_path_factory.mktemp("report") / "run"))


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_whole_run(tmp_path_factory.mktemp("hostile") / "run", tail=HOSTILE)
    return report_of(run)


@pytest.fixture(scope="session")
def large_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 layers of 128 experts: 18 624 quantized linears, each with its rows."""
    run = tmp_path_factory.mktemp("large") / "run"
    return report_of(write_whole_run(run, layers=48, experts=128, probes=1))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium as it is installed; MINITE_DIAG_CHROMIUM names another one."""
    found = os.environ.get("MINITE_DIAG_CHROMIUM") or next(
        filter(None, map(shutil.which, BROWSERS)), None
    )
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


class Opened:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Open a report offline; every page must be silent and ask for nothing but itself."""
    pages: list[Opened] = []

    def open_page(file: Path, **options: Any) -> Any:
        pages.append(Opened(browser, file, **options))
        return pages[-1].page

    yield open_page
    for one in pages:
        one.context.close()
        assert one.said == []
        assert [url for url in one.requests if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in one.requests if url.startswith("file:")]) == 1
