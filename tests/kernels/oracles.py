"""Loads the published NVFP4 code that our arithmetic is compared with, without its frameworks.

Each loader reads the file with the arithmetic from an installed distribution and stubs only what
that file imports from the rest of its package. Invariant: not one line of the arithmetic is ours,
and a missing oracle is an error, never a skip.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_INSTALL = "pip install --no-deps --target .oracles -r tests/kernels/oracles.txt"


def _folder() -> Path:
    folder = Path(os.environ.get("MINITE_ORACLES", _ROOT / ".oracles"))
    if not folder.is_dir():
        raise FileNotFoundError(f"no published quantizers in {folder}; run: {_INSTALL}")
    return folder


def _source(distribution: str, relative: str) -> Path:
    """Path of a file of an oracle package: in the oracle folder, else installed beside us."""
    path = _folder() / distribution / relative
    if path.is_file():
        return path
    spec = importlib.util.find_spec(distribution)
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / relative
    if not path.is_file():
        raise FileNotFoundError(f"no {distribution}/{relative}; run: {_INSTALL}")
    return path


@contextlib.contextmanager
def _modules(**stubs: types.ModuleType) -> Iterator[None]:
    """Put modules into ``sys.modules`` ("__" for a dot) and take everything new out again."""
    before = dict(sys.modules)
    sys.modules.update({name.replace("__", "."): module for name, module in stubs.items()})
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in {key.split("__")[0] for key in stubs}:
                del sys.modules[name]
        sys.modules.update(before)


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return module


def _load(path: Path, name: str, package: str = "") -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if package:
        module.__package__ = package
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def transformer_engine() -> Any:
    """TE's Python reference: ``reference_nvfp4`` with its two sibling modules, as shipped."""
    folder = "pytorch/custom_recipes"
    root = "transformer_engine"
    base = f"{root}.pytorch.custom_recipes"

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    storage = type("QuantizedTensorStorage", (), {})
    stubs = {
        root: _module(root),
        f"{root}__pytorch": _module(f"{root}.pytorch"),
        f"{root}__pytorch__quantized_tensor": _module(
            "q", QuantizedTensorStorage=storage, Quantizer=Quantizer
        ),
        f"{root}__pytorch__tensor": _module("t"),
        f"{root}__pytorch__tensor__utils": _module("u", is_custom=lambda x: True),
        base.replace(".", "__"): _module(base),
    }
    with _modules(**stubs):
        package = sys.modules[base]
        for name in ("reference_utils", "gemm", "reference_nvfp4"):
            module = _load(_source(root, f"{folder}/{name}.py"), f"{base}.{name}")
            setattr(package, name, module)
    return module


@functools.cache
def vllm_emulation() -> Any:
    """vLLM's ``nvfp4_emulation_utils`` (torch path), with its platform and Triton imports stubbed."""

    def jit(function: Any) -> Any:
        return function

    float4 = types.SimpleNamespace(max=lambda: 6.0)
    platform = types.SimpleNamespace(is_cuda_alike=lambda: False)
    triton = types.SimpleNamespace(jit=jit)
    stubs = {
        "vllm": _module("vllm"),
        "vllm__platforms": _module("p", current_platform=platform),
        "vllm__scalar_type": _module("s", scalar_types=types.SimpleNamespace(float4_e2m1f=float4)),
        "vllm__triton_utils": _module("t", tl=_Anything(), triton=triton),
        "vllm__utils": _module("u"),
        "vllm__utils__torch_utils": _module("tu", direct_register_custom_op=lambda **_: None),
    }
    path = "model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
    source = _source("vllm", path)
    with _modules(**stubs):
        return _load(source, "vllm.nvfp4_emulation_utils")


class _Anything:
    """Stands in for ``triton.language`` in annotations of kernels that are never called."""

    def __getattr__(self, name: str) -> Any:
        return _Anything()


@functools.cache
def modelopt() -> Any:
    """ModelOpt's ``NVFP4QTensor`` with its own amax functions; base class and platform stubbed."""
    base = "modelopt.torch.quantization"

    class BaseQuantizedTensor:
        def __init__(self, shape: Any, dtype: Any, data: torch.Tensor) -> None:
            self.metadata = {"shape": shape, "dtype": dtype}
            self._quantized_data = data

    path = _source("modelopt", "torch/quantization/utils/core_utils.py")
    functions = _functions(path, ("reduce_amax", "reduce_block_amax", "reduce_block_padding"))
    stubs = {
        "modelopt": _module("modelopt"),
        "modelopt__torch": _module("modelopt.torch"),
        "modelopt__torch__quantization": _module(base),
        "modelopt__torch__quantization__backends": _module("b"),
        "modelopt__torch__quantization__backends__utils": _module(
            "bu", fp4_compatible=lambda: False
        ),
        "modelopt__torch__quantization__qtensor": _module("q"),
        "modelopt__torch__quantization__qtensor__base_qtensor": _module(
            "bq", BaseQuantizedTensor=BaseQuantizedTensor
        ),
        "modelopt__torch__quantization__utils": _module("u", **functions),
    }
    with _modules(**stubs):
        numeric = _source("modelopt", "torch/quantization/utils/numeric_utils.py")
        _load(numeric, f"{base}.utils.numeric_utils")
        tensor = _source("modelopt", "torch/quantization/qtensor/nvfp4_tensor.py")
        return _load(tensor, f"{base}.qtensor.nvfp4_tensor", f"{base}.qtensor")


def _functions(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Execute some top-level functions of a file whose imports need its whole framework."""
    tree = ast.parse(path.read_text())
    wanted = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and "_FP8_DTYPES" in ast.dump(node))
    ]
    namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), namespace)
    return {name: namespace[name] for name in names}


@functools.cache
def torchao() -> Any:
    """torchao's ``nvfp4_tensor`` module, imported whole."""
    sys.path.insert(0, str(_folder()))
    try:
        import torchao.prototype.mx_formats.nvfp4_tensor as module
    finally:
        sys.path.remove(str(_folder()))
    return module


@functools.cache
def compressed_tensors() -> Any:
    """The installed compressed-tensors: calibration, quantization and packing functions."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils import helpers

    arguments: QuantizationArgs = NVFP4["weights"]
    return types.SimpleNamespace(
        arguments=arguments,
        generate_gparam=helpers.generate_gparam,
        compute_scales=helpers.compute_dynamic_scales_and_zp,
        quantize=quantize,
        pack=pack_fp4_to_uint8,
    )
