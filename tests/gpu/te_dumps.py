"""Debug dumps of real Transformer Engine modules (nvdlfw-inspect), and the same tensors as proof.

    python tests/gpu/te_dumps.py --out DIR

One process per case. A case leaves under DIR/CASE what TE's features wrote (`tensor_dumps/`,
`nvdlfw_inspect_statistics_logs/`), `tokens.jsonl` (which token each row is), and in DIR/CASE/proof
the tensors that hooks saw in the same calls, as plain tensors. DIR/cases.json says which cases ran,
and with which exception one ended: `nvfp4-native` needs compute capability 10, and TE's reference
tensors of a custom recipe have no `clone`, which its DumpTensors calls.

Needs transformer_engine, nvdlfw_inspect and PyYAML; nothing of minite_diag.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN = 32, 4, 2, 8, 64
LENGTHS: Final = (20, 12)
"""Tokens of each sequence; 32 rows together, which NVFP4 needs."""

LAYERS: Final = {
    "decoder.layers.0.self_attention.linear_qkv": (HIDDEN, (HEADS + 2 * GROUPS) * HEAD_DIM),
    "decoder.layers.0.self_attention.linear_proj": (HEADS * HEAD_DIM, HIDDEN),
    "decoder.layers.0.mlp.linear_fc1": (HIDDEN, 2 * FFN),
    "decoder.layers.0.mlp.linear_fc2": (FFN, HIDDEN),
}
"""Megatron's names -> (in features, out features)."""

FORWARD: Final = ("activation", "weight", "output")
BACKWARD: Final = ("gradient", "wgrad", "dgrad")

CASES: Final[dict[str, dict[str, Any]]] = {
    "bf16": {"tensors": FORWARD, "high": True, "quantized": False, "steps": 2},
    "bf16-backward": {"tensors": FORWARD + BACKWARD, "high": True, "quantized": False},
    "fp8-current": {"tensors": FORWARD[:2], "high": True, "quantized": True},
    "fp8-block": {"tensors": FORWARD[:2], "high": True, "quantized": True},
    "nvfp4-reference": {"tensors": FORWARD, "high": True, "quantized": False},
    "nvfp4-reference-quantized": {"tensors": FORWARD[:2], "high": True, "quantized": True},
    "nvfp4-tensor": {"tensors": FORWARD[:2], "high": True, "quantized": True},
    "nvfp4-native": {"tensors": FORWARD[:2], "high": True, "quantized": True},
    "statistics": {"tensors": (), "high": False, "quantized": False},
}


def recipe_of(case: str) -> Any:
    """TE's recipe of a case; None for BF16."""
    from transformer_engine.common import recipe

    if case == "fp8-current":
        return recipe.Float8CurrentScaling()
    if case == "fp8-block":
        return recipe.Float8BlockScaling()
    if case == "nvfp4-native":
        return recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    if case.startswith("nvfp4-reference"):
        from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import (
            nvfp4_ref_rht_2d_factory,
        )

        return recipe.CustomRecipe(qfactory=nvfp4_ref_rht_2d_factory)
    return None


def write_config(folder: Path, case: str) -> Path:
    """The nvdlfw-inspect configuration of a case."""
    wanted = CASES[case]
    features: dict[str, Any] = {}
    if wanted["tensors"]:
        features["DumpTensors"] = {
            "enabled": True,
            "tensors_struct": [
                {
                    "tensor": name,
                    "high_precision_tensor": wanted["high"],
                    "quantized_tensor": wanted["quantized"],
                }
                for name in wanted["tensors"]
            ],
        }
    else:
        features["LogTensorStats"] = {
            "enabled": True,
            "tensors_struct": [
                {"tensor": name, "stats": ["min", "max", "mean", "l2_norm"]} for name in FORWARD[:2]
            ],
        }
    layers = {"layer_name_regex_pattern": ".*"}
    config = {"dumps": {"enabled": True, "layers": layers, "transformer_engine": features}}
    file = folder / "config.yaml"
    file.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
    return file


def write_tokens(folder: Path) -> None:
    """Which token each row is: sequences one after the other."""
    generator = torch.Generator().manual_seed(7)
    lines = []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(0, 1000, (length,), generator=generator).tolist()
        lines.append(json.dumps({"id": f"sequence-{i}", "token_ids": ids, "prompt_length": 4}))
    (folder / "tokens.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def inspecting(folder: Path, case: str) -> Iterator[Any]:
    """nvdlfw-inspect with TE's own features, writing into `folder`."""
    import nvdlfw_inspect.api as inspect_api
    import transformer_engine

    features = Path(transformer_engine.__file__).parent / "debug" / "features"
    inspect_api.initialize(
        config_file=str(write_config(folder, case)),
        feature_dirs=[str(features)],
        log_dir=str(folder),
        default_logging_enabled=True,
    )
    try:
        yield inspect_api
    finally:
        inspect_api.end_debug()


class Proof:
    """What forward hooks saw, by step, layer and tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0

    def watch(self, name: str, module: Any) -> None:
        """Save input, weight and output of each call of a module."""

        def hook(module: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
            self.save(name, "activation", arguments[0])
            self.save(name, "weight", module.weight)
            self.save(name, "output", output)

        module.register_forward_hook(hook)

    def save(self, layer: str, tensor: str, value: torch.Tensor) -> None:
        """Write one tensor."""
        file = self.folder / f"step-{self.step}" / f"{layer}--{tensor}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value.detach().cpu().clone(), file)


def build(proof: Proof) -> dict[str, Any]:
    """The four linears of a decoder layer, with weights of a fixed seed."""
    import transformer_engine.pytorch as te

    generator = torch.Generator().manual_seed(1)
    modules = {}
    for name, (k, n) in LAYERS.items():
        module = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda", name=name)
        with torch.no_grad():
            module.weight.copy_(torch.randn(n, k, generator=generator).mul(0.2).bfloat16())
        proof.watch(name, module)
        modules[name] = module
    return modules


def run_layer(modules: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """x [T, H] -> [T, H]; attention is left out, its place takes a slice of the qkv output."""
    qkv, proj, fc1, fc2 = modules.values()
    x = proj(qkv(x)[:, : HEADS * HEAD_DIM].contiguous())
    gate, up = fc1(x).chunk(2, -1)
    return fc2(torch.nn.functional.silu(gate) * up)


def run_modules(folder: Path, case: str) -> None:
    """Forward (and backward) passes under nvdlfw-inspect."""
    import transformer_engine.pytorch as te

    proof = Proof(folder / "proof")
    recipe = recipe_of(case)
    with inspecting(folder, case) as inspect_api:
        modules = build(proof)
        generator = torch.Generator().manual_seed(2)
        for step in range(CASES[case].get("steps", 1)):
            proof.step = step
            x = torch.randn(sum(LENGTHS), HIDDEN, generator=generator).bfloat16().cuda()
            x.requires_grad_(case.endswith("backward"))
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = run_layer(modules, x)
            if case.endswith("backward"):
                y.float().square().mean().backward()
            inspect_api.step()


def run_nvfp4_tensor(folder: Path) -> None:
    """NVFP4Tensor objects through TE's DumpTensors, filled with what its reference quantizes.

    The quantization is the wheel's reference, which runs where the native kernel doesn't; class,
    padding of scales, pickling and file are TE's own.
    """
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory
    from transformer_engine.pytorch.quantization import QuantizerRole
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor

    proof = Proof(folder / "proof")
    generator = torch.Generator().manual_seed(3)
    with inspecting(folder, "nvfp4-tensor") as inspect_api:
        for layer, (k, n) in LAYERS.items():
            for name, rows, kind in (
                ("activation", sum(LENGTHS), "input"),
                ("weight", n, "weight"),
            ):
                value = torch.randn(rows, k, generator=generator).bfloat16().cuda()
                role = QuantizerRole(module_type="linear", tensor_type=kind)
                reference = nvfp4_ref_rht_2d_factory(role)
                reference.set_usage(rowwise=True, columnwise=False)
                found = reference.quantize(value)
                quantizer = NVFP4Quantizer(columnwise=False, with_2d_quantization=name == "weight")
                scales = found.scale.view(torch.uint8)
                padded = scales.new_zeros(quantizer.get_scale_shape(value.shape, columnwise=False))
                padded[: scales.shape[0], : scales.shape[1]] = scales
                amax = found.global_amax_row.float().reshape(1)
                tensor = NVFP4Tensor(
                    shape=value.shape,
                    dtype=torch.bfloat16,
                    rowwise_data=found.data.contiguous(),
                    rowwise_scale_inv=padded,
                    columnwise_data=None,
                    columnwise_scale_inv=None,
                    amax_rowwise=amax,
                    amax_columnwise=None,
                    fp4_dtype=DType.kFloat4E2M1,
                    quantizer=quantizer,
                    with_gemm_swizzled_scales=False,
                    requires_grad=False,
                )
                inspect_api.transformer_engine.inspect_tensor(
                    layer_name=layer,
                    tensor_name=name,
                    iteration=0,
                    tp_group=None,
                    tensor=value,
                    rowwise_quantized_tensor=tensor,
                    columnwise_quantized_tensor=None,
                    quantizer=quantizer,
                    tp_size=1,
                )
                proof.save(layer, name, value)
                proof.save(layer, f"{name}-codes", found.data)
                proof.save(layer, f"{name}-block-scale", scales)
                proof.save(layer, f"{name}-amax", amax)


def run_case(case: str, folder: Path) -> None:
    """One case, in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder)
    if case == "nvfp4-tensor":
        run_nvfp4_tensor(folder)
    else:
        run_modules(folder, case)
    torch.cuda.synchronize()


def run_all(out: Path, names: list[str]) -> int:
    """Every case in its own process; the number of cases that left no file."""
    found: dict[str, Any] = {}
    for case in names:
        command = [sys.executable, __file__, "--out", str(out), "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        files = [f for f in (out / case).rglob("*") if f.is_file()]
        last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        found[case] = {
            "exit": done.returncode,
            "error": last[0] if last else None,
            "dumped": len([f for f in files if "tensor_dumps" in f.parts]),
            "bytes": sum(f.stat().st_size for f in files),
        }
        print(case, json.dumps(found[case]), flush=True)
        if done.returncode:
            (out / f"{case}.stderr").write_text(done.stderr[-8000:], encoding="utf-8")
    record = {
        "transformer_engine": importlib.metadata.version("transformer_engine"),
        "nvdlfw_inspect": importlib.metadata.version("nvdlfw_inspect"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "cases": found,
    }
    (out / "cases.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return sum(not row["dumped"] for case, row in found.items() if CASES[case]["tensors"])


def main() -> int:
    """Run all cases, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", choices=list(CASES))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.case is None:
        return run_all(arguments.out, list(CASES))
    try:
        run_case(arguments.case, arguments.out / arguments.case)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
