"""From a purchase's candidates to what is known of them: clusters, best plans, nodes, phases."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hardware_db
from hardware_db.schema import NodeSpec
from simulator.analysis.assumptions import Assumptions
from simulator.analysis.candidate_cost import reliability
from simulator.analysis.candidate_facts import CandidateFacts, Nodes, Phase, Terms, Work
from simulator.analysis.candidate_hardware import owned_value
from simulator.analysis.goodput import spares_that_pay
from simulator.analysis.prediction import Prediction
from simulator.analysis.uncertain import medians
from simulator.cost.flops import model_flops_per_token
from simulator.errors import Problem, UserError
from simulator.planner.best_plan import Found, best_plan
from simulator.spec.cluster import NodeGroup
from simulator.spec.purchase import Candidate, Part, Purchase, PurchaseWorkload
from simulator.spec.scenario import Scenario, scenario_from_mapping

#: A candidate that can't hold a model is grown up to so many times its added nodes.
_GROWTH = 64
#: Network of described nodes that would be added where none is named.
_GROWN_FABRIC = "100gbe"


@dataclass(frozen=True)
class Planned:
    """A workload's best plan on a cluster."""

    workload: PurchaseWorkload
    scenario: Scenario
    prediction: Prediction

    @property
    def fits(self) -> bool:
        """Whether it runs at the accepted risk."""
        return self.prediction.verdict == "fits"

    @property
    def headroom(self) -> float:
        """Free share of the usable memory of the fullest GPU, at the median."""
        return 1.0 - max(c.fill for c in self.prediction.classes)


@dataclass(frozen=True)
class Prepared:
    """A candidate with its plans (of its last phase) and, where all fit, its facts.

    ``missing`` says which workload fits on none of its plans and what would hold it.
    """

    candidate: Candidate
    planned: tuple[Planned, ...]
    facts: CandidateFacts | None
    missing: str = ""


@dataclass
class Workshop:
    """Plans clusters for the workloads of a purchase, each different one once."""

    scenario: Scenario
    purchase: Purchase
    assumptions: Assumptions
    notify: Callable[[str], None] = lambda _: None
    _plans: dict[str, Prediction] = field(default_factory=dict)
    _parts: dict[str, Found] = field(default_factory=dict)

    def prepare(self, candidate: Candidate, explain: bool = True) -> Prepared:
        """Plan a candidate for every workload.

        Where one fits nowhere, ``explain`` looks for the smallest addition that would hold it.

        Raises:
            UserError: its cluster is impossible, or something has no price.
        """
        self.notify(candidate.name)
        try:
            planned = tuple(self._plan(candidate, w) for w in self.purchase.workloads)
            unfit = next((p for p in planned if not p.fits), None)
            if unfit is not None:
                why = self._what_would_fit(candidate, unfit) if explain else "doesn't fit"
                return Prepared(candidate, planned, None, why)
            return Prepared(candidate, planned, self._facts(candidate, planned))
        except UserError as error:
            where = f"candidate {candidate.name!r}"
            named = (
                replace(p, path=f"{where}, {p.path}" if p.path else where) for p in error.problems
            )
            raise UserError(*named) from None

    def groups(self, candidate: Candidate) -> list[dict[str, Any]]:
        """``cluster.groups`` of a candidate's last phase: kept, bought, rented."""
        standing = self.scenario.given["cluster"]["groups"]
        kept = [{**standing[i], "count": n} for i, n in candidate.keep.items() if n > 0]
        return [*kept, *(dict(p.group) for p in (*candidate.buy, *candidate.rent))]

    def standing_alone(self) -> CandidateFacts | None:
        """The standing cluster for itself; None where it can't do the work."""
        counts = {i: group.count for i, group in enumerate(self.scenario.cluster.groups)}
        try:
            return self.prepare(Candidate("what stands, alone", keep=counts), explain=False).facts
        except UserError:
            return None

    def standing_value(self, terms: Terms) -> float:
        """What the standing cluster would bring today, at the medians; 0 where none is owned."""
        owned = self.purchase.owned
        if owned is None:
            return 0.0
        facts = CandidateFacts(
            "what stands", (), owned=tuple(self._standing().values()),
            owned_age_years=owned.age_years, owned_value=owned.value,
        )  # fmt: skip
        return float(owned_value(facts, terms, medians(self.assumptions.inputs)))

    def price_of(self, part: Part) -> tuple[str, str]:
        """Name of a bought node and of the input with its price. Raises UserError without one."""
        scenario = self._scenario(
            [dict(part.group)], {}, self.purchase.workloads[0], Candidate("", buy=(part,))
        )
        node = scenario.cluster.groups[0].node
        return node.name, self.assumptions.node_price(_priced(node), part.price)

    def _plan(self, candidate: Candidate, workload: PurchaseWorkload) -> Planned:
        scenario = self._scenario(self.groups(candidate), candidate.settings, workload, candidate)
        key = json.dumps([scenario.given[k] for k in ("cluster", "workload")] +
                         [scenario.given.get(k) for k in ("model", "stack", "plan")],
                         sort_keys=True, default=str)  # fmt: skip
        if key not in self._plans:
            self._plans[key] = best_plan(scenario, self._parts)
        return Planned(workload, scenario, self._plans[key])

    def _scenario(
        self,
        groups: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        workload: PurchaseWorkload,
        candidate: Candidate,
    ) -> Scenario:
        given = self.scenario.given
        data: dict[str, Any] = {
            key: copy.deepcopy(given[key]) for key in ("model", "stack", "risk") if key in given
        }
        data.update(copy.deepcopy(dict(workload.given)))
        # A plan of the scenario is for the cluster that stands; candidates name their own.
        for key in ("stack", "plan"):
            if settings.get(key) is not None:
                data[key] = settings[key]
        data = {key: value for key, value in data.items() if value is not None}
        fabric = settings.get("fabric")
        # Described nodes have no network of their own: theirs is the one that stands.
        if fabric is None and (candidate.keep or any("node" not in g for g in groups)):
            fabric = given["cluster"].get("fabric")
        cluster: dict[str, Any] = {"groups": [dict(group) for group in groups]}
        if fabric is not None:
            cluster["fabric"] = fabric
        data["cluster"] = cluster
        folder = self.scenario.source.rpartition("/")[0] or "."
        return scenario_from_mapping(data, "", folder)

    def _what_would_fit(self, candidate: Candidate, unfit: Planned) -> str:
        """The fewest more nodes of the last added kind with which the workload fits."""
        p = unfit.prediction
        worst = p.classes[p.fullest]
        text = (
            f"{unfit.workload.name} doesn't fit on {_counted(p)}: the best plan needs "
            f"{worst.device_bytes / 2**30:,.0f} of {worst.usable_bytes / 2**30:,.0f} GiB on one "
            f"{worst.gpu}"
        )
        grown = self._grow(candidate, unfit.workload)
        if grown is None:
            return f"{text}; not even {_GROWTH} times as many nodes of its last kind would do"
        more, kind = grown
        return f"{text}; {more:,} more {kind} would hold it"

    def _grow(self, candidate: Candidate, workload: PurchaseWorkload) -> tuple[int, str] | None:
        """Doubling, then bisection: (nodes of the last kind to add, their name)."""
        *others, group = self.groups(candidate)
        before = int(group.get("count", 1))
        settings = {key: v for key, v in candidate.settings.items() if key != "plan"}
        if "node" not in group and self.scenario.given["cluster"].get("fabric") is None:
            settings.setdefault("fabric", _GROWN_FABRIC)

        def fits(more: int) -> bool:
            groups = [*others, {**group, "count": before + more}]
            try:
                grown = self._scenario(groups, settings, workload, candidate)
                return best_plan(grown, self._parts).verdict == "fits"
            except UserError:
                return False

        high = 1
        while not fits(high):
            high *= 2
            if high > _GROWTH * before:
                return None
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        box = f"boxes of {group.get('gpus_per_node', 8)} {group.get('gpu', 'mixed GPUs')}"
        return high, str(group.get("node") or box)

    def _facts(self, candidate: Candidate, planned: Sequence[Planned]) -> CandidateFacts:
        horizon, wait = self.purchase.horizon_years, candidate.wait_years
        if wait >= horizon:
            raise UserError(Problem("wait_years", f"{wait:g} years is not within the horizon",
                                    f"less than {horizon:g}"))  # fmt: skip
        standing = self._standing()
        last = self._phase(candidate, planned, horizon - wait)
        phases: tuple[Phase, ...] = (last,)
        if wait > 0:
            everything = Candidate("what stands", keep={i: n.count for i, n in standing.items()})
            now = tuple(self._plan(everything, w) for w in self.purchase.workloads)
            unfit = next((p for p in now if not p.fits), None)
            if unfit is not None:
                raise UserError(f"{unfit.workload.name} doesn't fit on what stands until then")
            phases = (self._phase(everything, now, wait), last)
        left = {
            i: n.count - candidate.keep.get(i, 0)
            for i, n in standing.items()
            if n.count > candidate.keep.get(i, 0)
        }
        rest = tuple(replace(standing[i], count=n) for i, n in left.items())
        owned = self.purchase.owned
        return CandidateFacts(
            name=candidate.name,
            phases=phases,
            sold=rest if candidate.sell and owned else (),
            lost=rest if not candidate.sell and owned else (),
            owned_age_years=owned.age_years if owned else 0.0,
            owned_value=owned.value if owned else None,
            owned=tuple(standing.values()) if owned else (),
        )

    def _standing(self) -> dict[int, Nodes]:
        """The standing cluster's groups; empty where nothing is owned."""
        if self.purchase.owned is None:
            return {}
        return {
            i: self._nodes(group, "kept", None)
            for i, group in enumerate(self.scenario.cluster.groups)
        }

    def _phase(self, candidate: Candidate, planned: Sequence[Planned], years: float) -> Phase:
        kept = [(self.scenario.cluster.groups[i], "kept", None) for i in candidate.keep]
        groups = planned[0].scenario.cluster.groups
        hows: list[tuple[str, Part | None]] = [("kept", None)] * len(kept)
        hows += [("bought", part) for part in candidate.buy]
        hows += [(part.tier, part) for part in candidate.rent]
        nodes = tuple(
            self._nodes(group, how, part) for group, (how, part) in zip(groups, hows, strict=True)
        )
        work = tuple(self._work(p) for p in planned)
        phase = Phase(years, nodes, work)
        spares = self.purchase.economics.spares
        return replace(phase, spares=self._spares(phase) if spares is None else spares)

    def _spares(self, phase: Phase) -> int:
        """Spare nodes that save more time than they cost; small clusters have none."""
        if not any(n.is_own for n in phase.nodes):
            return 0
        r = reliability(phase, phase.work[0], medians(self.assumptions.inputs))
        swaps = float(r.interruptions_per_s) * float(r.swap_share)  # type: ignore[arg-type]
        return spares_that_pay(swaps, float(r.repair_s), phase.n_nodes)  # type: ignore[arg-type]

    def _nodes(self, group: NodeGroup, how: str, part: Part | None) -> Nodes:
        given = part.price if part else None
        if how in ("kept", "bought"):
            price = self.assumptions.node_price(_priced(group.node), given)
        else:
            gpus = {gpu.name for gpu in group.gpus}
            if len(gpus) > 1 and given is None:
                raise UserError(Problem("rent", f"{group.name} mixes {', '.join(sorted(gpus))}",
                                        "give price_per_gpu_hour"))  # fmt: skip
            price = self.assumptions.rent(sorted(gpus)[0], how, given)
        return Nodes(
            name=group.name,
            how=how,
            count=group.count,
            n_gpus=len(group.gpus),
            gpus_idle_w=float(sum(gpu.idle_power_w for gpu in group.gpus)),
            gpus_limit_w=float(sum(gpu.power_limit_w for gpu in group.gpus)),
            host_w=float(group.node.host_power_w),
            price=price,
        )

    def _work(self, planned: Planned) -> Work:
        p, w = planned.prediction, planned.workload
        rate = p.tokens_per_s
        speed = self.assumptions.speed(list(p.gpus), rate.p10 / rate.p50, rate.p90 / rate.p50)
        waiting = p.shares.get("bubble", 0.0) + p.shares.get("dispatch", 0.0)
        scenario = planned.scenario
        flops = model_flops_per_token(scenario.model, scenario.workload.sequence_length)
        return Work(
            name=w.name, tokens=w.tokens, weight=w.weight, runs_per_year=w.runs_per_year,
            rate=rate.p50, speed=speed, load=max(1.0 - waiting, 0.0),
            flops_per_token=float(flops), parameters=float(p.parameters),
        )  # fmt: skip


def _priced(node: NodeSpec) -> NodeSpec:
    """The node, under another name where it has fewer GPUs than the one with a price."""
    try:
        listed = hardware_db.node(node.name)
    except UserError:
        return node
    return node if listed.gpus == node.gpus else replace(node, name=f"{node.name} (part)")


def _counted(p: Prediction) -> str:
    return " + ".join(f"{count:,} {name}" for name, count in p.gpus.items())
