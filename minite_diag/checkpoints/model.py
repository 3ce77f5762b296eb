"""`Checkpoint`: one model folder, validated, with the names that everything else goes by.

Knows folders, configs and names; it computes nothing and imports no model library. Invariant: a
`Checkpoint` made by `open_checkpoint` has every tensor that its config promises, each with the
shape and dtype that its name implies, so later stages need not check again.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from minite_diag.checkpoints import names, reader
from minite_diag.checkpoints.reader import TensorInfo
from minite_diag.errors import CheckpointError

Format = Literal["bf16", "fp16", "fp32", "nvfp4-modelopt", "nvfp4-compressed-tensors"]

CONFIG_FILE: Final = "config.json"
MODELOPT_CONFIG_FILE: Final = "hf_quant_config.json"
EXPORT_FILE: Final = "minite_export.json"
FINGERPRINT_ALL_BYTES: Final = 1 << 30
FINGERPRINT_EDGE_BYTES: Final = 4096
BLOCK_SIZE: Final = 16

_DTYPE_FORMATS: Final[dict[str, Format]] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_CODES_SUFFIX: Final = {"nvfp4-modelopt": ".weight", "nvfp4-compressed-tensors": ".weight_packed"}
_GLOBAL_SUFFIX: Final = {
    "nvfp4-modelopt": ".weight_scale_2",
    "nvfp4-compressed-tensors": ".weight_global_scale",
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A validated checkpoint folder.

    `tensors` maps checkpoint names to places, no data read; `notes` are remarks that every label
    of this model must carry; `fingerprint` is a SHA-256 (see `fingerprint`).
    """

    path: Path
    name: str
    format: Format
    architecture: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    tensors: dict[str, TensorInfo] = field(default_factory=dict, repr=False)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; valid token ids lie below it."""
        return int(self.config["vocab_size"])

    @property
    def max_positions(self) -> int:
        """The longest sequence that the config allows."""
        return int(self.config.get("max_position_embeddings", 2048))

    @property
    def num_experts(self) -> int:
        """Routed experts of each mixture-of-experts layer; 0 for a dense model."""
        return int(self.config.get("num_experts", self.config.get("num_local_experts", 0)) or 0)

    @property
    def is_moe(self) -> bool:
        """Whether any linear belongs to a routed expert."""
        return any(names.is_expert(name) for name in self.tensors)

    @property
    def is_quantized(self) -> bool:
        """Whether the folder holds NVFP4 codes."""
        return self.format.startswith("nvfp4")

    @property
    def is_tied(self) -> bool:
        """Whether lm_head is the embedding (and has no tensor of its own)."""
        return f"{names.LM_HEAD}.weight" not in self.tensors

    def linear_names(self) -> list[str]:
        """FQN of every linear: per expert, routers, and lm_head (also when it is tied)."""
        found = {
            fqn
            for name, info in self.tensors.items()
            if (fqn := _linear_of(name)) and len(info.shape) == 2
        }
        return sorted(found | {names.LM_HEAD}, key=names.natural_key)

    def quantized_linear_names(self) -> list[str]:
        """FQN of every linear whose weight is stored as NVFP4 codes."""
        return [fqn for fqn in self.linear_names() if self.is_linear_quantized(fqn)]

    def is_linear_quantized(self, fqn: str) -> bool:
        """Whether this linear's weight is stored as NVFP4 codes."""
        suffix = _GLOBAL_SUFFIX.get(self.format)
        return suffix is not None and fqn + suffix in self.tensors

    def shape(self, fqn: str) -> tuple[int, int]:
        """(N, K) of a linear, unpacked; raises CheckpointError for an unknown name."""
        info = self.tensors[self._weight_tensor(fqn)]
        packed = 2 if self.is_linear_quantized(fqn) else 1
        return info.shape[0], info.shape[1] * packed

    def read(self, name: str) -> Tensor:
        """Read one tensor by its checkpoint name, in the file's dtype."""
        if name not in self.tensors:
            near = names.near_misses(name, self.tensors)
            raise CheckpointError(f"{self.path} has no tensor {name!r}", f"near: {', '.join(near)}")
        return reader.load(self.tensors[name])

    def read_weight(self, fqn: str) -> Tensor:
        """The unquantized weight [N, K] of a linear; lm_head gives the embedding when tied."""
        if self.is_linear_quantized(fqn):
            raise CheckpointError(
                f"{fqn} of {self.name} is stored as NVFP4 codes", "use read_quantized"
            )
        return self.read(self._weight_tensor(fqn))

    def _weight_tensor(self, fqn: str) -> str:
        if fqn == names.LM_HEAD and self.is_tied:
            return f"{names.EMBEDDING}.weight"
        suffix = _CODES_SUFFIX[self.format] if self.is_linear_quantized(fqn) else ".weight"
        if fqn + suffix not in self.tensors:
            near = names.near_misses(fqn, self.linear_names())
            raise CheckpointError(f"{self.path} has no linear {fqn!r}", f"near: {', '.join(near)}")
        return fqn + suffix


def _linear_of(name: str) -> str | None:
    for suffix in (".weight_packed", ".weight"):
        if name.endswith(suffix):
            fqn = name.removesuffix(suffix)
            return None if names.projection(fqn).startswith("embed") else fqn
    return None


def open_checkpoint(
    folder: Path, name: str | None = None, notes: tuple[str, ...] = ()
) -> Checkpoint:
    """Open and validate a checkpoint folder; raises CheckpointError naming what is wrong."""
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint folder {folder}", "give an existing folder, or demo or demo-moe"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}", "give the folder that holds config.json and weights"
        )
    config = _read_config(folder)
    tensors = reader.list_tensors(folder)
    format = _format_of(folder, config, tensors)
    checkpoint = Checkpoint(
        path=folder,
        name=name or folder.resolve().name,
        format=format,
        architecture=config["architectures"][0],
        fingerprint=fingerprint(folder, tensors),
        notes=(*notes, *_source_notes(folder), *_dtype_notes(config, format)),
        config=config,
        tensors=tensors,
    )
    _check_layers(checkpoint)
    _check_shapes(checkpoint)
    return checkpoint


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    config = reader.read_json(file)
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and type(architectures[0]) is str):
        raise CheckpointError(
            f"{file} names no architecture", 'add "architectures": ["<class>"] as transformers does'
        )
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise CheckpointError(
                f"{file}: {key} is {config.get(key)!r}",
                "only text-only decoder configs with this key at top level can be read",
            )
    return config


def quantization_config(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """What the folder says about its quantization, from either of the two files, or None."""
    stated = config.get("quantization_config")
    if isinstance(stated, dict):
        return stated
    if (folder / MODELOPT_CONFIG_FILE).is_file():
        inner = reader.read_json(folder / MODELOPT_CONFIG_FILE).get("quantization")
        if isinstance(inner, dict):
            return {"quant_method": "modelopt", **inner}
    return None


def _format_of(folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Format:
    stated = quantization_config(folder, config)
    if stated is not None:
        return _quantized_format(folder, stated, tensors)
    dtypes = Counter(info.dtype for name, info in tensors.items() if _linear_of(name))
    unknown = [dtype for dtype in dtypes if dtype not in _DTYPE_FORMATS]
    if unknown or len(dtypes) != 1:
        raise CheckpointError(
            f"{folder} has linear weights of dtype {', '.join(sorted(dtypes)) or 'none at all'}",
            "the weights must all be BF16, FP16 or FP32, or carry a quantization_config (NVFP4)",
        )
    return _DTYPE_FORMATS[next(iter(dtypes))]


def _quantized_format(
    folder: Path, stated: dict[str, Any], tensors: dict[str, TensorInfo]
) -> Format:
    method = str(stated.get("quant_method", "")).lower()
    algorithm = str(stated.get("quant_algo", "")).upper()
    groups = stated.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    formats = {g.get("format") for g in groups if isinstance(g, dict)} | {stated.get("format")}
    format: Format
    if method.startswith("modelopt") and "NVFP4" in algorithm:
        format = "nvfp4-modelopt"
    elif method == "compressed-tensors" and "nvfp4-pack-quantized" in formats:
        format = "nvfp4-compressed-tensors"
    else:
        raise CheckpointError(
            f"{folder} is quantized as {method or 'unknown'} {algorithm}".rstrip(),
            "only NVFP4 in ModelOpt or compressed-tensors layout can be read; start from BF16",
        )
    if not any(name.endswith(_GLOBAL_SUFFIX[format]) for name in tensors):
        raise CheckpointError(
            f"{folder} says {format} but has no tensor *{_GLOBAL_SUFFIX[format]}",
            "its config and its weights don't belong together: export it again",
        )
    return format


def _source_notes(folder: Path) -> tuple[str, ...]:
    """The remarks on the model that an export of ours came from."""
    if not (folder / EXPORT_FILE).is_file():
        return ()
    source = reader.read_json(folder / EXPORT_FILE).get("source")
    notes = source.get("notes") if isinstance(source, dict) else None
    return tuple(str(note) for note in notes) if isinstance(notes, list) else ()


def _dtype_notes(config: dict[str, Any], format: Format) -> tuple[str, ...]:
    stated = str(config.get("dtype", config.get("torch_dtype", ""))).removeprefix("torch.")
    held = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(format)
    if held is None or stated in ("", "None", held):
        return ()
    return (f"config.json says {stated}, the weights are {held}",)


def _check_layers(checkpoint: Checkpoint) -> None:
    linears = checkpoint.linear_names()
    layers = {index for fqn in linears if (index := names.layer_index(fqn)) is not None}
    wanted = set(range(checkpoint.num_layers))
    if layers != wanted:
        missing, extra = sorted(wanted - layers), sorted(layers - wanted)
        what = f"lacks layer {missing[0]}" if missing else f"has an unexpected layer {extra[0]}"
        raise CheckpointError(
            f"{checkpoint.path} {what}; config.json says {checkpoint.num_layers} layers",
            "the folder mixes two models or lost a shard: copy it again",
        )
    _check_attention(checkpoint, linears)
    _check_experts(checkpoint, linears)
    if f"{names.EMBEDDING}.weight" not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.path} has no {names.EMBEDDING}.weight",
            "only decoder checkpoints in the Hugging Face naming can be read",
        )
    if checkpoint.is_tied and not checkpoint.config.get("tie_word_embeddings", False):
        raise CheckpointError(
            f"{checkpoint.path} has no lm_head.weight and config.json does not tie it",
            'a shard is missing, or "tie_word_embeddings" must be true',
        )


def _check_attention(checkpoint: Checkpoint, linears: list[str]) -> None:
    counts = Counter(
        names.layer_index(fqn) for fqn in linears if ".self_attn." in fqn and fqn.endswith("_proj")
    )
    if not counts:
        return
    usual = counts.most_common(1)[0][1]
    for layer in range(checkpoint.num_layers):
        # A layer without any is another kind of layer (linear attention), not a damaged one.
        if counts[layer] not in (0, usual):
            raise CheckpointError(
                f"{checkpoint.path}: layer {layer} has {counts[layer]} attention projections, "
                f"others have {usual}",
                "a shard is missing or from another save: copy the folder again",
            )


def _check_experts(checkpoint: Checkpoint, linears: list[str]) -> None:
    held: dict[str, Counter[int]] = {}
    for fqn in linears:
        module, index = names.experts_module(fqn), names.expert_index(fqn)
        if module is not None and index is not None:
            held.setdefault(module, Counter())[index] += 1
    if checkpoint.num_experts and not held:
        raise CheckpointError(
            f"{checkpoint.path} has {checkpoint.num_experts} experts by its config, but no tensor "
            "like *.experts.0.*",
            "experts stored as one fused tensor can't be read yet: save them one by one",
        )
    for module, counts in held.items():
        complete = all(counts[e] == 3 for e in range(checkpoint.num_experts))
        if not complete or len(counts) != checkpoint.num_experts:
            raise CheckpointError(
                f"{checkpoint.path}: {module} holds {sum(counts.values())} projections of "
                f"{len(counts)} experts; config.json says {checkpoint.num_experts} experts",
                "three projections an expert are needed: copy the folder again",
            )


def _check_shapes(checkpoint: Checkpoint) -> None:
    for fqn in checkpoint.linear_names():
        if checkpoint.is_linear_quantized(fqn):
            _check_quantized(checkpoint, fqn)
        actual, expected = checkpoint.shape(fqn), _expected_shape(checkpoint.config, fqn)
        if expected is not None and actual != expected:
            raise CheckpointError(
                f"{checkpoint.path}: {fqn} has shape {list(actual)}, config.json implies "
                f"{list(expected)}",
                "config.json and the weights don't belong together",
            )


def _expected_shape(config: dict[str, Any], fqn: str) -> tuple[int, int] | None:
    """(N, K) that the config implies, or None where it says nothing."""
    hidden, heads = config["hidden_size"], config.get("num_attention_heads")
    last = names.projection(fqn)
    if fqn == names.LM_HEAD:
        return config["vocab_size"], hidden
    if last in ("q_proj", "k_proj", "v_proj", "o_proj") and ".self_attn." in fqn:
        if not heads or config.get("attn_output_gate"):
            return None
        dim = config.get("head_dim") or hidden // heads
        if last in ("q_proj", "o_proj"):
            return (heads * dim, hidden) if last == "q_proj" else (hidden, heads * dim)
        return (config.get("num_key_value_heads") or heads) * dim, hidden
    if names.is_expert(fqn):
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
    else:
        inner = None if ".shared_expert" in fqn else config.get("intermediate_size")
    if last in ("gate_proj", "up_proj") and inner:
        return inner, hidden
    if last == "down_proj" and inner:
        return hidden, inner
    return None


def _check_quantized(checkpoint: Checkpoint, fqn: str) -> None:
    codes = checkpoint.tensors[checkpoint._weight_tensor(fqn)]
    n, half = codes.shape
    wanted = {
        f"{fqn}.weight_scale": ("F8_E4M3", (n, 2 * half // BLOCK_SIZE)),
        codes_name(checkpoint, fqn): ("U8", codes.shape),
    }
    for name, (dtype, shape) in wanted.items():
        info = checkpoint.tensors.get(name)
        if info is None or info.dtype != dtype or info.shape != shape:
            found = "nothing" if info is None else f"{info.dtype} {list(info.shape)}"
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {found}, expected {dtype} {list(shape)}",
                "this is no NVFP4 checkpoint with blocks of 16 along K: export it again",
            )
    scalar = checkpoint.tensors[fqn + _GLOBAL_SUFFIX[checkpoint.format]]
    if scalar.dtype != "F32" or math.prod(scalar.shape) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: {fqn}{_GLOBAL_SUFFIX[checkpoint.format]} is {scalar.dtype} "
            f"{list(scalar.shape)}, expected one FP32 number",
            "export the checkpoint again",
        )


def codes_name(checkpoint: Checkpoint, fqn: str) -> str:
    """Checkpoint name of the tensor that holds a quantized linear's codes."""
    return fqn + _CODES_SUFFIX[checkpoint.format]


def fingerprint(folder: Path, tensors: dict[str, TensorInfo]) -> str:
    """SHA-256 (hex) over config.json and, by name, each tensor's dtype, shape and bytes.

    Checkpoints above 1 GiB contribute the first and last 4 KiB of each tensor instead of all
    bytes; sharding does not change the result.
    """
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    whole = sum(info.num_bytes for info in tensors.values()) <= FINGERPRINT_ALL_BYTES
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode())
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            if whole or info.num_bytes <= 2 * FINGERPRINT_EDGE_BYTES:
                digest.update(stream.read(info.num_bytes))
            else:
                digest.update(stream.read(FINGERPRINT_EDGE_BYTES))
                stream.seek(info.offset + info.num_bytes - FINGERPRINT_EDGE_BYTES)
                digest.update(stream.read(FINGERPRINT_EDGE_BYTES))
    return digest.hexdigest()
