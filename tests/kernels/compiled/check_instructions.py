"""Cross-compiles the kernels for GPUs that are not here and looks for their instructions in PTX.

Compiled, not run: this shows that a kernel builds for an architecture and uses its tensor cores and
conversions, nothing about its numbers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minite_kernels.invariant.attention import _triton as attention
from minite_kernels.invariant.matmul import _triton as matmul
from minite_kernels.nvfp4.gemm import _native, configs
from minite_kernels.nvfp4.gemm import _triton as gemm
from minite_kernels.nvfp4.grouped_linear import _triton as grouped_linear
from minite_kernels.nvfp4.quantize import _triton as quantize
from minite_kernels.nvfp4.quantize import configs as quantize_configs
from minite_kernels.nvfp4.quantize.fused import _triton as fused
from minite_kernels.nvfp4.recipe import get_recipe

EPILOGUE = ("((A_a*A_b)*(1/((36*F_a)*F_b)))", 7225344.0, 1.384017e-07, False, "none")


def ptx(
    kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], **options: Any
) -> str:
    """PTX of a kernel for compute capability ``arch``/10; pointers and strides divisible by 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = [
        n for n in names if signature[n].startswith("*") or n in ("N", "K", "stride_am", "stride_m")
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n in types},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False} | options
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return str(compiled.asm["ptx"])


QUANTIZE = {
    **dict.fromkeys(("amax_ptr", "encode_ptr", "decode_ptr"), "*fp32"),
    **dict.fromkeys(("M", "K", "stride_m", "stride_k"), "i32"),
    "x_ptr": "*bf16",
    "q_ptr": "*u8",
    "s_ptr": "*fp8e4nv",
    "seed_ptr": "*i32",
}


@pytest.mark.parametrize("arch", (90, 100, 103))
@pytest.mark.parametrize("name", ("te", "vllm-cuda", "modelopt", "te-4over6", "sglang"))
def test_quantizer_uses_no_packed_conversion_and_fuses_nothing(name: str, arch: int) -> None:
    operand = get_recipe(name).weight
    constants = {
        "PER_ROW": False,
        "VALUES": False,
        "BM": 16,
        "BK": 128,
        "NAN_SPREADS": False,
        "RECIPE": quantize.recipe_constants(operand, torch.bfloat16),
    }
    code = ptx(quantize._quantize_kernel, arch, QUANTIZE, constants)
    assert "e4m3x2" not in code  # ptxas lets readers run before it has packed two of them
    assert "fma.rn.f32" not in code
    assert ("rcp.approx.ftz.f32" in code) == (operand.reciprocal == "rcp_approx")
    assert ("div.rn.f32" in code) == (operand.reciprocal == "div")


@pytest.mark.parametrize("arch", (90, 100))
@pytest.mark.parametrize("k", (768, 2048, 20480))
def test_token_quantizer_reads_a_row_once(k: int, arch: int) -> None:
    operand = get_recipe("te-row-scaled").activation
    config = quantize_configs.token_config(k)
    constants = {
        "VALUES": True,
        "BM": config.rows,
        "BK": config.columns,
        "PIECES": config.pieces,
        "PADDED": False,
        "LEADS": True,
        "NAN_SPREADS": False,
        "GLOBAL": quantize.global_constants(operand, torch.bfloat16),
        "RECIPE": quantize.recipe_constants(operand, torch.bfloat16),
    }
    types = QUANTIZE | {"q_ptr": "*fp16", "s_ptr": "*fp16"}
    code = ptx(quantize._quantize_token_kernel, arch, types, constants, num_warps=config.num_warps)
    assert "e4m3x2" not in code and "fma.rn.f32" not in code
    loops = len(re.findall(r"^\s*@%p\d+ bra", code, re.M))
    assert (loops >= 2) == (config.pieces == 0)
    assert "griddepcontrol.launch_dependents" in code


def test_ptxas_cannot_cancel_two_reciprocals() -> None:
    operand = get_recipe("flashinfer-token").activation  # S = rcp(g), then rcp(S)
    config = quantize_configs.token_config(512)
    constants = {
        "VALUES": False,
        "BM": config.rows,
        "BK": config.columns,
        "PIECES": config.pieces,
        "PADDED": False,
        "LEADS": False,
        "NAN_SPREADS": False,
        "GLOBAL": quantize.global_constants(operand, torch.bfloat16),
        "RECIPE": quantize.recipe_constants(operand, torch.bfloat16),
    }
    code = ptx(quantize._quantize_token_kernel, 90, QUANTIZE, constants, num_warps=2)
    first, second = code.index("rcp.approx"), code.index("%ctaid.z")
    assert "xor.b32" in code and min(first, second) > 0


FUSED = {
    **dict.fromkeys(("amax_ptr", "encode_ptr", "decode_ptr"), "*fp32"),
    **dict.fromkeys(("M", "K", "stride_x", "stride_residual"), "i32"),
    **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "sum_ptr"), "*bf16"),
    "q_ptr": "*u8",
    "s_ptr": "*fp8e4nv",
    "eps": "fp32",
}


@pytest.mark.parametrize("arch", (90, 100))
@pytest.mark.parametrize(
    ("producer", "name", "scope", "columns"),
    (
        (("silu_mul", "none", False, False, False), "vllm-cuda", "tensor", 256),
        (("silu_mul", "none", False, False, False), "te-row-scaled", "token", 1024),
        (("rms_norm", "rounded", False, True, True), "te-row-scaled", "token", 2048),
        (("rms_norm", "weight_first", True, True, True), "flashinfer-rmsnorm", "tensor", 2048),
    ),
    ids=("silu-static", "silu-token", "norm-token", "add-norm-static"),
)
def test_fused_producers_are_one_kernel(
    producer: tuple[Any, ...], name: str, scope: str, columns: int, arch: int
) -> None:
    operand = get_recipe(name).activation
    constants = {
        "PRODUCER": producer,
        "SCOPE": scope,
        "PADDED": False,
        "BM": max(1, 2048 // columns),
        "BK": columns,
        "NAN_SPREADS": False,
        "GLOBAL": quantize.global_constants(operand, torch.bfloat16),
        "RECIPE": quantize.recipe_constants(operand, torch.bfloat16),
    }
    code = ptx(fused._fused_kernel, arch, FUSED, constants)
    assert "e4m3x2" not in code
    assert "fma.rn.f32" not in code
    assert ("sqrt.rn.f32" in code) == (producer[0] == "rms_norm")
    assert ("rcp.approx.ftz.f32" in code) == (operand.reciprocal == "rcp_approx")


ALONG_ROWS = {
    **dict.fromkeys(("amax_ptr", "encode_ptr", "decode_ptr"), "*fp32"),
    **dict.fromkeys(("x_ptr", "h_ptr"), "*bf16"),
    **dict.fromkeys(("expert_ptr", "seed_ptr"), "*i32"),
    "out_ptr": "*fp16",
    "C": "i32",
}


@pytest.mark.parametrize("arch", (90, 100))
@pytest.mark.parametrize("per_column", (False, True), ids=("expert", "column"))
def test_wgrad_quantizer_transforms_on_tensor_cores(per_column: bool, arch: int) -> None:
    constants = {
        "PER_COLUMN": per_column,
        "NAN_SPREADS": False,
        "RHT": True,
        "BC": 256,
        "RECIPE": quantize.recipe_constants(get_recipe("te").gradient, torch.bfloat16),
    }
    code = ptx(grouped_linear._along_rows_kernel, arch, ALONG_ROWS, constants)
    assert re.search(r"mma\S*\.f32\.bf16\.bf16|tcgen05\.mma", code)
    assert "e4m3x2" not in code and "fma.rn.f32" not in code


PACKED = {
    **dict.fromkeys(("M", "N", "K", "E", "stride_am"), "i32"),
    "s_ptr": "*i32",
    **dict.fromkeys(("offsets_ptr", "row_ptr"), "*i64"),
    **dict.fromkeys(("a_statistic_ptr", "b_statistic_ptr", "bias_ptr"), "*fp32"),
    "a_ptr": "*fp16",
    "w_ptr": "*i16",
    "out_ptr": "*bf16",
}


@pytest.mark.parametrize("grouped", (False, True), ids=("dense", "grouped"))
def test_packed_gemm_decodes_into_hopper_tensor_cores(grouped: bool) -> None:
    config = configs.PACKED_SMALL
    constants = {
        "BM": config.rows,
        "BN": config.columns,
        "BK": 256,
        "SWAP": config.swap,
        "ASM": True,
        "EP": 128,
        "OVERLAP": True,
        "GROUPED": grouped,
        "GATHER": grouped,
        "GROUP": 8,
        "A_PER_ROW": False,
        "B_PER_COLUMN": False,
        "EPILOGUE": EPILOGUE,
    }
    code = ptx(
        gemm._packed_kernel,
        90,
        PACKED,
        constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    tensor_core = r"wgmma\.mma_async\S*\.f32\.f16\.f16|mma\.sync\S*m16n8k16\S*\.f32\.f16\.f16"
    assert re.search(tensor_core, code)
    assert "mul.rn.f16x2" in code
    assert "cp.async" in code
    wait = code.index("griddepcontrol.wait")
    assert ("prefetch.global.L2" in code[:wait]) == (not grouped)
    assert "cp.async" not in code[:wait]


NATIVE = {
    **dict.fromkeys(("M", "N", "K"), "i32"),
    **dict.fromkeys(("a_ptr", "b_ptr"), "*u8"),
    **dict.fromkeys(("a_scale_ptr", "b_scale_ptr"), "*fp8e4nv"),
    **dict.fromkeys(("a_statistic_ptr", "b_statistic_ptr", "bias_ptr"), "*fp32"),
    "out_ptr": "*bf16",
}


@pytest.mark.parametrize("arch", (100, 103))
def test_native_gemm_uses_block_scaled_tensor_cores(arch: int) -> None:
    config = _native.CONFIG
    constants = {
        "BM": config.rows,
        "BN": config.columns,
        "BK": config.k,
        "GROUP": 8,
        "A_PER_ROW": False,
        "B_PER_COLUMN": False,
        "EPILOGUE": EPILOGUE,
    }
    code = ptx(_native._native_kernel, arch, NATIVE, constants, num_stages=config.num_stages)
    assert re.search(r"\.target sm_10\da", code)
    assert re.search(r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)", code)


def test_invariant_matmul_uses_wgmma_in_one_accumulator() -> None:
    types = {
        **dict.fromkeys(("T", "N", "K", "stride_xt", "stride_wn"), "i32"),
        **dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), "*bf16"),
    }
    constants = {"BM": 64, "BN": 128, "BK": 64, "GROUP": 8, "HAS_BIAS": False, "IEEE": False}
    code = ptx(matmul._matmul_kernel, 90, types, constants, num_stages=4)
    assert re.search(r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", code)
    assert not re.search(r"^\s*(atom|red)\.", code, re.M)


def test_attention_compiles_for_hopper_and_blackwell() -> None:
    types = dict.fromkeys(attention._attention_kernel.arg_names, "i32")
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("table_ptr", "seq_lens_ptr"), "*i32")
    types |= {"query_start_ptr": "*i64", "scale_log2": "fp32"}
    constants = {"BQ": 64, "BL": 64, "DP": 128}
    for arch in (90, 100):
        code = ptx(attention._attention_kernel, arch, types, constants, num_stages=2)
        assert "wgmma" in code or "tcgen05.mma" in code or "mma.sync" in code
