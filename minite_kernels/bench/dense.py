"""Dense W4A4 linears of Qwen3-30B-A3B: quantizer and GEMM against BF16 and NVFP4 emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from minite_kernels.bench import peers
from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.nvfp4.gemm import gemm, linear, prepare
from minite_kernels.nvfp4.quantize import quantize

RECIPE = "te-row-scaled"
SHAPES = {"qkv": (5120, 2048), "o": (2048, 4096)}
CUDA_ROWS = (1, 16, 4096, 16384)
CPU_ROWS = (1, 128)
#: Bytes that no cache holds: weights are rotated over this much for cold figures.
COLD_BYTES = 300e6


def run(device: torch.device) -> Iterator[Row]:
    """Rows for each layer and number of tokens."""
    shapes = SHAPES if device.type == "cuda" else {"smollm2 gate_up": (3072, 576)}
    for layer, (n, k) in shapes.items():
        for m in CUDA_ROWS if device.type == "cuda" else CPU_ROWS:
            yield from _case(layer, m, n, k, device)


def _case(layer: str, m: int, n: int, k: int, device: torch.device) -> Iterator[Row]:
    case = f"{layer} M={m}"
    copies = max(2, int(COLD_BYTES / (n * k * 2))) if device.type == "cuda" else 1
    copies = min(copies, 24)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    quantized = [quantize(w, RECIPE, role="weight") for w in weights]
    prepared = [prepare(q) for q in quantized]
    a = quantize(x, RECIPE)
    encode = torch.div(torch.full((), 2688.0, device=device), x.float().abs().amax())
    emulated = [quantize(w, "vllm-emulation", role="weight", impl="ref") for w in weights[:2]]

    def calls(make: Callable[[int], Callable[[], object]], count: int = copies):  # type: ignore[no-untyped-def]  # noqa: ANN202
        def build() -> Sequence[Callable[[], object]]:
            return [make(index) for index in range(count)]

        return build

    wide = (m * k + m * n) * 2.0
    operations = 2.0 * m * n * k
    floor4 = floor_us(device, wide + n * k * (0.5 + 1 / 16), operations)
    floor16 = floor_us(device, wide + n * k * 2, operations)
    name = "ours W4A4, quantizer included"
    yield measure(
        "dense",
        case,
        name,
        calls(lambda i: lambda: linear(x, prepared[i])),
        device,
        floor_us=floor4,
    )
    name = "ours W4A4, GEMM alone"
    yield measure(
        "dense", case, name, calls(lambda i: lambda: gemm(a, prepared[i])), device, floor_us=floor4
    )
    name = "BF16, torch matmul"
    yield measure(
        "dense", case, name, calls(lambda i: lambda: x @ weights[i].t()), device, floor_us=floor16
    )
    name = "NVFP4 emulation, torch"
    yield measure(
        "dense",
        case,
        name,
        calls(lambda i: lambda: peers.emulate_torch(x, encode, emulated[i]), len(emulated)),
        device,
        cold=False,
    )
    if device.type == "cuda":
        name = "BF16, batch-invariant"
        yield measure(
            "dense",
            case,
            name,
            calls(lambda i: lambda: peers.invariant_matmul(x, weights[i])),
            device,
            floor_us=floor16,
        )
        name = "NVFP4 emulation, batch-invariant"
        yield measure(
            "dense",
            case,
            name,
            calls(lambda i: lambda: peers.emulate_invariant(x, encode, emulated[i]), len(emulated)),
            device,
            cold=False,
        )
