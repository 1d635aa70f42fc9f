"""All benchmarks once, quickly: do they run and give plausible numbers."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from simulator.errors import UserError

NAMES = ("plans", "search", "optimiser", "engine", "scaling", "startup", "replay", "accuracy")


def call(name: str, *, quick: bool, json: bool = False) -> dict[str, Any]:
    """Run a benchmark with those of the two switches that it has."""
    function = import_module(f"benchmarks.{name}").run
    known = signature(function).parameters
    switches = {"quick": quick, "json": json}
    found: dict[str, Any] = function(**{k: v for k, v in switches.items() if k in known})
    return found


def run() -> dict[str, Any]:
    """Quick figures of every benchmark, with its seconds; those that are missing say so."""
    figures: dict[str, Any] = {}
    for name in NAMES:
        if find_spec(f"benchmarks.{name}") is None:
            figures[name] = {"missing": True}
            continue
        start = time.perf_counter()
        try:
            found = call(name, quick=True, json=True)
        except UserError as error:  # measured data that isn't there
            figures[name] = {"skipped": str(error)}
            continue
        figures[name] = {"seconds": time.perf_counter() - start, "figures": found}
    return figures
