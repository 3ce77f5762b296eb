"""Recipes: the exact arithmetic with which each engine makes and multiplies NVFP4, as data.

NVFP4 fixes the number formats and leaves the FP32 arithmetic open; engines fill it in differently,
and one ulp in a scale moves codes. Here each engine is a value. Must not contain arithmetic: the
expressions named below are evaluated in ``quantize/_ref.py`` and ``gemm/_ref.py``, one small
function each. Invariant: no code anywhere asks a recipe for its name to decide what to compute.

Notation: ``A`` amax of the tensor (or token), ``b`` amax of the block, ``S`` global encode scale,
``g`` global decode scale, ``s`` the E4M3 block scale widened to FP32, ``c6`` = fp32(1/6),
``Q`` = 6 * e4m3_max, ``q`` the decoded code. Every operator is one FP32 rounding; a division is the
recipe's ``reciprocal`` where it is written ``rcp(...)``, else IEEE.

A new recipe is one entry at the end of this file.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Final, Literal

from minite_kernels.nvfp4.format import (
    E4M3_MAX,
    E4M3_SMALLEST_NORMAL,
    E4M3_SMALLEST_SUBNORMAL,
    NegativeZero,
    Ties,
)

Role = Literal["activation", "weight", "gradient"]
AmaxScope = Literal["tensor", "token", "static", "none"]
GlobalScale = Literal[
    "S = Q/A; g = 1/S",
    "S = (1/A)*Q; g = 1/S",
    "g = A/Q; S = 1/g",
    "g = A*(1/Q); S = 1/g",
    "g = A*(1/Q); S = rcp(g)",
    "g = (A*(1/448))*c6; S = 1/g",
    "S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S",
    "S = 1; g = 1",
]
GlobalGuard = Literal["none", "te", "cap", "tiny"]
BlockScale = Literal[
    "b*(S*c6)",
    "S*(b*c6)",
    "S*(b*rcp(6))",
    "(S*b)*rcp(6)",
    "(S*b)/6",
    "(b/6)*S",
    "(b*c6)*S",
    "(b/6)/g",
    "(b*c6)/g",
    "b/(6*g)",
    "(b*c6)*rcp(g)",
    "b/6",
]
ElementScale = Literal[
    "x * rcp(s*rcp(S))",
    "x * (S/s)",
    "x * (rcp(s)*S)",
    "x * ((1/g)/s)",
    "x * rcp(s*g)",
    "x * (6*rcp(b))",
    "x / (s*g)",
    "x / (s/S)",
    "(x*S)/s",
    "x * (1/s)",
]
Dequantize = Literal["q*((s*A)*(1/Q))", "q*(s*g)", "q*(s/S)", "q*(s*rcp(S))", "q*s"]
Alpha = Literal[
    "((A_a*A_b)*(1/((36*F_a)*F_b)))",
    "(A_a*A_b)/((36*F_a)*F_b)",
    "(1/((36*F_a)*F_b)) then (A_a*A_b)",
    "g_a*g_b",
    "(1/S_a)*(1/S_b)",
    "1/(S_a*S_b)",
    "bf16(g_a*g_b)",
]


@dataclass(frozen=True, slots=True)
class FourOverSix:
    """Adaptive block scales: try mapping the block amax to 4 and to 6, keep the smaller error.

    ``error`` sums |d| or d*d over the 16 elements in order (16x16 tiles: then a tree over rows).
    ``domain`` is where d is taken: ``"((q*s)*A)/Q - x"``, ``"(q*s)*g - x"`` or, with the product
    in FP16, ``"q*s - x*S"``. Map-to-4 wins only if its error is strictly smaller.
    """

    error: Literal["mae", "mse"] = "mae"
    domain: Literal["((q*s)*A)/Q - x", "(q*s)*g - x", "q*s - x*S"] = "((q*s)*A)/Q - x"


@dataclass(frozen=True, slots=True)
class OperandRecipe:
    """How one GEMM operand is quantized. Field values are expressions in the module's notation."""

    tile: tuple[int, int] = (1, 16)
    amax_scope: AmaxScope = "tensor"
    global_scale: GlobalScale = "S = Q/A; g = 1/S"
    #: ``te``: S = min(S, FLT_MAX), then 1 if A or S is 0; ``cap``: only the min; ``tiny``: A is
    #: raised to the smallest normal, a non-finite S becomes 1.
    global_guard: GlobalGuard = "te"
    e4m3_max: float = E4M3_MAX
    block_scale: BlockScale = "b*(S*c6)"
    #: ``input``: b, b/6 and S = Q/A are rounded to the dtype of x first.
    statistics_dtype: Literal["float32", "input"] = "float32"
    block_scale_floor: float = 0.0
    #: Replaces a block scale that is zero before (or after) the E4M3 cast; None leaves it.
    zero_block_scale: float | None = None
    zero_block_scale_when: Literal["before_cast", "after_cast"] = "before_cast"
    element_scale: ElementScale = "x * rcp(s*rcp(S))"
    #: The element scale sees the block scale before its E4M3 rounding.
    element_scale_unrounded: bool = False
    reciprocal: Literal["div", "rcp_approx"] = "div"
    #: min(element scale, FLT_MAX); without it a zero block scale makes it inf.
    element_scale_cap: bool = True
    #: Which zero makes the element scale ``zero_guard_value`` instead of a reciprocal of zero.
    zero_guard: Literal["none", "s", "b", "product"] = "none"
    zero_guard_value: float = 0.0
    #: Rounds the element scale; ``bfloat16_if_input`` only for BF16 x.
    element_scale_dtype: Literal["float32", "bfloat16_if_input"] = "float32"
    four_over_six: FourOverSix | None = None
    rounding: Literal["rne", "stochastic"] = "rne"
    ties: Ties = "even"
    negative_zero: NegativeZero = "keep"
    nan_code: int = 7
    #: ``ignore``: max drops NaN unless all are NaN (CUDA's fmaxf, max.xorsign); else it spreads.
    nan_amax: Literal["ignore", "propagate"] = "ignore"
    #: ``max``: min(t, FLT_MAX) drops NaN, so an all-NaN block gets 448; ``nan``: byte 0x7F.
    nan_block_scale: Literal["max", "nan"] = "max"
    #: Subnormal inputs and results of every FP32 operation become zero (-use_fast_math).
    flush_subnormals: bool = False
    dequantize: Dequantize = "q*(s*g)"


@dataclass(frozen=True, slots=True)
class GemmRecipe:
    """How two quantized operands are multiplied.

    ``operands="block_scaled"``: (q_a*s_a) . (q_b*s_b) accumulated in FP32, times alpha in FP32.
    ``"dequantized"``: each operand is dequantized and rounded to the output dtype first, no alpha.
    ``output="once"``: one cast of alpha*acc; ``"twice"``: acc is cast, multiplied, cast again.
    ``bias="epilogue"``: added in FP32 before the cast; ``"after_cast"``: added to the cast output.
    """

    operands: Literal["block_scaled", "dequantized"] = "block_scaled"
    alpha: Alpha = "g_a*g_b"
    output: Literal["once", "twice"] = "once"
    bias: Literal["epilogue", "after_cast"] = "after_cast"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named, complete arithmetic: three operand roles, the GEMM, and the wgrad transform."""

    name: str
    engine: str
    activation: OperandRecipe
    weight: OperandRecipe
    gradient: OperandRecipe
    gemm: GemmRecipe
    #: Random Hadamard transform along tokens on both operands of the weight gradient.
    rht_wgrad: bool = False

    def operand(self, role: Role) -> OperandRecipe:
        """Return the arithmetic of one role; ValueError for anything but the three roles."""
        match role:
            case "activation":
                return self.activation
            case "weight":
                return self.weight
            case "gradient":
                return self.gradient
        raise ValueError(f"unknown role {role!r}; one of activation, weight, gradient")


def get_recipe(name: str | Recipe) -> Recipe:
    """Look a recipe up by name (a ``Recipe`` is returned as it is); ValueError with near matches."""
    if isinstance(name, Recipe):
        return name
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(RECIPES))}"
    raise ValueError(f"unknown recipe {name!r}; {hint}")


# --------------------------------------------------------------------------- Transformer Engine
_TE: Final = OperandRecipe(dequantize="q*((s*A)*(1/Q))")
_TE_2D: Final = replace(_TE, tile=(16, 16))
_TE_GRADIENT: Final = replace(_TE, rounding="stochastic")
_TE_ALPHA: Final = GemmRecipe(alpha="((A_a*A_b)*(1/((36*F_a)*F_b)))", bias="epilogue")
_TE_ROW_ALPHA: Final = GemmRecipe(alpha="(1/((36*F_a)*F_b)) then (A_a*A_b)", bias="epilogue")


def _uniform(
    name: str, engine: str, operand: OperandRecipe, gemm: GemmRecipe, **roles: OperandRecipe
) -> Recipe:
    """Build a recipe whose three roles are ``operand`` except for those named in ``roles``."""
    return Recipe(
        name=name,
        engine=engine,
        activation=roles.get("activation", operand),
        weight=roles.get("weight", operand),
        gradient=roles.get("gradient", operand),
        gemm=gemm,
    )


_TE_DEFAULT: Final = Recipe(
    "te",
    "Transformer Engine 2.20.2, native kernels, default options",
    activation=_TE,
    weight=_TE_2D,
    gradient=_TE_GRADIENT,
    gemm=_TE_ALPHA,
    rht_wgrad=True,
)
_TE_1D: Final = replace(
    _TE_DEFAULT,
    name="te-1d",
    engine="Transformer Engine, disable_2d_quantization, no RHT, no stochastic rounding",
    weight=_TE,
    gradient=_TE,
    rht_wgrad=False,
)
_TE_ROW_SCALED: Final = replace(
    _TE_1D,
    name="te-row-scaled",
    engine="Transformer Engine, row_scaled_activation, 1x16 weights, no RHT",
    activation=replace(_TE, amax_scope="token"),
    gemm=_TE_ROW_ALPHA,
)
_TE_FAST: Final = replace(_TE, element_scale="x * (S/s)", element_scale_dtype="bfloat16_if_input")
_TE_PYTHON: Final = replace(
    _TE, negative_zero="positive", nan_code=0, nan_amax="propagate", nan_block_scale="nan"
)


def _four_over_six(operand: OperandRecipe, e4m3_max: float, rule: FourOverSix) -> OperandRecipe:
    return replace(operand, block_scale="(b/6)*S", e4m3_max=e4m3_max, four_over_six=rule)


def _te_four_over_six(name: str, e4m3_max: float, rule: FourOverSix) -> Recipe:
    return replace(
        _TE_DEFAULT,
        name=name,
        engine=f"Transformer Engine, nvfp4_4over6=all, E4M3 max {e4m3_max:g}, {rule.error.upper()}",
        activation=_four_over_six(_TE, e4m3_max, rule),
        weight=_four_over_six(_TE_2D, e4m3_max, rule),
        gradient=_TE,
        rht_wgrad=False,
    )


_TE_FAST_ERROR: Final = "q*s - x*S"
_TE_RECIPES: Final = (
    _TE_DEFAULT,
    _TE_1D,
    _TE_ROW_SCALED,
    replace(
        _TE_DEFAULT,
        name="te-fast-math",
        engine="Transformer Engine, NVTE_USE_FAST_MATH=1 (tuned 1x16 kernel; 16x16 unaffected)",
        activation=_TE_FAST,
        gradient=replace(_TE_FAST, rounding="stochastic"),
    ),
    replace(
        _TE_1D,
        name="te-1d-fast-math",
        engine="Transformer Engine, NVTE_USE_FAST_MATH=1, 1x16 weights, RNE gradients",
        activation=_TE_FAST,
        weight=_TE_FAST,
        gradient=_TE_FAST,
    ),
    replace(
        _TE_DEFAULT,
        name="te-python",
        engine="Transformer Engine 2.20.2, shipped Python reference run on CPU",
        activation=_TE_PYTHON,
        weight=replace(_TE_PYTHON, tile=(16, 16)),
        gradient=_TE_PYTHON,
        gemm=GemmRecipe(alpha="(A_a*A_b)/((36*F_a)*F_b)", bias="epilogue"),
    ),
    # torch.div of a CUDA tensor by a number multiplies by the rounded reciprocal.
    replace(
        _TE_DEFAULT,
        name="te-python-cuda",
        engine="Transformer Engine 2.20.2, shipped Python reference run on CUDA (te-emu)",
        activation=_TE_PYTHON,
        weight=replace(_TE_PYTHON, tile=(16, 16)),
        gradient=_TE_PYTHON,
    ),
    _te_four_over_six("te-4over6", 256.0, FourOverSix("mae")),
    _te_four_over_six("te-4over6-mse", 256.0, FourOverSix("mse")),
    _te_four_over_six("te-4over6-448", 448.0, FourOverSix("mae")),
    _te_four_over_six("te-4over6-448-mse", 448.0, FourOverSix("mse")),
    _te_four_over_six("te-4over6-fast-error", 256.0, FourOverSix("mae", _TE_FAST_ERROR)),
)

# ------------------------------------------------------------------------------------------ vLLM
_RCP_GLOBAL: Final = OperandRecipe(
    amax_scope="static",
    global_scale="g = A/Q; S = 1/g",
    global_guard="none",
    block_scale="S*(b*rcp(6))",
    reciprocal="rcp_approx",
    element_scale_cap=False,
    zero_guard="s",
    nan_block_scale="nan",
)
_VLLM_CUDA_CT: Final = replace(_RCP_GLOBAL, global_scale="S = Q/A; g = 1/S")
_VLLM_EMULATION: Final = replace(
    _RCP_GLOBAL,
    block_scale="S*(b*c6)",
    reciprocal="div",
    zero_guard="product",
    zero_guard_value=1.0 / 1e8,
    negative_zero="positive",
    nan_amax="propagate",
    dequantize="q*(s/S)",
)
# Triton's `/` is div.full.f32: measured on an H200 to be a * rcp.approx(b), 0 of 2^22 pairs differing.
_VLLM_TRITON: Final = replace(
    _VLLM_EMULATION,
    element_scale="x * (rcp(s)*S)",
    reciprocal="rcp_approx",
    zero_guard="s",
    zero_guard_value=0.0,
    dequantize="q*(s*rcp(S))",
)


def _tensor_scope(operand: OperandRecipe) -> OperandRecipe:
    return replace(operand, amax_scope="tensor")


def _static(name: str, engine: str, operand: OperandRecipe, gemm: GemmRecipe) -> Recipe:
    """Build a serving recipe: static activation scale, weights and gradients per tensor."""
    weight = _tensor_scope(operand)
    return _uniform(name, engine, operand, gemm, weight=weight, gradient=weight)


def _emulation(name: str, engine: str, operand: OperandRecipe) -> Recipe:
    weight = replace(_tensor_scope(operand), dequantize="q*(s*g)")
    gemm = GemmRecipe(operands="dequantized")
    return _uniform(name, engine, operand, gemm, weight=weight, gradient=weight)


_VLLM_RECIPES: Final = (
    _static(
        "vllm-cuda", "vLLM CUDA kernels, ModelOpt checkpoint (S = 1/g)", _RCP_GLOBAL, GemmRecipe()
    ),
    _static(
        "vllm-cuda-ct",
        "vLLM CUDA kernels, compressed-tensors checkpoint (S on disk)",
        _VLLM_CUDA_CT,
        GemmRecipe(alpha="(1/S_a)*(1/S_b)"),
    ),
    _static(
        "vllm-torch-mm",
        "vLLM CUDA quantizer, torch._scaled_mm backend (output rounded twice)",
        _RCP_GLOBAL,
        GemmRecipe(output="twice"),
    ),
    _emulation("vllm-emulation", "vLLM NVFP4 emulation, torch path", _VLLM_EMULATION),
    _emulation("vllm-emulation-triton", "vLLM NVFP4 emulation, Triton path", _VLLM_TRITON),
)

# ---------------------------------------------------------------------------- FlashInfer, SGLang
_FLASHINFER_FAST: Final = replace(
    _RCP_GLOBAL, global_scale="S = Q/A; g = 1/S", zero_guard="b", flush_subnormals=True
)
_FLASHINFER_EXACT: Final = replace(
    _TE, amax_scope="static", zero_guard="b", nan_block_scale="nan", dequantize="q*(s*g)"
)
_FLASHINFER_TOKEN: Final = replace(
    _FLASHINFER_FAST, amax_scope="token", global_scale="g = A*(1/Q); S = rcp(g)"
)
_FLASHINFER_TOKEN_EXACT: Final = replace(_FLASHINFER_EXACT, amax_scope="token", global_guard="cap")
_SGLANG: Final = replace(_FLASHINFER_FAST, global_scale="g = A/Q; S = 1/g", zero_guard="s")
_SGLANG_ONLINE_WEIGHT: Final = _four_over_six(
    replace(_FLASHINFER_EXACT, amax_scope="tensor"), 448.0, FourOverSix("mse", _TE_FAST_ERROR)
)
_FLASHINFER_RECIPES: Final = (
    _static("flashinfer-fast", "FlashInfer fp4_quantize, default", _FLASHINFER_FAST, GemmRecipe()),
    _static(
        "flashinfer-exact",
        "FlashInfer fp4_quantize, FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1",
        _FLASHINFER_EXACT,
        GemmRecipe(),
    ),
    _uniform(
        "flashinfer-token",
        "FlashInfer per_token_activation, default",
        _tensor_scope(_FLASHINFER_FAST),
        GemmRecipe(),
        activation=_FLASHINFER_TOKEN,
    ),
    _uniform(
        "flashinfer-token-exact",
        "FlashInfer per_token_activation, exact math",
        _tensor_scope(_FLASHINFER_EXACT),
        GemmRecipe(),
        activation=_FLASHINFER_TOKEN_EXACT,
    ),
    _static(
        "flashinfer-rmsnorm",
        "FlashInfer CuTe-DSL fused add + RMSNorm + quantize (the quantizer alone)",
        replace(
            _FLASHINFER_FAST,
            block_scale="(S*b)*rcp(6)",
            element_scale="x * (rcp(s)*S)",
            zero_guard="s",
        ),
        GemmRecipe(),
    ),
    _static(
        "sglang", "SGLang 0.5.23, ModelOpt checkpoint, CuTe-DSL quantizer", _SGLANG, GemmRecipe()
    ),
    _static(
        "sglang-ct",
        "SGLang 0.5.23, compressed-tensors checkpoint",
        replace(_SGLANG, global_scale="S = Q/A; g = 1/S"),
        GemmRecipe(alpha="1/(S_a*S_b)"),
    ),
    _uniform(
        "sglang-online",
        "SGLang nvfp4_online: four-over-six weights (448, MSE, fast error), per-token activations",
        _SGLANG_ONLINE_WEIGHT,
        GemmRecipe(),
        activation=_FLASHINFER_TOKEN_EXACT,
    ),
)

# ------------------------------------------------------------- checkpoint writers, training stacks
_TORCH: Final = OperandRecipe(
    global_guard="none",
    element_scale_cap=False,
    negative_zero="positive",
    nan_amax="propagate",
    nan_block_scale="nan",
)
_MODELOPT: Final = replace(
    _TORCH,
    global_scale="g = A/Q; S = 1/g",
    block_scale="b/(6*g)",
    zero_block_scale=1.0,
    block_scale_floor=E4M3_SMALLEST_SUBNORMAL,
    element_scale="x / (s*g)",
)
_COMPRESSED_TENSORS_FP32: Final = replace(
    _TORCH,
    global_scale="S = (1/A)*Q; g = 1/S",
    global_guard="tiny",
    block_scale="(b/6)*S",
    zero_block_scale=0.125,
    zero_block_scale_when="after_cast",
    element_scale="x / (s/S)",
    nan_code=0,
    dequantize="q*(s/S)",
)
_COMPRESSED_TENSORS: Final = replace(_COMPRESSED_TENSORS_FP32, statistics_dtype="input")
_TORCHAO: Final = replace(
    _TORCH,
    global_scale="g = A/Q; S = 1/g",
    block_scale="(b/6)/g",
    block_scale_floor=E4M3_SMALLEST_NORMAL,
    element_scale="x * ((1/g)/s)",
    negative_zero="keep",
)
_CT_GEMM: Final = GemmRecipe(alpha="(1/S_a)*(1/S_b)")
_WRITER_RECIPES: Final = (
    _uniform("modelopt", "ModelOpt NVFP4QTensor export on CPU", _MODELOPT, GemmRecipe()),
    _uniform(
        "modelopt-cuda",
        "ModelOpt NVFP4QTensor export on CUDA, where torch divides by a number by multiplying",
        replace(_MODELOPT, global_scale="g = A*(1/Q); S = 1/g"),
        GemmRecipe(),
    ),
    _uniform(
        "compressed-tensors",
        "compressed-tensors, statistics in the dtype of the observed tensor (BF16)",
        _COMPRESSED_TENSORS,
        _CT_GEMM,
    ),
    _uniform(
        "compressed-tensors-fp32",
        "compressed-tensors, FP32 statistics",
        _COMPRESSED_TENSORS_FP32,
        _CT_GEMM,
    ),
    _uniform(
        "compressed-tensors-cuda",
        "compressed-tensors on CUDA tensors, BF16 statistics, where b/6 is b * fp32(1/6)",
        replace(_COMPRESSED_TENSORS, block_scale="(b*c6)*S"),
        _CT_GEMM,
    ),
    _uniform(
        "torchao",
        "torchao nvfp4_quantize, dynamic per-tensor scale",
        _TORCHAO,
        GemmRecipe(alpha="bf16(g_a*g_b)", output="twice"),
    ),
    _uniform(
        "torchao-cuda",
        "torchao nvfp4_quantize on CUDA, where x/6 and A/Q multiply by the reciprocal",
        replace(_TORCHAO, global_scale="g = A*(1/Q); S = 1/g", block_scale="(b*c6)/g"),
        GemmRecipe(alpha="bf16(g_a*g_b)", output="twice"),
    ),
    _uniform(
        "torchao-single-level",
        "torchao nvfp4_quantize without per-tensor scale",
        replace(
            _TORCHAO,
            amax_scope="none",
            global_scale="S = 1; g = 1",
            block_scale="b/6",
            element_scale="x * (1/s)",
            dequantize="q*s",
        ),
        GemmRecipe(),
    ),
)

# ------------------------------------------------------------------------------ research kernels
_QUTLASS_SM120: Final = _tensor_scope(_VLLM_CUDA_CT)
_RESEARCH_RECIPES: Final = (
    _uniform("qutlass-sm120", "qutlass, sm120 epilogue, H = I", _QUTLASS_SM120, GemmRecipe()),
    _uniform(
        "qutlass-sm100",
        "qutlass, sm100 epilogue: elements scaled by the unrounded block scale, H = I",
        replace(_QUTLASS_SM120, element_scale_unrounded=True),
        GemmRecipe(),
    ),
    _uniform(
        "fp-quant",
        "FP-Quant pseudo-quantization kernel: ties toward zero, H = I",
        replace(
            _TORCH,
            block_scale="(S*b)/6",
            element_scale="(x*S)/s",
            ties="toward_zero",
        ),
        GemmRecipe(),
    ),
    _uniform(
        "quartet2",
        "Quartet-II rtn_fp4",
        replace(
            _RCP_GLOBAL,
            amax_scope="tensor",
            global_scale="g = (A*(1/448))*c6; S = 1/g",
            block_scale="(b*c6)*rcp(g)",
            element_scale="x * rcp(s*g)",
            zero_guard_value=1.0,
        ),
        GemmRecipe(),
    ),
    _uniform(
        "fouroversix-static6",
        "four-over-six reference, static_6",
        replace(_TORCH, block_scale="(b/6)*S"),
        GemmRecipe(),
    ),
    _uniform(
        "fouroversix",
        "four-over-six reference, MSE, E4M3 max 256",
        _four_over_six(_TORCH, 256.0, FourOverSix("mse", "(q*s)*g - x")),
        GemmRecipe(),
    ),
)

# ---------------------------------------------------------------- power-of-two global scale: a fix
_POW2: Final = replace(
    _TE, global_scale="S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S", dequantize="q*(s*g)"
)
_POW2_RECIPES: Final = (
    _uniform(
        "pow2",
        "TE arithmetic, 1x16, with S rounded down to a power of two: same bits in most engines",
        _POW2,
        GemmRecipe(),
    ),
    _uniform(
        "pow2-row-scaled",
        "pow2 with one amax per token",
        _POW2,
        GemmRecipe(),
        activation=replace(_POW2, amax_scope="token"),
    ),
)

RECIPES: Final[dict[str, Recipe]] = {
    recipe.name: recipe
    for recipe in (
        *_TE_RECIPES,
        *_VLLM_RECIPES,
        *_FLASHINFER_RECIPES,
        *_WRITER_RECIPES,
        *_RESEARCH_RECIPES,
        *_POW2_RECIPES,
    )
}
