"""The cost sheet of one candidate: every amount of money, time and energy, for any draw of inputs.

``evaluate_candidate`` is a pure function of what is known (:class:`CandidateFacts`) and of the
values of the uncertain inputs; numbers give one sheet, arrays of draws give arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.analysis import economics as eco
from simulator.analysis import goodput as gp
from simulator.analysis.assumptions import CO2, ELECTRICITY, STAFF, UTILISATION
from simulator.analysis.candidate_facts import CandidateFacts, Phase, Terms, Work
from simulator.analysis.candidate_hardware import hardware_costs, new_price, owned_value, plain
from simulator.analysis.uncertain import Inputs
from simulator.units import SECONDS_PER_DAY

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Sheet:
    """The outcome; every field a number or an array of draws.

    ``costs`` are over the horizon, by component; income is negative. ``upfront`` is the price of
    all that is bought. The ``run_*`` are of one run of every workload, on the last phase's
    cluster. ``owned_value`` is what the standing cluster would bring today, ``sale`` what of it is
    sold. ``busy`` is the share of the time in which it computes, ``demand_met`` the share of
    the wanted runs that it can do.
    """

    costs: Mapping[str, Numbers]
    tokens: Numbers
    flops: Numbers
    upfront: Numbers
    rent: Numbers
    sale: Numbers
    owned_value: Numbers
    energy_kwh: Numbers
    run_time_s: Numbers
    run_energy_kwh: Numbers
    run_co2_kg: Numbers
    goodput: Numbers
    busy: Numbers
    demand_met: Numbers
    workload_times_s: tuple[Numbers, ...] = field(default=())

    @property
    def total_cost(self) -> Numbers:
        """Sum of all components."""
        return np.asarray(sum(self.costs.values()))

    @property
    def cost_per_1e9_tokens(self) -> Numbers:
        """Cost of 10^9 tokens of the mix."""
        return eco.cost_per_1e9_tokens(self.total_cost, self.tokens)

    @property
    def cost_per_pflop_day(self) -> Numbers:
        """Cost of a delivered PFLOP/s-day of model FLOPs."""
        return eco.cost_per_pflop_day(self.total_cost, self.flops)


def evaluate_candidate(facts: CandidateFacts, terms: Terms, x: Inputs) -> Sheet:
    """The sheet of a candidate for values of the inputs."""
    parts = [_phase(phase, x) for phase in facts.phases]
    last = parts[-1]
    costs, upfront, sale = hardware_costs(facts, terms, x)
    for phase, result in zip(facts.phases, parts, strict=True):
        for name, amount in _running(phase, result, x).items():
            costs[name] = costs.get(name, np.zeros(())) + amount
    return Sheet(
        costs=costs,
        tokens=np.asarray(sum(p.tokens for p in parts)),
        flops=np.asarray(sum(p.flops for p in parts)),
        upfront=upfront,
        rent=costs["rent"],
        sale=sale,
        owned_value=owned_value(facts, terms, x),
        energy_kwh=np.asarray(sum(p.energy_kwh for p in parts)),
        run_time_s=last.run_time_s,
        run_energy_kwh=last.run_energy_kwh,
        run_co2_kg=eco.co2_kg(last.run_energy_kwh, x[CO2]),
        goodput=last.goodput,
        busy=last.busy,
        demand_met=np.asarray(
            sum(p.years * d.demand_met for p, d in zip(facts.phases, parts, strict=True))
            / facts.horizon_years
        ),
        workload_times_s=last.times_s,
    )


@dataclass(frozen=True)
class _Done:
    """What one phase does."""

    tokens: Numbers
    flops: Numbers
    energy_kwh: Numbers
    run_time_s: Numbers
    run_energy_kwh: Numbers
    goodput: Numbers
    busy: Numbers
    demand_met: Numbers
    own_power_w: Numbers
    times_s: tuple[Numbers, ...]


def reliability(phase: Phase, work: Work, x: Inputs) -> gp.Reliability:
    """What interrupts a workload on a phase's cluster."""
    rate = gp.interruptions_per_s(
        phase.n_gpus, phase.n_nodes,
        plain(x, "gpu_failures_per_year") / eco.SECONDS_PER_YEAR,
        plain(x, "host_failures_per_year") / eco.SECONDS_PER_YEAR,
    )  # fmt: skip
    if any(n.how == "spot" for n in phase.nodes):
        rate = rate + plain(x, "spot_interruptions_per_day") / SECONDS_PER_DAY
    write = gp.checkpoint_bytes(work.parameters) / (
        plain(x, "checkpoint_bytes_per_s_per_node") * phase.n_nodes
    )
    return gp.Reliability(
        interruptions_per_s=rate,
        checkpoint_s=write,
        restart_s=plain(x, "restart_s"),
        swap_share=plain(x, "swap_share") * phase.own_share,
        repair_s=plain(x, "repair_s"),
        spares=phase.spares,
    )


def _phase(phase: Phase, x: Inputs) -> _Done:
    seconds = phase.years * eco.SECONDS_PER_YEAR
    slower = gp.straggler_slowdown(phase.n_gpus, plain(x, "gpu_speed_sigma"))
    kept = [gp.best_goodput(reliability(phase, w, x))[1] for w in phase.work]
    rates = [
        np.asarray(w.rate * x[w.speed] * g / slower)
        for w, g in zip(phase.work, kept, strict=True)
    ]  # fmt: skip
    times = tuple(
        np.asarray(w.tokens / rate) for w, rate in zip(phase.work, rates, strict=True)
    )  # fmt: skip
    mix = _mix(phase.work)
    rate = eco.mix_rate(mix, rates)
    wanted = _wanted_tokens_per_s(phase.work)
    most = np.asarray(x[UTILISATION])
    busy = most if wanted is None else np.minimum(wanted / rate, most)
    met = np.ones_like(busy) if wanted is None else np.minimum(most * rate / wanted, 1.0)
    tokens = rate * busy * seconds
    share = np.array(mix) / sum(mix)
    load = sum(s * w.load for s, w in zip(share, phase.work, strict=True))
    busy_w, idle_w = _power(phase, x, float(load))
    own_w = _power(phase, x, float(load), own=True)
    pue = plain(x, "pue")
    run = np.asarray(sum(times))
    return _Done(
        tokens=tokens,
        flops=tokens * float(sum(s * w.flops_per_token
                                 for s, w in zip(share, phase.work, strict=True))),
        energy_kwh=eco.energy_kwh(eco.mean_power_w(busy_w, idle_w, busy), seconds, pue),
        run_time_s=run,
        run_energy_kwh=eco.energy_kwh(busy_w, run, pue),
        goodput=np.asarray(sum(s * g for s, g in zip(share, kept, strict=True))),
        busy=np.asarray(busy),
        demand_met=np.asarray(met),
        own_power_w=eco.mean_power_w(*own_w, busy),
        times_s=times,
    )  # fmt: skip


def _mix(work: Sequence[Work]) -> list[float]:
    """Tokens of each workload in the mix, in proportion."""
    if work[0].runs_per_year is not None:
        return [(w.runs_per_year or 0.0) * w.tokens for w in work]
    return [w.weight for w in work]


def _wanted_tokens_per_s(work: Sequence[Work]) -> float | None:
    if work[0].runs_per_year is None:
        return None
    return sum(_mix(work)) / eco.SECONDS_PER_YEAR


def _power(phase: Phase, x: Inputs, load: float, own: bool = False) -> tuple[Numbers, Numbers]:
    """IT power while computing and while idle; rented nodes left out where ``own``."""
    busy = idle = np.zeros(())
    share = plain(x, "busy_power_share") * load
    nodes = list(phase.nodes)
    for n in nodes:
        if own and not n.is_own:
            continue
        host_idle = n.host_w * plain(x, "host_idle_share")
        busy = busy + n.count * (eco.power_w(n.gpus_idle_w, n.gpus_limit_w, share) + n.host_w)
        # A rented node that isn't kept is somebody else's when idle.
        if n.how not in ("on-demand", "spot"):
            idle = idle + n.count * (n.gpus_idle_w + host_idle)
    spare = phase.spare_nodes
    if spare is not None and phase.spares:
        standing = phase.spares * (spare.gpus_idle_w + spare.host_w * plain(x, "host_idle_share"))
        busy, idle = busy + standing, idle + standing
    return np.asarray(busy), np.asarray(idle)


def _running(phase: Phase, done: _Done, x: Inputs) -> dict[str, Numbers]:
    """Costs of a phase that come with time or use."""
    hours = phase.years * eco.HOURS_PER_YEAR
    own = [n for n in phase.nodes if n.is_own]
    rated = float(sum(n.count * n.rated_w for n in own))
    spare = phase.spare_nodes
    if spare is not None:
        rated += phase.spares * spare.rated_w
    value = new_price(own, x)
    kwh = eco.energy_kwh(done.own_power_w, phase.years * eco.SECONDS_PER_YEAR, plain(x, "pue"))
    rent = np.zeros(())
    for n in phase.nodes:
        if not n.is_own:
            used = hours if n.how == "reserved" else hours * done.busy
            rent = rent + eco.rent_cost(x[n.price], n.count * n.n_gpus, used)
    return {
        "hosting": eco.hosting_cost(rated, plain(x, "hosting_per_kw_month"), phase.years),
        "electricity": np.asarray(kwh * x[ELECTRICITY]),
        "maintenance": np.asarray(value * plain(x, "maintenance_share_per_year") * phase.years),
        "staff": np.asarray(value * plain(x, "staff_share_per_year") * phase.years
                            + (x[STAFF] * phase.years if own else 0.0)),
        "rent": np.asarray(rent),
    }  # fmt: skip
