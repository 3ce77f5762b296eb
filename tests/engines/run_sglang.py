"""One SGLang engine in its own process, driven like the worker drives it; not a test.

argv: a JSON file {checkpoint, format, dtype, options, quantized, probes, sample_tokens, chunk, out}.
Writes a trace folder and `out/results.json`.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from minite_diag.alignments import sglang_plugin
from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import TokenSequence
from minite_diag.engines.sglang import SglangEngine
from minite_diag.engines.sglang_plugin.plugin_hooks import replace
from minite_diag.errors import MiniteDiagError
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan
from minite_diag.probe import Probe
from minite_diag.trace.store import TraceWriter


def make_plan(job: dict) -> Plan:
    spec = EngineSpec(
        "sglang",
        "sampler",
        "sglang",
        sys.executable,
        job["checkpoint"],
        job["format"],
        job["options"],
    )
    return Plan(
        model=ModelRef("tiny", job["checkpoint"], job["format"], "", "", 512, 2),
        engines=(spec,),
        probes=tuple(
            Probe.make(f"p{i}", ids, max(1, len(ids) // 2)) for i, ids in enumerate(job["probes"])
        ),
        dtype=job["dtype"],
        quantize="default",
        quantized=tuple(job["quantized"]),
        export_recipe="",
        sample_tokens=job["sample_tokens"],
        capture=CaptureSpec(top_k=5, sample_tensors=True),
    )


def error_of(action) -> dict:
    try:
        action()
    except MiniteDiagError as error:
        return {"kind": type(error).__name__, "message": error.message}
    return {"kind": "none", "message": ""}


def hook_twice() -> None:
    for _ in range(2):
        replace("sglang.srt.layers.activation.SiluAndMul.forward_cuda", print)


def break_a_forward(engine, sequence) -> None:
    """The second step of a batch fails: requests are in flight and the cache is in use."""
    forward, calls = engine.runner.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a kernel failed")
        return forward(*args, **kwargs)

    engine.runner.forward = failing
    try:
        engine.sample(sequence, 4, 0)
    finally:
        engine.runner.forward = forward


def main(job: dict) -> None:
    plan, out = make_plan(job), Path(job["out"])
    engine = SglangEngine()
    info = engine.load(plan.engines[0], plan)
    writer = TraceWriter(out)
    recorder = Recorder(writer, plan.capture, info.layout)
    prompts = [TokenSequence("score", "", p.id, p.token_ids, p.prompt_length) for p in plan.probes]
    bare = [engine.score(s) for s in prompts]
    engine.observe(recorder)
    recorder.active = True
    hooked = [engine.score(s) for s in prompts]
    sampled = [
        engine.sample(dataclasses.replace(s, mode="sample", source="sglang"), plan.sample_tokens, 7)
        for s in prompts
    ]
    recorder.active = False
    rescored = [engine.score(s.sequence) for s in sampled]
    outside = dataclasses.replace(prompts[0], token_ids=(3, 512))
    too_long = dataclasses.replace(prompts[0], token_ids=(3,) * 500)
    errors = {
        "outside": error_of(lambda: engine.score(outside)),
        "too_long": error_of(lambda: engine.score(too_long)),
    }
    if "tp_size" not in job["options"]:
        errors["broken"] = error_of(lambda: break_a_forward(engine, prompts[0]))
    batch = engine.score_batch(prompts)
    passes = engine.runner.forward_pass_id
    chunked = engine.score_chunked(prompts[0], 16)
    passes = engine.runner.forward_pass_id - passes
    after_errors = engine.score(prompts[0])
    layout = dataclasses.asdict(info.layout)
    writer.manifest({"engine": {"id": "sglang"}, "status": "ok", "layout": layout})
    writer.close()
    results = {
        "label": info.label,
        "version": info.version,
        "device": info.device,
        "dtype": info.dtype,
        "evidence": [dataclasses.asdict(e) for e in info.evidence],
        "invisible": info.invisible,
        "settings": info.settings,
        "silent": recorder.silent,
        "calls": recorder.calls,
        "bare": [dataclasses.asdict(s) for s in bare],
        "hooked": [dataclasses.asdict(s) for s in hooked],
        "sampled": [dataclasses.asdict(s) for s in sampled],
        "rescored": [dataclasses.asdict(s) for s in rescored],
        "batch": [dataclasses.asdict(s) for s in batch],
        "chunked": dataclasses.asdict(chunked),
        "chunks": passes,
        "patched_by_plugin": sglang_plugin.register(),
        "missing_hook": error_of(lambda: replace("sglang.srt.layers.layernorm.RMSNorm.no", print)),
        "taken_hook": error_of(hook_twice),
        "errors": errors,
        "after_errors": dataclasses.asdict(after_errors),
    }
    engine.close()
    (out / "results.json").write_text(json.dumps(results))


def load_errors(job: dict) -> None:
    """Engines that must not load: {"jobs": {name: job}}."""
    errors = {}
    for name, wrong in job["jobs"].items():
        plan = make_plan(wrong)
        errors[name] = error_of(lambda plan=plan: SglangEngine().load(plan.engines[0], plan))
    Path(job["out"]).mkdir(parents=True)
    (Path(job["out"]) / "results.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    description = json.loads(Path(sys.argv[1]).read_text())
    if "jobs" in description:
        load_errors(description)
    else:
        main(description)
    sys.stdout.flush()
    # The scheduler leaves threads behind that would hold the process.
    os._exit(0)
