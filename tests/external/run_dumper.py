"""SGLang's own dumper on a model that replays stored tensors; not a test.

    python run_dumper.py SITE FILE OUT RANK WORLD

SITE has sglang's source, FILE a dict of the tensors that each module is called with and returns,
by MODULE:input, MODULE:output and MODULE:weight, and the arguments of the model's forward. Every
file under OUT is written by the dumper's own hooks in mode `all`.
"""

import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from minite_diag.bench import sglang_peer


class Replay(nn.Module):
    """Returns what it is told, whatever it gets."""

    def __init__(self):
        super().__init__()
        self.answer = None

    def forward(self, value):
        return self.answer


class Model(nn.Module):
    """Calls every replaying module in the order of the file."""

    def __init__(self, tensors):
        super().__init__()
        self.calls = []
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition(":")
            module = self
            for part in name.split("."):
                if part not in module._modules:
                    module.add_module(part, Replay())
                module = module._modules[part]
            if kind == "weight":
                module.weight = nn.Parameter(tensor)
            elif kind == "output":
                module.answer = tensor
                self.calls.append((module, tensors.get(f"{name}:input", tensor)))

    def forward(self, input_ids, **others):
        for module, value in self.calls:
            module(value)


def pretend_megatron(rank, world):
    """What the dumper asks Megatron for its parallel state: tensor and sequence parallel ranks."""

    def answer(name):
        if not name.startswith("get_"):
            raise AttributeError(name)

        def ask():
            if name.startswith("get_tensor_model_parallel"):
                return rank if name.endswith("rank") else world
            return 1 if name.endswith("size") else 0

        return ask

    state = types.ModuleType("megatron.core.parallel_state")
    state.__getattr__ = answer
    core = types.ModuleType("megatron.core")
    core.parallel_state = state
    packed = types.ModuleType("megatron.core.packed_seq_params")
    packed.PackedSeqParams = type("PackedSeqParams", (), {})
    settings = types.ModuleType("megatron.training.global_vars")
    settings.get_args = lambda: types.SimpleNamespace(sequence_parallel=True)
    for module in (types.ModuleType("megatron"), types.ModuleType("megatron.training")):
        sys.modules[module.__name__] = module
    random = types.ModuleType("megatron.core.tensor_parallel.random")
    random.is_checkpointing = lambda: False
    sys.modules["megatron.core.tensor_parallel"] = types.ModuleType("tensor_parallel")
    for module in (core, state, packed, settings, random):
        sys.modules[module.__name__] = module


def main(site, file, out, rank, world):
    if world > 1:
        store = dist.FileStore(str(Path(out).parent / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sglang_peer.enter(Path(site))
    if world > 1:
        pretend_megatron(rank, world)
    from sglang.srt.debug_utils.dumper import DumperConfig, _Dumper

    stored = torch.load(file, weights_only=True)
    config = DumperConfig(
        enable=True, dir=out, exp_name="dump_it", enable_output_console=False,
        enable_model_value=True, non_intrusive_mode="all",
    )  # fmt: skip
    dumper = _Dumper(config=config)
    model = Model(stored["tensors"])
    dumper.register_non_intrusive_dumper(model)
    model(**stored["arguments"])
    for name, tensor in stored.get("named", {}).items():
        dumper.dump(name, tensor)
    dumper.dump_model(model)
    dumper.step()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
