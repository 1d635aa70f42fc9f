"""``gpumix plan``: the best plans of a scenario, beside the baselines, with the reasons.

Candidates come from GPUMix's optimiser, mixed pipelines and the best plans on each GPU type alone;
the best few are run again in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simulator.planner.baselines import (
    Baseline,
    even_split,
    lp_without_accumulation,
    proportional_to_speed,
)
from simulator.planner.candidate import Candidate, price_laid
from simulator.planner.gpumix import KEEPING, LAYERED, STYLES, Limits, Style, plan_gpumix
from simulator.planner.homogeneous import plan_alone
from simulator.planner.mixed_pipeline import legal_degrees, plan_mixed_pipelines
from simulator.planner.objectives import Measures, Objective, measures, rents_of, score
from simulator.planner.rank_tables import Job
from simulator.planner.reasons import smallest_change, verdict_sentences, why_slower
from simulator.spec.plan import Plan, Sharding
from simulator.spec.scenario import Scenario

#: Splits that can't come within this factor of a known plan are not searched.
_FAR_BEHIND = 1.25

_STYLE_NAMES: dict[Style, str] = {
    LAYERED: "GPUMix split",
    (Sharding.ZERO3, "1f1b"): "uneven fully sharded data parallelism",
    (Sharding.ZERO1, "1f1b"): "uneven data parallelism",
}


@dataclass(frozen=True)
class Request:
    """What is asked beside the scenario. ``fixed`` are fields of the plan that must hold."""

    objective: Objective = "throughput"
    risk: float | None = None
    top: int = 3
    max_gpus: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    engine: bool = True


@dataclass(frozen=True)
class Ranked:
    """A plan in its place, with what it costs and why it isn't first."""

    candidate: Candidate
    measures: Measures
    why_not_first: str


@dataclass(frozen=True)
class Recommendation:
    """The answer: ``plans`` best first, empty where nothing fits (``smallest_change`` then says
    what would help). ``alone`` is the best plan on each GPU type; ``front`` the plans that no other
    beats in throughput, headroom and, where prices are known, cost.
    """

    scenario: Scenario
    request: Request
    plans: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    baselines: Mapping[str, Baseline]
    alone: Mapping[str, Candidate | None]
    sentences: tuple[str, ...]
    smallest_change: str
    evaluator: str


def recommend(scenario: Scenario, request: Request = Request()) -> Recommendation:
    """Search the plans of a scenario.

    A plan in the scenario gives precision, optimiser and context parallelism and is otherwise
    replaced.

    Raises:
        UserError: the objective lacks what it needs, or a fixed field is unknown.
    """
    risk = scenario.risk if request.risk is None else request.risk
    scenario = replace(scenario, risk=risk)
    job = Job(scenario.model, scenario.workload, scenario.cluster, scenario.stack, risk)
    base = base_plan(scenario, request.fixed)
    rents = rents_of(scenario.economics, scenario.cluster.counts())
    by_type = {gpu: _alone(job, base, gpu, request) for gpu in scenario.cluster.counts()}
    alone = {gpu: plans[0] if plans else None for gpu, plans in by_type.items()}
    baselines = _baselines(job, base)
    found = [c for plans in by_type.values() for c in plans]
    found += [b.plan for b in baselines.values() if b.plan is not None and b.fits]
    found = _candidates(job, base, request, found) + found
    ranked = sorted(
        (_rank_key(c, request, rents) for c in _allowed(found, request)), key=lambda r: r[0]
    )
    best, note = _in_engine([c for _, c in ranked], request, rents)
    plans = tuple(
        Ranked(c, measures(c, rents), "" if i == 0 else why_slower(best[0], c))
        for i, c in enumerate(best[: request.top])
    )
    front = _front([Ranked(c, measures(c, rents), "") for c in best])
    sentences = verdict_sentences(scenario, [p.candidate for p in plans], baselines, alone)
    change = "" if plans else smallest_change(job, base)
    return Recommendation(
        scenario, request, plans, front, baselines, alone, (*sentences, *note), change,
        "engine" if request.engine else "closed form",
    )  # fmt: skip


def half_precision(scenario: Scenario) -> str:
    """bf16, or fp16 where a GPU lacks bf16 and the stack has an fp16 recipe."""
    native = all(g.supports("bf16") for g in scenario.cluster.gpu_types)
    return "fp16" if "fp16" in scenario.stack.recipes and not native else "bf16"


def base_plan(scenario: Scenario, fixed: Mapping[str, Any]) -> Plan:
    """Degrees and precision that a search starts from, with the fixed fields set.

    Raises:
        UserError: a fixed field is none of the plan's.
    """
    from simulator.spec.scenario import plan_from_mapping

    given = scenario.plan
    data: dict[str, Any] = {"precision": half_precision(scenario)}
    if given is not None:
        data = {
            "precision": given.precision, "optimizer": given.optimizer,
            "attention": given.attention, "compile": given.compile,
        }  # fmt: skip
    data |= {k: v for k, v in fixed.items() if k not in ("pp", "dp", "micro_batch", "vpp")}
    # One sequence for each rank always lays; only the fields matter here.
    width = int(fixed.get("tp", 1)) * int(fixed.get("cp", 1))
    workload = replace(
        scenario.workload, global_batch=max(scenario.cluster.n_gpus // max(width, 1), 1)
    )
    data["dp"] = max(scenario.cluster.n_gpus // max(width, 1), 1)
    return plan_from_mapping(data, scenario.model, workload, scenario.cluster, scenario.stack)


def _limits(request: Request) -> Limits:
    fixed = request.fixed
    keeping = tuple(
        (r, o)
        for r, o in KEEPING
        if str(fixed.get("recompute", r.name.lower())).lower() == r.name.lower()
        and str(fixed.get("offload", o)) == o
    )
    size = fixed.get("micro_batch")
    return Limits(keeping, None if size is None else (int(size),), max_gpus=request.max_gpus)


def _candidates(job: Job, base: Plan, request: Request, known: list[Candidate]) -> list[Candidate]:
    """Plans over several GPU types, and GPUMix's splits, but for those far behind the known."""
    found: list[Candidate] = []
    fixed = request.fixed
    top = max(2, (request.top + 1) // 2)
    if job.stack.uneven_batches and int(fixed.get("pp", 1)) == 1:
        for style in STYLES:
            for tp in _degrees(job, style, fixed):
                plan = replace(base, tp=tp, sequence_parallel=base.sequence_parallel and tp > 1)
                fastest = min((c.step_time_s for c in [*known, *found]), default=np.inf)
                found += plan_gpumix(
                    job, plan, _limits(request), style=style, top=top, kind=_STYLE_NAMES[style],
                    not_above_s=_FAR_BEHIND * fastest,
                )  # fmt: skip
    if job.cluster.is_mixed and int(fixed.get("pp", 2)) > 1:
        found += plan_mixed_pipelines(job, base, top=top)
    return found


def _degrees(job: Job, style: Style, fixed: Mapping[str, Any]) -> tuple[int, ...]:
    """Tensor-parallel degrees to try: with whole parameters all that stay inside every node."""
    if "tp" in fixed:
        return (int(fixed["tp"]),)
    if style[0] == Sharding.ZERO3:
        return (1,)
    return legal_degrees(job, min(len(g.gpus) for g in job.cluster.groups))


def _alone(job: Job, base: Plan, gpu: str, request: Request) -> list[Candidate]:
    top = 1 if job.cluster.is_mixed else request.top
    return plan_alone(job, base, gpu, _limits(request), fixed=request.fixed, top=top)


def _allowed(found: list[Candidate], request: Request) -> list[Candidate]:
    """Candidates that keep the request's limits, each once.

    Plans that differ in nothing that the GPUs notice (selective recomputation with a fused kernel)
    have the same price and count as one.
    """
    kept: dict[tuple[Any, ...], Candidate] = {}
    for c in found:
        gpus = sum(c.gpus.values())
        within = request.max_gpus is None or gpus <= request.max_gpus
        if within and _keeps(c.layout.plan, request.fixed):
            kept.setdefault((tuple(c.gpus.items()), c.step_time_s, c.headroom), c)
    return list(kept.values())


def _keeps(plan: Plan, fixed: Mapping[str, Any]) -> bool:
    from simulator.spec.dump import plan_to_mapping

    written = plan_to_mapping(plan)
    return all(str(written.get(k)).lower() == str(v).lower() for k, v in fixed.items()
               if k != "micro_batch") and (
        "micro_batch" not in fixed
        or {a.micro_batch for a in plan.assignment} <= {int(fixed["micro_batch"])}
    )  # fmt: skip


def _rank_key(
    c: Candidate, request: Request, rents: Mapping[str, float]
) -> tuple[tuple[float, ...], Candidate]:
    m = measures(c, rents)
    key = score(request.objective, m, sum(c.gpus.values()), request.deadline_s)
    return (*key, float(c.layout.plan.offload != "none"), c.oom_risk), c


def _in_engine(
    found: list[Candidate], request: Request, rents: Mapping[str, float]
) -> tuple[list[Candidate], tuple[str, ...]]:
    """The best few run in the engine and ordered by it; a note where that changes the order."""
    if not request.engine or not found:
        return found, ()
    few, rest = found[: request.top], found[request.top :]
    again = [price_laid(c.kind, c.layout, c.bound_s, "engine") for c in few]
    order = sorted(range(len(again)), key=lambda i: _rank_key(again[i], request, rents)[0])
    note: tuple[str, ...] = ()
    if order != list(range(len(again))):
        moved = order[0]
        note = (
            f"the engine puts another plan first: number {moved + 1} of the closed form "
            f"({again[moved].kind})",
        )
        if moved == 0:
            note = ("the engine changes the order of the plans behind the first",)
    return [again[i] for i in order] + rest, note


def _baselines(job: Job, base: Plan) -> dict[str, Baseline]:
    if not job.stack.uneven_batches:
        return {}
    return {
        "even_split": even_split(job, base),
        "proportional_to_speed": proportional_to_speed(job, base),
        "lp_without_accumulation": lp_without_accumulation(job, base),
    }


def _front(ranked: list[Ranked]) -> tuple[Ranked, ...]:
    """Plans that no other beats in throughput, headroom and cost at once."""

    def values(r: Ranked) -> tuple[float, ...]:
        cost = r.measures.cost_per_1e9_tokens
        return (r.measures.tokens_per_s, r.candidate.headroom, *(() if cost is None else (-cost,)))

    kept = []
    for r in ranked:
        mine = values(r)
        beaten = any(
            len(values(o)) == len(mine)
            and values(o) != mine
            and all(a >= b for a, b in zip(values(o), mine, strict=True))
            for o in ranked
        )
        if not beaten:
            kept.append(r)
    return tuple(kept)
