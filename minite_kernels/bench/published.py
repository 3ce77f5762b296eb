"""Published implementations as peers, where they are installed: each returns a call to time.

Imports nothing until asked. A package that is missing raises ``ModuleNotFoundError``, which becomes
the row's error: a peer is never left out silently. None of it is the product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
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


def vllm_marlin_experts(
    x: Tensor, w: Sequence[Nvfp4Tensor], routings: Sequence[Tensor], *, gathers: bool
) -> list[Call]:
    """Multiply tokens by their experts' weights [N, K] with vLLM's Marlin W4A16, a call a routing.

    A routing is top-k expert ids [T, k]. `gathers`: x [T, K] is read once a slot; else x has one
    row a slot. Sorting, as vLLM does it, is not in the call; the results are not weighted.
    """
    ops = importlib.import_module("vllm._custom_ops")
    align = importlib.import_module("vllm.model_executor.layers.fused_moe.moe_align_block_size")
    marlin = importlib.import_module(f"{_VLLM}.marlin_utils")
    weight, scale, decode = _marlin_experts(w, x.dtype)
    workspace = marlin.marlin_make_workspace_new(x.device, 4)
    (n, k), four_bits = w[0].shape, importlib.import_module("vllm.scalar_type").scalar_types

    def call(topk_ids: Tensor) -> Call:
        tokens, slots = topk_ids.shape
        block = next((b for b in (8, 16, 32, 48) if tokens * slots / len(w) / b < 0.9), 64)
        sorted_ids, expert_ids, padded = align.moe_align_block_size(topk_ids, block, len(w))
        output = torch.empty(tokens * slots, n, dtype=x.dtype, device=x.device)
        unused = torch.ones(tokens, slots, device=x.device)
        top_k, rows = (slots, tokens) if gathers else (1, tokens * slots)
        operands = (x, output, weight, None, scale, None, decode, None, None, None, workspace)
        options = {
            "moe_block_size": block,
            "top_k": top_k,
            "mul_topk_weights": False,
            "b_q_type": four_bits.float4_e2m1f,
            "size_m": rows,
            "size_n": n,
            "size_k": k,
            "is_k_full": True,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
        }
        return lambda: ops.moe_wna16_marlin_gemm(
            *operands, sorted_ids, expert_ids, padded, unused, **options
        )

    return [call(topk_ids) for topk_ids in routings]


def _marlin_experts(w: Sequence[Nvfp4Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, block scales and global scales of all experts in Marlin's layout."""
    utils = importlib.import_module(f"{_VLLM}.marlin_utils_fp4")
    marlin = importlib.import_module(f"{_VLLM}.marlin_utils")
    ops = importlib.import_module("vllm._custom_ops")
    n, k = w[0].shape
    no_order = torch.empty(0, dtype=torch.int, device=w[0].codes.device)
    columns = [q.codes.view(torch.int32).T.contiguous() for q in w]
    weight = torch.stack([ops.gptq_marlin_repack(c, no_order, k, n, 4) for c in columns])
    scales = torch.stack([q.block_scale for q in w]).to(dtype)
    factor = utils._nvfp4_compute_scale_factor(scales, dtype)
    permuted = [
        utils.nvfp4_marlin_process_scales(
            marlin.marlin_permute_scales(s=scale.T, size_k=k, size_n=n, group_size=16),
            scale_factor=factor,
            a_dtype=dtype,
        )[0]
        for scale in scales
    ]
    decode = torch.stack([q.global_decode_scale for q in w])
    decode = utils.nvfp4_marlin_process_global_scale(decode, dtype) / factor
    return weight, torch.stack(permuted), decode


def quantize_encode_scale(x: Tensor) -> Tensor:
    """2688 / amax of x, the static scale with which the peers quantize activations: FP32 []."""
    return torch.div(torch.full((), 2688.0, device=x.device), x.float().abs().amax())
