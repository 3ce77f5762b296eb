"""One vLLM engine in its own process, driven like the worker drives it; not a test.

argv: a JSON file {checkpoint, format, dtype, options, quantized, probes, sample_tokens, out}.
Writes a trace folder and `out/results.json`.
"""

import dataclasses
import json
import sys
from pathlib import Path

from minite_diag.capture.recorder import Recorder
from minite_diag.engines.base import TokenSequence
from minite_diag.engines.vllm import VllmEngine
from minite_diag.errors import MiniteDiagError
from minite_diag.plan import CaptureSpec, EngineSpec, ModelRef, Plan
from minite_diag.probe import Probe
from minite_diag.trace.store import TraceWriter


def make_plan(job: dict) -> Plan:
    spec = EngineSpec(
        "vllm", "sampler", "vllm", sys.executable, job["checkpoint"], job["format"], job["options"]
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


def as_record(scored) -> dict:
    return dataclasses.asdict(scored)


def kept_weights_are_fresh_ones(engine) -> bool:
    """Scores with and without kept dequantized weights are equal, and something was kept."""
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

    sequence = TokenSequence("score", "", "kept", tuple(range(3, 20)), 9)
    kept = emulation.dequantize_to_dtype
    if not hasattr(kept, "dequantize"):
        return False
    with_kept = engine.score(sequence)
    emulation.dequantize_to_dtype = kept.dequantize
    without = engine.score(sequence)
    emulation.dequantize_to_dtype = kept
    return with_kept == without and kept.bytes_kept > 0


def error_of(action) -> dict:
    try:
        action()
    except MiniteDiagError as error:
        return {"kind": type(error).__name__, "message": error.message}
    return {"kind": "none", "message": ""}


def main(job: dict) -> None:
    plan, out = make_plan(job), Path(job["out"])
    engine = VllmEngine()
    info = engine.load(plan.engines[0], plan)
    layout = dataclasses.asdict(info.layout)
    writer = TraceWriter(out)
    recorder = Recorder(writer, plan.capture, info.layout)
    prompts = [TokenSequence("score", "", p.id, p.token_ids, p.prompt_length) for p in plan.probes]
    bare = [engine.score(s) for s in prompts]
    engine.observe(recorder)
    recorder.active = True
    hooked = [engine.score(s) for s in prompts]
    sampled = [
        engine.sample(dataclasses.replace(s, mode="sample", source="vllm"), plan.sample_tokens, 7)
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
    after_errors = engine.score(prompts[0])
    kept = job["format"].startswith("nvfp4") and kept_weights_are_fresh_ones(engine)
    writer.manifest({"engine": {"id": "vllm"}, "status": "ok", "layout": layout})
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
        "bare": [as_record(s) for s in bare],
        "hooked": [as_record(s) for s in hooked],
        "sampled": [as_record(s) for s in sampled],
        "rescored": [as_record(s) for s in rescored],
        "errors": errors,
        "kept": kept,
        "after_errors": as_record(after_errors),
    }
    engine.close()
    (out / "results.json").write_text(json.dumps(results))


def load_errors(job: dict) -> None:
    """Engines that must not load: {"jobs": {name: job}}."""
    errors = {}
    for name, wrong in job["jobs"].items():
        plan = make_plan(wrong)
        errors[name] = error_of(lambda plan=plan: VllmEngine().load(plan.engines[0], plan))
    Path(job["out"]).mkdir(parents=True)
    (Path(job["out"]) / "results.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    description = json.loads(Path(sys.argv[1]).read_text())
    if "jobs" in description:
        load_errors(description)
    else:
        main(description)
