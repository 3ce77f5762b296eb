"""Published implementations as peers, where they are installed: each returns a call to time.

Imports nothing until asked. A package that is missing raises ``ModuleNotFoundError``, which becomes
the row's error: a peer is never left out silently. None of it is the product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minite_kernels.nvfp4.tensor import Nvfp4Tensor

Call = Callable[[], object]
_VLLM = "vllm.model_executor.layers.quantization.utils"


def torchao_quantize(x: Tensor) -> Call:
    """Torchao's NVFP4 quantizer with the scale of the tensor's amax."""
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    return lambda: module.nvfp4_quantize(x, 16, module.per_tensor_amax_to_scale(x.abs().max()))


def compressed_tensors_quantize(x: Tensor) -> Call:
    """compressed-tensors: observe, quantize and pack a weight."""
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


def vllm_fake_quantize(x: Tensor, encode: Tensor) -> Call:
    """Quantize and dequantize activations as vLLM's emulation does."""
    module = importlib.import_module(f"{_VLLM}.nvfp4_emulation_utils")
    return lambda: module.ref_nvfp4_quant_dequant(x, encode, block_size=16)


def vllm_emulation(x: Tensor, encode: Tensor, w: Nvfp4Tensor) -> Call:
    """Multiply as vLLM's NVFP4 emulation: both operands dequantized at every call, then matmul."""
    module = importlib.import_module(f"{_VLLM}.nvfp4_emulation_utils")
    decode = w.global_decode_scale
    return lambda: module.run_nvfp4_emulations(
        x, encode, w.codes, w.block_scale, decode, swizzle=False
    )


def vllm_marlin(x: Tensor, w: Nvfp4Tensor) -> Call:
    """Multiply by vLLM's Marlin W4A16, what Hopper runs of an NVFP4 checkpoint: x stays BF16."""
    module = importlib.import_module(f"{_VLLM}.marlin_utils_fp4")
    n, k = w.shape
    layer: Any = nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = n, k
    layer.params_dtype = x.dtype
    layer.weight = nn.Parameter(w.codes, requires_grad=False)
    layer.weight_scale = nn.Parameter(w.block_scale, requires_grad=False)
    layer.weight_global_scale = nn.Parameter(w.global_decode_scale, requires_grad=False)
    module.prepare_fp4_layer_for_marlin(layer)
    return lambda: module.apply_fp4_marlin_linear(
        input=x,
        weight=layer.weight,
        weight_scale=layer.weight_scale,
        weight_global_scale=layer.weight_global_scale,
        workspace=layer.workspace,
        size_n=n,
        size_k=k,
    )


def quantize_encode_scale(x: Tensor) -> Tensor:
    """2688 / amax of x, the static scale with which the peers quantize activations: FP32 []."""
    return torch.div(torch.full((), 2688.0, device=x.device), x.float().abs().amax())
