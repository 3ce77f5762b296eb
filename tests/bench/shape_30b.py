"""What comparing, judging and reporting cost at the size of Qwen3-30B-A3B, on synthetic traces.

    python tests/bench/shape_30b.py FOLDER            # 48 layers of 128 experts, widths / 8

Writes two traces with as many tensors as that model has (every width divided by `--shrink`, or
their weights alone would take 33 GB), then runs each command in a process of its own and prints
seconds and peak memory. The model is not run: its tensors are random, the sampler's are the
learner's with some bits changed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from minite_diag.plan import EngineSpec, ModelRef, Plan, write_plan
from minite_diag.probe import Probe
from minite_diag.trace.store import Row, TraceWriter

LEARNER, SAMPLER = "learner-toy", "sampler-toy"
TOP_K = 8
POLL_SECONDS = 0.02
WIDTHS = {"hidden": 2048, "query": 4096, "key": 512, "expert": 768, "vocabulary": 151936}
COMPARE = (
    "from pathlib import Path; from minite_diag.compare import compare; compare(Path({run!r}))"
)


class Shape:
    """Numbers of the model and of the capture."""

    def __init__(self, layers: int, experts: int, shrink: int, probes: int, tokens: int) -> None:
        self.layers, self.experts, self.probes, self.tokens = layers, experts, probes, tokens
        self.width = {name: max(16, size // shrink // 16 * 16) for name, size in WIDTHS.items()}

    def linears(self, layer: int) -> list[tuple[str, int, int, int | None]]:
        """(FQN, inputs, outputs, expert) of the quantized linears of a layer."""
        w, prefix = self.width, f"model.layers.{layer}"
        found: list[tuple[str, int, int, int | None]] = [
            (f"{prefix}.self_attn.q_proj", w["hidden"], w["query"], None),
            (f"{prefix}.self_attn.k_proj", w["hidden"], w["key"], None),
            (f"{prefix}.self_attn.v_proj", w["hidden"], w["key"], None),
            (f"{prefix}.self_attn.o_proj", w["query"], w["hidden"], None),
        ]
        for expert in range(self.experts):
            inner = f"{prefix}.mlp.experts.{expert}"
            found += [
                (f"{inner}.gate_proj", w["hidden"], w["expert"], expert),
                (f"{inner}.up_proj", w["hidden"], w["expert"], expert),
                (f"{inner}.down_proj", w["expert"], w["hidden"], expert),
            ]
        return found


class Side:
    """Writes one side; `changed` is the share of bytes that differ from the other side."""

    def __init__(self, run: Path, name: str, shape: Shape, changed: float) -> None:
        self.shape, self.changed, self.name = shape, changed, name
        self.writer = TraceWriter(run / "traces" / name)
        self.same = torch.Generator().manual_seed(0)
        self.own = torch.Generator().manual_seed(1)
        self.order = 0

    def codes(self, *shape: int) -> torch.Tensor:
        found = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.same)
        if self.changed:
            found[torch.rand(shape, generator=self.own) < self.changed] ^= 0x11
        return found

    def block_scales(self, *shape: int) -> torch.Tensor:
        bits = torch.randint(0x50, 0x7E, shape, dtype=torch.uint8, generator=self.same)
        if self.changed:
            bits[torch.rand(shape, generator=self.own) < self.changed] ^= 0x01
        return bits.view(torch.float8_e4m3fn)

    def values(self, *shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=self.same)
        if self.changed:
            found += 0.01 * torch.randn(shape, generator=self.own)
        return found.bfloat16()

    def weights(self) -> None:
        """Codes, block scales and global scale of every quantized linear."""
        for layer in range(self.shape.layers):
            for fqn, inputs, outputs, _ in self.shape.linears(layer):
                for kind, tensor in (
                    ("weight_codes", self.codes(outputs, inputs // 2)),
                    ("weight_block_scale", self.block_scales(outputs, inputs // 16)),
                    ("weight_global_decode_scale", torch.tensor(0.5)),
                ):
                    self.writer.tensor(fqn, kind, tensor, call=-1, order=-1, rows="static")

    def forward(self, call: int) -> None:
        """One sequence through every layer."""
        shape, w = self.shape, self.shape.width
        rows = [Row("score", "", f"probe-{call}", i, "prefill") for i in range(shape.tokens)]
        self.writer.call(call, rows)
        self.order = 0
        every = torch.arange(shape.tokens)
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            chosen = self._route(call, layer, prefix)
            for fqn, inputs, outputs, expert in shape.linears(layer):
                routed = every if expert is None else (chosen == expert).any(-1).nonzero()[:, 0]
                if len(routed):
                    index = None if expert is None else routed
                    self._linear(call, fqn, len(routed), inputs, outputs, index)
            self._put(call, prefix, "output", self.values(shape.tokens, w["hidden"]))
        self._put(call, "lm_head", "logits", self.values(shape.tokens, w["vocabulary"]))

    def _route(self, call: int, layer: int, prefix: str) -> torch.Tensor:
        """Both sides choose the same experts: each has then its rows on either side."""
        shape = self.shape
        generator = torch.Generator().manual_seed(1000 * layer + call)
        logits = torch.randn(shape.tokens, shape.experts, generator=generator)
        chosen = logits.topk(min(TOP_K, shape.experts), -1)
        self._put(call, f"{prefix}.mlp.gate", "router_logits", logits.bfloat16())
        self._put(call, f"{prefix}.mlp.experts", "topk_ids", chosen.indices.int())
        self._put(call, f"{prefix}.mlp.experts", "topk_weights", chosen.values)
        return chosen.indices

    def _linear(
        self, call: int, fqn: str, rows: int, inputs: int, outputs: int, index: torch.Tensor | None
    ) -> None:
        self._put(call, fqn, "input", self.values(rows, inputs), index)
        self._put(call, fqn, "act_codes", self.codes(rows, inputs // 2), index)
        self._put(call, fqn, "act_block_scale", self.block_scales(rows, inputs // 16), index)
        self._put(call, fqn, "act_global_decode_scale", torch.tensor(0.25))
        self._put(call, fqn, "output", self.values(rows, outputs), index)

    def _put(
        self,
        call: int,
        fqn: str,
        kind: str,
        tensor: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> None:
        rows = "call" if tensor.dim() == 0 else "tokens" if index is None else "routed"
        self.writer.tensor(
            fqn, kind, tensor, call=call, order=self.order, rows=rows, row_index=index
        )
        self.order += 1

    def tokens(self) -> None:
        """Log-probabilities that differ a little."""
        for probe in range(self.shape.probes):
            values = -torch.rand(self.shape.tokens, generator=self.same).double() * 4
            if self.changed:
                values += 0.01 * torch.randn(self.shape.tokens, generator=self.own).double()
            self.writer.tokens(
                [
                    {
                        "mode": "score",
                        "source": "",
                        "probe": f"probe-{probe}",
                        "position": i,
                        "token_id": i,
                        "logprob": value if i else None,
                        "phase": "prefill",
                        "generated": False,
                        "top_ids": [i],
                        "top_logprobs": [value],
                    }
                    for i, value in enumerate(values.tolist())
                ]
            )

    def close(self, spec: EngineSpec) -> int:
        """Write the manifest; returns the bytes of the tensors."""
        self.writer.manifest(
            {
                "engine": spec.__dict__ | {"align": [], "options": {}},
                "status": "ok",
                "error": None,
                "label": "toy",
                "version": "1",
                "device": "cpu",
                "dtype": "bfloat16",
                "layout": {"parts": {}, "block_scale_layout": "linear"},
                "evidence": [{"op": "linear", "status": "native", "impl": "random", "note": ""}],
            }
        )
        self.writer.close()
        return self.writer.bytes_written


def write_run(run: Path, shape: Shape) -> int:
    """Both traces and the plan; returns the bytes of the tensors."""
    run.mkdir(parents=True, exist_ok=True)
    specs = tuple(
        EngineSpec(id, role, "toy", sys.executable, "checkpoint", "nvfp4-modelopt")
        for id, role in ((LEARNER, "learner"), (SAMPLER, "sampler"))
    )
    probes = tuple(
        Probe.make(f"probe-{i}", range(shape.tokens), shape.tokens, "synthetic")
        for i in range(shape.probes)
    )
    linears = tuple(fqn for layer in range(shape.layers) for fqn, *_ in shape.linears(layer))
    model = ModelRef(
        "synthetic-30b-a3b", "path", "bf16", "Qwen3MoeForCausalLM", "none",
        shape.width["vocabulary"], shape.layers,
    )  # fmt: skip
    plan = Plan(model, specs, probes, "bfloat16", "default", linears, "modelopt")
    write_plan(plan, run)
    written = 0
    for spec, changed in zip(specs, (0.0, 0.01), strict=True):
        side = Side(run, spec.id, shape, changed)
        side.weights()
        for call in range(shape.probes):
            side.forward(call)
        side.tokens()
        written += side.close(spec)
    return written


def measure(name: str, arguments: list[str]) -> dict[str, Any]:
    """Seconds, processor seconds and peak memory of one command in a process of its own."""
    began, peak = time.monotonic(), 0
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    found = 0
    while not found:
        # ru_maxrss would keep what this process held when it forked.
        peak = max(peak, _high_water(process.pid))
        time.sleep(POLL_SECONDS)
        found, status, used = os.wait4(process.pid, os.WNOHANG)
    return {
        "what": name,
        "seconds": round(time.monotonic() - began, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(peak / 1024),
        "exit": os.waitstatus_to_exitcode(status),
    }


def _high_water(pid: int) -> int:
    """VmHWM of a process in KiB; 0 where it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def run_stages(run: Path) -> list[dict[str, Any]]:
    """compare, gate (twice: the first one makes the summary) and report."""
    cli = ["-m", "minite_diag.cli"]
    gate = [*cli, "gate", str(run), "--profile", "nvfp4", "--quiet"]
    return [
        measure("compare", ["-c", COMPARE.format(run=str(run))]),
        measure("gate, first", gate),
        measure("gate, again", gate),
        measure("report", [*cli, "report", str(run)]),
    ]


def main(arguments: list[str]) -> None:
    """Write, measure, print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--shrink", type=int, default=8)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args(arguments)
    shape = Shape(asked.layers, asked.experts, asked.shrink, asked.probes, asked.tokens)
    written = write_run(asked.folder, shape)
    print(json.dumps({"what": "traces", "megabytes": round(written / 1e6)}), flush=True)
    for row in run_stages(asked.folder):
        print(json.dumps(row), flush=True)
    sizes = {
        name: (asked.folder / name).stat().st_size for name in ("comparison.parquet", "report.html")
    }
    print(json.dumps({"what": "files", **sizes}))


if __name__ == "__main__":
    main(sys.argv[1:])
