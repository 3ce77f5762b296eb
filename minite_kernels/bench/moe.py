"""Grouped W4A4 GEMMs of Qwen3-30B-A3B's experts against torch's grouped BF16 GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from minite_kernels.bench import peers
from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.nvfp4.grouped_gemm import (
    ExpertOperands,
    experts_linear,
    gather,
    grouped_gemm,
    route,
)
from minite_kernels.nvfp4.quantize import quantize

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
        operands = ExpertOperands([quantize(w, RECIPE, role="weight") for w in weights])
        for tokens in TOKENS:
            yield from _case(layer, tokens, weights, operands, device)


def _case(
    layer: str, tokens: int, weights: torch.Tensor, operands: ExpertOperands, device: torch.device
) -> Iterator[Row]:
    n, k = operands.first.shape
    case = f"{layer} {tokens} tokens"
    generator = torch.Generator(device=device).manual_seed(0)
    scores = torch.rand(tokens, EXPERTS, device=device, generator=generator)
    routing = route(scores.topk(SLOTS).indices, EXPERTS)
    active = int((routing.offsets[1:] > routing.offsets[:-1]).sum())
    routed = tokens * SLOTS
    first = layer == "w13"
    x = torch.randn(tokens if first else routed, k, device=device, dtype=torch.bfloat16)
    rows = routing.order // SLOTS if first else None
    sorted_x = gather(x, routing) if first else x
    a = quantize(x, RECIPE)
    ends = routing.offsets[1:].to(torch.int32)
    wide = (x.numel() + routed * n) * 2.0
    operations = 2.0 * routed * n * k
    floor4 = floor_us(device, wide + active * n * k * (0.5 + 1 / 16), operations)
    floor16 = floor_us(device, wide + active * n * k * 2, operations)

    def one(call: Callable[[], object]) -> Callable[[], Sequence[Callable[[], object]]]:
        return lambda: [call]

    offsets = routing.offsets
    name = "ours W4A4, quantizer included"
    call: Callable[[], object] = lambda: experts_linear(x, operands, offsets, rows=rows)  # noqa: E731
    yield measure("moe", case, name, one(call), device, floor_us=floor4)
    call = lambda: grouped_gemm(a, operands, offsets, rows=rows)  # noqa: E731
    yield measure("moe", case, "ours W4A4, GEMM alone", one(call), device, floor_us=floor4)
    call = lambda: peers.grouped_mm(sorted_x, weights, ends)  # noqa: E731
    yield measure("moe", case, "BF16, torch._grouped_mm", one(call), device, floor_us=floor16)
    if first:
        call = lambda: peers.grouped_mm(gather(x, routing), weights, ends)  # noqa: E731
        name = "BF16, gather and torch._grouped_mm"
        yield measure("moe", case, name, one(call), device, floor_us=floor16)
