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
