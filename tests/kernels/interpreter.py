"""Runs Triton kernels in its CPU interpreter with correct casts. Test only.

The stock interpreter (3.6) truncates FP32 to BF16, casts to E4M3 without round-to-nearest-even and
multiplies the raw bits of BF16 in ``tl.dot``: silently wrong. ``install`` replaces those three with
torch's casts and FP32 products. Import this before any kernel module.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_LOW = (tl.bfloat16, tl.float8e4nv)
_STORED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}


def _torch(data: Any, dtype: Any) -> torch.Tensor:
    bits = np.ascontiguousarray(data).view(_SIGNED[dtype.primitive_bitwidth])
    return torch.from_numpy(bits.copy()).view(_FLOATS[dtype])


def _numpy(value: torch.Tensor) -> Any:
    width = value.element_size() * 8
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    return value.contiguous().view(integer).numpy().view(_STORED[width])


def _convert(data: Any, source: Any, target: Any) -> Any:
    value = _torch(data, source)
    if target == tl.float8e4nv:  # satfinite, NaN kept: cvt.rn.satfinite.e4m3x2
        value = value.to(torch.float32).clamp(-448.0, 448.0)
        value = torch.where(value.isnan(), torch.nan, value)
    return _numpy(value.to(_FLOATS[target])).reshape(np.shape(data))


def _float32(handle: Any) -> Any:
    dtype = handle.dtype.scalar
    if dtype in _LOW:
        return _convert(handle.data, dtype, tl.float32).view(np.float32)
    return handle.data


def install() -> None:
    """Patch the interpreter's builder; idempotent."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "has_correct_casts", False):
        return
    stock_cast, stock_binary, stock_convert = (
        builder.cast_impl,
        builder.binary_op,
        interpreter._convert_float,
    )

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        floats = source in _FLOATS and target in _FLOATS
        if floats and (source in _LOW or target in _LOW or source != target):
            data = _convert(src.data, source, target).view(interpreter._get_np_dtype(dst_type))
            return interpreter.TensorHandle(data, target)
        if source in _LOW:
            data = _float32(src).astype(interpreter._get_np_dtype(dst_type))
            return interpreter.TensorHandle(data, target)
        return stock_cast(self, src, dst_type)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        dtype = lhs.dtype.scalar
        bitwise = op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
        if dtype != tl.bfloat16 or bitwise:
            return stock_binary(self, lhs, rhs, op)
        out = op(_float32(lhs), _float32(rhs))
        if out.dtype == np.bool_:
            return interpreter.TensorHandle(out, tl.int1)
        data = _convert(out.astype(np.float32), tl.float32, dtype).view(np.uint16)
        return interpreter.TensorHandle(data, dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        out = np.matmul(_float32(a).astype(np.float32), _float32(b).astype(np.float32)) + d.data
        return interpreter.TensorHandle(out.astype(d.data.dtype), d.dtype.scalar)

    def convert_float(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source in _FLOATS and target in _FLOATS:
            return _convert(data, source, target)
        return stock_convert(data, source, target, mode)

    builder.cast_impl = cast_impl
    builder.binary_op = binary_op
    builder.create_dot = create_dot
    builder.has_correct_casts = True
    interpreter._convert_float = convert_float


install()
