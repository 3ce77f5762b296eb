"""What bounds the decode GEMMs, measured: launches, the chain along K, the weights' bytes, decoding.

Each row does one part of the work with the rest left out, in the tiles of the real kernel: a GEMM
that does all parts cannot be faster than the slowest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from minite_kernels.bench import dense, moe
from minite_kernels.bench.row import Row, floor_us, measure
from minite_kernels.nvfp4.gemm import configs


def run(device: torch.device) -> Iterator[Row]:
    """Rows for dense decode (chain, launch) and for experts at 16 tokens (bytes, decoding)."""
    if device.type != "cuda":
        yield Row("bounds", "all", "all", error="timed on CUDA only")
        return
    from minite_kernels.bench import _bounds_triton as kernels

    out = torch.empty(1 << 20, device=device)
    launch: Callable[[], object] = lambda: kernels.empty_kernel[(132,)](out)  # noqa: E731
    yield measure("bounds", "decode", "one empty launch", lambda: [launch], device)
    half = torch.ones(64, 64, device=device, dtype=torch.float16)
    for layer, (_, k) in dense.SHAPES.items():
        chain = partial(kernels.chain_kernel[(132,)], half, half, out, k, BM=8, BN=32, num_warps=2)
        name = f"accumulator's chain along K={k}"
        yield measure("bounds", f"{layer} M=1", name, lambda call=chain: [call], device)  # type: ignore[misc]
    active = int(moe.choices(16, device)[0].unique().numel())
    for layer, (n, k) in moe.SHAPES.items():
        config, columns = configs.grouped_packed_config(1.0, k), configs.slice_columns(k) or 64
        words = torch.randint(
            -30000, 30000, (active, k // columns, n, columns // 4), device=device, dtype=torch.int16
        )
        scales = torch.full(
            (active, k // columns, n, columns // 64), 0x38383838, device=device, dtype=torch.int32
        )
        tile = {"BN": config.columns, "BK": columns, "num_warps": config.num_warps}
        grid, case = (n // config.columns, active), f"{layer} 16 tokens"
        whole = torch.empty(active, n, device=device)
        stream = partial(
            kernels.stream_kernel[grid], words, scales, whole.view(torch.int32), n, k, **tile
        )
        floor = floor_us(device, words.numel() * 2.0 + scales.numel() * 4.0)
        yield measure(
            "bounds",
            case,
            "the weights' bytes read",
            lambda call=stream: [call],  # type: ignore[misc]
            device,
            floor_us=floor,
        )
        decode = partial(kernels.decode_kernel[grid], words, scales, whole, n, k, ASM=True, **tile)
        name = "the weights decoded, not read"
        yield measure("bounds", case, name, lambda call=decode: [call], device)  # type: ignore[misc]
