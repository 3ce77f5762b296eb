"""One small real trace: a Qwen3-MoE with random weights in the engine `hf`, twice, as a run."""

import io
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from minite_diag import __version__
from minite_diag.capture.worker import Capture, Progress
from minite_diag.cli import app
from minite_diag.compare import compare
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, write_plan
from minite_diag.probe import Probe
from minite_diag.terminal import reset

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TOKENS = {"chat": [5, 9, 11, 13, 20, 30, 40, 7, 8, 9, 10, 11], "code": [50, 90, 11, 13, 20, 30, 40]}


def minite(*arguments):
    """A command line in this process, as if it were the first one."""
    reset()
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="session")
def moe_checkpoint(tmp_path_factory):
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SHAPE, norm_topk_prob=True)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else 0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("moe") / "tiny-moe"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hf_run(moe_checkpoint, tmp_path_factory):
    """Learner hf and sampler hf: the same model, so that all that differs is what is imported."""
    return captured(tmp_path_factory.mktemp("hf") / "run", "hf", moe_checkpoint)


@pytest.fixture(scope="session")
def te_run(moe_checkpoint, tmp_path_factory):
    """Learner te and sampler te, attention quantized to NVFP4."""
    names = [f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qkvo"]
    return captured(tmp_path_factory.mktemp("te") / "run", "te", moe_checkpoint, names)


def captured(run, engine, moe_checkpoint, quantized=()):
    """A run of one engine as learner and as sampler, in this process."""
    engines = tuple(
        EngineSpec(f"{role}-{engine}", role, engine, sys.executable, str(moe_checkpoint), "bf16")
        for role in ("learner", "sampler")
    )
    plan = Plan(
        model=ModelRef("tiny-moe", str(moe_checkpoint), "bf16", "Qwen3MoeForCausalLM", "", 96, 2),
        engines=engines,
        probes=tuple(Probe.make(name, ids, 4) for name, ids in TOKENS.items()),
        dtype="bfloat16",
        quantize="default" if quantized else "none",
        quantized=tuple(quantized),
        export_recipe="modelopt",
        modes=("score",),
        capture=CaptureSpec(top_k=4),
        version=__version__,
    )
    run.mkdir()
    write_plan(plan, run)
    for spec in engines:
        assert Capture(run, plan, spec, Progress(io.StringIO())).run_all() == "ok"
    compare(run)
    return run


@pytest.fixture
def as_json():
    """A manifest's file, read, changed and written again."""

    def change(file, edit):
        record = json.loads(file.read_text())
        edit(record)
        file.write_text(json.dumps(record))

    return change
