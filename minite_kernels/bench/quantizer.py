"""Quantizers: ours against a copy of the same tensor, torch, and published CPU quantizers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.nvfp4.quantize import quantize

CUDA_SHAPES = ((16, 2048), (4096, 2048), (16384, 2048), (131072, 768))
CPU_SHAPES = ((128, 2048), (2048, 2048))


def run(device: torch.device) -> Iterator[Row]:
    """Rows for BF16 tensors: per token, per tensor, 16x16, and the peers of the device."""
    for m, k in CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        yield from _case(f"{m}x{k}", x, device)


def _case(case: str, x: Tensor, device: torch.device) -> Iterator[Row]:
    floor = floor_us(device, x.numel() * (2 + 0.5 + 1 / 16))
    ours: dict[str, Callable[[], object]] = {
        "ours, amax a token": lambda: quantize(x, "te-row-scaled"),
        "ours, amax a tensor": lambda: quantize(x, "te"),
    }
    if x.shape[0] % 16 == 0:
        ours["ours, 16x16"] = lambda: quantize(x, "te", role="weight")
    for name, call in ours.items():
        yield measure("quantizer", case, name, lambda call=call: [call], device, floor_us=floor)  # type: ignore[misc]
    y = torch.empty_like(x)
    copy_floor = floor_us(device, x.numel() * 4)
    yield measure(
        "quantizer", case, "copy", lambda: [lambda: y.copy_(x)], device, floor_us=copy_floor
    )
    if device.type == "cuda":
        return
    yield measure("quantizer", case, "torchao", lambda: [_torchao(x)], device)
    yield measure("quantizer", case, "compressed-tensors", lambda: [_compressed_tensors(x)], device)


def _torchao(x: Tensor) -> Callable[[], object]:
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def call() -> object:
        scale = module.per_tensor_amax_to_scale(x.abs().max())
        return module.nvfp4_quantize(x, 16, scale)

    return call


def _compressed_tensors(x: Tensor) -> Callable[[], object]:
    helpers = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    scheme = importlib.import_module("compressed_tensors.quantization.quant_scheme")
    packing = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
    arguments = scheme.NVFP4["weights"]

    def call() -> object:
        scale = helpers.generate_gparam(x.min(), x.max())
        scales, _ = helpers.compute_dynamic_scales_and_zp(x, arguments, None, scale)
        values = forward.quantize(x, scales, None, arguments, global_scale=scale)
        return packing.pack_fp4_to_uint8(values)

    return call
