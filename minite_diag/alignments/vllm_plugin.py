"""vLLM general plugin: the same alignments in a user's own `vllm serve` and worker processes.

Installed with this package and loaded by vLLM in every process; does nothing unless
MINITE_DIAG_ALIGN names alignments, such as `MINITE_DIAG_ALIGN=norm,rope,attention vllm serve ...`.
"""

from __future__ import annotations

from minite_diag.alignments.base import (
    apply_replacements,
    names_in_environment,
    resolve_alignments,
)

_patched: dict[str, list[str]] = {}


def register() -> dict[str, list[str]]:
    """Apply what the environment asks for, once; op -> names of what was patched."""
    names = names_in_environment()
    if names and not _patched:
        chosen = resolve_alignments(names)
        _patched.update(apply_replacements("vllm", chosen, None, in_plugin=True))
    return _patched
