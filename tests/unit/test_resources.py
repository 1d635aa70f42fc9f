from __future__ import annotations

import pytest
import simpy

from simulator.evaluate.resources import SharedLinks, max_min_rates


def test_flows_without_a_shared_link_run_at_full_rate() -> None:
    assert max_min_rates([("a",), ("b",), ()]) == [1.0, 1.0, 1.0]


def test_equal_flows_share_equally() -> None:
    assert max_min_rates([("a",)] * 4) == [0.25] * 4


def test_what_a_bottlenecked_flow_leaves_goes_to_the_others() -> None:
    """Three flows on link a, one of them also on b with two more: 1/3 each, the rest of b apart."""
    rates = max_min_rates([("a", "b"), ("a",), ("a",), ("b",)])
    assert rates == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def finish_times(flows: list[tuple[int, tuple[str, ...], int]]) -> list[int]:
    """(start, links, duration alone) -> end of each flow."""
    env = simpy.Environment()
    links = SharedLinks(env)
    ends = [0] * len(flows)

    def flow(n: int, start: int, names: tuple[str, ...], duration: int):  # type: ignore[no-untyped-def]
        yield env.timeout(start)
        yield links.transfer(names, duration)
        ends[n] = int(env.now)

    for n, (start, names, duration) in enumerate(flows):
        env.process(flow(n, start, names, duration))
    env.run()
    return ends


def test_a_flow_alone_takes_its_own_time() -> None:
    assert finish_times([(5, ("a",), 100)]) == [105]


def test_two_flows_together_take_twice_as_long() -> None:
    assert finish_times([(0, ("a",), 100), (0, ("a",), 100)]) == [200, 200]


def test_a_late_flow_shares_only_what_is_left() -> None:
    """50 ns alone, then shared: the first has 50 left, which take 100; the second ends at 200."""
    assert finish_times([(0, ("a",), 100), (50, ("a",), 100)]) == [150, 200]


def test_different_links_do_not_disturb_each_other() -> None:
    assert finish_times([(0, ("a",), 100), (0, ("b",), 70)]) == [100, 70]


def test_work_is_conserved_on_a_busy_link() -> None:
    flows = [(start, ("a",), 30 + start) for start in range(0, 50, 7)]
    total = sum(duration for _, _, duration in flows)
    assert total <= max(finish_times(flows)) <= total + len(flows)
