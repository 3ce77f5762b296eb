"""Quantizers: ours against a copy of the same tensor and published quantizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minite_kernels.bench import published
from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.quantize.fused import silu_mul_quantize

CUDA_SHAPES = ((16, 2048), (4096, 2048), (16384, 2048), (131072, 768))
CPU_SHAPES = ((128, 2048), (2048, 2048))


def run(device: torch.device) -> Iterator[Row]:
    """Rows for BF16 tensors: per token, per tensor, 16x16, fused with SiLU-mul, and the peers."""
    for m, k in CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        yield from _case(f"{m}x{k}", x, device)
    if device.type == "cuda":
        yield from _fused(torch.randn(131072, 1536, device=device, dtype=torch.bfloat16), device)


def _case(case: str, x: Tensor, device: torch.device) -> Iterator[Row]:
    floor = floor_us(device, x.numel() * (2 + 0.5 + 1 / 16))
    ours: dict[str, Callable[[], object]] = {
        "ours, amax a token": lambda: quantize(x, "te-row-scaled"),
        "ours, amax a tensor": lambda: quantize(x, "te"),
        "ours, four-over-six": lambda: quantize(x, "te-4over6"),
    }
    if x.shape[0] % 16 == 0:
        ours["ours, 16x16"] = lambda: quantize(x, "te", role="weight")
    for name, call in ours.items():
        yield measure("quantizer", case, name, lambda call=call: [call], device, floor_us=floor)  # type: ignore[misc]
    y = torch.empty_like(x)
    copy_floor = floor_us(device, x.numel() * 4)
    copy: Callable[[], object] = lambda: y.copy_(x)  # noqa: E731
    yield measure("quantizer", case, "copy", lambda: [copy], device, floor_us=copy_floor)
    encode = published.quantize_encode_scale(x)
    peers: dict[str, Callable[[], Callable[[], object]]] = {
        "torchao": lambda: published.torchao_quantize(x),
        "compressed-tensors": lambda: published.compressed_tensors_quantize(x),
        "vLLM emulation": lambda: published.vllm_fake_quantize(x, encode),
    }
    for name, make in peers.items():
        yield measure("quantizer", case, name, lambda make=make: [make()], device)  # type: ignore[misc]


def _fused(gate_up: Tensor, device: torch.device) -> Iterator[Row]:
    """SiLU-mul and quantizer in one kernel against one after the other, under a static scale."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    case = f"silu-mul {tokens}x{width}"
    encode = torch.full((), 400.0, device=device)
    floor = floor_us(device, tokens * width * (4 + 0.5 + 1 / 16))

    def fused() -> object:
        return silu_mul_quantize(gate_up, "vllm-cuda", global_encode_scale=encode)

    def apart() -> object:
        hidden = silu_mul(gate_up, rounding="once")
        return quantize(hidden, "vllm-cuda", global_encode_scale=encode)

    for name, call in (("ours, fused", fused), ("ours, two kernels", apart)):
        yield measure("quantizer", case, name, lambda call=call: [call], device, floor_us=floor)  # type: ignore[misc]
