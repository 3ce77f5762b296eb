"""Batch-invariant operations: a row's bits do not depend on the batch, the chunking or the phase.

Each op is a folder: signature, promise and dispatch in ``__init__``, torch in ``_ref``, the kernel
in ``_triton``, pinned tiles in ``configs``. Invariant: every sum has an order fixed by the row
itself (its length, its positions), and no library function whose vector and scalar versions may
differ decides a bit.
"""
