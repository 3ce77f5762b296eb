"""A transformers model on several ranks: FSDP2 or tensor parallelism, and what each rank holds.

Under `fsdp2` a rank keeps a slice of every weight and gathers a layer's weights before it runs:
each rank computes the whole forward, with the bits of a single device. Under `tp` transformers'
own plan splits linears and experts: a rank computes its columns or rows, and sums over rows are
all-reduced.

Knows torch.distributed and transformers' module names; no file. Invariant: what is said about a
module is read from its parameters (DTensor placements), never from the plan that was asked for.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minite_diag.capture import ranks
from minite_diag.capture.recorder import Recorder
from minite_diag.capture.shards import Rules, Shard, gather_into
from minite_diag.engines.base import Evidence
from minite_diag.errors import EngineError, EngineUnavailable, UsageError
from minite_diag.plan import EngineSpec, Plan

FORMS: Final = ("fsdp2", "tp")
OPTIONS: Final = frozenset({"parallel", "world_size"})


def asked_ranks(options: dict[str, str]) -> int:
    """Ranks that `parallel` and `world_size` ask for; raises UsageError where they don't fit."""
    form = options.get("parallel")
    if form is None:
        if "world_size" in options:
            raise UsageError("hf: world_size without parallel", f"parallel={FORMS[0]}")
        return 1
    if form not in FORMS:
        raise UsageError(f"hf: parallel={form} is unknown", f"one of: {', '.join(FORMS)}")
    text = options.get("world_size", "")
    if not text.isdigit() or int(text) < 2:
        raise UsageError(
            f"hf: parallel={form} needs world_size, the number of ranks (2 or more)",
            f"parallel={form},world_size=2",
        )
    return int(text)


class Parallel:
    """This process as one rank of `form`; the group exists from here on."""

    def __init__(self, spec: EngineSpec, plan: Plan, device: torch.device) -> None:
        self.form = spec.options["parallel"]
        self.count = asked_ranks(spec.options)
        self._check(spec, device)
        ranks.join(device.type, plan.timeout_s)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        )

    def _check(self, spec: EngineSpec, device: torch.device) -> None:
        if device.index is not None:
            raise UsageError(f"hf: device={device} with parallel", f"device={device.type}")
        if device.type == "cuda" and torch.cuda.device_count() < self.count:
            raise EngineUnavailable(
                f"hf: world_size={self.count}, but {torch.cuda.device_count()} GPUs are here",
                "a smaller world_size, or device=cpu",
            )
        if self.form == "tp" and device.type == "cpu" and torch.cuda.is_available():
            raise UsageError(
                "hf: transformers puts the ranks of parallel=tp on the GPUs", "leave device=cpu out"
            )
        heads = _key_heads(Path(spec.checkpoint))
        if self.form == "tp" and heads is not None and heads % self.count:
            raise UsageError(
                f"hf: {heads} key heads don't split over {self.count} ranks",
                "a world_size that divides them, or parallel=fsdp2",
            )

    def load(self, read: Callable[..., Any]) -> Any:
        """The model, this rank's share of it on its device; `read` loads it from the checkpoint."""
        return self._load_tp(read) if self.form == "tp" else self._load_fsdp2(read)

    def _load_fsdp2(self, read: Callable[..., Any]) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.count,))
        model = None
        # The host holds the whole model once, however many ranks there are.
        for turn in range(self.count):
            if turn == dist.get_rank():
                model = read()
                for layer in decoder_layers(model):
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
                fully_shard(model, mesh=mesh, reshard_after_forward=True)
            dist.barrier()
        return model

    def _load_tp(self, read: Callable[..., Any]) -> Any:
        try:
            config = importlib.import_module("transformers.distributed").DistributedConfig
            distributed = config(tp_size=self.count, tp_plan="auto")
        except (ImportError, AttributeError, TypeError) as error:
            raise EngineUnavailable(
                f"hf: this transformers has no tensor parallelism by DistributedConfig: {error}",
                "pip install 'transformers>=5.17'",
            ) from error
        model = read(distributed_config=distributed)
        if not placements(model):
            raise EngineError(
                f"hf: transformers split nothing of {type(model).__name__} over {self.count} ranks",
                "the architecture has no plan: use parallel=fsdp2",
            )
        return model

    def gather_into(self, model: nn.Module, recorder: Recorder) -> None:
        """Let rank 0 record whole tensors."""
        if self.form == "tp":
            rules = shard_rules(model)
            gather_into(recorder, rules, dist.group.WORLD, engine="hf", option="parallel=tp")

    def watch(self, model: Any) -> None:
        """Run one token, to see which collectives a forward has."""
        seen = _Collectives()
        with torch.inference_mode(), seen:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))
        self.seen = seen.counts

    @property
    def collectives(self) -> str:
        """The collectives of one forward, counted as they ran."""
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.seen.items()))
        return f"{self.backend}: {counts or 'none'} in a forward"

    def settings(self, model: nn.Module) -> dict[str, str]:
        """What runs where, read back from the process group and the parameters."""
        found: list[Any] = [None] * self.count
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        here = f"rank {dist.get_rank()}: {self.device}" + (f" ({name})" if name else "")
        dist.all_gather_object(found, here)
        return {
            "parallel": self.form_read_back(model),
            "world_size": str(dist.get_world_size()),
            "collectives": self.collectives,
            "devices": "; ".join(found),
            "placements": describe(model),
        }

    def form_read_back(self, model: nn.Module) -> str:
        """fsdp2 where modules are FSDP's own class, tp where parameters are split without it."""
        from torch.distributed.fsdp import FSDPModule

        wrapped = sum(isinstance(module, FSDPModule) for module in model.modules())
        if wrapped:
            return f"fsdp2 ({wrapped} modules)"
        split = sum(split_dim(parameter) is not None for parameter in model.parameters())
        return f"tp ({split} split parameters)"

    @property
    def backend(self) -> str:
        """The backend of this device's collectives."""
        by_device = dict(part.split(":") for part in dist.get_backend_config().split(","))
        return by_device[self.device.type]

    def note(self, model: nn.Module, op: str) -> str:
        """What the ranks do in one op, for its evidence."""
        if self.form == "fsdp2":
            return ""
        wanted = {"linear": ".weight", "experts": "_proj", "lm_head": "lm_head.weight"}.get(op)
        if wanted is None:
            return ""
        kinds: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            of = "experts" if ".experts." in name else name.split(".")[0]
            is_op = of == op or (op == "linear" and of not in ("experts", "lm_head"))
            if is_op and name.endswith(wanted) and hasattr(parameter, "placements"):
                kinds[_way(parameter)] += 1
        parts = [f"{count} by {way}" for way, count in sorted(kinds.items())]
        return f"split over {self.count} ranks: {', '.join(parts)}" if parts else ""

    def evidence(self) -> Evidence:
        """Who moves and adds what the ranks hold."""
        note = f"{self.form}, {self.count} ranks; {self.collectives}"
        return Evidence("collectives", "native", f"torch.distributed {self.backend}", note)


def _key_heads(checkpoint: Path) -> int | None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config.get("num_key_value_heads") or config.get("num_attention_heads")


class _Collectives(TorchDispatchMode):
    """Counts the collectives that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run."""
        # Waiting and wrapping move nothing.
        if "c10d" in func.namespace and not func._opname.startswith(("wait", "_wrap")):
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def decoder_layers(model: Any) -> Iterator[nn.Module]:
    """The modules that FSDP2 gathers one at a time."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise EngineError(
            f"hf: {type(model).__name__} has no list of decoder layers", "use device_map=auto"
        )
    yield from layers


def placements(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Parameter -> its DTensor placements; parameters that every rank holds whole are left out."""
    return {
        name: tuple(parameter.placements)
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "placements")
    }


def describe(model: nn.Module) -> str:
    """The placements of all parameters by their last names, counted."""
    kinds = Counter(
        (
            name.split(".")[-1] if ".experts." in name else ".".join(name.split(".")[-2:]),
            str(found[0]),
        )
        for name, found in placements(model).items()
    )
    return "; ".join(f"{name} {how} ({n})" for (name, how), n in sorted(kinds.items()))


def split_dim(tensor: Any) -> int | None:
    """The dim along which the ranks split a DTensor; None where each has all of it."""
    for placement in getattr(tensor, "placements", ()):
        # Replicate and Partial have no dim; a packed split is no Shard by class.
        dim = getattr(placement, "dim", None)
        if dim is not None:
            return int(dim) % tensor.dim()
    return None


def _way(parameter: Any) -> str:
    """columns: output features are split; rows: input features are."""
    dim = split_dim(parameter)
    return "copies" if dim is None else "rows" if dim == parameter.dim() - 1 else "columns"


def whole(tensor: Any) -> torch.Tensor:
    """The whole of a weight that the ranks hold together; every rank must call it."""
    if not hasattr(tensor, "full_tensor"):
        return tensor  # type: ignore[no-any-return]
    parts = int(getattr(tensor.placements[0], "split_factor", 1))
    if parts == 1:
        return tensor.full_tensor()  # type: ignore[no-any-return]
    # torch 2.11 can't gather a packed split; 2.13 gives these bytes.
    local, dim = tensor.to_local().contiguous(), int(tensor.placements[0].dim)
    group = tensor.device_mesh.get_group()
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, local, group=group)
    sizes = (local.shape[dim] // parts,) * parts
    return Shard("concatenate", dim=dim, sizes=sizes).join(shards)


def shard_rules(model: Any) -> Rules:
    """(native name, kind) -> how the ranks' tensors make the whole, from the weights' placements."""
    rules: Rules = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and hasattr(weight, "placements"):
            _linear_rules(name, weight, rules)
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if hasattr(gate_up, "placements") and hasattr(down, "placements"):
            _expert_rules(name, gate_up, down, rules)
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and (f"{name}.q_proj", "output") in rules:
            _attention_rules(name, module, rules)
    return rules


def _linear_rules(name: str, weight: Any, rules: Rules) -> None:
    outputs, inputs = weight.shape
    if split_dim(weight) == 1:
        rules[name, "input"] = Shard("concatenate", width=inputs)
        if name.endswith("mlp.down_proj"):
            activation = name.removesuffix("down_proj") + "act_fn"
            rules[activation, "output"] = Shard("concatenate", width=inputs)
    elif split_dim(weight) == 0:
        # A packed weight holds a piece of each of its parts on every rank.
        parts = int(getattr(weight.placements[0], "split_factor", 1))
        sizes = (weight.to_local().shape[0] // parts,) * parts if parts > 1 else ()
        kind = "logits" if name == "lm_head" else "output"
        rules[name, kind] = Shard("concatenate", sizes=sizes, width=outputs)


def _attention_rules(name: str, module: Any, rules: Rules) -> None:
    widths = {leaf: getattr(module, f"{leaf}_proj").weight.shape[0] for leaf in ("q", "k")}
    for leaf, width in widths.items():
        rules[f"{name}.{leaf}_rope", "output"] = Shard("concatenate", width=width)
        if hasattr(module, f"{leaf}_norm"):
            for kind in ("input", "output"):
                rules[f"{name}.{leaf}_norm", kind] = Shard("concatenate", width=width)
    width = module.o_proj.weight.shape[1]
    rules[f"{name}.attn", "output"] = Shard("concatenate", width=width)


def _expert_rules(name: str, gate_up: Any, down: Any, rules: Rules) -> None:
    if (split_dim(gate_up), split_dim(down)) != (1, 2):
        raise EngineUnavailable(
            f"{name}: experts that are split as {gate_up.placements[0]}, {down.placements[0]} "
            "can't be put together yet",
            "use parallel=fsdp2",
        )
    width = down.shape[2]
    for expert in range(gate_up.shape[0]):
        site = f"{name}.{expert}"
        for leaf in ("gate_proj", "up_proj"):
            rules[f"{site}.{leaf}", "output"] = Shard("concatenate", width=width)
        rules[f"{site}.down_proj", "input"] = Shard("concatenate", width=width)
        rules[f"{site}.down_proj", "output"] = Shard("add")
