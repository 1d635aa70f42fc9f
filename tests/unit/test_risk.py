"""Probability of running out of memory."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from simulator.analysis.risk import (
    PRIOR_SPREADS,
    eighty_percent_rule,
    memory_risk,
    normal_cdf,
    oom_risk,
    prior_spread,
)
from simulator.cost.batch import RankBatch
from simulator.cost.memory import MemoryBreakdown, rank_memory
from simulator.spec.presets import preset
from simulator.spec.stack import load_stack, stack_names


def sharded() -> MemoryBreakdown:
    """Llama-3.1-8B over eight torchtitan ranks."""
    row = dict.fromkeys(RankBatch.__dataclass_fields__, 1.0)
    row |= dict.fromkeys(("moe_layers", "stage", "sequence_parallel", "recompute"), 0.0)
    row |= {"sequence_length": 4096.0, "dense_layers": 32.0, "recompute_layers": 0.0}
    row |= {"sharding": 3.0, "dp": 8.0, "shard_degree": 8.0, "state_share": 1 / 8}
    stack = load_stack("torchtitan")
    batch = RankBatch(**{name: np.array([value]) for name, value in row.items()})
    return rank_memory(preset("llama-3.1-8b"), stack, stack.recipe("bf16"), "adamw", batch)


def test_normal_distribution_function() -> None:
    z = np.linspace(-5, 5, 41)
    expected = [NormalDist().cdf(v) for v in z]
    assert normal_cdf(z) == pytest.approx(expected, abs=2e-7)


def test_median_at_capacity_is_even_odds() -> None:
    assert oom_risk(80e9, 80e9, 0.05) == pytest.approx(0.5, abs=1e-6)


def test_one_sigma_below_capacity() -> None:
    assert oom_risk(80e9, 80e9 * math.exp(0.05), 0.05) == pytest.approx(0.158655, abs=1e-5)


def test_no_spread_is_a_plain_comparison() -> None:
    assert oom_risk([70e9, 90e9, 0.0], 80e9, 0.0).tolist() == [0.0, 1.0, 0.0]


def test_risk_broadcasts_and_rises_with_need() -> None:
    risk = oom_risk(np.array([[60e9], [75e9], [85e9]]), np.array([80e9, 96e9]), 0.05)
    assert risk.shape == (3, 2)
    assert np.all(np.diff(risk, axis=0) >= 0)
    assert np.all(risk[:, 0] >= risk[:, 1])


@pytest.mark.parametrize("faulty", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_negative_values_are_refused(faulty: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="negative"):
        oom_risk(*faulty)


def test_eighty_percent_rule() -> None:
    """arXiv 2411.06465 section 4.1: at most 80 % of capacity is safe."""
    assert eighty_percent_rule([64e9, 64.1e9], 80e9).tolist() == [True, False]


def test_every_stack_has_a_prior_with_assumptions() -> None:
    assert set(PRIOR_SPREADS) == set(stack_names())
    assert all(len(s.assumptions) >= 4 for s in PRIOR_SPREADS.values())
    assert prior_spread("unheard-of").allocated > max(s.allocated for s in PRIOR_SPREADS.values())


def test_quantiles_enclose_the_median_and_match_the_risk() -> None:
    """At p90 of the need as capacity the risk is 10 %."""
    found = sharded()
    spread = prior_spread("torchtitan")
    first = memory_risk(found, 80e9, spread)
    assert first.p10_bytes[0] < first.p50_bytes[0] < first.p90_bytes[0]
    again = memory_risk(found, first.p90_bytes, spread)
    assert again.oom_risk[0] == pytest.approx(0.1, abs=1e-5)


def test_returnable_segments_do_not_count_as_need() -> None:
    found = sharded()
    assert found.reclaimable[0] > 0
    risk = memory_risk(found, 80e9, prior_spread("torchtitan"))
    assert risk.p50_bytes[0] == pytest.approx(found.device_bytes[0] - found.reclaimable[0])
