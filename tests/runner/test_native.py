"""torch's own parallelism trains as one process does, alone and combined."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from native_cases import LENGTH, ONE, PLANS, SPECS, run_plans, world_of  # noqa: E402

from real_runner.launch import launch  # noqa: E402
from real_runner.parallel.torch_native import Degrees, check_native  # noqa: E402
from simulator.errors import UserError  # noqa: E402

Outcome = dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Differences by plan and rank; one launch per world size."""
    found: Outcome = {}
    for world in sorted({world_of(name) for name in PLANS}):
        names = [name for name in PLANS if world_of(name) == world]
        ranks = launch(run_plans, (names,), world=world, threads=1, timeout_s=120)
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_process(name: str, outcome: Outcome) -> None:
    for rank in outcome[name]:
        assert max(rank["loss"], rank["norm"], rank["values"]) < 1e-10, rank


@pytest.mark.parametrize("name", [n for n in PLANS if "pp" in n or PLANS[n][1].pp > 1])
def test_stages_hold_parts_of_the_model(name: str, outcome: Outcome) -> None:
    held = [int(rank["parameters"]) for rank in outcome[name]]
    per_layer = 9
    layers = SPECS[PLANS[name][0]].layers
    ends = 3  # token table, final norm, output matrix
    degrees = PLANS[name][1]
    copies = degrees.dp * degrees.tp
    assert sum(held) == copies * (per_layer * layers + ends)


def test_what_cannot_be_combined_is_named() -> None:
    degrees = Degrees(1, 2, 2, ONE * 2, 1, 2, LENGTH, schedule="zb-h1")
    with pytest.raises(UserError, match=r"tied embeddings with tp or pp.*schedule zb-h1"):
        check_native(SPECS["tied gpt"], degrees)
    check_native(SPECS["even llama"], replace(degrees, schedule="1f1b"))
