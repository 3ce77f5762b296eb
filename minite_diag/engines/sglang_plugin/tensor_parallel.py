"""The other ranks of a tensor-parallel SGLang, each a process, and what rank 0 can show of the whole.

Knows SGLang's start-up and site names. A rank runs SGLang's own event loop: it gets the requests
that rank 0 broadcasts. Invariant: a rank dies with its parent, and only tensors that rank 0 holds
whole are recorded; the rest is said to be invisible.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch

from minite_diag.alignments.base import apply_replacements
from minite_diag.capture.interventions import IntervenedRecorder
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.sglang_plugin import nvfp4_methods
from minite_diag.errors import EngineUnavailable
from minite_diag.site import matches

SHARDED: Final = (
    "*_proj:*",
    "*.q_norm:*put",
    "*.k_norm:*put",
    "*.q_rope:*",
    "*.k_rope:*",
    "*.attn:*",
    "*.act_fn:*",
    "*.experts:output",
    "*embed_tokens:weight",
    "lm_head:weight",
)
"""Sites of which a rank holds a part, or a partial sum."""

REASON: Final = "tensor parallel: a rank holds a part of it"


@dataclass(frozen=True)
class Preparation:
    """What is put into SGLang before the model exists, the same in every rank."""

    nvfp4_recipe: str | None
    align: tuple[str, ...]

    def apply(self) -> dict[str, list[str]]:
        """Register NVFP4 methods and alignments; op -> names of what was patched."""
        if self.nvfp4_recipe is not None:
            nvfp4_methods.register(self.nvfp4_recipe)
        return apply_replacements("sglang", self.align, None)


def bind_cores(ranks: int) -> None:
    """Give each rank a share of this process's cores, unless the user did: SGLang asks for it."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or cores[:1] for rank in range(ranks)]
    text = "|".join(",".join(map(str, share)) for share in shares)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", text)


def start_scheduler(arguments: Any, ports: Any, rank: int) -> Any:
    """SGLang's Scheduler of one rank in this process; waits for the other ranks.

    It gets two methods that every rank must call alike: SGLang's remote calls find them by name.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    world_rank = spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
    scheduler: Any = Scheduler(arguments, ports)
    scheduler.minite_seed = torch.manual_seed
    scheduler.minite_chunk = lambda tokens: setattr(scheduler, "chunked_prefill_size", tokens)
    return scheduler


def follow(arguments: Any, ports: Any, rank: int, preparation: Preparation) -> None:
    """The body of a rank's process: SGLang's own event loop."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    preparation.apply()
    load_plugins()
    start_scheduler(arguments, ports, rank).run_event_loop()


def start_followers(arguments: Any, ports: Any, preparation: Preparation) -> list[BaseProcess]:
    """Start ranks 1 and up of `arguments.tp_size`."""
    context = multiprocessing.get_context("spawn")
    followers: list[BaseProcess] = []
    for rank in range(1, int(arguments.tp_size)):
        process = context.Process(
            target=follow, args=(arguments, ports, rank, preparation), daemon=True
        )
        process.start()
        followers.append(process)
    return followers


def only_whole_sites(recorder: Recorder) -> None:
    """Make a recorder want what rank 0 holds whole; raises EngineUnavailable for interventions."""
    if isinstance(recorder, IntervenedRecorder):
        raise EngineUnavailable(
            "sglang takes interventions with one rank only", "run it without the option tp_size"
        )
    wants: Callable[[str, str], bool] = recorder.wants

    def whole(native: str, kind: str) -> bool:
        parts = recorder.layout.parts.get(native)
        names = [part.fqn for part in parts] if parts else [native]
        return wants(native, kind) and not any(matches(name, kind, SHARDED) for name in names)

    recorder.wants = whole  # type: ignore[method-assign]
