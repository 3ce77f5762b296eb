"""Transformer Engine's own DumpTensors, run on the CPU: its file, with stand-ins for its imports.

What names, folders and files come out is its code, unchanged; the tests say which tensors go in.
"""

import sys
import types

from tests.kernels import oracles

FEATURE = "debug/features/dump_tensors.py"


def module(name, **content):
    found = types.ModuleType(name)
    found.__dict__.update(content)
    return found


def load_feature(root):
    """The DumpTensors class of the wheel, writing under `root`; and its folder."""
    registry = types.SimpleNamespace(register_feature=lambda namespace: lambda cls: cls)
    messages = []
    stand_ins = {
        "nvdlfw_inspect": module("nvdlfw_inspect"),
        "nvdlfw_inspect.api": module("api", log_message=lambda *a, **k: messages.append(a)),
        "nvdlfw_inspect.logging": module(
            "logging", get_logger=lambda: types.SimpleNamespace(root_log_dir=str(root))
        ),
        "nvdlfw_inspect.registry": module(
            "registry", Registry=registry, api_method=lambda function: function
        ),
        "transformer_engine": module("transformer_engine"),
        "transformer_engine.debug": module("debug"),
        "transformer_engine.debug.features": module("features"),
        "transformer_engine.debug.features.api": module("api", TEConfigAPIMapper=object),
        "transformer_engine.debug.features.utils": module("utils", next_enabled_iter=None),
        "transformer_engine.pytorch": module("pytorch"),
        "transformer_engine.pytorch.tensor": module(
            "tensor", QuantizedTensor=object, Quantizer=object
        ),
    }
    path = oracles._source("transformer_engine", FEATURE)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        sys.modules["nvdlfw_inspect"].api = stand_ins["nvdlfw_inspect.api"]
        feature = module("te_dump_tensors")
        exec(compile(path.read_text(), str(path), "exec"), feature.__dict__)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return feature.DumpTensors()


class Dumps:
    """A folder that DumpTensors fills."""

    def __init__(self, root):
        self.root = root
        self.feature = load_feature(root)

    def dump(self, layer, tensor, value, iteration=0, quantized=None):
        """As a te.Linear of that name calls it."""
        config = {"high_precision_tensor": True, "quantized_tensor": quantized is not None}
        self.feature.inspect_tensor(
            config, layer, tensor, iteration, None, value, rowwise_quantized_tensor=quantized
        )
