"""What plans are ranked by: throughput, cost per token, a deadline, energy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from simulator.analysis.economics import power_w
from simulator.errors import Problem, UserError
from simulator.planner.candidate import Candidate

Objective = Literal["throughput", "cost", "deadline", "energy"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "cost", "deadline", "energy")

#: Categories during which a GPU computes; else it draws what waiting takes.
_BUSY = ("compute", "recompute", "optimizer")


@dataclass(frozen=True)
class Measures:
    """What a candidate costs. ``cost_per_1e9_tokens`` is None where a GPU has no price."""

    tokens_per_s: float
    energy_kwh_per_1e9_tokens: float
    cost_per_1e9_tokens: float | None
    time_to_train_s: float | None


def measures(candidate: Candidate, rents: Mapping[str, float]) -> Measures:
    """Rate, energy and cost of a plan; ``rents`` in money per GPU-hour by GPU."""
    tokens = candidate.layout.workload.tokens
    rate = candidate.tokens_per_s
    priced = all(name in rents for name in candidate.gpus)
    hourly = sum(n * rents.get(name, 0.0) for name, n in candidate.gpus.items())
    return Measures(
        rate,
        _watts(candidate) / rate * 1e9 / 3.6e6,
        hourly / 3600.0 / rate * 1e9 if priced else None,
        tokens / rate if tokens else None,
    )


def _watts(candidate: Candidate) -> float:
    """Mean draw of the GPUs and their share of the hosts: busy at the limit, waiting at idle."""
    total = 0.0
    layout = candidate.layout
    for c, seconds in zip(layout.classes, candidate.evaluation.seconds, strict=True):
        busy = sum(seconds[name] for name in _BUSY) / candidate.step_time_s
        gpu = float(power_w(c.gpu.idle_power_w, c.gpu.power_limit_w, busy))
        group = layout.cluster.groups[c.group]
        total += c.ranks * (gpu + group.node.host_power_w / len(group.gpus))
    return total


def rents_of(economics: Mapping[str, Any] | None, gpus: Mapping[str, int]) -> dict[str, float]:
    """Money per GPU-hour on demand: ``economics.rents`` of the scenario, else the price list.

    The list is in USD and counts times ``economics.exchange_rate``; GPUs without a price are left
    out.
    """
    import hardware_db
    from hardware_db.price_list import find_price
    from simulator.spec.purchase_inputs import EconomicsInput

    money = EconomicsInput.model_validate(dict(economics or {}))
    given = {hardware_db.gpu(name).name: tiers for name, tiers in money.rents.items()}
    found = {}
    for name in gpus:
        tiers = given.get(name, {})
        listed = find_price("cloud", name, tier="on-demand", region=money.region)
        if tiers:
            found[name] = tiers.get("on-demand", next(iter(tiers.values()))).value
        elif listed is not None:
            found[name] = listed.value * (money.exchange_rate or 1.0)
    return found


def score(objective: Objective, m: Measures, gpus: int, deadline_s: float | None
          ) -> tuple[float, ...]:  # fmt: skip
    """Sort key, smallest first.

    Raises:
        UserError: the objective needs a price, a number of tokens or a deadline that isn't there.
    """
    if objective == "throughput":
        return (-m.tokens_per_s,)
    if objective == "energy":
        return (m.energy_kwh_per_1e9_tokens,)
    if objective == "cost":
        return (_cost(m),)
    if m.time_to_train_s is None:
        raise UserError(Problem("workload.tokens", "missing", "a deadline needs the run's tokens"))
    if deadline_s is None:
        raise UserError(Problem("--deadline", "missing", "say within how many days"))
    late = max(m.time_to_train_s / deadline_s - 1.0, 0.0)
    cost = m.cost_per_1e9_tokens
    return (late, gpus / m.tokens_per_s if cost is None else cost)


def _cost(m: Measures) -> float:
    if m.cost_per_1e9_tokens is None:
        raise UserError(
            Problem("economics.rents", "a GPU of the cluster has no price",
                    "economics: {rents: {h100-sxm-80gb: {on-demand: 2.5}}}")
        )  # fmt: skip
    return m.cost_per_1e9_tokens
