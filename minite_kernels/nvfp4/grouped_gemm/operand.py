"""``ExpertOperands``: all experts' weights, with the layouts that implementations made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minite_kernels.nvfp4.gemm.operand import PreparedOperand, prepare
from minite_kernels.nvfp4.tensor import Nvfp4Tensor


class ExpertOperands:
    """E quantized weights [N, K] of one shape and recipe, for many multiplications."""

    def __init__(self, operands: Sequence[Nvfp4Tensor | PreparedOperand]) -> None:
        self._operands = [prepare(operand) for operand in operands]
        self._stacked: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._operands)

    def __iter__(self) -> Iterator[PreparedOperand]:
        return iter(self._operands)

    @property
    def first(self) -> Nvfp4Tensor:
        """Expert 0's weight: the shape and recipe of all."""
        return self._operands[0].q

    def stacked(self, name: str, make: Callable[[Nvfp4Tensor], Tensor]) -> Tensor:
        """Return [E, ..] of what ``make`` makes of each weight, made on first use and kept."""
        if name not in self._stacked:
            self._stacked[name] = torch.stack([make(operand.q) for operand in self._operands])
        return self._stacked[name]
