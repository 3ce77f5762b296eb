"""Log-probabilities that a training run logged are compared and gated like any other run."""

import json
import random

import pytest

from minite_diag.errors import UsageError
from minite_diag.external.logprobs_jsonl import read_jsonl
from tests.external.conftest import minite


def line(i, noise, tokens=40, prompt=10, **more):
    rng = random.Random(i)
    ids = [rng.randrange(500) for _ in range(tokens)]
    learner = [-rng.expovariate(0.5) for _ in range(tokens - prompt)]
    sampler = [min(0.0, value + rng.gauss(0, noise)) for value in learner]
    record = {"id": f"rollout-{i}", "token_ids": ids, "prompt_length": prompt}
    return record | {"learner_logprobs": learner, "sampler_logprobs": sampler} | more


def write(path, *records):
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    return path


def run(tmp_path, *records, profile="bf16-dense"):
    file = write(tmp_path / "rollouts.jsonl", *records)
    out = tmp_path / "run"
    done = minite("import", str(file), "-o", str(out), "--gate", profile, "--json", "-q")
    return done.exit_code, json.loads(done.stdout), out


def test_equal_sides_pass_and_large_gaps_fail(tmp_path):
    code, summary, out = run(tmp_path, *(line(i, 0.0) for i in range(30)), profile="bitwise")
    assert (code, summary["verdict"]) == (0, "pass")
    sample = summary["pairs"][0]["logprob"]["sample"]
    assert (sample["tokens"], sample["equal"], sample["max_abs"]) == (900, 900, 0.0)
    assert (out / "report.html").exists()
    (tmp_path / "b").mkdir()
    code, summary, out = run(tmp_path / "b", *(line(i, 0.3) for i in range(30)))
    assert (code, summary["verdict"]) == (1, "fail")
    assert minite("gate", str(out), "--profile", "nvfp4").exit_code == 1


def test_the_meaning_of_the_numbers_is_checked_first(tmp_path):
    records = []
    for i in range(10):
        record = line(i, 0.0)
        record["sampler_logprobs"] = [value / 0.7 for value in record["learner_logprobs"]]
        records.append(record)
    code, summary, _ = run(tmp_path, *records)
    assert code == 3
    assert summary["pairs"][0]["causes"][0]["code"] == "MD403"
    (tmp_path / "b").mkdir()
    other = line(0, 0.0)
    other["learner_token_ids"] = [*other["token_ids"][:-1], 499]
    other["token_ids"][-1] = 3
    code, summary, _ = run(tmp_path / "b", other, *(line(i, 0.0) for i in range(1, 9)))
    assert code == 3
    assert summary["pairs"][0]["causes"][0]["code"] == "MD406"


def test_whole_and_response_lists_are_the_same(tmp_path):
    short = line(1, 0.1)
    whole = {
        **short,
        "id": "whole",
        "learner_logprobs": [None] * 10 + short["learner_logprobs"],
        "sampler_logprobs": [None] * 10 + short["sampler_logprobs"],
    }
    a, b = read_jsonl(write(tmp_path / "f.jsonl", short, whole))
    assert a.logprobs == b.logprobs
    assert a.logprobs["learner"][:10] == (None,) * 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": "abc"}, "token_ids is not a list of token ids"),
        ({"prompt_length": 40}, "prompt_length 40 of 40 tokens"),
        ({"sampler_logprobs": [0.0] * 7}, "7 values for 40 tokens"),
        ({"sampler_logprobs": [float("nan")] * 30}, "not a list of numbers or null"),
        ({"learner_logprobs": None}, "learner_logprobs is not a list"),
        ({"learner_token_ids": [1, 2]}, "learner_token_ids has 2 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, said):
    file = write(tmp_path / "f.jsonl", line(0, 0.0), line(1, 0.0, **change))
    with pytest.raises(UsageError, match=r"f\.jsonl:2") as caught:
        read_jsonl(file)
    assert said in caught.value.message


def test_files_that_are_no_jsonl(tmp_path):
    for text, said in (("", "no sequence"), ("{", "not JSON"), ("[1]", "not a JSON object")):
        file = tmp_path / "f.jsonl"
        file.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_jsonl(file)
    with pytest.raises(UsageError, match="can't read"):
        read_jsonl(tmp_path / "none.jsonl")
    write(tmp_path / "f.jsonl", line(0, 0.0), line(0, 0.0))
    with pytest.raises(UsageError, match="occurs twice"):
        read_jsonl(tmp_path / "f.jsonl")


def test_a_run_is_not_written_over(tmp_path):
    _, _, out = run(tmp_path, line(0, 0.0))
    done = minite("import", str(tmp_path / "rollouts.jsonl"), "-o", str(out))
    assert done.exit_code == 2
    assert "holds a run already" in done.stderr


def test_an_imported_run_can_not_be_run_again_and_that_is_said(tmp_path):
    _, _, out = run(tmp_path, *(line(i, 0.1) for i in range(3)))
    done = minite("align", str(out))
    assert done.exit_code == 3
    assert "request.json is missing" in done.stderr
    assert "no import" in done.stderr
