"""Real SGLang with its own dumper on, and our hooks beside it; not a test.

argv: a JSON file {checkpoint, probes, run}. The dumper is told by DUMPER_* variables; the trace of
the same passes goes to run/traces/learner-sglang.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from minite_diag.capture.recorder import Recorder
from minite_diag.capture.sequences import token_rows
from minite_diag.engines.base import TokenSequence
from minite_diag.engines.sglang import SglangEngine
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan, write_plan
from minite_diag.probe import Probe
from minite_diag.trace.store import TraceWriter


def main(job):
    run = Path(job["run"])
    checkpoint = job["checkpoint"]
    spec = EngineSpec("learner-sglang", "learner", "sglang", sys.executable, checkpoint, "bf16")
    plan = Plan(
        model=ModelRef("tiny", checkpoint, "bf16", "", "", 512, 2),
        engines=(spec,),
        probes=tuple(Probe.make(name, ids, len(ids) - 4) for name, ids in job["probes"].items()),
        dtype="bfloat16",
        quantize="none",
        quantized=(),
        export_recipe="",
        sample_tokens=6,
        capture=CaptureSpec(top_k=5, sample_tensors=True),
    )
    run.mkdir()
    write_plan(plan, run)
    engine = SglangEngine()
    info = engine.load(spec, plan)
    writer = TraceWriter(run / "traces" / spec.id)
    recorder = Recorder(writer, plan.capture, info.layout)
    engine.observe(recorder)
    recorder.active = True
    prompts = [TokenSequence("score", "", p.id, p.token_ids, p.prompt_length) for p in plan.probes]
    scored = engine.score_batch(prompts)
    first = dataclasses.replace(prompts[0], mode="sample", source=spec.id)
    scored.append(engine.sample(first, plan.sample_tokens, 7))
    recorder.active = False
    for sequence in scored:
        writer.tokens(token_rows(sequence))
    record = {"engine": dataclasses.asdict(spec), "status": "ok", "label": info.label}
    writer.manifest(record | {"layout": dataclasses.asdict(info.layout), "evidence": []})
    writer.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # the scheduler leaves threads behind that would hold the process
