"""Every op's reference and kernel are one signature: what one accepts, the other does too."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import interpreter  # noqa: F401
import pytest

import minite_kernels


def op_folders() -> list[str]:
    """Packages that hold both a ``_ref`` and a ``_triton``."""
    names = {m.name for m in pkgutil.walk_packages(minite_kernels.__path__, "minite_kernels.")}
    folders = {name.rsplit(".", 1)[0] for name in names}
    return sorted(f for f in folders if f"{f}._ref" in names and f"{f}._triton" in names)


#: Functions that dispatch calls on whichever module it selected.
DISPATCHED = {
    "minite_kernels.invariant.attention": ("paged_attention",),
    "minite_kernels.invariant.log_softmax": ("log_softmax",),
    "minite_kernels.invariant.matmul": ("matmul",),
    "minite_kernels.invariant.rms_norm": ("rms_norm",),
    "minite_kernels.invariant.rope": ("rope",),
    "minite_kernels.invariant.router": ("route_logits",),
    "minite_kernels.invariant.silu_mul": ("silu_mul", "silu_mul_backward"),
    "minite_kernels.nvfp4.gemm": ("gemm",),
    "minite_kernels.nvfp4.grouped_gemm": (
        *("grouped_gemm", "gather", "combine", "combine_backward", "amax_per_expert"),
    ),
    "minite_kernels.nvfp4.grouped_linear": (
        *("prepare_weight", "forward", "data_gradient", "weight_gradient"),
    ),
    "minite_kernels.nvfp4.quantize": ("quantize_rows", "quantize_tokens", "tensor_scale"),
    "minite_kernels.nvfp4.quantize.fused": ("silu_mul_quantize", "rms_norm_quantize"),
}


def test_every_op_folder_is_listed() -> None:
    assert op_folders() == sorted(DISPATCHED)


@pytest.mark.parametrize(
    ("folder", "name"), [(f, name) for f, names in DISPATCHED.items() for name in names]
)
def test_signatures_are_equal(folder: str, name: str) -> None:
    ref, triton = (
        inspect.signature(getattr(importlib.import_module(f"{folder}.{impl}"), name))
        for impl in ("_ref", "_triton")
    )
    assert list(ref.parameters) == list(triton.parameters)
    assert ref.return_annotation == triton.return_annotation
    for left, right in zip(ref.parameters.values(), triton.parameters.values(), strict=True):
        assert (left.kind, left.default, left.annotation) == (
            right.kind,
            right.default,
            right.annotation,
        )


def test_the_native_gemm_has_it_too() -> None:
    modules = ("_ref", "_native")
    ref, native = (
        inspect.signature(importlib.import_module(f"minite_kernels.nvfp4.gemm.{impl}").gemm)
        for impl in modules
    )
    assert ref == native
