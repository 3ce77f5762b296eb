"""A model loader for vLLM that keeps the weights which post-load processing repacks or drops.

Knows torch and vLLM's loader registry; no site and no recorder. Everything is loaded by vLLM's own
DefaultModelLoader; after that each layer's parameters are checked around its
`process_weights_after_loading`, and those that changed are spilled to a file. Invariant: `loaded`
returns the bytes that vLLM's loader wrote, and memory is bounded by one layer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

LOAD_FORMAT: Final = "minite_diag"


class WeightSnapshot:
    """Parameters as loaded, by module name and parameter name."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minite-diag-weights-")
        self._spilled: dict[tuple[str, str], tuple[Path, torch.dtype, tuple[int, ...]]] = {}

    def watch(self, model: nn.Module) -> None:
        """Wrap the post-load processing of every layer with a quant method."""
        watched: set[int] = set()
        names = {id(module): name for name, module in model.named_modules()}
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            process = getattr(method, "process_weights_after_loading", None)
            if process is None or id(method) in watched:
                continue
            watched.add(id(method))
            self._wrap(method, process, names)

    def _wrap(self, method: Any, process: Any, names: dict[int, str]) -> None:
        def watched(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = {n: p.data.clone() for n, p in layer.named_parameters(recurse=False)}
            result = process(layer, *args, **kwargs)
            for name, tensor in before.items():
                if not any(_same_bytes(tensor, p.data) for p in layer.parameters(recurse=False)):
                    self._spill(names[id(layer)], name, tensor)
            return result

        method.process_weights_after_loading = watched

    def _spill(self, module: str, name: str, tensor: torch.Tensor) -> None:
        file = Path(self._folder.name) / f"{len(self._spilled):06d}.bin"
        data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        data.numpy().tofile(file)
        self._spilled[module, name] = (file, tensor.dtype, tuple(tensor.shape))

    def spilled(self, module: str, name: str) -> torch.Tensor | None:
        """The parameter as loaded, mapped from its file; None if processing left it alone."""
        entry = self._spilled.get((module, name))
        if entry is None:
            return None
        file, dtype, shape = entry
        size = file.stat().st_size
        data = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        return data.view(dtype).reshape(shape)

    def loaded(self, module_name: str, module: nn.Module, *names: str) -> torch.Tensor:
        """The first of `names` that the loader filled; AttributeError if there is none."""
        for name in names:
            tensor = self.spilled(module_name, name)
            if tensor is not None:
                return tensor
        for name in names:
            tensor = getattr(module, name, None)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                return tensor.data
        raise AttributeError(f"{module_name} holds none of {', '.join(names)}")

    def __len__(self) -> int:
        return len(self._spilled)

    def close(self) -> None:
        """Delete the spilled files."""
        self._folder.cleanup()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def register_loader(snapshot: WeightSnapshot) -> str:
    """Register the loader and return the load format that selects it."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class SnapshotLoader(DefaultModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            load_config.load_format = "safetensors"
            super().__init__(load_config)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            snapshot.watch(model)

    register_model_loader(LOAD_FORMAT)(SnapshotLoader)
    return LOAD_FORMAT
