"""torch's own parallelism trains as one process does, alone and combined."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from native_cases import LENGTH, ONE, PLANS, SPECS, run_plans, world_of  # noqa: E402

from real_runner.launch import launch  # noqa: E402
from real_runner.parallel.torch_native import Degrees, check_native  # noqa: E402
from simulator.errors import UserError  # noqa: E402


def outcome() -> dict[str, list[dict[str, float]]]:
    """Differences by plan and rank; one launch per world size."""
    found = {}
    for world in sorted({world_of(name) for name in PLANS}):
        names = [name for name in PLANS if world_of(name) == world]
        ranks = launch(run_plans, (names,), world=world, threads=1, timeout_s=150)
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


def test_plans_equal_one_process() -> None:
    per_layer, ends = 9, 3  # parameters of a llama; token table, final norm, output matrix
    for name, ranks in outcome().items():
        for rank in ranks:
            assert max(rank["loss"], rank["norm"], rank["values"]) < 1e-10, (name, rank)
        spec, degrees = PLANS[name]
        if degrees.pp > 1:  # the stages together hold the model once for each of their copies
            held = sum(int(rank["parameters"]) for rank in ranks)
            copies = degrees.dp * degrees.tp
            assert held == copies * (per_layer * SPECS[spec].layers + ends), name


def test_what_cannot_be_combined_is_named() -> None:
    degrees = Degrees(1, 2, 2, ONE * 2, 1, 2, LENGTH, schedule="zb-h1")
    with pytest.raises(UserError, match=r"tied embeddings with tp or pp.*compile.*zb-h1"):
        check_native(SPECS["tied gpt"], degrees, compiled=True)
    check_native(SPECS["even llama"], replace(degrees, schedule="1f1b"))
