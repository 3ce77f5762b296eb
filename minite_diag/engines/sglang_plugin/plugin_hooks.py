"""SGLang's plugin hooks, with a failure that can be seen.

Knows HookRegistry and SGLang's version. SGLang logs a hook that it can't apply and goes on; here that is an error.
Invariant: after `install` the target is the hooked one, in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from minite_diag.errors import EngineUnavailable

KNOWN_VERSIONS: Final = ("0.5.23",)
"""SGLang versions whose functions the hooks of this package know."""


def check_sglang(what: str) -> None:
    """Raise EngineUnavailable where hooks would not take hold: another version, or a GPU.

    On a GPU SGLang calls other functions than those that are hooked.
    """
    import sglang
    from sglang.srt.utils import is_cpu

    if sglang.__version__ not in KNOWN_VERSIONS:
        raise EngineUnavailable(
            f"{what} hooks into functions of SGLang {KNOWN_VERSIONS[0]}, "
            f"this is {sglang.__version__}",
            "build the environment that fits: minite-diag env create sglang",
        )
    if not is_cpu():
        raise EngineUnavailable(
            f"{what} is wired into SGLang on CPU only",
            "leave it out, or set SGLANG_USE_CPU_ENGINE=1",
        )


def replace(target: str, function: Callable[..., Any]) -> str:
    """Put `function` in the place of a dotted SGLang function or method; returns `target`."""
    return install(target, function, "REPLACE")


def around(target: str, function: Callable[..., Any]) -> str:
    """Call `function(native, *args, **kwargs)` in the place of `target`; returns `target`."""
    return install(target, function, "AROUND")


def install(target: str, function: Callable[..., Any], kind: str) -> str:
    """Register and apply one hook; raises EngineUnavailable where SGLang has no such target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in HookRegistry._patched:
        raise EngineUnavailable(
            f"{target} is hooked by another plugin already",
            "leave one of the two out: SGLANG_PLUGINS names the plugins to load",
        )
    HookRegistry.register(target, function, HookType[kind])
    HookRegistry.apply_hooks()
    if target not in HookRegistry._patched:
        raise EngineUnavailable(
            f"this SGLang has no {target} to hook",
            "install the version that this tool knows: minite-diag env create sglang",
        )
    return target
