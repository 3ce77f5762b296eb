"""Tiny random checkpoints and one real vLLM run per configuration, each in its own process."""

import json
import os
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest
import torch

import minite_diag
from minite_diag.canonical.names import STATIC, SequenceKey, index_trace
from minite_diag.canonical.tokens import read_site
from minite_diag.site import Site
from minite_diag.trace.store import Trace

SCRIPT = Path(__file__).with_name("run_vllm.py")
VOCAB_SIZE = 512
SAMPLE_TOKENS = 12
TIMEOUT_S = 300
MODELLED = "flashinfer-exact"
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def token_ids(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


PROBES = [token_ids(40, 1), token_ids(7, 2)]


def build_model(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE))
    else:
        config = transformers.Qwen3MoeConfig(**_SHAPE, **_EXPERTS, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 1.0 if "embed" in name else 0.08)
    return model.eval()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """(kind, dtype) -> checkpoint folder."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {}
    for kind in ("llama", "moe"):
        model = build_model(kind)
        for dtype in ("float32", "bfloat16"):
            folder = root / f"{kind}-{dtype}"
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            folders[kind, dtype] = folder
    return folders


@pytest.fixture(scope="session")
def exported(models, tmp_path_factory):
    """(kind, layout) -> NVFP4 checkpoint and the names of its quantized linears."""
    from minite_diag.checkpoints import calibrate, export, open_checkpoint, quantized_names

    root = tmp_path_factory.mktemp("nvfp4")
    found = {}
    for kind, layout in (("llama", "modelopt"), ("moe", "compressed-tensors")):
        master = open_checkpoint(models[kind, "bfloat16"])
        names = quantized_names(master, "default")
        amax = calibrate(master, PROBES, names)
        folder = root / f"{kind}-{layout}"
        checkpoint = export(master, "vllm-emulation", layout, folder, calibration=amax)
        found[kind, layout] = (checkpoint, names)
    return found


class Run:
    """What one engine process wrote."""

    def __init__(self, out):
        self.out = out
        self.results = json.loads((out / "results.json").read_text())

    @cached_property
    def trace(self):
        return Trace(self.out)

    @cached_property
    def sites(self):
        return index_trace(self.trace)

    def read(self, key, fqn, kind):
        return read_site(self.trace, self.sites[key][Site(fqn, kind)])

    def static(self, fqn, kind):
        return self.read(STATIC, fqn, kind).tensor

    def native(self, name, kind):
        """A static tensor as captured, by its native name."""
        refs = [r for r in self.trace.index if (r.native, r.kind) == (name, kind)]
        return self.trace.read(refs[0])

    def scored(self, fqn, kind, probe="p0"):
        """(tensor, positions) of a site in score mode."""
        site = self.read(SequenceKey("score", "", probe), fqn, kind)
        return site.tensor, site.positions


def start(job, root, name):
    job_file = root / f"{name}.json"
    job_file.write_text(json.dumps(job))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(Path(minite_diag.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(job_file)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (Path(job["out"]) / "results.json").exists(), done.stderr[-4000:]
    return Run(Path(job["out"]))


def make_job(checkpoint, out, dtype, format="bf16", quantized=(), **options):
    return {
        "checkpoint": str(checkpoint),
        "format": format,
        "dtype": dtype,
        "options": {key: str(value) for key, value in options.items()},
        "quantized": list(quantized),
        "probes": PROBES,
        "sample_tokens": SAMPLE_TOKENS,
        "out": str(out),
    }


@pytest.fixture(scope="session")
def runs(models, exported, tmp_path_factory):
    """A function from a configuration's name to its Run; each runs once a session."""
    root = tmp_path_factory.mktemp("runs")
    cache = {}

    def describe(name):
        out = root / name
        kind, precision, *_ = name.split("-")
        if precision == "nvfp4":
            layout = "modelopt" if kind == "llama" else "compressed-tensors"
            checkpoint, names = exported[kind, layout]
            recipe = {"nvfp4_recipe": MODELLED} if name.endswith("modelled") else {}
            return make_job(checkpoint.path, out, "bfloat16", f"nvfp4-{layout}", names, **recipe)
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        chunked = {"max_num_batched_tokens": 16} if name.endswith("chunked") else {}
        return make_job(models[kind, dtype], out, dtype, precision, **chunked)

    def run(name):
        if name not in cache:
            cache[name] = start(describe(name), root, name)
        return cache[name]

    return run


@pytest.fixture(scope="session")
def load_errors(models, tmp_path_factory):
    """Error records of engines that must not load."""
    root = tmp_path_factory.mktemp("errors")
    unknown = root / "unknown"
    unknown.mkdir()
    config = json.loads((models["llama", "bfloat16"] / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (unknown / "config.json").write_text(json.dumps(config))
    model = models["llama", "bfloat16"]
    truncated = root / "truncated"
    shutil.copytree(model, truncated)
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    jobs = {
        "architecture": make_job(unknown, root, "bfloat16"),
        "missing": make_job(root / "nowhere", root, "bfloat16"),
        "option": make_job(model, root, "bfloat16", chunks=3),
        "recipe": make_job(model, root, "bfloat16", nvfp4_recipe="te"),
        "pointless": make_job(model, root, "bfloat16", nvfp4_recipe=MODELLED),
        "format": make_job(model, root, "bfloat16", format="nvfp4-modelopt"),
        "truncated": make_job(truncated, root, "bfloat16"),
    }
    out = root / "out"
    return start({"jobs": jobs, "out": str(out)}, root, "errors").results
