"""The other ranks of a tensor-parallel SGLang, each a process.

Knows SGLang's start-up; no plan. A rank runs SGLang's own event loop: it gets the requests that
rank 0 broadcasts, and with them the calls of this package. Invariant: a rank dies with its parent.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from minite_diag.alignments.base import apply_replacements
from minite_diag.engines.sglang_plugin import nvfp4_methods, statics
from minite_diag.engines.sglang_plugin.hooks import ShardObserver
from minite_diag.engines.sglang_plugin.layout import build_layout
from minite_diag.engines.sglang_plugin.shards import ShardRecorder, shard_rules


@dataclass(frozen=True)
class Preparation:
    """What is put into SGLang before the model exists, the same in every rank."""

    nvfp4_recipes: tuple[str, str] | None
    align: tuple[str, ...]

    def apply(self) -> dict[str, list[str]]:
        """Register NVFP4 methods and alignments; op -> names of what was patched."""
        if self.nvfp4_recipes is not None:
            nvfp4_methods.register(*self.nvfp4_recipes)
        return apply_replacements("sglang", self.align, None)


def bind_cores(ranks: int) -> None:
    """Give each rank a share of this process's cores, unless the user did: SGLang asks for it."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or cores[:1] for rank in range(ranks)]
    text = "|".join(",".join(map(str, share)) for share in shares)
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", text)


def start_scheduler(arguments: Any, ports: Any, rank: int) -> Any:
    """SGLang's Scheduler of one rank in this process; waits for the other ranks.

    It gets methods that every rank must call alike: SGLang's remote calls find them by name.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    world_rank = spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
    scheduler: Any = Scheduler(arguments, ports)
    scheduler.minite_seed = torch.manual_seed
    scheduler.minite_chunk = lambda tokens: setattr(scheduler, "chunked_prefill_size", tokens)
    return scheduler


def contribute(scheduler: Any) -> None:
    """Let rank 0's calls hook this rank's model, so that its shards are gathered."""
    runner = scheduler.tp_worker.model_runner
    recorders: list[ShardRecorder] = []

    def observe(sites: str) -> None:
        rules = shard_rules(runner.model)
        layout = build_layout(runner.model)
        group = scheduler.tp_group.cpu_group
        recorder = ShardRecorder(layout, tuple(sites.split("\n")), rules, group)
        statics.write(runner.model, recorder)
        ShardObserver(runner.model, runner, {}, recorder).attach()
        recorders.append(recorder)

    def activate(active: bool) -> None:
        for recorder in recorders:
            recorder.active = active

    scheduler.minite_observe, scheduler.minite_active = observe, activate


def follow(arguments: Any, ports: Any, rank: int, preparation: Preparation) -> None:
    """The body of a rank's process: SGLang's own event loop."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    preparation.apply()
    load_plugins()
    scheduler = start_scheduler(arguments, ports, rank)
    contribute(scheduler)
    scheduler.run_event_loop()


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
