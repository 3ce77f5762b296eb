"""The FP32 expressions that recipes name, each evaluated as written.

Knows formulas, not engines. Invariant: one operator in an expression is one FP32 rounding, on every
device. Two habits of torch would break that and are avoided here: ``number / tensor`` is
``tensor.reciprocal() * number``, and on CUDA ``tensor / number`` multiplies by the rounded
reciprocal of the number; so both sides of a division are tensors on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from minite_kernels.nvfp4.format import E2M1_MAX, FLOAT32_MAX, FLOAT32_SMALLEST_NORMAL
from minite_kernels.nvfp4.recipe import OperandRecipe
from minite_kernels.nvfp4.reciprocal import flush, rcp_approx

#: fp32(1/6), 0x3E2AAAAB.
C6: Final = 0.16666667163372039794921875


class Fp32:
    """FP32 multiply, divide and reciprocal as one operand recipe does them."""

    def __init__(self, operand: OperandRecipe, dtype: torch.dtype = torch.float32) -> None:
        self._flush = operand.flush_subnormals
        self._approximate = operand.reciprocal == "rcp_approx"
        self.statistics_dtype = dtype if operand.statistics_dtype == "input" else torch.float32

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        """Multiply, rounded once."""
        return self._out(self._in(a) * (self._in(b) if isinstance(b, Tensor) else b))

    def div(self, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Divide a by b, IEEE, rounded once; one of the two must be a tensor."""
        device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]
        return self._out(torch.div(self._tensor(a, device), self._tensor(b, device)))

    def rcp(self, a: Tensor) -> Tensor:
        """The recipe's reciprocal of a: IEEE division or ``rcp.approx.ftz``."""
        return rcp_approx(a) if self._approximate else self.div(1.0, a)

    def statistic(self, a: Tensor) -> Tensor:
        """Round a statistic (1/A, S, b/6) to the dtype in which the recipe's observer works."""
        return a.to(self.statistics_dtype).to(torch.float32)

    def _tensor(self, value: Tensor | float, device: torch.device) -> Tensor:
        if isinstance(value, Tensor):
            return self._in(value)
        return torch.full((), value, dtype=torch.float32, device=device)

    def _in(self, value: Tensor) -> Tensor:
        return flush(value) if self._flush else value

    _out = _in


def _decode_of_encode(fp: Fp32, encode: Tensor) -> tuple[Tensor, Tensor]:
    return encode, fp.div(1.0, encode)


def _encode_of_decode(fp: Fp32, decode: Tensor) -> tuple[Tensor, Tensor]:
    return fp.div(1.0, decode), decode


def _power_of_two_below(fp: Fp32, encode: Tensor) -> Tensor:
    """2^floor(log2(S)) by clearing the mantissa; a subnormal or infinite S is kept as it is."""
    bits = encode.view(torch.int32) & 0x7F800000
    usable = (encode >= FLOAT32_SMALLEST_NORMAL) & encode.isfinite()
    return torch.where(usable, bits.view(torch.float32), encode)


#: (fp, A, Q) -> (S, g), before the recipe's guard.
GLOBAL_SCALES: Final[dict[str, Callable[[Fp32, Tensor, float], tuple[Tensor, Tensor]]]] = {
    "S = Q/A; g = 1/S": lambda fp, A, Q: _decode_of_encode(fp, fp.div(Q, A)),
    "S = (1/A)*Q; g = 1/S": lambda fp, A, Q: _decode_of_encode(
        fp, fp.statistic(fp.mul(fp.statistic(fp.div(1.0, A)), Q))
    ),
    "g = A/Q; S = 1/g": lambda fp, A, Q: _encode_of_decode(fp, fp.div(A, Q)),
    "g = A*(1/Q); S = 1/g": lambda fp, A, Q: _encode_of_decode(
        fp, fp.mul(A, fp.div(1.0, _like(A, Q)))
    ),
    "g = A*(1/Q); S = rcp(g)": lambda fp, A, Q: _rcp_of_decode(
        fp, fp.mul(A, fp.div(1.0, _like(A, Q)))
    ),
    "g = (A*(1/448))*c6; S = 1/g": lambda fp, A, Q: _encode_of_decode(
        fp, fp.mul(fp.mul(A, fp.div(1.0, _like(A, Q / E2M1_MAX))), C6)
    ),
    "S = 2^floor(log2(Q/A)); g = 1/S; A := Q/S": lambda fp, A, Q: _decode_of_encode(
        fp, _power_of_two_below(fp, fp.div(Q, A))
    ),
    "S = 1; g = 1": lambda fp, A, Q: (torch.ones_like(A), torch.ones_like(A)),
}


def _like(a: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=a.device)


def _rcp_of_decode(fp: Fp32, decode: Tensor) -> tuple[Tensor, Tensor]:
    return fp.rcp(decode), decode


def guard_global(name: str, amax: Tensor, encode: Tensor) -> Tensor:
    """Apply a recipe's ``global_guard`` to S (``tiny`` also needs A raised before the division)."""
    if name in ("te", "cap"):
        encode = torch.where(encode > FLOAT32_MAX, FLOAT32_MAX, encode)
    if name == "te":
        encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    if name == "tiny":
        encode = torch.where(encode.isfinite(), encode, 1.0)
    return encode


#: (fp, b, S, g) -> block scale before its E4M3 cast.
BLOCK_SCALES: Final[dict[str, Callable[[Fp32, Tensor, Tensor, Tensor], Tensor]]] = {
    "b*(S*c6)": lambda fp, b, S, g: fp.mul(b, fp.mul(S, C6)),
    "S*(b*c6)": lambda fp, b, S, g: fp.mul(S, fp.mul(b, C6)),
    "S*(b*rcp(6))": lambda fp, b, S, g: fp.mul(S, fp.mul(b, C6)),  # rcp.approx is exact at 6
    "(S*b)*rcp(6)": lambda fp, b, S, g: fp.mul(fp.mul(S, b), C6),
    "(S*b)/6": lambda fp, b, S, g: fp.div(fp.mul(S, b), E2M1_MAX),
    "(b/6)*S": lambda fp, b, S, g: fp.mul(fp.statistic(fp.div(b, E2M1_MAX)), S),
    "(b*c6)*S": lambda fp, b, S, g: fp.mul(fp.statistic(fp.mul(b, C6)), S),
    "(b/6)/g": lambda fp, b, S, g: fp.div(fp.div(b, E2M1_MAX), g),
    "(b*c6)/g": lambda fp, b, S, g: fp.div(fp.mul(b, C6), g),
    "b/(6*g)": lambda fp, b, S, g: fp.div(b, fp.mul(g, E2M1_MAX)),
    "(b*c6)*rcp(g)": lambda fp, b, S, g: fp.mul(fp.mul(b, C6), fp.rcp(g)),
    "b/6": lambda fp, b, S, g: fp.div(b, E2M1_MAX),
}

#: (fp, s, b, S, g) -> factor that multiplies x.
FACTORS: Final[dict[str, Callable[[Fp32, Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "x * rcp(s*rcp(S))": lambda fp, s, b, S, g: fp.rcp(fp.mul(s, fp.rcp(S))),
    "x * (S/s)": lambda fp, s, b, S, g: fp.div(S, s),
    "x * (rcp(s)*S)": lambda fp, s, b, S, g: fp.mul(fp.rcp(s), S),
    "x * ((1/g)/s)": lambda fp, s, b, S, g: fp.div(fp.div(1.0, g), s),
    "x * rcp(s*g)": lambda fp, s, b, S, g: fp.rcp(fp.mul(s, g)),
    "x * (6*rcp(b))": lambda fp, s, b, S, g: fp.mul(fp.rcp(b), E2M1_MAX),
    "x * (1/s)": lambda fp, s, b, S, g: fp.div(1.0, s),
}

#: (fp, x, s, S, g) -> scaled x, for recipes that divide each element.
QUOTIENTS: Final[dict[str, Callable[[Fp32, Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "x / (s*g)": lambda fp, x, s, S, g: fp.div(x, fp.mul(s, g)),
    "x / (s/S)": lambda fp, x, s, S, g: fp.div(x, fp.div(s, S)),
    "(x*S)/s": lambda fp, x, s, S, g: fp.div(fp.mul(x, S), s),
}

#: (s, A, S, g, Q) -> factor that dequantizes a decoded code, without the code itself.
DEQUANTIZE: Final[dict[str, Callable[[Fp32, Tensor, Tensor, Tensor, Tensor, float], Tensor]]] = {
    "q*((s*A)*(1/Q))": lambda fp, s, A, S, g, Q: fp.mul(fp.mul(s, A), fp.div(1.0, _like(s, Q))),
    "q*(s*g)": lambda fp, s, A, S, g, Q: fp.mul(s, g),
    "q*(s/S)": lambda fp, s, A, S, g, Q: fp.div(s, S),
    "q*(s*rcp(S))": lambda fp, s, A, S, g, Q: fp.mul(s, fp.rcp(S)),
    "q*s": lambda fp, s, A, S, g, Q: s,
}
