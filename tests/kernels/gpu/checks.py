"""What only a GPU can show: kernels against the CPU reference, bit for bit, and against themselves.

Each check is a function that returns numbers; ``python tests/kernels/gpu/checks.py`` prints them as
JSON. ``test_checks.py`` asserts on them where CUDA is present.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[1])]

from data import DISTRIBUTIONS, NOT_FINITE, amax_sweep, matrix

from minite_kernels.bench import published
from minite_kernels.invariant.attention import attention, paged_attention
from minite_kernels.invariant.log_softmax import log_softmax
from minite_kernels.invariant.matmul import matmul
from minite_kernels.invariant.rms_norm import add_rms_norm, rms_norm
from minite_kernels.invariant.router import route_logits
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4 import grouped_linear
from minite_kernels.nvfp4.gemm import _triton as gemm_triton
from minite_kernels.nvfp4.gemm import configs, gemm, prepare
from minite_kernels.nvfp4.gemm._epilogue import Epilogue
from minite_kernels.nvfp4.grouped_gemm import (
    gather,
    grouped_gemm,
    quantize_grouped,
    route,
)
from minite_kernels.nvfp4.layout import pack_codes
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.quantize.fused import (
    add_rms_norm_quantize,
    rms_norm_quantize,
    silu_mul_quantize,
)
from minite_kernels.nvfp4.recipe import RECIPES, get_recipe
from minite_kernels.nvfp4.reciprocal import pack_corrections, rcp_approx
from minite_kernels.nvfp4.tensor import Nvfp4Tensor

DEVICE = "cuda"
#: (index, of): which recipes this process checks (``--shard 0/4``); compiling them takes the time.
SHARD = [0, 1]


def different(a: Tensor, b: Tensor) -> int:
    """Number of elements whose bytes differ."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


def measure_reciprocal() -> Tensor:
    """int8 [2^23]: ulps between rcp.approx and the rounded reciprocal, asserted for 5 exponents."""
    mantissa = torch.arange(1 << 23, dtype=torch.int32)
    corrections = []
    for exponent in (127, 1, 64, 200, 252):
        x = (mantissa | (exponent << 23)).view(torch.float32)
        device = rcp_approx(x.to(DEVICE)).cpu()
        corrections.append(device.view(torch.int32) - torch.reciprocal(x).view(torch.int32))
    for other in corrections[1:]:
        assert torch.equal(corrections[0], other), "rcp.approx depends on the exponent"
    return corrections[0].to(torch.int8)


def check_reciprocal() -> dict[str, Any]:
    """The shipped table against the instruction, every mantissa, and special values."""
    from minite_kernels.nvfp4.reciprocal import correction_ulps

    special = torch.tensor([0.0, -0.0, torch.inf, 1e-40, -1e-40, 3e38, 2.0**127, 1.5 * 2.0**126])
    on_device, modelled = rcp_approx(special.to(DEVICE)).cpu(), rcp_approx(special)
    return {
        "mantissas_wrong": different(measure_reciprocal(), correction_ulps()),
        "special_values_wrong": different(on_device, modelled),
    }


def inputs() -> list[tuple[str, Tensor]]:
    out = [(kind, matrix(kind, 64, 512)) for kind in (*DISTRIBUTIONS, *NOT_FINITE)]
    out += [("sweep", torch.cat(amax_sweep(torch.float32, 16, 128)))]
    out += [("wide", matrix("heavy_t2", 3, 20480)), ("one_row", matrix("normal", 1, 256))]
    out += [("three_pieces", matrix("heavy_t2", 17, 768)), ("ragged", matrix("normal", 32, 250))]
    return [(f"{k}/{d}", x.to(d)) for k, x in out for d in (torch.bfloat16, torch.float32)]


def check_quantizer() -> dict[str, Any]:
    """Bytes of Triton, and of the reference on the GPU, that differ from the CPU reference."""
    wrong: dict[str, int] = {}
    compared = 0
    for name, recipe in list(RECIPES.items())[SHARD[0] :: SHARD[1]]:
        for role in ("activation", "weight"):
            operand = recipe.operand(role)
            for kind, x in inputs():
                scales = {}
                if operand.amax_scope == "static":
                    scales = {"amax": x.float().abs().nan_to_num(0, 1, 1).amax().clamp(min=1e-30)}
                rows = x.shape[0] // 16 * 16 if operand.tile[0] > 1 else x.shape[0]
                x = x[:rows]
                expected = quantize(x, recipe, role=role, impl="ref", **scales)
                on_device = {key: value.to(DEVICE) for key, value in scales.items()}
                for impl in ("ref", "triton"):
                    ours = quantize(x.to(DEVICE), recipe, role=role, impl=impl, **on_device)
                    bad = different(ours.codes.cpu(), expected.codes)
                    bad += different(
                        ours.block_scale.view(torch.uint8).cpu(),
                        expected.block_scale.view(torch.uint8),
                    )
                    compared += 1
                    if bad:
                        wrong[f"{name}/{role}/{kind}/{impl}"] = bad
    return {"tensors": compared, "wrong": len(wrong), "examples": dict(list(wrong.items())[:40])}


def adversarial(m: int, k: int, seed: int, recipe: str = "pow2") -> Nvfp4Tensor:
    """Random codes and E4M3 scales over all binades: exact sums far beyond 24 bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (m, k), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 127, (m, k // 16), dtype=torch.uint8, generator=generator)
    one = torch.ones((), device=DEVICE)
    return Nvfp4Tensor(
        codes=pack_codes(codes).to(DEVICE),
        block_scale=scale.to(DEVICE).view(torch.float8_e4m3fn),
        amax=one * 2688.0,
        global_encode_scale=one,
        global_decode_scale=one,
        shape=(m, k),
        recipe=get_recipe(recipe),
        role="activation",
    )


PACKED = [
    configs.PackedConfig(16, 64, True, 4, 4),
    configs.PackedConfig(16, 32, True, 4, 4),
    configs.PackedConfig(16, 128, True, 8, 4),
    configs.PackedConfig(8, 64, True, 4, 4),
    configs.PackedConfig(8, 128, True, 8, 4),
    configs.PackedConfig(16, 32, False, 4, 4),
    configs.PackedConfig(16, 64, False, 8, 4),
    configs.PackedConfig(64, 64, True, 4, 4),
    configs.PackedConfig(64, 128, True, 8, 3),
]
DECODED = [
    configs.DecodedConfig(128, 128, 64, 8, 4),
    configs.DecodedConfig(64, 128, 64, 4, 4),
    configs.DecodedConfig(64, 64, 128, 4, 3),
]


def run_config(config: Any, q: Nvfp4Tensor, b: Any) -> Tensor:
    values = gemm_triton.decode_values(q)
    out = torch.empty(q.shape[0], b.q.shape[0], dtype=torch.float32, device=DEVICE)
    epilogue = Epilogue(q, b.q, torch.float32)
    if isinstance(config, configs.PackedConfig):
        words = b.layout("packed_words", gemm_triton.packed_words)
        scales = b.layout("packed_scales", gemm_triton.packed_scales)
        gemm_triton.launch_packed(values, words, scales, out, epilogue, config)
    else:
        decoded = b.layout("decoded_fp16", gemm_triton.decode_values)
        gemm_triton.launch_decoded(values, decoded, out, epilogue, config)
    return out


def check_tiles() -> dict[str, Any]:
    """Elements that differ from the exact, once-rounded sum, and between tiles, by data."""
    out: dict[str, Any] = {}
    cases: dict[str, tuple[Nvfp4Tensor, Nvfp4Tensor]] = {}
    for kind in ("normal", "heavy_t2", "outlier_channels"):
        for k in (4096, 16384):
            x = matrix(kind, 256, k).bfloat16().to(DEVICE)
            w = matrix(kind if kind != "normal" else "normal", 512, k, seed=1).bfloat16().to(DEVICE)
            cases[f"{kind}/{k}"] = (quantize(x, "pow2"), quantize(w, "pow2", role="weight"))
    cases["adversarial/4096"] = (adversarial(256, 4096, 0), adversarial(512, 4096, 1))
    for name, (a, b) in cases.items():
        prepared = prepare(b)
        exact = gemm(a, prepared, out_dtype=torch.float32, impl="ref")
        runs = {}
        for config in (*PACKED, *DECODED):
            key = "/".join(str(v) for v in (type(config).__name__[:3], *vars_of(config)))
            try:
                runs[key] = run_config(config, a, prepared)
            except Exception as error:
                runs[key] = None
                out[f"{name} {key}"] = repr(error)[:200]
        done = {key: value for key, value in runs.items() if value is not None}
        first = next(iter(done.values()))
        out[name] = {
            "elements": exact.numel(),
            "not_exact": {key: different(value, exact) for key, value in done.items()},
            "between_tiles": {key: different(value, first) for key, value in done.items()},
            "relative_error": ((first.double() - exact.double()).norm() / exact.norm()).item(),
        }
    return out


def vars_of(config: Any) -> list[Any]:
    return [getattr(config, name) for name in config.__slots__]


def check_batches() -> dict[str, Any]:
    """Bits of a row at every M, with its place in the batch varied: adversarial and ordinary data."""
    wrong: dict[str, int] = {}
    compared = 0
    for kind, recipe in (("adversarial", "pow2"), ("normal", "te"), ("heavy_t2", "te-row-scaled")):
        n, k = 768, 2048
        if kind == "adversarial":
            whole, w = adversarial(16384, k, 2), prepare(adversarial(n, k, 3))
        else:
            x = matrix(kind, 16384, k).bfloat16().to(DEVICE)
            whole = quantize(x, recipe)
            weight = matrix("normal", n, k, seed=1).bfloat16().to(DEVICE)
            w = prepare(quantize(weight, recipe, role="weight"))
        full = gemm(whole, w, out_dtype=torch.float32)
        for m in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 129, 200, 256, 512, 1000, 1024,
                  2048, 4096, 5000, 8192, 16384):  # fmt: skip
            for start in {0, (16384 - m) // 2, 16384 - m}:
                part = gemm(whole.rows(slice(start, start + m)), w, out_dtype=torch.float32)
                bad = different(part, full[start : start + m])
                compared += 1
                if bad:
                    wrong[f"{kind}/M={m}/{start}"] = bad
        repeats = [gemm(whole.rows(slice(0, 300)), w, out_dtype=torch.float32) for _ in range(30)]
        wrong_repeats = sum(different(r, repeats[0]) for r in repeats)
        if wrong_repeats:
            wrong[f"{kind}/repeats"] = wrong_repeats
    return {
        "comparisons": compared,
        "wrong": len(wrong),
        "examples": dict(list(wrong.items())[:40]),
    }


def check_experts() -> dict[str, Any]:
    """Grouped GEMM against each expert alone, for several splits and both kernels."""
    wrong: dict[str, int] = {}
    experts, n, k, slots = 16, 1536, 2048, 4
    for recipe in ("te", "te-row-scaled"):
        w = [
            prepare(
                quantize(
                    matrix("normal", n, k, seed=e).bfloat16().to(DEVICE), recipe, role="weight"
                )
            )
            for e in range(experts)
        ]
        for tokens in (1, 5, 64, 500, 4096):
            for skew in (0.0, 4.0):
                generator = torch.Generator().manual_seed(tokens)
                scores = torch.rand(tokens, experts, generator=generator)
                scores += skew * torch.arange(experts) / experts
                routing = route(scores.topk(slots).indices.to(DEVICE), experts)
                x = gather(matrix("normal", tokens, k).bfloat16().to(DEVICE), routing)
                q = quantize_grouped(x, routing.offsets, recipe)
                ours = grouped_gemm(q, w, routing.offsets)
                bounds = routing.offsets.tolist()
                for e in range(experts):
                    rows = slice(bounds[e], bounds[e + 1])
                    if rows.stop > rows.start:
                        bad = different(gemm(q.rows(rows), w[e]), ours[rows])
                        if bad:
                            wrong[f"{recipe}/{tokens}/{skew}/{e}"] = bad
    return {"wrong": len(wrong), "examples": dict(list(wrong.items())[:20])}


def check_invariant() -> dict[str, Any]:
    """Invariant ops: Triton's bits against the CPU reference's, and against themselves."""
    wrong: dict[str, int] = {}

    def compare(name: str, a: Tensor, b: Tensor) -> None:
        bad = different(a.cpu(), b.cpu())
        if bad:
            wrong[name] = bad

    for dtype in (torch.bfloat16, torch.float32):
        x, w = (
            matrix("heavy_t2", 300, 2048).to(dtype),
            matrix("normal", 1, 2048, seed=1)[0].to(dtype),
        )
        y = x.flip(0)
        on = [t.to(DEVICE) for t in (x, y, w)]
        compare(f"rms_norm/{dtype}", rms_norm(on[0], on[2], 1e-6), rms_norm(x, w, 1e-6))
        ours, ref = add_rms_norm(*on, 1e-6), add_rms_norm(x, y, w, 1e-6)
        compare(f"add_rms_norm/{dtype}", ours[0], ref[0])
        compare(f"silu_mul/{dtype}", silu_mul(on[0]), silu_mul(x))
        logits = matrix("normal", 300, 128).to(dtype)
        ours, ref = route_logits(logits.to(DEVICE), 8), route_logits(logits, 8)
        compare(f"router weights/{dtype}", ours[0], ref[0])
        compare(f"router ids/{dtype}", ours[1], ref[1])
        big = matrix("normal", 20, 50000).to(dtype) * 4
        compare(f"log_softmax/{dtype}", log_softmax(big.to(DEVICE)), log_softmax(big))
        weight = matrix("normal", 768, 2048, seed=3).to(dtype).to(DEVICE)
        rows = matrix("outlier_channels", 2048, 2048).to(dtype).to(DEVICE)
        whole = matmul(rows, weight, out_dtype=torch.float32)
        for m in (1, 2, 16, 17, 63, 64, 65, 200, 1000):
            part = matmul(rows[5 : 5 + m], weight, out_dtype=torch.float32)
            compare(f"matmul/{dtype}/M={m}", part, whole[5 : 5 + m])
    compare_attention(compare)
    return {"wrong": len(wrong), "examples": dict(list(wrong.items())[:20])}


def compare_attention(compare: Callable[[str, Tensor, Tensor], None]) -> None:
    """Decode, chunks and a neighbour in the batch against one prefill."""
    length, page = 1500, 16
    q, k, v = (
        matrix("normal", length, h * 128, seed=s).view(length, h, 128).bfloat16().to(DEVICE)
        for s, h in enumerate((8, 2, 2))
    )
    whole = attention(q, k, v, torch.tensor([0, length], device=DEVICE), scale=0.088)
    pages = -(-length // page)
    caches = []
    for value in (k, v):
        cache = torch.zeros(pages * page, 2, 128, dtype=torch.bfloat16, device=DEVICE)
        cache[:length] = value
        caches.append(cache.view(pages, page, 2, 128))
    table = torch.arange(pages, device=DEVICE, dtype=torch.int32)
    for first, last in ((0, 1), (63, 65), (777, 778), (1000, 1500), (1499, 1500)):
        part = paged_attention(
            torch.cat((q[first:last], q[40:41])),
            caches[0],
            caches[1],
            torch.stack((table, table)),
            torch.tensor([0, last - first, last - first + 1], device=DEVICE),
            torch.tensor([last, 41], device=DEVICE),
            scale=0.088,
        )
        compare(f"attention/{first}:{last}", part[:-1], whole[first:last])
        compare(f"attention/neighbour of {first}:{last}", part[-1:], whole[40:41])


def check_training() -> dict[str, Any]:
    """The three GEMMs of grouped linears: Triton against the reference on this GPU."""
    out: dict[str, Any] = {}
    base = get_recipe("te")
    rne = replace(base, gradient=replace(base.gradient, rounding="rne"))
    offsets = torch.tensor([0, 192, 192, 1024, 2048], device=DEVICE)
    x = matrix("normal", 2112, 512).bfloat16().to(DEVICE)
    dy = matrix("heavy_t2", 2112, 768, seed=1).bfloat16().to(DEVICE)
    x[2048:], dy[2048:] = 0, 0
    w = torch.stack([matrix("normal", 768, 512, seed=e) for e in range(4)]).bfloat16().to(DEVICE)
    recipes = (rne, replace(rne, rht_wgrad=False), get_recipe("te-4over6"))
    for recipe in (*recipes, get_recipe("te-row-scaled")):
        for function, args in (
            (grouped_linear.forward, (x, w)),
            (grouped_linear.data_gradient, (dy, w)),
            (grouped_linear.weight_gradient, (dy, x)),
        ):
            ref, ours = (
                function(*args, offsets, grouped_linear.Options(recipe, impl), aligned=True)
                for impl in ("ref", "triton")
            )
            name = f"{recipe.name}/{function.__name__}/rht={recipe.rht_wgrad}"
            error = ((ours.double() - ref.double()).norm() / ref.double().norm()).item()
            out[name] = {"different": different(ours, ref), "of": ref.numel(), "relative": error}
    return out


def check_fused() -> dict[str, Any]:
    """Fused producers: one Triton kernel against the composition on the CPU, byte for byte."""
    wrong: dict[str, int] = {}
    compared = 0
    recipes = ("vllm-cuda", "flashinfer-fast", "flashinfer-rmsnorm", "te-row-scaled", "te",
               "te-4over6", "compressed-tensors")  # fmt: skip
    kinds = (
        "normal/",
        "heavy_t2/",
        "zero_blocks/",
        "nan_element/",
        "inf_element/",
        "three_pieces/",
    )
    for name in recipes[SHARD[0] :: SHARD[1]]:
        static = get_recipe(name).activation.amax_scope == "static"
        for kind, x in inputs():
            k = x.shape[1] // 4 * 2
            if not kind.startswith(kinds):
                continue
            weight = matrix("normal", 1, 2 * k, seed=1)[0].to(x.dtype)
            x = x[:, : 2 * k]
            options = {"global_encode_scale": torch.tensor(300.0)} if static else {}
            calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
                "silu": (silu_mul_quantize, (x, name), {}),
                "silu/twice": (silu_mul_quantize, (x, name), {"rounding": "twice"}),
                "norm": (rms_norm_quantize, (x, weight, 1e-6, name), {}),
                "add": (add_rms_norm_quantize, (x, x.flip(0), weight, 1e-6), {"recipe": name}),
                "add/float32": (
                    add_rms_norm_quantize,
                    (x, x.flip(0), weight, 1e-6),
                    {"recipe": name, "form": "float32"},
                ),
            }
            for call, (function, args, extra) in calls.items():
                expected = function(*args, **extra, **options, impl="ref")
                on = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in args]
                scales = {key: value.to(DEVICE) for key, value in options.items()}
                ours = function(*on, **extra, **scales, impl="triton")
                pairs = [(ours, expected)] if "add" not in call else [(ours[0], expected[0])]
                bad = sum(
                    different(o.codes.cpu(), e.codes)
                    + different(
                        o.block_scale.view(torch.uint8).cpu(), e.block_scale.view(torch.uint8)
                    )
                    for o, e in pairs
                )
                if "add" in call:
                    # A NaN's payload is the device's.
                    bad += different(ours[1].cpu().nan_to_num(), expected[1].nan_to_num())
                compared += 1
                if bad:
                    wrong[f"{name}/{call}/{kind}"] = bad
    return {"tensors": compared, "wrong": len(wrong), "examples": dict(list(wrong.items())[:40])}


def check_peers() -> dict[str, Any]:
    """Largest error of vLLM's Marlin, as the bench calls it, relative to the largest FP32 product."""
    torch.manual_seed(0)
    experts, slots, n, k = 16, 4, 256, 512
    w = torch.randn(experts, n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02
    quantized = [quantize(one, "te-row-scaled", role="weight") for one in w]
    decoded = torch.stack([dequantize(q) for q in quantized])
    x = torch.randn(33, k, device=DEVICE, dtype=torch.bfloat16)
    topk_ids = torch.rand(33, experts, device=DEVICE).topk(slots).indices
    rows = x.repeat_interleave(slots, 0)
    expected = torch.einsum("sk,snk->sn", rows.float(), decoded[topk_ids.flatten()])

    def error(found: Any, wanted: Tensor) -> float:
        return float((found.float() - wanted).abs().max() / wanted.abs().max())

    try:
        dense = published.vllm_marlin(x, quantized[0])()
        first, second = (
            published.vllm_marlin_experts(given, quantized, [topk_ids], gathers=gathers)[0]()
            for given, gathers in ((x, True), (rows, False))
        )
    except ModuleNotFoundError as missing:
        return {"not installed": missing.name}
    return {
        "linear": error(dense, x.float() @ decoded[0].t()),
        "experts, x a token": error(first, expected),
        "experts, x a slot": error(second, expected),
    }


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "reciprocal": check_reciprocal,
    "quantizer": check_quantizer,
    "fused": check_fused,
    "tiles": check_tiles,
    "batches": check_batches,
    "experts": check_experts,
    "invariant": check_invariant,
    "training": check_training,
    "peers": check_peers,
}


def main(names: list[str]) -> None:
    if names and names[0] == "--shard":
        SHARD[:] = map(int, names[1].split("/"))
        names = names[2:]
    if names and names[0] == "table":
        Path(names[1]).write_bytes(pack_corrections(measure_reciprocal()))
        names = names[2:]
    for name in names or CHECKS:
        start = time.time()
        try:
            result: Any = CHECKS[name]()
        except Exception:
            result = {"error": traceback.format_exc()[-1500:]}
        print(json.dumps({name: result, "seconds": round(time.time() - start, 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
