"""Reference SiLU-mul: x / (1 + exp(-x)) with the library's own exp and an IEEE division."""

from __future__ import annotations

import torch
from torch import Tensor

from minite_kernels.invariant.elementary import exp


def silu_mul(gate_up: Tensor, round_silu: bool) -> Tensor:
    """[.., 2I] -> [.., I]."""
    gate, up = gate_up.to(torch.float32).chunk(2, -1)
    silu = torch.div(gate, 1.0 + exp(-gate))
    if round_silu:
        silu = silu.to(gate_up.dtype).to(torch.float32)
    return (silu * up).to(gate_up.dtype)


def silu_mul_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient [.., 2I] of silu(gate) * up in FP32, rounded once."""
    gate, up = gate_up.to(torch.float32).chunk(2, -1)
    dy = dy.to(torch.float32)
    sigmoid = torch.div(torch.ones_like(gate), 1.0 + exp(-gate))
    d_gate = (dy * up) * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    d_up = dy * (gate * sigmoid)
    return torch.cat((d_gate, d_up), -1).to(gate_up.dtype)
