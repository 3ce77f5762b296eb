"""SGLang general plugin: the same alignments in a user's own server and scheduler processes.

Installed with this package and loaded by SGLang in every process; does nothing unless
MINITE_DIAG_ALIGN names alignments, such as `MINITE_DIAG_ALIGN=norm,rope,attention`. NVFP4 experts
need SGLang's `--moe-runner-backend flashinfer_cutlass`.
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
        from minite_diag.alignments.sglang_ops import align_nvfp4

        chosen = resolve_alignments(names)
        if "nvfp4-linear" in chosen:
            _patched["nvfp4_linear"] = list(align_nvfp4(None))
        _patched.update(apply_replacements("sglang", chosen, None))
    return _patched
