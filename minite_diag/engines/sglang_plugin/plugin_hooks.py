"""SGLang's plugin hooks, with a failure that can be seen.

Knows HookRegistry only. SGLang logs a hook that it can't apply and goes on; here that is an error.
Invariant: after `install` the target is the hooked one, in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minite_diag.errors import EngineUnavailable


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
