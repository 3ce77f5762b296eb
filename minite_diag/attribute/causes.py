"""Cause codes: what can split a learner from a sampler, each with a page.

Data and look-up only: no torch, no engine. Invariant: every code has a page under `pages/`, every
page has a code, and a code never changes its meaning.
"""

from __future__ import annotations

import difflib
import importlib.resources
from dataclasses import dataclass
from typing import Final

from minite_diag.errors import UsageError


@dataclass(frozen=True)
class Cause:
    """One cause: `code` for SARIF, waivers and `explain`; `title` in a few words."""

    code: str
    title: str


CAUSES: Final = {
    cause.code: cause
    for cause in (
        Cause("MD101", "activation scale has another scope (tensor, token, static)"),
        Cause("MD102", "weight scales cover another tile (16x16, 1x16)"),
        Cause("MD103", "block scale is computed in another order"),
        Cause("MD104", "element scale is computed by another formula"),
        Cause("MD105", "four-over-six on one side only, or with other settings"),
        Cause("MD106", "fast math: approximate reciprocal or BF16 scale"),
        Cause("MD107", "other floor, zero-block or guard rule for block scales"),
        Cause("MD108", "statistics are rounded to the input dtype first"),
        Cause("MD109", "GEMM on operands that were dequantized and rounded"),
        Cause("MD110", "epilogue alpha is computed by another formula"),
        Cause("MD111", "output is rounded twice"),
        Cause("MD112", "static activation scale does not fit the activations"),
        Cause("MD113", "parts of a fused module do not share the scale that the kernel uses"),
        Cause("MD114", "global scale is computed by another formula"),
        Cause("MD115", "activations are not quantized (W4A16)"),
        Cause("MD116", "signs of zero, ties or NaN are encoded by another rule"),
        Cause("MD117", "GEMM accumulates in another order or precision"),
        Cause("MD118", "static activation scales differ"),
        Cause("MD119", "block scales are read in another layout (swizzle, padding)"),
        Cause("MD199", "codes that no known arithmetic reproduces"),
        Cause("MD201", "norm computes other bits from equal input"),
        Cause("MD202", "RoPE computes other bits from equal input"),
        Cause("MD203", "attention computes other bits from equal input"),
        Cause("MD204", "activation function computes other bits from equal input"),
        Cause("MD205", "router computes other bits from equal input"),
        Cause("MD206", "experts combine to other bits from equal input"),
        Cause("MD207", "lm_head computes other bits from equal input"),
        Cause("MD208", "linear computes other bits from equal input and weights"),
        Cause("MD209", "embedding computes other bits from equal tokens"),
        Cause("MD210", "log-probabilities differ from equal logits"),
        Cause("MD211", "sums are split over another number of tensor-parallel ranks"),
        Cause("MD301", "weights differ: stale, partly loaded or from another step"),
        Cause("MD302", "gate and up are swapped"),
        Cause("MD303", "attention heads are permuted"),
        Cause("MD304", "one part of a fused module is off by a factor"),
        Cause("MD305", "bias is missing or different"),
        Cause("MD306", "lm_head is tied to the embedding on one side only"),
        Cause("MD307", "model configs differ"),
        Cause("MD401", "log-probabilities of another temperature"),
        Cause("MD402", "log-probabilities are shifted by a token"),
        Cause("MD403", "log-probabilities, not logits, were divided by the temperature"),
        Cause("MD404", "log-probabilities are renormalized after top-k or top-p"),
        Cause("MD405", "logits were sent as log-probabilities"),
        Cause("MD406", "the sides saw other tokens"),
        Cause("MD501", "hooks change the engine's result"),
        Cause("MD502", "the engine does not repeat itself"),
        Cause("MD503", "the result depends on the rest of the batch"),
        Cause("MD504", "the result depends on how the prompt is chunked"),
        Cause("MD505", "decode differs from prefill"),
        Cause("MD506", "decode reads a cache of an earlier request or state"),
        Cause("MD507", "production settings compute other bits than the captured run"),
        Cause("MD601", "tokens are routed to other experts"),
    )
}


def get_cause(code: str) -> Cause:
    """The cause of that code; raises UsageError with near matches."""
    found = CAUSES.get(code.upper())
    if found is None:
        near = difflib.get_close_matches(code.upper(), CAUSES, n=3)
        raise UsageError(
            f"no cause has the code {code!r}",
            f"did you mean {', '.join(near)}?" if near else "minite-diag explain lists all codes",
        )
    return found


def page(code: str) -> str:
    """The page of a cause as Markdown: what it is, how to confirm it, how to fix it."""
    cause = get_cause(code)
    folder = importlib.resources.files("minite_diag.attribute") / "pages"
    return (folder / f"{cause.code}.md").read_text(encoding="utf-8")


RECIPE_FIELDS: Final = {
    "amax_scope": "MD101",
    "tile": "MD102",
    "block_scale": "MD103",
    "element_scale": "MD104",
    "element_scale_unrounded": "MD104",
    "four_over_six": "MD105",
    "e4m3_max": "MD105",
    "reciprocal": "MD106",
    "element_scale_dtype": "MD106",
    "scaled_dtype": "MD106",
    "flush_subnormals": "MD106",
    "block_scale_floor": "MD107",
    "zero_block_scale": "MD107",
    "zero_block_scale_when": "MD107",
    "zero_guard": "MD107",
    "zero_guard_value": "MD107",
    "element_scale_cap": "MD107",
    "global_guard": "MD107",
    "statistics_dtype": "MD108",
    "global_scale": "MD114",
    "negative_zero": "MD116",
    "nan_code": "MD116",
    "nan_amax": "MD116",
    "nan_block_scale": "MD116",
    "ties": "MD116",
}
"""Field of an operand recipe -> cause that a difference in it is."""

GEMM_FIELDS: Final = {"operands": "MD109", "alpha": "MD110", "output": "MD111"}
"""Field of a GEMM recipe -> cause."""

OPS: Final = {
    "norm": "MD201",
    "rope": "MD202",
    "attention": "MD203",
    "activation": "MD204",
    "router": "MD205",
    "experts": "MD206",
    "lm_head": "MD207",
    "linear": "MD208",
    "embedding": "MD209",
}
"""Op class -> cause, where its output differs and its input does not."""

SPLIT_SUM: Final = "MD211"
"""The cause of linears and experts whose sum runs over other ranks."""
