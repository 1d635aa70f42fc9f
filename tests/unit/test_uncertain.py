"""Uncertain inputs: their draws, swings, probabilities and break-even values."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.analysis.uncertain import (
    Inputs,
    Uncertain,
    break_even,
    certain,
    draw,
    medians,
    percentiles,
    probability_less,
    tornado,
)

PRICE = Uncertain(80.0, 100.0, 150.0)


def test_draws_have_the_stated_percentiles() -> None:
    found = percentiles(draw({"price": PRICE}, 40_000)["price"])
    assert (found.p10, found.p50, found.p90) == pytest.approx((80, 100, 150), rel=0.02)


def test_a_low_end_of_zero_is_kept_within_bounds() -> None:
    drawn = draw({"share": Uncertain(0.0, 0.3, 0.9, 0.0, 1.0)}, 10_000)["share"]
    assert drawn.min() >= 0.0
    assert drawn.max() <= 1.0


def test_draws_of_an_input_don_t_depend_on_the_others() -> None:
    alone = draw({"price": PRICE}, 50, seed=3)["price"]
    beside = draw({"other": PRICE, "price": PRICE}, 50, seed=3)
    assert np.array_equal(alone, beside["price"])
    assert not np.array_equal(alone, beside["other"])


def test_tornado_is_sorted_and_leaves_out_what_doesn_t_matter() -> None:
    inputs = {"a": Uncertain(1, 2, 3), "b": Uncertain(0, 5, 30), "c": certain(4), "d": PRICE}

    def outcome(x: Inputs) -> np.ndarray:
        return np.asarray(10 * x["a"] + x["b"] + x["c"])

    found = tornado(inputs, outcome)
    assert [s.name for s in found] == ["b", "a"]
    assert (found[1].at_low, found[1].at_high) == (19.0, 39.0)


def test_break_even_of_a_linear_difference() -> None:
    inputs = {"price": PRICE, "other": certain(120.0)}

    def gap(x: Inputs) -> np.ndarray:
        return np.asarray(x["price"] - x["other"])

    found = break_even("price", inputs, gap)
    assert found is not None
    assert found.value == pytest.approx(120.0, rel=1e-3)
    assert found.inside
    assert break_even("price", {**inputs, "other": certain(1e5)}, gap) is None


def test_probability_of_paired_draws() -> None:
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 2.0, 2.0])
    assert probability_less(a, b) == pytest.approx((1 + 0.5) / 4)
    assert probability_less(a, a) == 0.5


def test_medians_are_the_values() -> None:
    assert float(medians({"price": PRICE})["price"]) == 100.0
