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
from simulator.analysis.assumptions import CO2, ELECTRICITY, PLAIN, RESALE, STAFF, UTILISATION
from simulator.analysis.uncertain import Inputs
from simulator.units import SECONDS_PER_DAY

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a candidate.

    ``how`` is ``kept``, ``bought``, ``on-demand``, ``reserved`` or ``spot``; ``price`` names the
    input with the price of a node (kept, bought) or of a GPU-hour (rented). Watts are of one node.
    """

    name: str
    how: str
    count: int
    n_gpus: int
    gpus_idle_w: float
    gpus_limit_w: float
    host_w: float
    price: str

    @property
    def is_own(self) -> bool:
        """Whether it stands in the owner's room."""
        return self.how in ("kept", "bought")

    @property
    def rated_w(self) -> float:
        """Power that the room must provide for one node."""
        return self.gpus_limit_w + self.host_w


@dataclass(frozen=True)
class Work:
    """One workload on one cluster under its best plan.

    ``rate`` is the predicted median in tokens/s, ``speed`` names the input with its error,
    ``load`` is the share of the step in which GPUs aren't waiting for other ranks.
    """

    name: str
    tokens: float
    weight: float
    runs_per_year: float | None
    rate: float
    speed: str
    load: float
    flops_per_token: float
    parameters: float


@dataclass(frozen=True)
class Phase:
    """A stretch of the horizon with one cluster. ``spares`` are idle nodes beside it."""

    years: float
    nodes: tuple[Nodes, ...]
    work: tuple[Work, ...]
    spares: int = 0

    @property
    def n_gpus(self) -> int:
        """GPUs that the job runs on."""
        return sum(n.count * n.n_gpus for n in self.nodes)

    @property
    def n_nodes(self) -> int:
        """Nodes that the job runs on."""
        return sum(n.count for n in self.nodes)

    @property
    def own_share(self) -> float:
        """Share of the nodes that the owner must repair himself."""
        return sum(n.count for n in self.nodes if n.is_own) / max(self.n_nodes, 1)

    @property
    def spare_nodes(self) -> Nodes | None:
        """The kind of node that spares are of: the one with most nodes in the own room."""
        own = [n for n in self.nodes if n.is_own]
        return max(own, key=lambda n: (n.how == "bought", n.count)) if own else None


@dataclass(frozen=True)
class CandidateFacts:
    """What is known of a candidate before any price: phases in order, and what isn't kept.

    ``owned_age_years`` and ``owned_value`` (None: by price and age) are of the standing cluster,
    ``lost`` are its nodes that are neither kept nor sold.
    """

    name: str
    phases: tuple[Phase, ...]
    sold: tuple[Nodes, ...] = ()
    lost: tuple[Nodes, ...] = ()
    owned_age_years: float = 0.0
    owned_value: float | None = None
    owned: tuple[Nodes, ...] = ()

    @property
    def horizon_years(self) -> float:
        """Sum of the phases."""
        return sum(p.years for p in self.phases)

    @property
    def wait_years(self) -> float:
        """Time before the last phase."""
        return self.horizon_years - self.phases[-1].years


@dataclass(frozen=True)
class Terms:
    """What is certain: contract and curve."""

    financing_years: float
    price_change_per_year: float
    resale_years: Sequence[float]
    resale_shares: Sequence[float]


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
    costs, upfront, sale = _hardware(facts, terms, x)
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
        _get(x, "gpu_failures_per_year") / eco.SECONDS_PER_YEAR,
        _get(x, "host_failures_per_year") / eco.SECONDS_PER_YEAR,
    )  # fmt: skip
    if any(n.how == "spot" for n in phase.nodes):
        rate = rate + _get(x, "spot_interruptions_per_day") / SECONDS_PER_DAY
    write = gp.checkpoint_bytes(work.parameters) / (
        _get(x, "checkpoint_bytes_per_s_per_node") * phase.n_nodes
    )
    return gp.Reliability(
        interruptions_per_s=rate,
        checkpoint_s=write,
        restart_s=_get(x, "restart_s"),
        swap_share=_get(x, "swap_share") * phase.own_share,
        repair_s=_get(x, "repair_s"),
        spares=phase.spares,
    )


def _phase(phase: Phase, x: Inputs) -> _Done:
    seconds = phase.years * eco.SECONDS_PER_YEAR
    slower = gp.straggler_slowdown(phase.n_gpus, _get(x, "gpu_speed_sigma"))
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
    pue = _get(x, "pue")
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
    share = _get(x, "busy_power_share") * load
    nodes = list(phase.nodes)
    for n in nodes:
        if own and not n.is_own:
            continue
        host_idle = n.host_w * _get(x, "host_idle_share")
        busy = busy + n.count * (eco.power_w(n.gpus_idle_w, n.gpus_limit_w, share) + n.host_w)
        # A rented node that isn't kept is somebody else's when idle.
        if n.how not in ("on-demand", "spot"):
            idle = idle + n.count * (n.gpus_idle_w + host_idle)
    spare = phase.spare_nodes
    if spare is not None and phase.spares:
        standing = phase.spares * (spare.gpus_idle_w + spare.host_w * _get(x, "host_idle_share"))
        busy, idle = busy + standing, idle + standing
    return np.asarray(busy), np.asarray(idle)


def _hardware(
    facts: CandidateFacts, terms: Terms, x: Inputs
) -> tuple[dict[str, Numbers], Numbers, Numbers]:
    """Purchase, interest and what is left at the end; the price paid; what selling brings."""
    horizon, wait = facts.horizon_years, facts.wait_years
    bought, network, installation = _bought(facts.phases[-1], x)
    dearer = (1.0 + terms.price_change_per_year) ** wait
    bought, network, installation = bought * dearer, network * dearer, installation * dearer
    upfront = bought + network + installation
    held = horizon - wait
    term = terms.financing_years
    paid = eco.annuity_per_month(upfront, _get(x, "financing_rate"), max(term, 1 / 12))
    owed = eco.balance_after(upfront, _get(x, "financing_rate"), term, held)
    months = min(term, held) * eco.MONTHS_PER_YEAR
    interest = paid * months + owed - upfront if term > 0 else np.zeros(())
    lost, sale = _standing(facts, terms, x)
    costs = {
        "hardware": bought,
        "network": network,
        "installation": installation,
        "interest": np.asarray(interest),
        "resale": -bought * _share(terms, x, held),
        "value lost by what stood": lost,
    }
    return costs, np.asarray(upfront), sale


def _standing(facts: CandidateFacts, terms: Terms, x: Inputs) -> tuple[Numbers, Numbers]:
    """What the standing nodes lose in value against selling them today; what selling brings."""
    if not facts.owned:
        return np.zeros(()), np.zeros(())
    now, age = owned_value(facts, terms, x), facts.owned_age_years
    kept = _part_value(facts, [n for n in facts.phases[-1].nodes if n.how == "kept"], now, x)
    gone = _part_value(facts, facts.lost, now, x)
    sold = now - kept - gone
    sale = sold * _left(terms, x, age, facts.wait_years)
    kept_at_end = kept * _left(terms, x, age, facts.horizon_years)
    return np.asarray(kept - kept_at_end + gone + sold - sale), np.asarray(sale)


def owned_value(facts: CandidateFacts, terms: Terms, x: Inputs) -> Numbers:
    """What the standing cluster would bring today: as given, or by price and age."""
    if facts.owned_value is not None:
        return np.asarray(facts.owned_value, float)
    return np.asarray(_new_price(facts.owned, x) * _share(terms, x, facts.owned_age_years))


def _left(terms: Terms, x: Inputs, age_years: float, later_years: float) -> Numbers:
    """Value after some more years over the value at an age."""
    first, then = _share(terms, x, age_years), _share(terms, x, age_years + later_years)
    return np.asarray(np.where(first > 0, then / np.where(first > 0, first, 1.0), 0.0))


def _bought(phase: Phase, x: Inputs) -> tuple[Numbers, Numbers, Numbers]:
    """Price of the bought nodes with spares, of their network and of putting them up."""
    price = np.zeros(())
    for n in phase.nodes:
        if n.how == "bought":
            price = price + n.count * x[n.price]
    spare = phase.spare_nodes
    if spare is not None and phase.spares:
        price = price + phase.spares * x[spare.price]
    network = price * _get(x, "network_share") if phase.n_nodes > 1 else np.zeros(())
    return np.asarray(price), np.asarray(network), price * _get(x, "installation_share")


def _share(terms: Terms, x: Inputs, age_years: float) -> Numbers:
    curve = eco.resale_share(age_years, terms.resale_years, terms.resale_shares)
    return np.asarray(np.clip(curve * x[RESALE], 0.0, 1.0))


def _new_price(nodes: Sequence[Nodes], x: Inputs) -> Numbers:
    return np.asarray(sum((n.count * x[n.price] for n in nodes), np.zeros(())))


def _part_value(facts: CandidateFacts, nodes: Sequence[Nodes], now: Numbers, x: Inputs) -> Numbers:
    """Part of today's value of the standing cluster that some of its nodes are, by price."""
    if not nodes:
        return np.zeros(())
    whole = _new_price(facts.owned, x)
    safe = np.where(whole > 0, whole, 1.0)
    return np.asarray(np.where(whole > 0, now * _new_price(nodes, x) / safe, 0.0))


def _running(phase: Phase, done: _Done, x: Inputs) -> dict[str, Numbers]:
    """Costs of a phase that come with time or use."""
    hours = phase.years * eco.HOURS_PER_YEAR
    own = [n for n in phase.nodes if n.is_own]
    rated = float(sum(n.count * n.rated_w for n in own))
    spare = phase.spare_nodes
    if spare is not None:
        rated += phase.spares * spare.rated_w
    value = _new_price(own, x)
    kwh = eco.energy_kwh(done.own_power_w, phase.years * eco.SECONDS_PER_YEAR, _get(x, "pue"))
    rent = np.zeros(())
    for n in phase.nodes:
        if not n.is_own:
            used = hours if n.how == "reserved" else hours * done.busy
            rent = rent + eco.rent_cost(x[n.price], n.count * n.n_gpus, used)
    return {
        "hosting": eco.hosting_cost(rated, _get(x, "hosting_per_kw_month"), phase.years),
        "electricity": np.asarray(kwh * x[ELECTRICITY]),
        "maintenance": np.asarray(value * _get(x, "maintenance_share_per_year") * phase.years),
        "staff": np.asarray(value * _get(x, "staff_share_per_year") * phase.years
                            + (x[STAFF] * phase.years if own else 0.0)),
        "rent": np.asarray(rent),
    }  # fmt: skip


def _get(x: Inputs, key: str) -> Numbers:
    """Value of a plain input by its key."""
    return np.asarray(x[PLAIN[key][1]])
