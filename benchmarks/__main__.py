"""``python -m benchmarks NAME [--json] [--quick]``: one benchmark, one document of figures."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from typing import Any

from benchmarks.smoke import NAMES, call


def main() -> int:
    """Run the named benchmark and print what it found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "smoke"))
    parser.add_argument("--json", action="store_true", help="print one JSON document only")
    parser.add_argument("--quick", action="store_true", help="smaller cases, for a first look")
    asked = parser.parse_args()
    if find_spec(f"benchmarks.{asked.name}") is None:
        print(f"benchmarks: {asked.name} isn't there yet", file=sys.stderr)
        return 2
    figures = call(asked.name, quick=asked.quick, json=asked.json)
    if asked.json:
        print(json.dumps(figures, indent=2, default=float))
    else:
        _print(figures)
    return 0


def _print(value: Any, indent: int = 0, name: str = "") -> None:
    """Figures as indented lines."""
    head = " " * indent + (f"{name}: " if name else "")
    if isinstance(value, dict):
        if name:
            print(head)
        for key, item in value.items():
            _print(item, indent + 2 * bool(name), str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            _print(item, indent, f"{name} {number}")
    else:
        print(head + (f"{value:,.4g}" if isinstance(value, float) else str(value)))


if __name__ == "__main__":
    sys.exit(main())
