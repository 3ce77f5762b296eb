"""Fused producers: equal to their parts, and different from the unfused pair where engines are."""

from __future__ import annotations

import torch
from data import matrix

from minite_kernels.invariant.rms_norm import add_rms_norm
from minite_kernels.invariant.silu_mul import silu_mul
from minite_kernels.nvfp4.layout import unpack_codes
from minite_kernels.nvfp4.quantize import dequantize, quantize
from minite_kernels.nvfp4.quantize.fused import add_rms_norm_quantize, silu_mul_quantize


def test_fused_silu_mul_rounds_once_and_that_shows_in_codes() -> None:
    x = matrix("normal", 64, 1024).bfloat16() * 2
    amax = silu_mul(x, rounding="once").float().abs().amax()
    fused = silu_mul_quantize(x, "vllm-cuda", amax=amax)
    same = quantize(silu_mul(x, rounding="once"), "vllm-cuda", amax=amax)
    assert torch.equal(fused.codes, same.codes)
    unfused = quantize(silu_mul(x, rounding="twice"), "vllm-cuda", amax=amax)
    different = (unpack_codes(fused.codes) != unpack_codes(unfused.codes)).float().mean().item()
    assert 0.001 < different < 0.05


def test_fused_add_rms_norm_is_near_the_unfused_one_and_returns_the_sum() -> None:
    x, residual = matrix("normal", 32, 512).bfloat16(), matrix("normal", 32, 512, seed=1).bfloat16()
    weight = (matrix("normal", 1, 512, seed=2)[0] * 0.1 + 1).bfloat16()
    encode = torch.tensor(512.0)
    q, total = add_rms_norm_quantize(x, residual, weight, 1e-6, global_encode_scale=encode)
    normed, plain_total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, plain_total)
    unfused = quantize(normed, "flashinfer-rmsnorm", global_encode_scale=encode)
    different = (unpack_codes(q.codes) != unpack_codes(unfused.codes)).float().mean().item()
    assert 0.0001 < different < 0.05
    error = (dequantize(q) - normed.float()).norm() / normed.float().norm()
    assert error.item() < 0.12
