"""te-ref against the published arithmetic of Transformer Engine, written out again in numpy.

Nothing here calls minite_kernels: the formulas are those of TE 2.20 (compute_global_encode_scaling
_factor_FP4, compute_decoding_scaling_factor, the VEC16_UE4M3 GEMM with its FP32 alpha).
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minite_diag.canonical.names import STATIC, SequenceKey, index_trace
from minite_diag.canonical.tokens import read_site
from minite_diag.capture.runner import capture
from minite_diag.checkpoints import quantized_names, read_tensor, resolve
from minite_diag.plan import EngineSpec, ModelRef, Plan, write_plan
from minite_diag.probe import Probe
from minite_diag.site import Site
from minite_diag.trace.store import Trace

F = np.float32
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def e4m3(x: np.ndarray[Any, Any]) -> torch.Tensor:
    """RNE, satfinite: torch's cast rounds to nearest even and the values lie in range."""
    return torch.from_numpy(np.minimum(x, F(448))).to(torch.float8_e4m3fn)


def e2m1(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Nearest code, ties to the even code, saturating; the sign is bit 3."""
    distance = np.abs(np.minimum(np.abs(y.astype(np.float64)), 6.0)[..., None] - GRID)
    nearest = distance.min(-1, keepdims=True)
    odd = np.arange(8) % 2
    code = np.where(distance == nearest, odd, 2).argmin(-1).astype(np.uint8)
    return code | (np.signbit(y).astype(np.uint8) << 3)


def quantize(x: np.ndarray[Any, Any], amax: Any, tile_rows: int) -> tuple[Any, Any, Any]:
    """Codes [M, K], E4M3 block scales [M, K/16], decode scale; tile_rows 1 or 16."""
    m, k = x.shape
    s_enc = min(F(2688) / F(amax), np.finfo(F).max)
    tiles = np.abs(x).reshape(m // tile_rows, tile_rows, k // 16, 16).max((1, 3))
    scale = e4m3((tiles * (s_enc * F(1 / 6))).astype(F))
    s = np.repeat(scale.float().numpy(), tile_rows, 0)
    with np.errstate(divide="ignore"):
        e = np.minimum(F(1) / (s * (F(1) / s_enc)), np.finfo(F).max)
    codes = e2m1((x * np.repeat(e, 16, 1)).astype(F))
    return codes, scale.view(torch.uint8).repeat_interleave(tile_rows, 0), s


def decode(codes: np.ndarray[Any, Any], s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    value = GRID[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return value * np.repeat(s.astype(np.float64), 16, 1)


def unpack(packed: torch.Tensor) -> np.ndarray[Any, Any]:
    p = packed.numpy()
    return np.stack([p & 15, p >> 4], -1).reshape(*p.shape[:-1], -1)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Any, Plan]:
    run = tmp_path_factory.mktemp("te")
    checkpoint = resolve("demo-moe", run)
    generator = np.random.default_rng(0)
    probe = Probe.make("p", generator.integers(0, 256, 48).tolist())
    spec = {
        "python": sys.executable,
        "checkpoint": str(checkpoint.path),
        "checkpoint_format": checkpoint.format,
    }
    plan = Plan(
        model=ModelRef(
            "demo-moe",
            str(checkpoint.path),
            checkpoint.format,
            checkpoint.architecture,
            "",
            checkpoint.vocab_size,
            checkpoint.num_layers,
        ),
        engines=(
            EngineSpec("learner-te", "learner", "te", **spec),
            EngineSpec("sampler-hf", "sampler", "hf", options={"dtype": "float32"}, **spec),
        ),
        probes=(probe,),
        dtype="bfloat16",
        quantize="default",
        quantized=tuple(quantized_names(checkpoint, "default")),
        export_recipe="modelopt",
        modes=("score",),
    )
    write_plan(plan, run)
    results = capture(plan, run, lambda spec, event: None)
    assert [r.status for r in results] == ["ok", "ok"], results
    trace = Trace(run / "traces" / "learner-te")
    return trace, index_trace(trace), plan


def weight(plan: Plan, fqn: str) -> np.ndarray[Any, Any]:
    return read_tensor(Path(plan.model.path), f"{fqn}.weight").float().numpy()


def read(traced: Any, key: Any, fqn: str, kind: str) -> torch.Tensor:
    trace, found, _ = traced
    return read_site(trace, found[key][Site(fqn, kind)]).tensor


ATTENTION = [f"model.layers.1.self_attn.{p}_proj" for p in "qkv"]
EXPERT = [f"model.layers.2.mlp.experts.{{e}}.{p}_proj" for p in ("gate", "up")]
SCORE = SequenceKey("score", "", "p")


def groups(traced: Any) -> list[list[str]]:
    _, found, _ = traced
    used = sorted(
        {s.expert_index for s in found[SCORE] if s.expert_index is not None and s.layer_index == 2}
    )
    routed = [[name.format(e=e) for name in EXPERT] for e in used[:3]]
    down = [[f"model.layers.2.mlp.experts.{e}.down_proj"] for e in used[:3]]
    return [ATTENTION, ["model.layers.0.self_attn.o_proj"], *routed, *down]


def test_weights_are_16x16_tiles_of_the_fused_weight(traced: Any) -> None:
    *_, plan = traced
    for names in groups(traced):
        amax = max(np.abs(weight(plan, name)).max() for name in names)
        for name in names:
            codes, scales, _ = quantize(weight(plan, name), amax, 16)
            assert np.array_equal(unpack(read(traced, STATIC, name, "weight_codes")), codes), name
            held = read(traced, STATIC, name, "weight_block_scale").view(torch.uint8)
            assert torch.equal(held, scales), name


def test_activations_and_outputs(traced: Any) -> None:
    *_, plan = traced
    for names in groups(traced):
        x = read(traced, SCORE, names[0], "input").float().numpy()
        a_x, a_w = np.abs(x).max(), max(np.abs(weight(plan, name)).max() for name in names)
        codes, scales, s = quantize(x, a_x, 1)
        for name in names:
            assert np.array_equal(unpack(read(traced, SCORE, name, "act_codes")), codes), name
            held = read(traced, SCORE, name, "act_block_scale").view(torch.uint8)
            assert torch.equal(held, scales), name
            w_codes, _, w_s = quantize(weight(plan, name), a_w, 16)
            acc = (decode(codes, s) @ decode(w_codes, w_s).T).astype(F)
            alpha = F(a_w) * F(a_x) * (F(1) / F(36 * 448 * 448))
            y = torch.from_numpy(alpha * acc).to(torch.bfloat16)
            out = read(traced, SCORE, name, "output")
            assert torch.equal(out.view(torch.int16), y.view(torch.int16)), name


def test_the_amax_of_an_expert_is_of_its_own_tokens(traced: Any) -> None:
    scales = set()
    for names in groups(traced)[2:]:
        scales.add(float(read(traced, SCORE, names[0], "act_global_decode_scale")))
    assert len(scales) > 3


def test_what_te_leaves_alone_is_transformers_own(traced: Any) -> None:
    trace, *_ = traced
    manifest = json.loads((trace.folder / "manifest.json").read_text())
    status = {item["op"]: item["status"] for item in manifest["evidence"]}
    assert status["nvfp4_linear"] == status["nvfp4_quantize"] == status["experts"] == "modelled"
    assert status["norm"] == status["attention"] == status["router"] == "native"
    assert manifest["label"] == "te-ref"
