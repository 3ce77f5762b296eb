"""``batch_invariant()``: run any torch code with its matmuls, log-softmax and means batch-invariant.

Overrides four ATen operations below autograd, so modules need no change and gradients go through
the same operations. Invariant: the mode ends with its block, also by an exception; what it replaced
is counted; a call it cannot make invariant raises instead of running as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minite_kernels.invariant.elementary import row_sum
from minite_kernels.invariant.log_softmax import log_softmax
from minite_kernels.invariant.matmul import matmul

__all__ = ["BatchInvariantMode", "batch_invariant"]


class BatchInvariantMode(TorchDispatchMode):
    """The mode as an object: ``replaced`` counts the calls of each operation it took over."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        self.replaced[str(func)] += 1
        return replacement(*args, **(kwargs or {}))


def batch_invariant() -> BatchInvariantMode:
    """Return a context manager under which mm, addmm, log_softmax and mean are batch-invariant.

    Convolutions, bmm and fused attention stay as they are: use this library's attention. Raises
    NotImplementedError inside for scaled addmm, and for log_softmax or mean over other dims than
    the last.
    """
    return BatchInvariantMode()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b.t(), out_dtype=a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta != 1 or alpha != 1 or bias.ndim != 1:
        raise NotImplementedError("batch-invariant addmm takes a bias [N] and no factors")
    return matmul(a, b.t(), bias=bias, out_dtype=a.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if dim not in (-1, x.ndim - 1):
        raise NotImplementedError(f"batch-invariant log_softmax over dim {dim} of {x.ndim}")
    out = log_softmax(x)
    return out if half_to_float else out.to(x.dtype)


def _mean(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if dim is None or [d % x.ndim for d in dim] != [x.ndim - 1]:
        raise NotImplementedError(f"batch-invariant mean over dims {dim} of {x.ndim}")
    count = torch.full((), x.shape[-1], dtype=torch.float32, device=x.device)
    out = torch.div(row_sum(x).to(torch.float32), count).to(dtype or x.dtype)
    return out.unsqueeze(-1) if keepdim else out


_aten: Any = torch.ops.aten
_REPLACEMENTS: Final[dict[Any, Callable[..., Tensor]]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten._log_softmax.default: _log_softmax,
    _aten.mean.dim: _mean,
}
