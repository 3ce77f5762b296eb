"""NVFP4 recipes, quantizers and W4A4 GEMM, plus the batch-invariant ops around them.

A library of operations on tensors. It must not know which engine, checkpoint or run a tensor came
from: what an engine computes is a ``Recipe``, which is data. Invariant: an operation's bits are a
function of its arguments alone, never of the batch a row sits in, of the thread count, or of a
fallback that nobody asked for.
"""

__version__ = "0.1.0"
