"""Time of full automatic searches: Llama-3.1-405B on 16,384 H100, GPT-3 175B on 512 A100.

The second looks at 6.6 million plans, as many as an established analytical tool takes about eight
core-hours for (232 plans/s).
"""

from __future__ import annotations

from typing import Any

from benchmarks.plans import OPTIONS, gpt3
from benchmarks.reference import element_operations_per_s, timed
from simulator.planner.search import SearchResult, search
from simulator.planner.space import divisors
from simulator.spec.dump import plan_to_mapping
from simulator.spec.scenario import load_scenario

LIMITS_S = {"llama_405b_16384_h100": 5.0, "gpt3_175b_512_a100": 15.0}
PUBLISHED_PLANS_PER_S = 232.0

#: Micro-batches of the second search, which make it 6.6 million legal plans.
MICRO_BATCHES = {"micro_batch": divisors(7680, 40)}


def _figures(name: str, found: SearchResult, cpu_s: float, wall_s: float) -> dict[str, Any]:
    best = found.plans[0]
    return {
        "considered": found.considered,
        "legal": found.legal,
        "fitting": found.fitting,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "limit_s": LIMITS_S[name],
        "legal_plans_per_s": found.legal / cpu_s,
        "speed_over_232_plans_per_s": found.legal / cpu_s / PUBLISHED_PLANS_PER_S,
        "best_step_time_s": best.step_time_s,
        "best_tokens_per_s": best.tokens_per_s,
        "best_plan": plan_to_mapping(best.plan),
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Both searches; ``quick`` leaves most options of the second out."""
    reference = element_operations_per_s()
    options = {"offload": OPTIONS["offload"]} if quick else OPTIONS
    llama, asked = load_scenario("llama-3.1-405b-16k-h100"), gpt3(7680)
    cases = {
        "llama_405b_16384_h100": timed(lambda: search(llama)),
        "gpt3_175b_512_a100": timed(lambda: search(asked, fixed=MICRO_BATCHES, options=options)),
    }
    figures: dict[str, Any] = {"reference_operations_per_s": reference}
    for name, done in cases.items():
        figures[name] = _figures(name, done.result, done.cpu_s, done.wall_s)
        rate = figures[name]["legal_plans_per_s"]
        figures[name]["legal_plans_per_reference_operation"] = rate / reference
    return figures
