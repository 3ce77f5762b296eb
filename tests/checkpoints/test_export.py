"""Export: the bytes on disk are those of `quantize`, in both layouts, streamed and atomic."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minite_diag.checkpoints import (
    Checkpoint,
    export,
    iter_tensors,
    open_checkpoint,
    quantized_names,
    read_quantized,
)
from minite_diag.checkpoints.demo import open_demo_moe
from minite_diag.errors import CheckpointError, UsageError
from minite_kernels.nvfp4.quantize import dequantize, global_scale, quantize

LAYOUTS = ("modelopt", "compressed-tensors")
RECIPES = ("te", "te-4over6", "vllm-emulation", "modelopt", "compressed-tensors", "pow2")


def as_bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some_amax(checkpoint: Checkpoint, pattern: str = "default") -> dict[str, float]:
    """A calibration with another amax for every linear, so that a mix-up shows."""
    return {fqn: 1.5 + 0.25 * i for i, fqn in enumerate(quantized_names(checkpoint, pattern))}


@pytest.fixture
def master(dense: Path) -> Checkpoint:
    return open_checkpoint(dense)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_on_disk_are_those_of_quantize_with_the_group_amax(
    master: Checkpoint, tmp_path: Path, layout: Any, recipe: str
) -> None:
    exported = export(master, recipe, layout, tmp_path / "out", calibration=some_amax(master))
    assert exported.format == f"nvfp4-{layout}"
    groups = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    for layer in range(2):
        for parent, members in zip(("self_attn", "self_attn", "mlp", "mlp"), groups, strict=True):
            names = [f"model.layers.{layer}.{parent}.{member}" for member in members]
            weights = {name: master.read_weight(name) for name in names}
            amax = max(w.abs().max() for w in weights.values()).float()
            for name, weight in weights.items():
                q = quantize(weight, recipe, role="weight", amax=amax)
                stored = read_quantized(exported, name)
                assert as_bytes(stored.codes) == as_bytes(q.codes)
                assert as_bytes(stored.block_scale) == as_bytes(q.block_scale)
                want = q.global_decode_scale if layout == "modelopt" else q.global_encode_scale
                assert as_bytes(stored.global_scale) == as_bytes(want)
                assert stored.direction == ("decode" if layout == "modelopt" else "encode")
    assert exported.quantized_linear_names() == quantized_names(master, "default")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_groups_share_weight_and_input_scales_and_others_do_not(
    master: Checkpoint, tmp_path: Path, layout: Any
) -> None:
    amax = some_amax(master)
    exported = export(master, "te", layout, tmp_path / "out", calibration=amax)
    layer = "model.layers.0"
    qkv = [read_quantized(exported, f"{layer}.self_attn.{p}_proj") for p in "qkv"]
    gate_up = [read_quantized(exported, f"{layer}.mlp.{p}_proj") for p in ("gate", "up")]
    scales = []
    for group in (qkv, gate_up, [read_quantized(exported, f"{layer}.mlp.down_proj")]):
        assert len({as_bytes(w.global_scale) for w in group}) == 1
        assert len({as_bytes(w.input_global_scale) for w in group}) == 1
        scales.append((as_bytes(group[0].global_scale), as_bytes(group[0].input_global_scale)))
    assert len(set(scales)) == 3
    largest = torch.tensor(max(amax[f"{layer}.self_attn.{p}_proj"] for p in "qkv"))
    encode = torch.tensor(2688.0) / largest
    want = encode if layout == "compressed-tensors" else torch.tensor(1.0) / encode
    assert qkv[0].input_global_scale.item() == pytest.approx(want.item(), rel=2**-22)


@pytest.mark.parametrize("recipe", RECIPES)
def test_input_scale_is_the_recipes_scale_of_bf16_activations(
    master: Checkpoint, tmp_path: Path, recipe: str
) -> None:
    name = "model.layers.0.mlp.down_proj"
    amax = some_amax(master) | {name: 1.7}
    exported = export(master, recipe, "compressed-tensors", tmp_path / "out", calibration=amax)
    x = torch.zeros(2, 96, dtype=torch.bfloat16)
    want = global_scale(x, recipe, role="activation", amax=torch.tensor(1.7)).encode
    stored = read_quantized(exported, name).input_global_scale
    assert as_bytes(stored) == as_bytes(want)
    if recipe == "compressed-tensors":
        # Its observer works in the dtype of the activations, which shows here.
        fp32 = global_scale(x.float(), recipe, role="activation", amax=torch.tensor(1.7)).encode
        assert as_bytes(stored) != as_bytes(fp32)


def test_te_tiles_are_replicated_to_rows(master: Checkpoint, tmp_path: Path) -> None:
    exported = export(master, "te", "modelopt", tmp_path / "out", calibration=some_amax(master))
    scale = read_quantized(exported, "model.layers.0.mlp.gate_proj").block_scale
    tiles = scale.view(6, 16, 4)
    assert tiles.eq(tiles[:, :1]).all()
    assert len(scale.unique()) > 3
    one_d = export(master, "te-1d", "modelopt", tmp_path / "1d", calibration=some_amax(master))
    rows = read_quantized(one_d, "model.layers.0.mlp.gate_proj").block_scale.view(6, 16, 4)
    assert not rows.eq(rows[:, :1]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_quantized_keeps_its_bytes(
    master: Checkpoint, tmp_path: Path, layout: Any
) -> None:
    pattern = "default,!*.layers.1.*"
    exported = export(master, "te", layout, tmp_path / "out", pattern, some_amax(master, pattern))
    before, after = load_file(master.path / "model.safetensors"), dict(iter_tensors(exported.path))
    kept = [name for name in before if ".layers.0." not in name or "norm" in name]
    assert len(kept) == 2 + 1 + 4 + 7
    for name in kept:
        assert as_bytes(before[name]) == as_bytes(after[name])
    assert not any("scale" in name for name in after if ".layers.1." in name)


def test_compressed_tensors_library_decodes_the_export_to_our_values(
    master: Checkpoint, tmp_path: Path
) -> None:
    from compressed_tensors.compressors.nvfp4 import helpers

    layout = "compressed-tensors"
    exported = export(master, "te", layout, tmp_path / "out", calibration=some_amax(master))
    for name in exported.quantized_linear_names():
        stored = read_quantized(exported, name)
        n, k = master.shape(name)
        values = helpers.unpack_fp4_from_uint8(stored.codes, n, k, dtype=torch.float32)
        scale = stored.block_scale.view(torch.float8_e4m3fn).float() / stored.global_scale
        theirs = values.view(n, -1, 16) * scale[..., None]
        group = [f for f in exported.quantized_linear_names() if _same_group(f, name)]
        amax = max(master.read_weight(f).abs().max() for f in group).float()
        q = quantize(master.read_weight(name), "te", role="weight", amax=amax)
        assert torch.allclose(theirs.flatten(1), dequantize(q), rtol=2**-20, atol=0)
        error = theirs.flatten(1) - master.read_weight(name).float()
        assert error.norm() / master.read_weight(name).float().norm() < 0.15


def _same_group(a: str, b: str) -> bool:
    from minite_diag.checkpoints import fused_group

    return fused_group(a) == fused_group(b)


def test_library_reads_what_our_writer_wrote_and_tensors_are_aligned(
    master: Checkpoint, tmp_path: Path
) -> None:
    exported = export(master, "te", "modelopt", tmp_path / "out", calibration=some_amax(master))
    theirs = load_file(exported.path / "model.safetensors")
    ours = dict(iter_tensors(exported.path))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert value.dtype == ours[name].dtype
        assert as_bytes(value) == as_bytes(ours[name])
    assert all(i.offset % ours[n].dtype.itemsize == 0 for n, i in exported.tensors.items())


def test_sharded_source_and_sharded_output_hold_the_same_tensors(
    master: Checkpoint, sharded: Path, tmp_path: Path
) -> None:
    one = export(master, "te", "modelopt", tmp_path / "one", calibration=some_amax(master))
    many = export(
        open_checkpoint(sharded),
        "te",
        "modelopt",
        tmp_path / "many",
        calibration=some_amax(master),
        shard_bytes=10_000,
    )
    shards = sorted(many.path.glob("model-*.safetensors"))
    assert len(shards) > 3
    index = json.loads((many.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(i.num_bytes for i in many.tensors.values())
    for shard in shards:
        load_file(shard)
    assert many.tensors.keys() == one.tensors.keys()
    for (name, a), (_, b) in zip(iter_tensors(one.path), iter_tensors(many.path), strict=True):
        assert as_bytes(a) == as_bytes(b), name


def test_exporting_twice_gives_equal_files(master: Checkpoint, tmp_path: Path) -> None:
    for out in ("a", "b"):
        export(master, "te", "modelopt", tmp_path / out, calibration=some_amax(master))
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert "minite_export.json" in files
    assert files == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_only_one_fused_group_is_in_memory(
    master: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minite_diag.checkpoints import reader

    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0
    real = reader.load

    def counted(info: Any) -> torch.Tensor:
        nonlocal peak
        value = real(info)
        alive.append(weakref.ref(value))
        held = (ref() for ref in alive)
        peak = max(peak, sum(t.numel() * t.element_size() for t in held if t is not None))
        return value

    monkeypatch.setattr(reader, "load", counted)
    export(master, "te", "modelopt", tmp_path / "out", calibration=some_amax(master))
    largest_group = 2 * 96 * 64 * 2
    # The last group may still be referenced while the next one's first weight is read.
    assert peak <= 2 * largest_group < sum(i.num_bytes for i in master.tensors.values()) / 2


def test_refuses_to_overwrite_and_leaves_nothing_behind_a_failure(
    master: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        export(master, "te", "modelopt", out, calibration=some_amax(master))
    assert (out / "mine").read_text() == "precious"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_weights_are_an_error_and_nothing_is_written(
    tmp_path: Path, bad: float, dense: Path
) -> None:
    from .conftest import dense_weights, write_folder

    weights = dense_weights()
    weights["model.layers.1.mlp.up_proj.weight"][0, :32] = bad
    broken = open_checkpoint(write_folder(tmp_path / "broken", weights))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj of broken holds NaN"):
        export(broken, "te", "modelopt", tmp_path / "out", calibration=some_amax(broken))
    assert sorted(tmp_path.iterdir()) == before


def test_all_zero_weights_export_under_te_and_fail_where_the_recipe_has_no_answer(
    tmp_path: Path,
) -> None:
    from .conftest import dense_weights, write_folder

    weights = dense_weights()
    weights["model.layers.0.mlp.down_proj.weight"].zero_()
    master = open_checkpoint(write_folder(tmp_path / "zero", weights))
    exported = export(master, "te", "modelopt", tmp_path / "te", calibration=some_amax(master))
    stored = read_quantized(exported, "model.layers.0.mlp.down_proj")
    assert not stored.codes.any()
    assert stored.global_scale == 1
    with pytest.raises(CheckpointError, match="global scale"):
        export(master, "modelopt", "modelopt", tmp_path / "mo", calibration=some_amax(master))


def test_missing_calibration_wrong_names_and_requantizing_are_errors(
    master: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="need a calibration"):
        export(master, "te", "modelopt", out)
    with pytest.raises(CheckpointError, match="the calibration lacks"):
        export(master, "te", "modelopt", out, calibration={"lm_head": 1.0})
    with pytest.raises(UsageError, match="unknown recipe 'tee'"):
        export(master, "tee", "modelopt", out, activations="none")
    with pytest.raises(UsageError, match="unknown layout"):
        export(master, "te", "gguf", out, activations="none")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="leaves nothing to export"):
        export(master, "te", "modelopt", out, "none", activations="none")
    assert not out.exists()
    exported = export(master, "te", "modelopt", out, activations="none")
    with pytest.raises(CheckpointError, match="nvfp4-modelopt already"):
        export(exported, "te", "modelopt", tmp_path / "again", activations="none")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_only_export_says_so_and_has_no_input_scales(
    master: Checkpoint, tmp_path: Path, layout: Any
) -> None:
    exported = export(master, "te", layout, tmp_path / "out", activations="none")
    assert not any("input" in name and "scale" in name for name in exported.tensors)
    group = exported.config["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] is None
    assert read_quantized(exported, "model.layers.0.mlp.up_proj").input_global_scale is None


def test_kept_linears_are_named_in_both_layouts_configs(tmp_path: Path) -> None:
    moe = open_demo_moe()
    pattern = "attention,!model.layers.2.*"
    amax = some_amax(moe, pattern)
    modelopt = export(moe, "te", "modelopt", tmp_path / "mo", pattern, amax)
    ignore = modelopt.config["quantization_config"]["ignore"]
    legacy = json.loads((modelopt.path / "hf_quant_config.json").read_text())
    assert legacy["quantization"]["exclude_modules"] == ignore
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts*"} <= set(ignore)
    for part in ("q_proj", "qkv_proj", "o_proj"):
        assert f"model.layers.2.self_attn.{part}" in ignore
        assert f"model.layers.1.self_attn.{part}" not in ignore
    ct = export(moe, "te", "compressed-tensors", tmp_path / "ct", pattern, amax)
    ignore = ct.config["quantization_config"]["ignore"]
    assert "re:model[.]layers[.]3[.]mlp[.]experts[.].*" in ignore
    assert "model.layers.2.self_attn.q_proj" in ignore


def test_export_record_and_tokenizer_go_along(tmp_path: Path) -> None:
    from minite_diag.checkpoints import Calibration

    moe = open_demo_moe()
    fallback = {"model.layers.0.mlp.experts.3.down_proj": "saw no token"}
    amax = Calibration(some_amax(moe, "experts"), fallback)
    exported = export(moe, "te", "modelopt", tmp_path / "out", "experts", amax)
    record = json.loads((exported.path / "minite_export.json").read_text())
    assert record["recipe"] == "te"
    assert record["quantize"] == "experts"
    assert record["quantized"] == quantized_names(moe, "experts")
    assert record["source"]["fingerprint"] == moe.fingerprint
    assert record["input_amax_fallbacks"] == fallback
    assert exported.notes == moe.notes == open_checkpoint(exported.path).notes
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported.path / name).read_bytes() == (moe.path / name).read_bytes()
    assert not (exported.path / "training.json").exists()


def _cut_block_scale(file: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    file[name] = file[name][:, :-1].contiguous()


def _drop_block_scale(file: dict[str, torch.Tensor]) -> None:
    del file["model.layers.0.mlp.up_proj.weight_scale"]


def _widen_global_scale(file: dict[str, torch.Tensor]) -> None:
    file["model.layers.0.mlp.up_proj.weight_scale_2"] = torch.ones(3)


@pytest.mark.parametrize("damage", [_cut_block_scale, _drop_block_scale, _widen_global_scale])
def test_damaged_nvfp4_checkpoints_are_refused(
    master: Checkpoint, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    from safetensors.torch import save_file

    exported = export(master, "te", "modelopt", tmp_path / "out", activations="none")
    file = load_file(exported.path / "model.safetensors")
    damage(file)
    save_file(file, exported.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight_scale"):
        open_checkpoint(exported.path)


def test_read_quantized_only_reads_what_is_quantized(master: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no NVFP4 codes"):
        read_quantized(master, "lm_head")
    exported = export(master, "te", "modelopt", tmp_path / "out", activations="none")
    with pytest.raises(CheckpointError, match="lm_head of out is not quantized"):
        read_quantized(exported, "lm_head")
    with pytest.raises(CheckpointError, match="stored as NVFP4 codes"):
        exported.read_weight("model.layers.0.mlp.up_proj")
    assert exported.shape("model.layers.0.mlp.down_proj") == (64, 96)
