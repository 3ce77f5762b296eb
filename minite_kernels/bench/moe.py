"""Grouped W4A4 GEMMs of Qwen3-30B-A3B's experts against torch's grouped BF16 GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minite_kernels.bench import peers, published
from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.nvfp4.grouped_gemm import (
    ExpertOperands,
    experts_linear,
    gather,
    grouped_gemm,
    route,
)
from minite_kernels.nvfp4.quantize import quantize
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

RECIPE = "te-row-scaled"
EXPERTS, SLOTS = 128, 8
SHAPES = {"w13": (1536, 2048), "w2": (2048, 768)}
TOKENS = (1, 16, 16384)


def run(device: torch.device) -> Iterator[Row]:
    """Rows for w13 and w2 at decode and prefill sizes; CUDA only."""
    if device.type != "cuda":
        yield Row("moe", "all", "all", error="timed on CUDA only")
        return
    for layer, (n, k) in SHAPES.items():
        weights = torch.randn(EXPERTS, n, k, device=device, dtype=torch.bfloat16) * 0.02
        quantized = [quantize(w, RECIPE, role="weight") for w in weights]
        for tokens in TOKENS:
            yield from _case(layer, tokens, weights, quantized, device)


def choices(tokens: int, device: torch.device) -> list[Tensor]:
    """Expert ids [T, slots] to rotate over: with one token, disjoint; with more, no cache holds."""
    if tokens == 1:
        return list(torch.arange(EXPERTS, device=device).view(-1, 1, SLOTS))
    generator = torch.Generator(device=device).manual_seed(0)
    scores = torch.rand(tokens, EXPERTS, device=device, generator=generator)
    return [scores.topk(SLOTS).indices]


def _case(
    layer: str, tokens: int, weights: Tensor, quantized: list[Nvfp4Tensor], device: torch.device
) -> Iterator[Row]:
    operands = ExpertOperands(quantized)
    n, k = operands.first.shape
    case, first = f"{layer} {tokens} tokens", layer == "w13"
    routed = tokens * SLOTS
    topk_ids = choices(tokens, device)
    made = [route(ids, EXPERTS) for ids in topk_ids]
    active = int((made[0].offsets[1:] > made[0].offsets[:-1]).sum())
    x = torch.randn(tokens if first else routed, k, device=device, dtype=torch.bfloat16)
    rows = [r.order // SLOTS if first else None for r in made]
    sorted_x = gather(x, made[0]) if first else x
    a = quantize(x, RECIPE)
    offsets = [r.offsets for r in made]
    ends = [o[1:].to(torch.int32) for o in offsets]
    wide = (x.numel() + routed * n) * 2.0
    operations = 2.0 * routed * n * k
    floor4 = floor_us(device, wide + active * n * k * (0.5 + 1 / 16), operations)
    floor16 = floor_us(device, wide + active * n * k * 2, operations)

    def timed(name: str, floor: float | None, make: Callable[[int], Callable[[], object]]) -> Row:
        calls: Callable[[], Sequence[Callable[[], object]]] = lambda: [  # noqa: E731
            make(index) for index in range(len(made))
        ]
        return measure("moe", case, name, calls, device, floor_us=floor)

    yield timed(
        "ours W4A4, quantizer included",
        floor4,
        lambda i: lambda: experts_linear(x, operands, offsets[i], rows=rows[i]),
    )
    yield timed(
        "ours W4A4, GEMM alone",
        floor4,
        lambda i: lambda: grouped_gemm(a, operands, offsets[i], rows=rows[i]),
    )
    yield timed(
        "BF16, torch._grouped_mm",
        floor16,
        lambda i: lambda: peers.grouped_mm(sorted_x, weights, ends[i]),
    )
    if first:
        yield timed(
            "BF16, gather and torch._grouped_mm",
            floor16,
            lambda i: lambda: peers.grouped_mm(gather(x, made[i]), weights, ends[i]),
        )
    yield measure(
        "moe",
        case,
        "vLLM Marlin W4A16",
        lambda: published.vllm_marlin_experts(x, quantized, topk_ids, gathers=first),
        device,
        floor_us=floor4,
    )
