"""Dense W4A4 linears of Qwen3-30B-A3B: quantizer and GEMM against BF16 and NVFP4 emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from minite_kernels.bench import peers, published
from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.nvfp4.gemm import gemm, linear, prepare
from minite_kernels.nvfp4.quantize import quantize

RECIPE = "te-row-scaled"
SHAPES = {"qkv": (5120, 2048), "o": (2048, 4096)}
CPU_LAYERS = {"smollm2 gate_up": (3072, 576)}
CUDA_ROWS = (1, 16, 4096, 16384)
CPU_ROWS = (1, 128)
#: Bytes that no cache holds: weights are rotated over this much for cold figures.
COLD_BYTES = 300e6
Calls = Callable[[], Sequence[Callable[[], object]]]


def run(device: torch.device) -> Iterator[Row]:
    """Rows for each layer and number of tokens."""
    on_gpu = device.type == "cuda"
    for layer, (n, k) in (SHAPES if on_gpu else CPU_LAYERS).items():
        for m in CUDA_ROWS if on_gpu else CPU_ROWS:
            yield from _case(layer, m, n, k, device)


def _case(layer: str, m: int, n: int, k: int, device: torch.device) -> Iterator[Row]:
    case, on_gpu = f"{layer} M={m}", device.type == "cuda"
    copies = min(24, max(2, int(COLD_BYTES / (n * k * 2)))) if on_gpu else 1
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    quantized = [quantize(w, RECIPE, role="weight") for w in weights]
    prepared = [prepare(q) for q in quantized]
    a = quantize(x, RECIPE)
    encode = published.quantize_encode_scale(x)
    emulated = [quantize(w, "vllm-emulation", role="weight", impl="ref") for w in weights[:2]]
    marlin = [quantize(w, "vllm-cuda", role="weight") for w in weights] if on_gpu else []

    def calls(make: Callable[[int], Callable[[], object]], count: int = copies) -> Calls:
        return lambda: [make(index) for index in range(count)]

    wide = (m * k + m * n) * 2.0
    operations = 2.0 * m * n * k
    floor4 = floor_us(device, wide + n * k * (0.5 + 1 / 16), operations)
    floor16 = floor_us(device, wide + n * k * 2, operations)
    ours = calls(lambda i: lambda: linear(x, prepared[i]))
    alone = calls(lambda i: lambda: gemm(a, prepared[i]))
    bf16 = calls(lambda i: lambda: x @ weights[i].t())
    naive = calls(lambda i: lambda: peers.emulate_torch(x, encode, emulated[i]), len(emulated))
    rows: list[tuple[str, Calls, float | None, bool]] = [
        ("ours W4A4, quantizer included", ours, floor4, True),
        ("ours W4A4, GEMM alone", alone, floor4, True),
        ("BF16, torch matmul", bf16, floor16, True),
        ("NVFP4 emulation, torch", naive, None, False),
    ]
    of_vllm = calls(lambda i: published.vllm_emulation(x, encode, emulated[i]), len(emulated))
    rows.append(("vLLM emulation", of_vllm, None, False))
    if on_gpu:
        invariant = calls(lambda i: lambda: peers.invariant_matmul(x, weights[i]))
        emulation = calls(lambda i: lambda: peers.emulate_invariant(x, encode, emulated[i]), 2)
        rows += [
            ("BF16, batch-invariant", invariant, floor16, True),
            ("NVFP4 emulation, batch-invariant", emulation, None, False),
            ("vLLM Marlin W4A16", calls(lambda i: published.vllm_marlin(x, marlin[i])), None, True),
        ]
    for name, made, floor, cold in rows:
        yield measure("dense", case, name, made, device, floor_us=floor, cold=cold)
