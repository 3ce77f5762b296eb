"""A complete learner update of one Qwen3-30B-A3B block: forward, dgrad, wgrad, optimizer.

The same block three times: BF16 GEMMs, naive NVFP4 emulation (torch fake quantization around BF16
GEMMs), and ours (recipe ``te``: 16x16 weights, stochastic gradients, RHT). Norms, attention,
routing, activation and optimizer are the same code in all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minite_kernels.bench import peers
from minite_kernels.bench.row import Row
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4.grouped_gemm import combine, gather, route
from minite_kernels.nvfp4.hadamard import hadamard_matrix
from minite_kernels.nvfp4.linear import LinearOptions, grouped_linear_function
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.recipe import get_recipe

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, SLOTS, INTERMEDIATE = 128, 8, 768
SEQUENCES, LENGTH = 4, 4096
RECIPE = "te"

Linear = Callable[[Tensor, Tensor], Tensor]
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Block(nn.Module):
    """One decoder block; ``linear(x, w)`` and ``grouped(x, w, offsets)`` are what is compared."""

    def __init__(self, linear: Linear, grouped: Grouped, device: torch.device) -> None:
        super().__init__()
        self.linear, self.grouped = linear, grouped

        def weight(*shape: int) -> nn.Parameter:
            value = torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5
            return nn.Parameter(value)

        self.qkv = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.o = weight(HIDDEN, HEADS * HEAD_DIM)
        self.router = weight(EXPERTS, HIDDEN)
        self.w13 = weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN)
        self.w2 = weight(EXPERTS, HIDDEN, INTERMEDIATE)
        self.norms = nn.ParameterList([torch.ones(HIDDEN, device=device, dtype=torch.bfloat16)] * 2)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Attention and experts with residuals."""
        x = x_TH + self.attention(nn.functional.rms_norm(x_TH, (HIDDEN,), self.norms[0]))
        return x + self.experts(nn.functional.rms_norm(x, (HIDDEN,), self.norms[1]))

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention over ``SEQUENCES`` packed sequences."""
        heads = self.linear(x, self.qkv).view(SEQUENCES, LENGTH, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear(y.transpose(1, 2).reshape(x.shape[0], -1), self.o)

    def experts(self, x: Tensor) -> Tensor:
        """Route, two grouped linears around SwiGLU, combine."""
        scores = nn.functional.linear(x, self.router).float().softmax(-1)
        weights, ids = scores.topk(SLOTS)
        weights = weights / weights.sum(-1, keepdim=True)
        routing = route(ids, EXPERTS, align=64)
        rows = gather(x, routing)
        hidden = silu_mul(self.grouped(rows, self.w13, routing.offsets))
        return combine(self.grouped(hidden, self.w2, routing.offsets), routing, weights)


def _bf16_grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return peers.grouped_mm(x, w, offsets[1:].to(torch.int32))


def _ours(device: torch.device) -> tuple[Linear, Grouped]:
    options = LinearOptions(get_recipe(RECIPE))
    start = torch.tensor([0, SEQUENCES * LENGTH], device=device)

    def linear(x: Tensor, w: Tensor) -> Tensor:
        return grouped_linear_function(x, w[None], start, options)

    def grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return grouped_linear_function(x, w, offsets, options)

    return linear, grouped


def _fake(x: Tensor, role: Any, transform: bool = False) -> Tensor:
    """Quantize and dequantize along the last dim with torch operations, back to BF16."""
    flat = x.reshape(-1, x.shape[-1])
    if transform:
        h = hadamard_matrix(x.device).to(x.dtype)
        flat = (flat.reshape(-1, 16) @ h).view(flat.shape)
    q = quantize(flat, RECIPE, role=role, impl="ref")
    return dequantize(q, x.dtype).view(x.shape)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w, offsets)
        return _product(_fake(x, "activation"), _fake(w, "weight"), offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, offsets = ctx.saved_tensors
        dy = gradients[0].contiguous()
        wt = _fake(w.transpose(-1, -2).contiguous(), "weight")
        dx = _product(_fake(dy, "gradient"), wt, offsets)
        dyt = _fake(dy.t().contiguous(), "gradient", transform=True)
        xt = _fake(x.t().contiguous(), "activation", transform=True)
        if offsets is None:
            return dx, dyt @ xt.t(), None
        grouped: Any = torch._grouped_mm
        return dx, grouped(dyt, xt.t(), offs=offsets[1:].to(torch.int32)), None


def _product(x: Tensor, w: Tensor, offsets: Tensor | None) -> Tensor:
    return x @ w.t() if offsets is None else _bf16_grouped(x, w, offsets)


def _emulated() -> tuple[Linear, Grouped]:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = _EmulatedLinear.apply(x, w, None)
        return out

    def grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = _EmulatedLinear.apply(x, w, offsets)
        return out

    return linear, grouped


def run(device: torch.device) -> Iterator[Row]:
    """One row an implementation; the case states the tokens of an update."""
    if device.type != "cuda":
        yield Row("update", "all", "all", error="timed on CUDA only")
        return
    emulated = _emulated()
    implementations: dict[str, tuple[Linear, Grouped]] = {
        "ours W4A4 (te)": _ours(device),
        "BF16": (nn.functional.linear, _bf16_grouped),
        "NVFP4 emulation, torch": emulated,
    }
    for name, (linear, grouped) in implementations.items():
        yield _time(name, linear, grouped, device, capture=grouped is not emulated[1])
        torch.cuda.empty_cache()


def _time(
    name: str, linear: Linear, grouped: Grouped, device: torch.device, *, capture: bool
) -> Row:
    """Time steps as graph replays, or eagerly where an implementation synchronizes."""
    tokens = SEQUENCES * LENGTH
    row = Row("update", f"Qwen3-30B-A3B block, {tokens} tokens", name, tokens=tokens)
    try:
        torch.manual_seed(0)
        block = _Block(linear, grouped, device)
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True, capturable=True)
        x = torch.randn(SEQUENCES * LENGTH, HIDDEN, device=device, dtype=torch.bfloat16)
        target = torch.randn_like(x)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            block(x).backward(target)
            optimizer.step()

        row.warm_us = _median_step_us(_captured(step) if capture else step)
    except Exception as error:  # noqa: BLE001
        row.error = f"{type(error).__name__}: {error}"[:400]
    return row


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, so that no implementation waits for Python's launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _median_step_us(step: Callable[[], None], warmup: int = 3, repeats: int = 7) -> float:
    for _ in range(warmup):
        step()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]
