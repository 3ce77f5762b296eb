"""Run the real engines on one GPU and print what they computed: for whoever has a GPU.

    python tests/gpu/engines.py --out OUT [--steps NAME,...] [--jobs 8]

Each step is a `minite-diag` command in its own process, several at a time on one GPU. OUT gets a
folder for each run, and `results.json` with the figures that reports/h200-* quote. A step that
fails is in the table with the end of its log; the exit code is the number of them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
CLI: Final = (sys.executable, "-m", "minite_diag.cli", "--no-progress")
CACHE_GIB: Final = "kv_cache_gib=2"
TRITON: Final = "attention_backend=TRITON_ATTN"
TE_SAMPLER: Final = ("--sampler", "te:impl=emu", "--modes", "score")
"""Scores only: under a per-tensor scale a decoded token has other bits than in its own prefill."""
LADDER: Final = (
    "weights",
    "pow2-scale",
    "norm",
    "rope",
    "attention",
    "activation",
    "router",
    "experts",
    "nvfp4-linear",
    "nvfp4-moe",
    "lm-head",
    "logprobs",
)
STATIC: Final = (
    "weights",
    "pow2-scale",
    "static-scale",
    *(rung for rung in LADDER[2:] if rung != "nvfp4-linear"),
)
"""The ladder with vLLM's own dense linears; its experts in Triton have another combination."""
NATIVE: Final = ("norm", "activation", "lm-head", "logprobs")
"""Ops of the ladder that are expected to be equal on CUDA without us."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One command, and the steps that must be over before it."""

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    run: str = ""
    """The run folder that it leaves, under OUT."""
    threads: int = 2


def compare(name: str, *arguments: str, model: str = "demo-moe", probes: int = 3) -> Step:
    """A comparison of its own run folder."""
    fixed = ("--model", model, "--num-probes", str(probes), "--out", f"{{out}}/{name}")
    return Step(name, (*CLI, "compare", *arguments, *fixed), run=name)


def billion(name: str, *arguments: str) -> Step:
    """A comparison on the random MoE of about 1e9 weights; digests only, no attribution."""
    probes = ("--probes", "{out}/moe-1b/probes.jsonl", "--stats-only", "--no-attribute")
    step = compare(f"moe-1b-{name}", *arguments, *probes, model="{out}/moe-1b/model", probes=2)
    return dataclasses.replace(step, after=("moe-1b",), threads=8)


def vllm(*options: str) -> tuple[str, str]:
    """The sampler with its options."""
    return "--sampler", "vllm:" + ",".join((CACHE_GIB, *options))


def steps() -> list[Step]:
    """Every step, those that others wait for first."""
    found = [
        Step("te-modules", (sys.executable, "{root}/tests/gpu/te_modules.py", "{out}/te-modules")),
        compare("te-emu-vs-ref", *_te("ref,recipe=te-python-cuda"), *TE_SAMPLER),
        compare("te-emu-vs-cpu-ref", *_te("ref,recipe=te-python"), *TE_SAMPLER),
        compare("te-emu-vs-te", *_te("ref,recipe=te"), *TE_SAMPLER),
        compare("bf16", "--quantize", "none", "--learner", "hf", *vllm()),
        compare("bf16-triton", "--quantize", "none", "--learner", "hf", *vllm(TRITON)),
        compare("marlin", *_te("emu"), *vllm()),
        compare("emulation", *_te("emu"), *vllm("nvfp4_recipe=vllm-emulation")),
        compare("prefix", "--quantize", "none", "--learner", "hf", *vllm("prefix_caching=true")),
        compare(
            "ct-marlin", "--layout", "compressed-tensors", *_te("ref"), *vllm(), "--no-attribute"
        ),
        compare(
            "invariant",
            *_te("ref"),
            *vllm("nvfp4_recipe=vllm-emulation"),
            "--align",
            "batch-invariant",
            "--no-attribute",
        ),
    ]
    legs = [live(name) for name in ("marlin", "emulation", "bf16", "prefix")]
    aligned = _named(LADDER)
    large = [
        Step("moe-1b", (sys.executable, "{root}/tests/gpu/random_moe.py", "{out}/moe-1b")),
        billion("bf16", "--quantize", "none", "--learner", "hf", *vllm()),
        billion("marlin", *_te("emu"), *vllm(), "--modes", "score"),
        dataclasses.replace(
            billion(
                "emulation",
                *_te("ref,recipe=te-python-cuda"),
                *vllm("nvfp4_recipe=vllm-emulation"),
                *("--modes", "score"),
            ),
            after=("moe-1b-marlin",),
        ),
        billion("aligned", *_te("ref"), *vllm(TRITON), *aligned),
    ]
    flash = vllm("attention_backend=FLASH_ATTN")
    native = _named([rung for rung in LADDER if rung not in NATIVE])
    static = _named(STATIC)
    own = vllm(TRITON, "nvfp4_linear_recipe=vllm-emulation")
    last = f"ladder/align/{len(LADDER)}-{LADDER[-1]}"
    return [
        *found,
        *legs,
        *large,
        *demo(aligned),
        *several(),
        *ladder("ladder", TRITON),
        compare("aligned-flash", *_te("ref"), *flash, *aligned, "--no-attribute"),
        compare("aligned-emu", *_te("emu"), *vllm(TRITON), *aligned),
        compare("static-linears", *_te("ref"), *own, *static),
        dataclasses.replace(
            compare("demo-static", *_te("ref"), *own, *_dense(static), model="demo"),
            after=("demo-bf16",),
        ),
        compare("aligned-native", *_te("ref"), *vllm(TRITON), *native),
        live("aligned-emu"),
        dataclasses.replace(live(last), after=(f"ladder-{len(LADDER)}",), name="live-aligned"),
        Step(
            "plugin-alone",
            (
                sys.executable,
                "{root}/tests/gpu/plugin_alone.py",
                f"{{out}}/{last}",
                "{out}/plugin-alone.json",
            ),
            (f"ladder-{len(LADDER)}",),
        ),
        *left_out("ladder", TRITON),
        Step(
            "price", (*CLI, "align", "{out}/ladder", *aligned, "--price"), ("left-out",), "ladder"
        ),
    ]


def live(run: str) -> Step:
    """The live half of attribution on a run: legs of both engines, and the pair where it fits."""
    command = (*CLI, "attribute", f"{{out}}/{run}", "--live", "--budget", "200")
    return Step(f"live-{run}", command, (run,), run)


def left_out(name: str, backend: str) -> list[Step]:
    """The aligned run without each alignment, at the same time, and then their table."""
    found = []
    for out in LADDER[2:]:  # the first two put no op of ours into an engine
        named = _named([rung for rung in LADDER if rung != out])
        folder = f"{name}/align/without-{out}"
        step = compare(folder, *_te("ref"), *vllm(backend), *named, "--no-attribute")
        found.append(dataclasses.replace(step, name=f"without-{out}", after=(name,)))
    aligned = _named(LADDER)
    command = (*CLI, "align", f"{{out}}/{name}", *aligned, "--leave-one-out")
    after = (f"{name}-table", *(step.name for step in found))
    return [*found, Step("left-out", command, after, name)]


def demo(aligned: list[str]) -> list[Step]:
    """SmolLM2; the first run converts the checkpoint for the others.

    Not with Marlin, which vLLM 0.23 chooses: its kernel refuses K = 576.
    """
    found = [
        compare("demo-bf16", "--quantize", "none", "--learner", "hf", *vllm(), model="demo"),
        compare("demo-emulation", *_te("emu"), *vllm("nvfp4_recipe=vllm-emulation"), model="demo"),
        compare("demo-aligned", *_te("ref"), *vllm(TRITON), *_dense(aligned), model="demo"),
        compare("demo-aligned-emu", *_te("emu"), *vllm(TRITON), *_dense(aligned), model="demo"),
    ]
    # The first converts the checkpoint, others export for those after them.
    waits = ((), ("demo-bf16",), ("demo-bf16",), ("demo-aligned",))
    return [
        dataclasses.replace(step, after=after, threads=4)
        for step, after in zip(found, waits, strict=True)
    ] + ladder(
        "demo-ladder", TRITON, "nvfp4_recipe=vllm-emulation", model="demo", after=("demo-bf16",)
    )


def several() -> list[Step]:
    """One model on two GPUs against one: FSDP2, tensor parallel, layers spread, vLLM's ranks."""
    two = "world_size=2"
    one = ("--quantize", "none", "--learner", "hf")
    wide = ("--quantize", "none", "--learner", "hf:dtype=float32", "--no-attribute")
    ranks = "tensor_parallel_size=2"
    emulation = "nvfp4_recipe=vllm-emulation"
    score = ("--modes", "score", "--no-attribute")
    return [
        compare("hf-fsdp2", *one, "--sampler", f"hf:parallel=fsdp2,{two}"),
        compare("hf-tp", *one, "--sampler", f"hf:parallel=tp,{two}"),
        compare("hf-tp-fp32", *wide, "--sampler", f"hf:parallel=tp,{two},dtype=float32"),
        # demo-moe has 3.8 MB: small bounds spread it.
        compare("hf-device-map", *one, "--sampler", "hf:max_memory=0:3MiB/1:3MiB"),
        compare("hf-offload", *one, "--sampler", "hf:max_memory=0:2MiB/cpu:2MiB", *score),
        compare("vllm-tp", *one, *vllm(), *vllm(ranks)),
        compare("vllm-tp-marlin", *_te("ref"), *vllm(), *vllm(ranks), *score),
        compare(
            "vllm-tp-emulation", *_te("ref"), *vllm(emulation), *vllm(emulation, ranks), *score
        ),
        billion("fsdp2", *one, "--sampler", f"hf:parallel=fsdp2,{two}", "--modes", "score"),
        billion("tp", *one, "--sampler", f"hf:parallel=tp,{two}", *vllm(ranks)),
    ]


def _named(alignments: Sequence[str]) -> list[str]:
    return [word for name in alignments for word in ("--align", name)]


def _dense(aligned: list[str]) -> list[str]:
    """Without the alignments that need experts."""
    pairs = zip(aligned[::2], aligned[1::2], strict=True)
    return [
        word for pair in pairs if pair[1] not in ("router", "experts", "nvfp4-moe") for word in pair
    ]


def _te(impl: str) -> tuple[str, str]:
    return "--learner", f"te:impl={impl}"


def ladder(
    name: str, *options: str, model: str = "demo-moe", after: tuple[str, ...] = ()
) -> list[Step]:
    """The rungs at the same time, each in the folder where `align` looks for it, then `align`."""
    engines = (*_te("ref"), *vllm(*options))
    whole = _named(LADDER)
    every = (whole if model == "demo-moe" else _dense(whole))[1::2]
    found = [dataclasses.replace(compare(name, *engines, model=model), after=after)]
    for count in range(1, len(every) + 1):
        folder = f"{name}/align/{count}-{every[count - 1]}"
        step = compare(folder, *engines, *_named(every[:count]), "--no-attribute", model=model)
        found.append(dataclasses.replace(step, name=f"{name}-{count}", after=after))
    rungs = tuple(step.name for step in found)
    named = _named(every)
    found.append(Step(f"{name}-table", (*CLI, "align", f"{{out}}/{name}", *named), rungs, name))
    return found


def run_step(
    step: Step, out: Path, environment: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """Run one step; its log is OUT/logs/NAME.log."""
    log = out / "logs" / f"{step.name.replace('/', '-')}.log"
    command = [word.format(out=out, root=ROOT) for word in step.command]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**environment, "OMP_NUM_THREADS": str(step.threads)},
                timeout=timeout_s,
                cwd=ROOT,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
    return {
        "step": step.name,
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "command": command,
        "figures": figures(out / step.run) if step.run else None,
        "log": log.read_text(encoding="utf-8", errors="replace")[-1500:] if code else "",
    }


def figures(run: Path) -> dict[str, Any] | None:
    """What a report quotes of a run: labels, evidence, gaps, equal tensors, causes, legs."""
    file = run / "summary.json"
    if not file.exists():
        return None
    summary = json.loads(file.read_text(encoding="utf-8"))["summary"]
    engine_keys = ("id", "label", "version", "device", "error", "seconds", "settings")
    return {
        "verdict": summary["verdict"],
        "engines": [
            {key: engine[key] for key in engine_keys}
            | {
                "evidence": [
                    f"{e['op']}: {e['status']} {e['impl']} {e['note']}".strip()
                    for e in engine["evidence"]
                ],
            }
            for engine in summary["engines"]
        ],
        "pairs": [
            {
                key: pair[key]
                for key in (
                    "learner",
                    "sampler",
                    "logprob",
                    "sites",
                    "first_divergence",
                    "routing",
                    "causes",
                    "live",
                )
            }
            for pair in summary["pairs"]
        ],
    }


def climb(chosen: list[Step], out: Path, jobs: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run steps as soon as those they wait for are over."""
    environment = {**os.environ, "PYTHONPATH": _path()}
    waiting = list(chosen)
    over: set[str] = set()
    running: dict[concurrent.futures.Future[dict[str, Any]], str] = {}
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            names = {step.name for step in chosen}
            ready = [s for s in waiting if all(a in over or a not in names for a in s.after)]
            for step in ready[: jobs - len(running)]:
                waiting.remove(step)
                running[pool.submit(run_step, step, out, environment, timeout_s)] = step.name
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                over.add(running.pop(future))
                results.append(future.result())
                print(line(results[-1]), flush=True)
                _keep(out / "results.json", results)
    return results


def _keep(file: Path, results: list[dict[str, Any]]) -> None:
    """Write the results of this call, and those of earlier calls in the same folder."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    new = {result["step"] for result in results}
    kept = [result for result in old if result["step"] not in new]
    file.write_text(json.dumps([*kept, *results], indent=1) + "\n", encoding="utf-8")


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    found = result["figures"] or {}
    words = [f"{result['step']:<22} rc={result['code']} {result['seconds']:>6}s"]
    for pair in found.get("pairs", []):
        for mode, gap in (pair["logprob"] or {}).items():
            words.append(f"{mode} {gap['mean_abs']:.4g} equal {gap['equal']}/{gap['tokens']}")
        sites = pair["sites"] or {}
        words.append(f"tensors {sites.get('bitwise_equal')}/{sites.get('compared')}")
    for engine in found.get("engines", []):
        words.append(f"{engine['id']}={engine['label']}")
        if engine["error"]:
            words.append(str(engine["error"])[:300])
    if result["log"]:
        words.append("\n    " + result["log"][-700:].replace("\n", "\n    "))
    return "  ".join(words)


def pack(out: Path, archive: Path) -> None:
    """The figures and plans of every run, without the traces, as one archive."""
    kept = out.parent / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    wanted = {"summary.json", "plan.json", "align.json", "results.json", "attribution.json"}
    wanted |= {"te-modules.json", "plugin-alone.json", "manifest.json"}
    for file in [*out.rglob("*.json"), *out.rglob("*.log")]:
        if file.name not in wanted and file.suffix != ".log":
            continue
        target = kept / file.relative_to(out)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.make_archive(str(archive), "xztar", kept)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default="", help="comma list of names or prefixes ending in *")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--pack", type=Path, help="archive of figures and logs")
    given = parser.parse_args()
    names = [name for name in given.steps.split(",") if name]
    chosen = [
        step
        for step in steps()
        if not names
        or any(step.name == n or (n[-1] == "*" and step.name.startswith(n[:-1])) for n in names)
    ]
    if given.list:
        for step in chosen:
            print(step.name, " ".join(step.command))
        return 0
    out = given.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    results = climb(chosen, out, given.jobs, given.timeout)
    if given.pack:
        pack(out, given.pack)
    return sum(result["code"] != 0 for result in results)


if __name__ == "__main__":
    sys.exit(main())
