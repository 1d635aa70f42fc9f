"""What a candidate's hardware costs: purchase, loan, resale, and the value of what stood before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.analysis import economics as eco
from simulator.analysis.assumptions import PLAIN, RESALE
from simulator.analysis.candidate_facts import CandidateFacts, Nodes, Phase, Terms
from simulator.analysis.uncertain import Inputs

Numbers = NDArray[np.float64]


def plain(x: Inputs, key: str) -> Numbers:
    """Value of a plain input by its key."""
    return np.asarray(x[PLAIN[key][1]])


def hardware_costs(
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
    paid = eco.annuity_per_month(upfront, plain(x, "financing_rate"), max(term, 1 / 12))
    owed = eco.balance_after(upfront, plain(x, "financing_rate"), term, held)
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
    return np.asarray(new_price(facts.owned, x) * _share(terms, x, facts.owned_age_years))


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
    network = price * plain(x, "network_share") if phase.n_nodes > 1 else np.zeros(())
    return np.asarray(price), np.asarray(network), price * plain(x, "installation_share")


def _share(terms: Terms, x: Inputs, age_years: float) -> Numbers:
    curve = eco.resale_share(age_years, terms.resale_years, terms.resale_shares)
    return np.asarray(np.clip(curve * x[RESALE], 0.0, 1.0))


def new_price(nodes: Sequence[Nodes], x: Inputs) -> Numbers:
    return np.asarray(sum((n.count * x[n.price] for n in nodes), np.zeros(())))


def _part_value(facts: CandidateFacts, nodes: Sequence[Nodes], now: Numbers, x: Inputs) -> Numbers:
    """Part of today's value of the standing cluster that some of its nodes are, by price."""
    if not nodes:
        return np.zeros(())
    whole = new_price(facts.owned, x)
    safe = np.where(whole > 0, whole, 1.0)
    return np.asarray(np.where(whole > 0, now * new_price(nodes, x) / safe, 0.0))
