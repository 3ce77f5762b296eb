"""Runs SGLang's comparator on two dump folders: `python sglang_peer.py SITE BASE TARGET REPEATS`.

A script for a process of its own, with nothing of this package in it. SITE is the folder into which
`sglang` was installed without its dependencies. The comparator needs none of what `import sglang`
loads (engines, CUDA kernels), so the package is entered without running its `__init__`, and the
three modules that its dumper takes server state from are empty: no code of the comparator itself
is replaced. Prints one JSON line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

STATE_MODULES = {
    "sglang.srt.managers": (),
    "sglang.srt.managers.io_struct": ("sock_recv", "sock_send", "wrap_as_pickle"),
    "sglang.srt.runtime_context": ("get_parallel", "get_server_args", "get_serving"),
    "sglang.srt.utils": ("get_device",),
}
"""What the dumper imports to talk to a running server; a comparison has none."""


def enter(site: Path) -> None:
    """Make `sglang.srt.debug_utils` importable from `site`."""
    # Behind the interpreter's own packages, so that both sides run the same torch and numpy.
    sys.path.append(str(site))
    for name in ("sglang", "sglang.srt", "sglang.srt.debug_utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(site.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name, members in STATE_MODULES.items():
        module: Any = types.ModuleType(name)
        for member in members:
            setattr(module, member, None)
        sys.modules[name] = module


def run(baseline: str, target: str) -> dict[str, Any]:
    """Compare two dump folders with the comparator's entry point; its output is kept apart."""
    comparator = importlib.import_module("sglang.srt.debug_utils.comparator.entrypoint")
    folders = ["--baseline-path", baseline, "--target-path", target]
    arguments = comparator.parse_args([*folders, "--output-format", "json", "--report-path", ""])
    printed = io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(printed):
        comparator.run(arguments)
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in printed.getvalue().splitlines() if line[:1] == "{"]
    summary = next(record for record in reversed(records) if record.get("type") == "summary")
    kept = ("total", "passed", "failed", "skipped", "errored")
    return {"seconds": seconds, **{key: summary[key] for key in kept}}


def main() -> None:
    """Read the command line, run, print."""
    site, baseline, target, repeats = sys.argv[1:5]
    enter(Path(site))
    run(baseline, target)  # imports, allocator, page cache
    results = [run(baseline, target) for _ in range(int(repeats))]
    result = sorted(results, key=lambda found: float(found["seconds"]))[len(results) // 2]
    found = importlib.metadata.distributions(path=[site])
    result["version"] = next((d.version for d in found if d.name == "sglang"), "")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
