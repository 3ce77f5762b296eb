"""`compare` names the cause of a planted fault, `attribute --live` where it is born, both in words."""

import json
from pathlib import Path

import pandas as pd
import pytest
from command import minite, planted


@pytest.mark.parametrize(
    ("fault", "code", "where"),
    [
        ("up_proj_gain", "MD304", "model.layers.1.mlp.up_proj"),
        ("gate_up_swapped", "MD302", "model.layers.0.mlp.gate_proj"),
        ("norm_cast_order", "MD201", "model.layers.1.input_layernorm"),
        ("norm_eps", "MD201", "model.layers.0.post_attention_layernorm"),
        ("final_norm_cast_order", "MD201", "model.norm"),
        ("rope_table_bf16", "MD202", "model.layers.0.self_attn.q_rope"),
        ("rope_shifted", "MD202", "model.layers.1.self_attn.k_rope"),
        ("attention_scale", "MD203", "model.layers.1.self_attn.attn"),
        ("causal_mask_off_by_one", "MD203", "model.layers.0.self_attn.attn"),
        ("heads_permuted", "MD203", "model.layers.1.self_attn.attn"),
        ("rows_zeroed", "MD203", "model.layers.0.self_attn.attn"),
        ("activation_rounds_twice", "MD204", "model.layers.0.mlp.act_fn"),
        ("lm_head_bf16", "MD207", "lm_head"),
        ("embedding_scaled", "MD209", "model.embed_tokens"),
        ("bias_dropped", "MD305", "model.layers.0.self_attn.o_proj"),
        ("stale_weight", "MD301", "model.layers.1.mlp.down_proj"),
    ],
)
def test_the_planted_cause_comes_first(tmp_path: Path, fault: str, code: str, where: str) -> None:
    causes = planted(fault, tmp_path / "run")["causes"]
    assert (causes[0]["code"], causes[0]["where"]) == (code, where), causes
    table = pd.read_parquet(tmp_path / "run" / "attribution.parquet")
    assert code in set(table["code"])


def test_another_temperature_is_inconclusive_not_a_gap(tmp_path: Path) -> None:
    done = minite(
        "compare",
        "--learner",
        "toy",
        "--sampler",
        "toy:fault=temperature",
        "--model",
        "demo-moe",
        "--num-probes",
        "2",
        "--out",
        str(tmp_path / "run"),
        "--json",
        "--no-progress",
        "--modes",
        "score",
    )
    assert done.returncode == 3
    summary = json.loads(done.stdout)
    assert summary["verdict"] == "inconclusive"
    assert summary["pairs"][0]["causes"][0]["code"] == "MD401"
    assert "not comparable" in done.stderr


def test_a_clean_pair_has_no_cause(tmp_path: Path) -> None:
    done = minite(
        "compare",
        "--learner",
        "toy",
        "--sampler",
        "toy",
        "--model",
        "demo-moe",
        "--num-probes",
        "2",
        "--out",
        str(tmp_path / "run"),
        "--json",
        "-q",
    )
    (pair,) = json.loads(done.stdout)["pairs"]
    assert pair["causes"] == []


def test_live_attribution_reaches_the_summary_and_the_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    planted("norm_cast_order", run)
    done = minite("attribute", str(run), "--live", "--budget", "60", "--json")
    assert done.returncode == 0, done.stderr
    live = json.loads(done.stdout)["live"]
    assert live["forwards"]["total"] <= 60
    born = {row["site"] for row in live["local"] if row["bitwise_local"] < 1.0}
    assert born == {"model.layers.1.input_layernorm"}
    assert "born in" in done.stderr
    assert "norm" in done.stderr.split("born in")[1].splitlines()[0]
    assert "The engines against themselves" in (run / "report.html").read_text()
    rows = pd.read_parquet(run / "attribution.parquet")
    assert {"leg", "local", "causal-ops"} <= set(rows["analysis"])


def test_explain_lists_and_shows_pages() -> None:
    assert "MD102  weight scales cover another tile" in minite("explain").stdout
    assert "NVTE_NVFP4_DISABLE_2D_QUANTIZATION" in minite("explain", "md102").stdout
    assert "did you mean" in minite("explain", "MD10Z").stderr
