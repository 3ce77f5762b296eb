"""A Qwen3-MoE checkpoint of about 1e9 random weights, and probes for it.

    python tests/gpu/random_moe.py FOLDER

FOLDER/model is a checkpoint folder, FOLDER/probes.jsonl has three probes of random token ids. The
weights are normal, scaled by 1/sqrt(K) so that activations keep their size from layer to layer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def weights(device: str) -> dict[str, torch.Tensor]:
    """Tensors by checkpoint name."""
    torch.manual_seed(0)
    found: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        w = torch.randn(rows, columns, device=device) * columns**-0.5
        found[f"{name}.weight"] = w.bfloat16().cpu()

    def ones(name: str, size: int) -> None:
        found[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    hidden, inner, dim = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["head_dim"]
    heads, kv_heads = CONFIG["num_attention_heads"] * dim, CONFIG["num_key_value_heads"] * dim
    found["model.embed_tokens.weight"] = torch.randn(CONFIG["vocab_size"], hidden).bfloat16()
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows, columns in (
            ("q_proj", heads, hidden),
            ("k_proj", kv_heads, hidden),
            ("v_proj", kv_heads, hidden),
            ("o_proj", hidden, heads),
        ):
            matrix(f"{layer}.self_attn.{name}", rows, columns)
        for name, size in (
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            ones(f"{layer}.{name}", size)
        matrix(f"{layer}.mlp.gate", CONFIG["num_experts"], hidden)
        for expert in range(CONFIG["num_experts"]):
            for name, rows, columns in (
                ("gate_proj", inner, hidden),
                ("up_proj", inner, hidden),
                ("down_proj", hidden, inner),
            ):
                matrix(f"{layer}.mlp.experts.{expert}.{name}", rows, columns)
    ones("model.norm", hidden)
    matrix("lm_head", CONFIG["vocab_size"], hidden)
    return found


def main() -> None:
    """Write the folder."""
    folder = Path(sys.argv[1])
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    found = weights("cuda" if torch.cuda.is_available() else "cpu")
    save_file(found, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    with (folder / "probes.jsonl").open("w", encoding="utf-8") as stream:
        for number, length in enumerate((24, 40, 64)):
            ids = torch.randint(3, CONFIG["vocab_size"], (length,), generator=generator).tolist()
            probe = {"id": f"random-{number}", "category": "random", "token_ids": ids}
            stream.write(json.dumps(probe) + "\n")
    print(sum(tensor.numel() for tensor in found.values()), "parameters")


if __name__ == "__main__":
    main()
