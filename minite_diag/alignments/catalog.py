"""The bundled alignments, in ladder order: first what needs no kernel, then op by op.

Data only. Ops that are bitwise equal already keep the engines' own code and are not listed.
"""

from __future__ import annotations

from typing import Final

from minite_diag.alignments.base import EXPORT, Alignment, Application, Needs

_HF: Final = "minite_diag.alignments.transformers_ops"
_VLLM: Final = "minite_diag.alignments.vllm_ops"
_SGLANG: Final = "minite_diag.alignments.sglang_ops"
_VLLM_KNOWN: Final = ">=0.32,<0.33 (CPU), ==0.23 (CUDA)"
_SGLANG_CPU: Final = "==0.5.23 (CPU)"
_TRANSFORMERS: Final = ">=5.12,<5.20"


def _learner(op: str, function: str) -> dict[str, Application]:
    application = Application(_TRANSFORMERS, replacements=((op, f"{_HF}:{function}"),))
    return {"te": application, "hf": application}


def _op(name: str, title: str, op: str, needs: Needs = "") -> Alignment:
    """One op, replaced by the same kernel on both sides."""
    function = f"align_{op}"
    vllm = Application(_VLLM_KNOWN, replacements=((op, f"{_VLLM}:{function}"),))
    sglang = Application(_SGLANG_CPU, replacements=((op, f"{_SGLANG}:{function}"),))
    engines = {**_learner(op, function), "vllm": vllm, "sglang": sglang}
    return Alignment(name, title, engines, kernels=True, needs=needs)


def _settings(recipe: str) -> dict[str, Application]:
    """A recipe of the learner; samplers load what it exports."""
    any_sampler = {name: Application("any") for name in ("vllm", "sglang")}
    return {"te": Application("any", options={"recipe": recipe}), **any_sampler}


def _nvfp4(name: str, title: str, op: str, part: Needs, option: str) -> Alignment:
    """The W4A4 arithmetic of one part of the model; `option` names the part in the engines."""

    def sampler(versions: str, module: str) -> Application:
        plugin = ((op, f"{module}:align_{name.replace('-', '_')}"),)
        return Application(versions, options={f"nvfp4_{option}": _POW2_BY_ROW}, plugin=plugin)

    engines = {
        "te": Application("any", options={option: _POW2_BY_ROW}),
        "vllm": sampler(_VLLM_KNOWN, _VLLM),
        "sglang": sampler(_SGLANG_CPU, _SGLANG),
    }
    return Alignment(name, title, engines, export={"recipe": "pow2"}, kernels=True, needs=part)


_POW2_BY_ROW: Final = "pow2-row-scaled"

_EXACT_MATH: Final = {
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
}

ALIGNMENTS: Final = {
    alignment.name: alignment
    for alignment in (
        Alignment(
            "exact-fp4-math",
            "exact FP4 quantization: FlashInfer in Transformer Engine's order, no fast math",
            {
                "te": Application("any", "cuda", environment={"NVTE_USE_FAST_MATH": "0"}),
                "vllm": Application("any", "cuda", environment=_EXACT_MATH),
                "sglang": Application("any", "cuda", environment=_EXACT_MATH),
            },
        ),
        Alignment(
            "batch-invariant",
            "the sampler's own batch-invariant kernels",
            {"vllm": Application(">=0.12", "cuda", environment={"VLLM_BATCH_INVARIANT": "1"})},
        ),
        Alignment(
            "decode-as-prefill",
            "attention of a decoded token in one piece, as in prefill",
            {"vllm": Application(">=0.30", "cpu", environment={"VLLM_CPU_ATTN_SPLIT_KV": "0"})},
            in_ladder=False,
        ),
        Alignment(
            "whole-prefill",
            "no chunked prefill: a prompt is one forward pass",
            {
                "vllm": Application("any", options={"max_num_batched_tokens": "16384"}),
            },
            in_ladder=False,
        ),
        Alignment(
            "row-scale",
            "one activation scale per token (TE row-scaled, SGLang per token), 1x16 weights",
            {
                "te": Application("any", options={"recipe": "te-row-scaled"}),
                "sglang": Application(
                    "==0.5.23",
                    "cuda",
                    environment={"SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": "1"},
                ),
            },
            export={"recipe": "te-1d"},
            in_ladder=False,
        ),
        Alignment(
            "weights",
            "export the sampler's weights with the learner's codes and scales (1x16)",
            _settings("te-1d"),
            export={"recipe": "te-1d"},
        ),
        Alignment(
            "pow2-scale",
            "power-of-two global scales on both sides: scope and formula order cease to matter",
            _settings("pow2"),
            export={"recipe": "pow2"},
        ),
        Alignment(
            "static-scale",
            "the learner takes the activation scales that the sampler's checkpoint was calibrated to",
            {"te": Application("any", options={"input_scales": EXPORT})},
            needs="quantized",
            superseded_by=("nvfp4-linear", "nvfp4-moe"),
        ),
        _op("norm", "RMSNorm of the rounded residual sum", "norm"),
        _op("rope", "RoPE in FP32 from one table, rounded once", "rope"),
        _op("attention", "attention with a fixed order over a paged cache", "attention"),
        _op(
            "activation",
            "SiLU from fixed FP32 operations, rounded before the product",
            "activation",
        ),
        _op("router", "softmax over all experts in FP32, lower index on ties", "router", "moe"),
        _op(
            "experts",
            "weighted sum of experts in slot order, FP32, rounded once",
            "experts",
            "experts",
        ),
        _nvfp4(
            "nvfp4-linear",
            "per-token power-of-two scales and one W4A4 GEMM in every quantized dense linear",
            "nvfp4_linear",
            "linears",
            "linear_recipe",
        ),
        _nvfp4(
            "nvfp4-moe",
            "per-token power-of-two scales and one W4A4 GEMM in every quantized expert",
            "nvfp4_experts",
            "experts",
            "expert_recipe",
        ),
        _op("lm-head", "lm_head with a row-invariant FP32 sum", "lm_head"),
        _op("logprobs", "log-softmax with a fixed order", "logprobs"),
    )
}
