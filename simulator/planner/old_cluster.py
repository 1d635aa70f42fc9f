"""What the standing cluster is still worth beside a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.analysis.candidate_cost import evaluate_candidate
from simulator.analysis.candidate_facts import CandidateFacts, Terms
from simulator.analysis.cash import RUNNING
from simulator.analysis.uncertain import Inputs
from simulator.planner.purchase_candidates import Workshop
from simulator.planner.purchase_result import OldWorth


def old_worth(
    workshop: Workshop, leaders: Sequence[CandidateFacts], terms: Terms, x: Inputs
) -> OldWorth | None:
    """Value in use of the standing cluster, working for itself, against selling it.

    What it trains over the horizon would cost so much on the best candidate that keeps nothing;
    less what running it costs, that is what it is worth to keep. None where nothing stands, where
    it can't hold the workloads, or where no candidate is all new.
    """
    if workshop.purchase.owned is None:
        return None
    new = next(
        (f for f in leaders if not any(n.how == "kept" for p in f.phases for n in p.nodes)), None
    )
    if new is None:
        return None
    alone = workshop.standing_alone()
    if alone is None or any(w.speed not in x for w in alone.phases[-1].work):
        return None
    # Beside a new cluster it would work all the time that it can, whatever is wanted.
    free = replace(
        alone.phases[-1],
        work=tuple(replace(w, runs_per_year=None) for w in alone.phases[-1].work),
    )
    sheet = evaluate_candidate(replace(alone, phases=(free,)), terms, x)
    price = evaluate_candidate(new, terms, x).cost_per_1e9_tokens / 1e9
    running = sum(float(sheet.costs[name]) for name in RUNNING)
    return OldWorth(
        beside=new.name,
        value_in_use=float(sheet.tokens * price) - running,
        resale_value=float(sheet.owned_value),
        running_cost=running,
        tokens=float(sheet.tokens),
    )
