"""SGLang's own Scheduler in this process, driven step by step instead of by its event loop.

Knows SGLang's request and output records; no plan and no recorder. The scheduler builds batches,
runs the model, samples and keeps the cache as it does in a server: only its sockets are replaced,
by a list of requests and a list of outputs. Invariant: after an error the scheduler is empty.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minite_diag.capture.recorder import Recorder
from minite_diag.engines.sglang_plugin.shards import Errors
from minite_diag.engines.sglang_plugin.tensor_parallel import (
    Preparation,
    bind_cores,
    start_followers,
    start_scheduler,
)
from minite_diag.errors import EngineError

TopK = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class GenerateRequest:
    """Token ids to continue; with `score_prompt`, their own log-probabilities too."""

    id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_k: int
    score_prompt: bool


@dataclass
class Generated:
    """What SGLang sent back for one request.

    `prompt` and `output` hold one log-probability a token (None for the first of the prompt),
    `prompt_top` and `output_top` the most probable ids and their log-probabilities.
    """

    token_ids: list[int] = field(default_factory=list)
    prompt: list[float | None] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    prompt_top: list[TopK] = field(default_factory=list)
    output_top: list[TopK] = field(default_factory=list)
    finished: dict[str, Any] | None = None


class _Outputs:
    """Stands where the scheduler has a socket to the detokenizer."""

    def __init__(self) -> None:
        self.results: dict[str, Generated] = {}

    def send_output(self, output: Any, _: Any = None) -> None:
        for number, id in enumerate(output.rids):
            result = self.results.setdefault(id, Generated())
            result.token_ids += [int(token) for token in output.output_ids[number]]
            result.prompt += _entries(output.input_token_logprobs_val, number)
            result.output += _entries(output.output_token_logprobs_val, number)
            result.prompt_top += _top(
                output.input_top_logprobs_idx, output.input_top_logprobs_val, number
            )
            result.output_top += _top(
                output.output_top_logprobs_idx, output.output_top_logprobs_val, number
            )
            result.finished = output.finished_reasons[number] or result.finished


def _entries(column: Any, number: int) -> list[Any]:
    return list(column[number] or ()) if column else []


def _top(ids: Any, values: Any, number: int) -> list[TopK]:
    return [
        ((), ()) if not position else (tuple(map(int, position)), tuple(map(float, logprobs)))
        for position, logprobs in zip(_entries(ids, number), _entries(values, number), strict=True)
    ]


class InProcessScheduler:
    """One SGLang scheduler with its model, tensor-parallel rank 0; the others are processes."""

    def __init__(self, arguments: dict[str, Any], preparation: Preparation) -> None:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        if arguments["tp_size"] > 1:
            bind_cores(arguments["tp_size"])
        self.arguments = ServerArgs(**arguments)
        ports = PortArgs.init_new(self.arguments)
        self._followers = start_followers(self.arguments, ports, preparation)
        self._queued: list[Any] = []
        self._recorder: Recorder | None = None
        try:
            self.scheduler: Any = start_scheduler(self.arguments, ports, 0)
        except BaseException:
            self.close()
            raise
        # These ride the broadcast to the other ranks, as what arrives at the socket does.
        self.scheduler._poll_timeout_aborts = self._take_queued
        self.outputs = _Outputs()
        self.scheduler.output_streamer.send_to_detokenizer = self.outputs

    @property
    def runner(self) -> Any:
        """SGLang's ModelRunner."""
        return self.scheduler.tp_worker.model_runner

    def seed(self, seed: int) -> None:
        """Seed the generator that SGLang samples with."""
        self._call("minite_seed", seed=seed)

    def chunk(self, tokens: int | None) -> None:
        """Bound the tokens of a prefill step from now on; None for no bound."""
        self._call("minite_chunk", tokens=tokens)

    def observe(self, write: Callable[[], None], recorder: Recorder) -> None:
        """Call `write`, which hooks this rank's model, while the other ranks hook theirs."""
        observed = Errors(lambda sites: write())
        self.scheduler.minite_observe = observed
        self.scheduler.minite_active = lambda active: None
        self._recorder = recorder
        self._call("minite_observe", sites="\n".join(recorder.spec.sites))
        observed.check()

    def _call(self, method: str, **parameters: int | str | None) -> None:
        """Call a method of the scheduler in every rank."""
        from sglang.srt.managers.io_struct import RpcReqInput

        if not self._followers:
            getattr(self.scheduler, method)(*parameters.values())
            return
        self._queued.append(RpcReqInput(method=method, parameters=dict(parameters)))
        self._run_steps()

    def run(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Queue requests together and step until all are finished; results in their order.

        Raises EngineError where a request was aborted or a log-probability is NaN.
        """
        self.outputs.results.clear()
        if self._recorder is not None and self._followers:
            self._call("minite_active", active=self._recorder.active)
        self._queued += [_tokenized(request) for request in requests]
        self._run_steps()
        found = [self.outputs.results.get(request.id, Generated()) for request in requests]
        for request, result in zip(requests, found, strict=True):
            _check(request, result)
        return found

    def _take_queued(self) -> list[Any]:
        taken, self._queued = self._queued, []
        return taken

    def _run_steps(self) -> None:
        dead = [process for process in self._followers if not process.is_alive()]
        if dead:
            raise EngineError(
                f"rank {1 + self._followers.index(dead[0])} of sglang has died "
                f"(exit {dead[0].exitcode})",
                "see the engine's log",
            )
        try:
            with torch.no_grad():
                self._step_until_idle()
        except BaseException:
            self._empty()
            raise

    def _step_until_idle(self) -> None:
        """As SGLang's event_loop_normal, which waits for ever."""
        scheduler = self.scheduler
        while True:
            scheduler.ingest_requests()
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
            if not batch:
                return

    def close(self) -> None:
        """End the other ranks."""
        for process in self._followers:
            process.kill()
            process.join()

    def _empty(self) -> None:
        """Drop every request and every cached token; other ranks would be left in a step: end."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        self.close()
        scheduler = self.scheduler
        self._queued.clear()
        scheduler.waiting_queue.clear()
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.last_batch = scheduler.chunked_req = None
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()


def _tokenized(request: GenerateRequest) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(
        temperature=request.temperature, max_new_tokens=request.max_new_tokens, ignore_eos=True
    )
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=request.id,
        input_text="",
        input_ids=array("q", request.token_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=parameters,
        return_logprob=True,
        logprob_start_len=0 if request.score_prompt else -1,
        top_logprobs_num=request.top_k,
        token_ids_logprob=None,
        stream=False,
    )


def _check(request: GenerateRequest, result: Generated) -> None:
    reason = result.finished or {}
    if reason.get("type") != "length" or len(result.token_ids) != request.max_new_tokens:
        raise EngineError(
            f"sglang ended request {request.id} after {len(result.token_ids)} of "
            f"{request.max_new_tokens} tokens: {reason.get('message') or reason or 'no result'}",
            "raise max_model_len",
        )
    if any(value is not None and math.isnan(value) for value in (*result.prompt, *result.output)):
        raise EngineError(
            f"sglang gives NaN for request {request.id}", "check the checkpoint's weights"
        )
