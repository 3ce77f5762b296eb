"""What to type against a cause, by engine and version: data, and the choice for a run.

Knows names and versions only. Invariant: an environment variable or argument named here exists in
the versions that its entry states; what no engine offers is an alignment or says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

KINDS: Final = ("environment", "argument", "config", "export", "alignment", "code")


@dataclass(frozen=True)
class Fix:
    """One remedy: `line` is what to type in `engine` (`any`: not in an engine) of `versions`.

    `alignment` names the rung of the ladder whose measured gain is this fix's.
    """

    engine: str
    kind: str
    line: str
    versions: str = ""
    note: str = ""
    alignment: str = ""


def _te(line: str, kind: str = "environment", note: str = "", alignment: str = "") -> Fix:
    return Fix("te", kind, line, ">=2.8", note, alignment)


def _vllm(line: str, kind: str = "argument", versions: str = "", note: str = "") -> Fix:
    return Fix("vllm", kind, line, versions, note)


def _sglang(line: str, kind: str = "environment", note: str = "") -> Fix:
    return Fix("sglang", kind, line, ">=0.5.20", note)


def _align(name: str) -> Fix:
    return Fix("any", "alignment", f"minite-diag align RUN --align {name}", alignment=name)


_EXACT_MATH: Final = "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1"
_EXACT_NOTE: Final = "FlashInfer's exact order, which is Transformer Engine's"
_POW2: Final = Fix(
    "any",
    "export",
    "minite-diag export MODEL -o DIR --recipe pow2",
    note="with power-of-two global scales scope and formula order don't change the codes",
    alignment="pow2-scale",
)
_RAW: Final = (_vllm('logprobs_mode="raw_logprobs"'), _align("logprobs"))
_INVARIANT: Final = (
    _vllm("VLLM_BATCH_INVARIANT=1", "environment", note="GPU kernels of compute capability 9+"),
    _sglang("--enable-deterministic-inference", "argument"),
)
_LEARNER_WEIGHTS: Final = Fix(
    "any",
    "export",
    "minite-diag export MODEL -o DIR --recipe te",
    note="the sampler then holds the learner's codes and scales",
    alignment="weights",
)

_NVFP4: Final = Fix(
    "any",
    "alignment",
    "minite-diag align RUN --align nvfp4-linear",
    note="experts: --align nvfp4-moe",
    alignment="nvfp4-linear",
)

FIXES: Final[dict[str, tuple[Fix, ...]]] = {
    "MD101": (
        _te(
            "NVTE_NVFP4_ROW_SCALED_ACTIVATION=1 NVTE_NVFP4_DISABLE_RHT=1 "
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1 NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1",
            note="read when transformer_engine is imported",
        ),
        _sglang("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1", note="MoE layers"),
        _POW2,
        _align("static-scale"),
        _NVFP4,
    ),
    "MD102": (
        _te("NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1", alignment="weights"),
        _LEARNER_WEIGHTS,
    ),
    "MD103": (
        _vllm(_EXACT_MATH, "environment", note=_EXACT_NOTE),
        _sglang(_EXACT_MATH, note=_EXACT_NOTE),
        _LEARNER_WEIGHTS,
        _POW2,
    ),
    "MD104": (
        _vllm(_EXACT_MATH, "environment", note=_EXACT_NOTE),
        _sglang(_EXACT_MATH, note=_EXACT_NOTE),
        _LEARNER_WEIGHTS,
        _POW2,
    ),
    "MD105": (
        _te("NVTE_NVFP4_4OVER6=none", note="or set both sides alike, E4M3 maximum included"),
        _sglang("FLASHINFER_NVFP4_4OVER6=0"),
    ),
    "MD106": (
        _te("NVTE_USE_FAST_MATH=0"),
        _vllm(_EXACT_MATH, "environment", note=_EXACT_NOTE),
        _sglang(_EXACT_MATH, note=_EXACT_NOTE),
    ),
    "MD107": (_LEARNER_WEIGHTS, _NVFP4),
    "MD108": (_LEARNER_WEIGHTS,),
    "MD109": (
        _vllm(
            'linear_backend="auto" moe_backend="auto"',
            note="on a GPU with FP4 tensor cores: a native kernel instead of the emulation",
        ),
        _POW2,
        _NVFP4,
    ),
    "MD110": (_POW2,),
    "MD111": (_vllm('linear_backend="cutlass"', note="any but torch rounds once"),),
    "MD112": (
        Fix("any", "export", "minite-diag export MODEL -o DIR --probes FRESH.jsonl"),
        _NVFP4,
    ),
    "MD113": (Fix("any", "export", "minite-diag export MODEL -o DIR"),),
    "MD114": (_LEARNER_WEIGHTS, _POW2),
    "MD115": (
        _vllm('linear_backend="emulation" moe_backend="emulation"', note="W4A4 numerics, slow"),
        Fix("te", "code", "leave activations unquantized in the learner", note="trains W4A16"),
    ),
    "MD117": (*_INVARIANT, _NVFP4),
    "MD118": (
        Fix("any", "export", "minite-diag export MODEL -o DIR", note="one export for both engines"),
        _align("static-scale"),
        _POW2,
    ),
    "MD119": (Fix("any", "export", "minite-diag export MODEL -o DIR", note="linear scales"),),
    "MD201": (_align("norm"),),
    "MD202": (_align("rope"),),
    "MD203": (
        _vllm("VLLM_CPU_ATTN_SPLIT_KV=0", "environment", ">=0.30", "CPU: decode as prefill"),
        _align("attention"),
    ),
    "MD204": (_align("activation"),),
    "MD205": (_align("router"),),
    "MD206": (_align("experts"),),
    "MD207": (_align("lm-head"),),
    "MD208": (*_INVARIANT, _NVFP4),
    "MD210": _RAW,
    "MD211": (
        Fix("hf", "argument", "parallel=fsdp2", note="in the place of parallel=tp"),
        Fix("any", "argument", "the same number of ranks on both sides"),
    ),
    "MD401": (_vllm('logprobs_mode="processed_logprobs"', note="logits / temperature"),),
    "MD404": _RAW[:1],
    "MD405": _RAW[:1],
    "MD501": (),
    "MD502": _INVARIANT,
    "MD503": (*_INVARIANT, _NVFP4),
    "MD504": (_vllm("enable_chunked_prefill=False"), _align("attention")),
    "MD505": (
        _vllm("VLLM_CPU_ATTN_SPLIT_KV=0", "environment", ">=0.30", "CPU: decode as prefill"),
        _align("attention"),
    ),
    "MD506": (
        _vllm("enable_prefix_caching=False"),
        _vllm("LLM.reset_prefix_cache()", "code", note="after every weight update"),
        _sglang("--disable-radix-cache", "argument"),
    ),
    "MD507": (
        _vllm("enforce_eager=True"),
        _vllm('compilation_config={"custom_ops": ["all"]}', note="the engine's own kernels"),
    ),
}
"""Cause -> fixes, the ones that need no kernel first. Causes that are not here are faults of a
converter or of a call: their pages say what to correct."""

_VERSION: Final = re.compile(r"\d+(?:\.\d+)+")


def fixes_for(code: str, engines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fixes that exist in a run's engines ({"engine", "version"}), each as a dict.

    An engine whose version no entry covers gets none of that entry; fixes that live outside of the
    engines always apply.
    """
    present = {(e["engine"], str(e.get("version") or "")) for e in engines}
    return [
        asdict(fix)
        for fix in FIXES.get(code, ())
        if fix.engine == "any"
        or any(name == fix.engine and _covers(fix.versions, version) for name, version in present)
    ]


def _covers(versions: str, text: str) -> bool:
    match = _VERSION.search(text)
    return not versions or (match is not None and Version(match[0]) in SpecifierSet(versions))
