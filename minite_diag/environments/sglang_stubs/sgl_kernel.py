"""Stands in for SGLang's kernel package, which has no CPU build for this machine.

Registers no operator, so that SGLang's own checks find no CPU kernels and take its torch paths.
Names that SGLang imports at start exist; calling one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0+cpu.stub"
__path__: list[str] = []

SUBMODULES = ("sgl_kernel.mamba",)


def _refuse(name: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} has no CPU build in this environment")

    call.__name__ = call.__qualname__ = name
    return call


class _Submodule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in SUBMODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(name)
    return _refuse(f"sgl_kernel.{name}")
