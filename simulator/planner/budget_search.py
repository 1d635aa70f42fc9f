"""What should I buy for this budget: counts of each node type, with bounds that save planning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.assumptions import PLAIN
from simulator.analysis.candidate_cost import Sheet, evaluate_candidate
from simulator.analysis.candidate_facts import CandidateFacts, Nodes, Terms, Work
from simulator.analysis.uncertain import Inputs, medians
from simulator.errors import Problem, UserError
from simulator.planner.purchase_candidates import Prepared, Workshop
from simulator.planner.purchase_result import SearchResult
from simulator.spec.purchase import BudgetSearch, Candidate, Part

Numbers = NDArray[np.float64]

#: More mixes than this are not enumerated one by one.
MAX_MIXES = 20_000
#: A mix is never believed to train faster than its node types alone, together, times this.
_OPTIMISM = 1.1
#: Mixes that are planned at most, and that enter the comparison.
_MAX_PLANNED, _SHOWN = 12, 3


@dataclass(frozen=True)
class _Kind:
    """A node type: the part that is bought, what one costs put up, and its facts when alone."""

    part: Part
    name: str
    price: float
    most: int
    alone: CandidateFacts | None


def search_budget(
    workshop: Workshop,
    search: BudgetSearch,
    terms: Terms,
    outcome: Callable[[Sheet], Numbers],
) -> tuple[list[Prepared], SearchResult]:
    """The best mixes that the budget buys, as candidates, best first.

    ``outcome`` is what is to be small, the time of a training run for example.

    Every node type is planned alone at the largest count that the budget allows. A mix can't be
    faster than its types alone together and a little (:data:`_OPTIMISM`); with that bound mixes
    are planned in the order of their promise, until none left can beat the best found.

    Raises:
        UserError: the budget buys no single node, or there are too many mixes.
    """
    # Where nothing is kept, what stands is sold and pays for a part.
    spend = search.budget + (0.0 if search.keep else workshop.standing_value(terms))
    kinds = _kinds(workshop, search, spend)
    x = medians(workshop.assumptions.inputs)
    mixes = _mixes(kinds, spend)
    promise = sorted(
        (_bound(workshop, kinds, counts, search.keep, terms, outcome, x), counts)
        for counts in mixes
    )  # fmt: skip
    found: list[tuple[float, Prepared]] = []
    planned = 0
    for bound, counts in promise:
        if planned >= _MAX_PLANNED or (len(found) >= 1 and bound >= found[0][0]):
            break
        planned += 1
        prepared = _try(workshop, kinds, counts, search)
        if prepared is None or prepared.facts is None:
            continue
        sheet = evaluate_candidate(prepared.facts, terms, medians(workshop.assumptions.inputs))
        value = float(outcome(sheet))
        spent = float(sheet.upfront - sheet.sale)
        if spent <= search.budget * (1 + 1e-9):
            found = sorted([*found, (value, prepared)], key=lambda f: f[0])
    best = [p for _, p in found[:_SHOWN]]
    names = tuple(p.candidate.name for p in best)
    return best, SearchResult(search.budget, names, len(mixes), planned)


def _kinds(workshop: Workshop, search: BudgetSearch, spend: float) -> list[_Kind]:
    kinds = []
    for part in search.nodes:
        one = Part({**part.group, "count": 1}, part.price)
        name, price = _put_up(workshop, one)
        most = min(int(spend / price), search.most) if price > 0 else search.most
        if most < 1:
            continue
        alone = _try_alone(workshop, search, one, most, name)
        kinds.append(_Kind(one, name, price, most, alone))
    if not kinds:
        message = f"{search.budget:,.0f} buys none of the nodes"
        raise UserError(Problem("purchase.search.budget", message, "raise it"))
    return kinds


def _put_up(workshop: Workshop, part: Part) -> tuple[str, float]:
    """Name and price of one node with its installation; a network comes on top of several."""
    name, price = workshop.price_of(part)
    inputs = workshop.assumptions.inputs
    share = inputs[PLAIN["installation_share"][1]].value
    return name, inputs[price].value * (1.0 + share)


def _try_alone(
    workshop: Workshop, search: BudgetSearch, part: Part, most: int, name: str
) -> CandidateFacts | None:
    """Facts of one type alone, at the largest count at which it can be planned."""
    count = most
    while count >= 1:
        try:
            group = Part({**part.group, "count": count}, part.price)
            alone = Candidate(f"{count} {name}", buy=(group,), settings=search.settings)
            prepared = workshop.prepare(alone, explain=False)
        except UserError:
            prepared = None
        if prepared is not None and prepared.facts is not None:
            return prepared.facts
        count //= 2
    return None


def _mixes(kinds: Sequence[_Kind], budget: float) -> list[tuple[int, ...]]:
    """Counts by type that the budget buys (network left out: the plan's own sum decides)."""
    size = 1
    for kind in kinds:
        size *= kind.most + 1
    if size > 100 * MAX_MIXES:
        raise UserError(Problem("purchase.search.most", f"{size:,} mixes are too many",
                                "name fewer node types or a smaller most"))  # fmt: skip
    prices = np.array([kind.price for kind in kinds])
    grid = np.array(list(itertools.product(*(range(kind.most + 1) for kind in kinds))))
    affordable = grid[(grid @ prices <= budget) & (grid.sum(axis=1) > 0)]
    # Where there are many, those that leave most of the budget unspent go first.
    order = np.argsort(-(affordable @ prices), kind="stable")[:MAX_MIXES]
    return [tuple(int(n) for n in row) for row in affordable[order]]


def _try(
    workshop: Workshop, kinds: Sequence[_Kind], counts: Sequence[int], search: BudgetSearch
) -> Prepared | None:
    parts = [(kind, n) for kind, n in zip(kinds, counts, strict=True) if n]
    groups = workshop.scenario.cluster.groups if search.keep else ()
    kept = {i: g.count for i, g in enumerate(groups)}
    name = " + ".join(f"{n} {kind.name}" for kind, n in parts)
    candidate = Candidate(
        f"{'keep all, buy' if search.keep else 'buy'} {name}",
        keep=kept,
        buy=tuple(Part({**kind.part.group, "count": n}, kind.part.price) for kind, n in parts),
        settings=search.settings,
    )
    try:
        return workshop.prepare(candidate, explain=False)
    except UserError:
        return None


def _bound(
    workshop: Workshop,
    kinds: Sequence[_Kind],
    counts: Sequence[int],
    keep: bool,
    terms: Terms,
    outcome: Callable[[Sheet], Numbers],
    x: Inputs,
) -> float:
    """The outcome if all node types together were as fast as each alone, and a little faster."""
    nodes: list[Nodes] = []
    rates = np.zeros(len(workshop.purchase.workloads))
    template: CandidateFacts | None = None
    for kind, n in zip(kinds, counts, strict=True):
        if not n or kind.alone is None:
            continue
        last = kind.alone.phases[-1]
        template = template or kind.alone
        nodes.append(replace(last.nodes[0], count=n))
        rates = rates + np.array([w.rate for w in last.work]) * n / last.n_nodes
    if template is None:
        return float("inf")
    last = template.phases[-1]
    if keep:
        standing = workshop.standing_alone()
        if standing is not None:
            nodes += standing.phases[-1].nodes
            rates = rates + np.array([w.rate for w in standing.phases[-1].work])
    work: tuple[Work, ...] = tuple(
        replace(w, rate=float(rate) * _OPTIMISM) for w, rate in zip(last.work, rates, strict=True)
    )
    facts = replace(template, phases=(replace(last, nodes=tuple(nodes), work=work, spares=0),))
    return float(outcome(evaluate_candidate(facts, terms, {**x, **_unit_speeds(work, x)})))


def _unit_speeds(work: Sequence[Work], x: Inputs) -> dict[str, Numbers]:
    return {w.speed: x.get(w.speed, np.ones(())) for w in work}
