"""vLLM on a GPU with nothing of ours but the installed plugin: does it give the learner's bits?

    python tests/gpu/plugin_alone.py RUN OUT.json

RUN is an aligned comparison. Its checkpoint is served by a bare vLLM process that knows
MINITE_DIAG_ALIGN alone, and scored alone, in a batch, and after decoding; the exit code is 1 if a
log-probability has other bits than the run's learner, or than itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BARE: Final = ROOT / "tests" / "alignments" / "run_plugin.py"


def bare_vllm(checkpoint: str, prompts: list[list[int]], align: str, backend: str) -> Any:
    """What tests/alignments/run_plugin.py prints."""
    arguments = {"attention_backend": backend, "kv_cache_memory_bytes": 2**31}
    done = subprocess.run(
        [sys.executable, str(BARE), checkpoint, json.dumps(arguments)],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MINITE_DIAG_ALIGN": align, "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def flat(sequences: list[list[float]]) -> list[float]:
    """All tokens, in order."""
    return [value for sequence in sequences for value in sequence]


def equal(one: list[float], other: list[float]) -> dict[str, int]:
    """Tokens, and how many have the same bits."""
    pairs = list(zip(one, other, strict=True))
    return {"tokens": len(pairs), "equal": sum(a == b for a, b in pairs)}


def check(run: Path) -> dict[str, Any]:
    """One count for each equality that should hold."""
    from minite_diag.plan import read_plan
    from minite_diag.trace.store import Trace

    plan = read_plan(run)
    sampler = plan.samplers[0]
    prompts = [list(probe.token_ids) for probe in plan.probes]
    backend = sampler.options.get("attention_backend", "TRITON_ATTN")
    found = bare_vllm(sampler.checkpoint, prompts, ",".join(sampler.align), backend)
    tokens = Trace(run / "traces" / plan.learner.id).tokens
    learner: list[float] = []
    for probe in plan.probes:
        rows = tokens[(tokens["mode"] == "score") & (tokens["probe"] == probe.id)]
        learner += rows.sort_values("position")["logprob"].dropna().tolist()
    return {
        "MINITE_DIAG_ALIGN": ",".join(sampler.align),
        "alone against the learner": equal(flat(found["alone"]), learner),
        "a batch against the learner": equal(flat(found["batch"]), learner),
        "decoded against scored": equal(found["decoded"], found["rescored"]),
    }


def main() -> int:
    """Print and write the counts."""
    result = check(Path(sys.argv[1]))
    text = json.dumps(result, indent=1)
    Path(sys.argv[2]).write_text(text + "\n", encoding="utf-8")
    print(text)
    counts = [value for value in result.values() if isinstance(value, dict)]
    return int(any(count["tokens"] != count["equal"] for count in counts))


if __name__ == "__main__":
    sys.exit(main())
