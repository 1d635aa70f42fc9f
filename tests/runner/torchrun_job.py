"""A plan run as ranks that torchrun has started; rank 0 prints what was measured."""

from __future__ import annotations

import json

from plans import layout_of

from real_runner.train import RunSettings, run_plan

if __name__ == "__main__":
    parts = [
        {"micro_batch": 2, "count": 1, "state_share": 1.0},
        {"micro_batch": 1, "count": 1, "state_share": 0.0},
    ]
    measured = run_plan(layout_of(parts, global_batch=3), RunSettings(steps=2, warmup=1))
    if measured is not None:
        print(json.dumps(measured))
