"""Time of ``gpumix estimate`` as a whole process, and which imports it goes to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

from benchmarks.reference import element_operations_per_s

TARGET_S = 0.6
SCENARIO = "llama-3.1-8b-dgx-h100"
COMMAND = (sys.executable, "-m", "simulator", "estimate", SCENARIO, "--json")
_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)")
_SLOWEST = 12


def _once() -> tuple[float, float]:
    """Processor and wall-clock seconds of one run."""
    before, wall = os.times(), time.perf_counter()
    subprocess.run(COMMAND, check=True, capture_output=True)
    after = os.times()
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return cpu, time.perf_counter() - wall


def _imports() -> list[dict[str, Any]]:
    """The packages whose own modules take longest to load, milliseconds."""
    command = (COMMAND[0], "-X", "importtime", *COMMAND[1:])
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    own: dict[str, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found:
            name = found[4].split(".")[0]
            own[name] = own.get(name, 0.0) + int(found[1]) / 1000.0
    ranked = sorted(own.items(), key=lambda item: -item[1])[:_SLOWEST]
    return [{"package": name, "self_ms": ms} for name, ms in ranked]


def run(quick: bool = False) -> dict[str, Any]:
    """Best of a few runs: the first warms the file cache."""
    reference = element_operations_per_s()
    runs = [_once() for _ in range(2 if quick else 5)]
    cpu, wall = min(r[0] for r in runs), min(r[1] for r in runs)
    return {
        "reference_operations_per_s": reference,
        "command": "gpumix estimate " + SCENARIO,
        "cpu_s": cpu,
        "wall_s": wall,
        "target_s": TARGET_S,
        "cpu_in_reference_operations": cpu * reference,
        "imports": _imports(),
    }
