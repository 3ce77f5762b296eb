"""``python -m minite_kernels.bench``: every kernel against its peers, and the goals, on this device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minite_kernels.bench import BENCHMARKS, run_benchmarks
from minite_kernels.bench.goals import judge


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print two tables; ``--json FILE`` also writes rows and goals."""
    parser = argparse.ArgumentParser(prog="python -m minite_kernels.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write rows and goals to this file")
    options = parser.parse_args(arguments)
    try:
        records = run_benchmarks(options.device, options.names or None)
    except ValueError as error:
        parser.error(str(error))
    goals = list(judge(records)) if options.device.startswith("cuda") else []
    if options.json:
        options.json.write_text(json.dumps({"rows": records, "goals": goals}, indent=1))
    sys.stdout.write("\n".join((*map(_line, records), *map(_goal_line, goals), "")))
    return 0


def _line(record: dict[str, Any]) -> str:
    name = f"{record['benchmark']:9} {record['case']:22} {record['implementation']:36}"
    if record["error"]:
        return f"{name} {str(record['error']).strip().splitlines()[-1]}"
    parts = [f"{record['warm_us']:10.1f} us warm"]
    if record["cold_us"]:
        parts.append(f"{record['cold_us']:.1f} cold")
    if record["of_floor"]:
        parts.append(f"{record['of_floor']:.0%} of the floor {record['floor_us']:.1f}")
    if record["tokens_per_s"]:
        parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    # Of our rows only, against others'; all the ratios are in the JSON.
    shown = record["speedup"].items() if record["implementation"].startswith("ours") else ()
    ratios = ", ".join(f"{value:.2f}x {p}" for p, value in shown if not p.startswith("ours"))
    return f"{name} {', '.join(parts)}" + (f" | {ratios}" if ratios else "")


def _goal_line(goal: dict[str, Any]) -> str:
    name = f"goal {goal['benchmark']:9} {goal['case']:34} {goal['against']:36}"
    if goal["ratio"] is None:
        return f"{name} not measured"
    cold = "" if goal["ratio_cold"] is None else f" ({goal['ratio_cold']:.2f} cold)"
    verdict = "met" if goal["met"] else f"missed by {goal['missed_by']:.2f}: {goal['bound']}"
    return f"{name} {goal['ratio']:.2f}{cold} of {goal['goal']:.2f}: {verdict}"


if __name__ == "__main__":
    raise SystemExit(main())
