"""The shipped probe sets: hashes, vocabularies, categories, and that they can be rebuilt."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers

PROBES = Path(__file__).parent.parent / "probes"
VOCAB = {"smollm2": 49152, "demo-moe": 288}
REQUIRED = {"chat", "maths", "code", "long-context", "multilingual", "repeats"}


def records(name: str) -> list[dict[str, Any]]:
    lines = (PROBES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def rebuild() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probes_rebuild", PROBES / "rebuild.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["default", "smollm2", "demo-moe"])
def test_every_category_is_there_and_ids_are_unique(name: str) -> None:
    rows = records(name)
    assert {row["category"] for row in rows} >= REQUIRED
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["text"] for row in rows)


@pytest.mark.parametrize("name", sorted(VOCAB))
def test_fixed_ids_are_hashed_and_in_the_vocabulary(name: str) -> None:
    for row in records(name):
        ids = row["token_ids"]
        packed = struct.pack(f"<{len(ids)}i", *ids)
        assert row["sha256"] == hashlib.sha256(packed).hexdigest(), row["id"]
        assert min(ids) >= 0 and max(ids) < VOCAB[name]
        # A prompt of the whole sequence would leave `score` mode nothing after it.
        assert 1 <= row["prompt_length"] < len(ids)


def test_one_probe_is_a_few_hundred_tokens_and_the_set_stays_small() -> None:
    for name in VOCAB:
        lengths = sorted(len(row["token_ids"]) for row in records(name))
        assert lengths[-1] >= 240 and lengths[-2] <= 100 and sum(lengths) <= 1000


def test_default_texts_carry_no_ids_and_no_markers_of_one_model() -> None:
    for row in records("default"):
        assert "token_ids" not in row and "<|" not in row["text"]


def test_byte_ids_are_those_of_the_shipped_tokenizer(rebuild: ModuleType) -> None:
    folder = PROBES.parent / "minite_diag" / "checkpoints" / "demo_moe"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row in records("demo-moe"):
        assert tokenizer.encode(row["text"]).ids == row["token_ids"]
        assert rebuild.encode_bytes(row["text"]) == row["token_ids"]
        assert tokenizer.decode(row["token_ids"], skip_special_tokens=False) == row["text"]


def test_rebuilding_changes_no_byte(rebuild: ModuleType) -> None:
    def line(record: dict[str, Any]) -> str:
        return json.dumps(record, ensure_ascii=False)

    moe = [line(rebuild.tokenized(text, rebuild.encode_bytes)) for text in rebuild.BYTES]
    assert moe == [line(row) for row in records("demo-moe")]
    assert [line(rebuild.untokenized(text)) for text in rebuild.COMMON] == [
        line(row) for row in records("default")
    ]
    assert [text.prompt + text.rest for text in rebuild.COMMON] == [
        row["text"] for row in records("smollm2")
    ]
