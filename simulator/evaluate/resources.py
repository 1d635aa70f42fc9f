"""Links whose bandwidth flows share max-min fairly, on SimPy's clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import simpy


def max_min_rates(flows: Sequence[Sequence[str]]) -> list[float]:
    """Max-min fair rates of flows that cross the named links.

    A flow alone runs at rate 1, its full rate, which is also what each link carries.
    Progressive filling: Bertsekas and Gallager, Data Networks (1992), section 6.5.2.
    """
    left = {link: 1.0 for flow in flows for link in flow}
    rates = [1.0] * len(flows)
    open_flows = {n for n, flow in enumerate(flows) if flow}
    while open_flows:
        users = dict.fromkeys(left, 0)
        for n in open_flows:
            for link in flows[n]:
                users[link] += 1
        share, tightest = min((left[link] / n, link) for link, n in users.items() if n)
        fixed = {n for n in open_flows if tightest in flows[n]}
        for n in fixed:
            rates[n] = share
            for link in flows[n]:
                left[link] = max(left[link] - share, 0.0)
        open_flows -= fixed
    return rates


@dataclass
class _Flow:
    links: tuple[str, ...]
    left_ns: float
    done: simpy.Event
    rate: float = 1.0


class SharedLinks:
    """Running flows and what is left of them, in nanoseconds at full rate.

    Rates change only when a flow starts or ends; completions fall on whole nanoseconds, rounded
    up. Flows finish in the order in which they started when they end together.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._flows: list[_Flow] = []
        self._updated_ns = 0
        self._version = 0

    def transfer(self, links: tuple[str, ...], duration_ns: int) -> simpy.Event:
        """Start a flow that takes ``duration_ns`` alone; the event fires when it is through."""
        self._advance()
        flow = _Flow(links, float(duration_ns), self._env.event())
        self._flows.append(flow)
        self._replan()
        return flow.done

    def _advance(self) -> None:
        elapsed = self._env.now - self._updated_ns
        self._updated_ns = int(self._env.now)
        for flow in self._flows:
            flow.left_ns -= elapsed * flow.rate

    def _replan(self) -> None:
        """New rates, and one wake-up at the next completion; older wake-ups lapse."""
        self._version += 1
        if not self._flows:
            return
        for flow, rate in zip(
            self._flows, max_min_rates([f.links for f in self._flows]), strict=True
        ):
            flow.rate = rate
        wait = min(f.left_ns / f.rate for f in self._flows)
        # Float dust must not add a nanosecond.
        wake = self._env.timeout(max(0, math.ceil(wait - 1e-6)), value=self._version)
        assert wake.callbacks is not None
        wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._version:
            return
        self._advance()
        finished = [f for f in self._flows if f.left_ns <= 1e-3]
        self._flows = [f for f in self._flows if f.left_ns > 1e-3]
        for flow in finished:
            flow.done.succeed()
        self._replan()
