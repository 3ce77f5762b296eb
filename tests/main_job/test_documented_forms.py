"""Forms of the main job that the README shows and no other test runs."""

import json
from typing import Any

import jsonschema
from command import ROOT, minite


def test_row_scaled_activations_of_the_experts_alone(compare: Any) -> None:
    done = compare(
        "row-scaled-experts",
        *("--learner", "te:recipe=te-row-scaled", "--sampler", "vllm", "--quantize", "experts"),
        *("--model", "demo-moe", "--num-probes", "1", "--modes", "score"),
    )
    assert done.code == 0, done.stderr
    rows = done.rows[done.rows["kind"] == "weight_codes"]
    assert len(rows)
    assert rows["fqn"].str.contains(".experts.", regex=False).all()
    codes = {cause["code"]: cause for cause in done.summary["pairs"][0]["causes"]}
    assert "learner token" in codes["MD101"]["text"]


def test_the_json_of_a_real_run_follows_its_schema(te_vs_vllm: Any) -> None:
    schema = json.loads((ROOT / "docs" / "summary.schema.json").read_text())
    jsonschema.validate(te_vs_vllm.summary, schema)
    judged = minite("gate", str(te_vs_vllm.run), "--json", "--limit", "rel_l2=9@*:output")
    jsonschema.validate(json.loads(judged.stdout), schema)
