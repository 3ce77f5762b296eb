"""What differs in vLLM 0.23 on CUDA, on stand-ins: layers, kernels, scales that Marlin overwrites.

tests/gpu/engines.py runs the real one.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from minite_diag.engines.vllm_plugin import readback, statics
from minite_diag.engines.vllm_plugin.hooks import hidden_quantizer, is_weight_only
from minite_diag.engines.vllm_plugin.layout import expert_layers
from minite_diag.engines.vllm_plugin.snapshot import WeightSnapshot
from minite_diag.errors import EngineError

GPU_SCRIPTS = Path(__file__).parents[1] / "gpu"


class MarlinNvFp4LinearKernel:
    pass


class EmulationNvFp4LinearKernel:
    pass


class ModelledKernel:
    recipe = SimpleNamespace(name="pow2-row-scaled")


def linear(kernel: Any, **scales: torch.Tensor) -> Any:
    module = nn.Module()
    module.quant_method = SimpleNamespace(kernel=kernel)
    module.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    for name, scale in scales.items():
        module.register_parameter(name, nn.Parameter(scale, requires_grad=False))
    return module


def snapshot_of(module: str, **tensors: torch.Tensor) -> WeightSnapshot:
    snapshot = WeightSnapshot()
    for name, tensor in tensors.items():
        snapshot._spill(module, name, tensor)
    return snapshot


def experts_of_023(**attributes: Any) -> nn.Module:
    layer = nn.Module()
    layer.runner = nn.Module()
    layer.router = SimpleNamespace()
    layer.quant_method = SimpleNamespace(is_monolithic=False, **attributes)
    layer.local_num_experts = 2
    layer.moe_config = SimpleNamespace(
        intermediate_size_per_partition=128, intermediate_size_per_partition_unpadded=96
    )
    return layer


def test_experts_are_found_where_each_version_keeps_them() -> None:
    model = nn.Module()
    model.new = experts_of_023(nvfp4_backend="MARLIN")
    old = nn.Module()
    old.routed_experts = nn.Module()
    old.routed_experts.quant_method = SimpleNamespace()
    old.router = SimpleNamespace()
    model.old = old
    layers = {layer.name: layer for layer in expert_layers(model)}
    assert layers.keys() == {"new", "old"}
    assert layers["new"].weights is model.new
    assert layers["new"].holder == "new"
    assert layers["new"].is_nvfp4
    assert (layers["new"].num_experts, layers["new"].intermediate_size) == (2, 96)
    assert layers["old"].weights is old.routed_experts
    assert layers["old"].holder == "old.routed_experts"
    assert not layers["old"].is_nvfp4
    assert not layers["new"].is_monolithic
    model.new.quant_method.is_monolithic = True
    assert layers["new"].is_monolithic


def test_marlin_shows_no_codes_and_says_w4a16() -> None:
    module = linear(MarlinNvFp4LinearKernel())
    assert is_weight_only(module)
    assert "W4A16" in str(hidden_quantizer(module))
    (item,) = readback._nvfp4_linear(module)
    assert (item.op, item.status) == ("nvfp4_linear", "native")
    assert "does not quantize activations" in item.note


def test_codes_are_seen_on_cpu_and_in_our_kernels_only() -> None:
    assert hidden_quantizer(linear(EmulationNvFp4LinearKernel())) is None
    assert hidden_quantizer(linear(ModelledKernel())) is None
    on_gpu = linear(EmulationNvFp4LinearKernel()).to("meta")
    assert "inside a kernel" in str(hidden_quantizer(on_gpu))
    found = list(readback._nvfp4_linear(on_gpu))
    assert [item.status for item in found] == ["emulated", "emulated"]
    assert "not visible" in found[1].note


def test_the_weight_scale_is_the_loaded_one_where_marlin_wrote_its_own() -> None:
    processed = {"weight_global_scale": torch.tensor(8.0)}
    marlin = linear(MarlinNvFp4LinearKernel(), **processed)
    modelopt = snapshot_of("q", weight_scale_2=torch.tensor([0.25, 0.5]))
    assert statics._weight_decode_scale("q", marlin, modelopt) == 0.5
    stored = snapshot_of("q", weight_global_scale=torch.tensor([4.0, 2.0]))
    assert statics._weight_decode_scale("q", marlin, stored) == 0.25
    other = linear(EmulationNvFp4LinearKernel(), **processed)
    assert statics._weight_decode_scale("q", other, modelopt) == 8.0


def test_expert_scales_as_loaded() -> None:
    model = nn.Module()
    model.experts = experts_of_023(nvfp4_backend="MARLIN")
    (layer,) = expert_layers(model)
    scales = torch.tensor([[0.5, 0.5], [0.25, 0.25]])
    modelopt = snapshot_of("experts", w13_weight_scale_2=scales)
    assert statics._stored_expert_scale(layer, "w13", modelopt).tolist() == [0.5, 0.25]
    with pytest.raises(EngineError, match="no weight scale of w2"):
        statics._stored_expert_scale(layer, "w2", modelopt)
    model.experts.w2_weight_global_scale = nn.Parameter(torch.tensor([2.0, 8.0]))
    assert statics._stored_expert_scale(layer, "w2", modelopt).tolist() == [0.5, 0.125]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GPU_SCRIPTS))
    import engines

    yield engines
    sys.modules.pop("engines")


def test_the_gpu_script_climbs_in_the_folders_that_align_reads(scripts: Any) -> None:
    steps = scripts.steps()
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert all(set(step.after) <= set(names) for step in steps)
    runs = {step.run for step in steps}
    assert {f"ladder/align/{i}-{rung}" for i, rung in enumerate(scripts.LADDER, 1)} <= runs
    table = steps[names.index("ladder-table")]
    assert set(table.after) == {n for n in names if n.startswith("ladder")} - {"ladder-table"}


def test_the_gpu_script_runs_what_waits_after_what_it_waits_for(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(name: str, code: str, *after: str) -> Any:
        return scripts.Step(name, (sys.executable, "-c", code), after)

    (tmp_path / "logs").mkdir()
    mark = f"open(r'{tmp_path}/mark', 'w').close()"
    chosen = [
        step("second", f"open(r'{tmp_path}/mark')", "first"),
        step("first", mark),
        step("fails", "raise SystemExit('why')"),
    ]
    results = {r["step"]: r for r in scripts.climb(chosen, tmp_path, 2, 60.0)}
    assert [results[name]["code"] for name in ("first", "second", "fails")] == [0, 0, 1]
    assert "why" in results["fails"]["log"]
    assert "fails" in capsys.readouterr().out
    scripts.pack(tmp_path, tmp_path / "packed")
    assert (tmp_path / "packed.tar.xz").stat().st_size > 0
