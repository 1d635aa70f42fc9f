"""Why a plan is better than another, in sentences computed from their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simulator.planner.candidate import Candidate
from simulator.planner.gpumix import Limits, plan_gpumix
from simulator.planner.rank_tables import Job
from simulator.spec.plan import Plan

if TYPE_CHECKING:
    from simulator.planner.baselines import Baseline
    from simulator.spec.scenario import Scenario

#: Words for the categories of time.
_WORDS = {
    "compute": "computation",
    "recompute": "recomputation",
    "dispatch": "waiting for the host",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "pipeline communication",
    "dp": "gradient reduction",
    "fsdp": "gathering sharded parameters",
    "optimizer": "the optimiser's step",
    "overhead": "framework overhead",
    "bubble": "idle time",
}

#: Gains below this are noise beside the model's own error.
WORTH = 0.01


def why_slower(best: Candidate, other: Candidate) -> str:
    """One sentence on why ``other`` isn't first."""
    slower = best.tokens_per_s / other.tokens_per_s - 1.0
    if slower < 0.0005:
        return f"as fast, with {abs(other.headroom - best.headroom):.0%} " + (
            "less free memory" if other.headroom < best.headroom else "more free memory"
        )
    if sum(other.gpus.values()) < sum(best.gpus.values()):
        return f"{slower:.1%} slower: uses {_gpu_words(other.gpus)} only"
    mine, theirs = best.shares(), other.shares()
    worst = max(mine, key=lambda name: theirs[name] - mine[name])
    more = (theirs[worst] - mine[worst]) / best.step_time_s
    return f"{slower:.1%} slower, mostly by {_WORDS[worst]} ({more:+.1%} of the best plan's step)"


def _gpu_words(gpus: Mapping[str, int]) -> str:
    return " + ".join(f"{n:,} {name}" for name, n in gpus.items())


def verdict_sentences(
    scenario: Scenario,
    plans: Sequence[Candidate],
    baselines: Mapping[str, Baseline],
    alone: Mapping[str, Candidate | None],
) -> tuple[str, ...]:
    """What the best plan gains over the baselines, and whether each GPU type helps."""
    if not plans:
        return (f"no plan found that keeps the risk of running out at {scenario.risk:.0%}",)
    best = plans[0]
    mixed = scenario.cluster.is_mixed
    head = _headline(best, baselines, alone, mixed)
    rest = _type_sentences(scenario, best, alone) if mixed else ()
    return (head, *rest)


def _headline(
    best: Candidate,
    baselines: Mapping[str, Baseline],
    alone: Mapping[str, Candidate | None],
    mixed: bool,
) -> str:
    parts = []
    even = baselines.get("even_split")
    if even is not None and even.plan is not None and even.fits:
        parts.append(f"{best.tokens_per_s / even.plan.tokens_per_s:.2f}x the even split")
    fitting = [c for c in alone.values() if c is not None]
    single = max(fitting, key=lambda c: c.tokens_per_s, default=None)
    if mixed and single is not None and set(single.gpus) != set(best.gpus):
        parts.append(f"{best.tokens_per_s / single.tokens_per_s:.2f}x the {single.kind}")
    rate = f"{best.tokens_per_s:,.0f} tokens/s"
    text = f"{_capital(best.kind)}: {rate}"
    if parts:
        text += ", " + " and ".join(parts)
    if even is not None and not even.fits:
        text += "; the even split does not fit"
    if mixed and single is None:
        text += "; no GPU type alone holds the job"
    return text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _type_sentences(
    scenario: Scenario, best: Candidate, alone: Mapping[str, Candidate | None]
) -> tuple[str, ...]:
    """Whether mixing pays, against the best single type."""
    fitting = {gpu: c for gpu, c in alone.items() if c is not None}
    if not fitting:
        return ()
    name, single = max(fitting.items(), key=lambda item: item[1].tokens_per_s)
    others = [gpu for gpu in scenario.cluster.counts() if gpu != name]
    gain = best.tokens_per_s / single.tokens_per_s - 1.0
    words = ", ".join(others)
    found = []
    unused = [gpu for gpu in others if gpu not in best.gpus]
    if unused:
        found.append(
            f"adding {', '.join(unused)} does not help: the best plan found leaves them idle"
        )
    elif gain < WORTH:
        found.append(
            f"adding {words} to the {single.kind.removesuffix(' alone')} gains only {gain:.1%}: "
            "not worth their cost"
        )
    return tuple(found)


def smallest_change(job: Job, base: Plan) -> str:
    """The smallest change that would make some plan fit, where none does."""
    for risk in (0.1, 0.25, 0.5):
        if risk > job.risk and _any_fits(replace(job, risk=risk), base):
            return f"accept a risk of {risk:.0%} of running out of memory (--risk {risk:g})"
    for factor in (2, 4, 8, 16):
        longer = replace(
            job,
            workload=replace(
                job.workload, sequence_length=max(job.workload.sequence_length // factor, 1)
            ),
        )
        more = tuple(replace(g, count=g.count * factor) for g in job.cluster.groups)
        batch = max(job.workload.global_batch, sum(g.n_gpus for g in more))
        larger = replace(
            job,
            cluster=replace(job.cluster, groups=more),
            workload=replace(job.workload, global_batch=batch),
        )
        if job.cluster.fabric is not None and _any_fits(larger, base):
            return f"{factor}x as many nodes of each group would hold it"
        if _any_fits(longer, base):
            length = longer.workload.sequence_length
            return f"sequences of {length:,} tokens (workload.sequence_length) would fit"
    return "no change that was tried makes it fit: fewer layers, or GPUs with more memory"


def _any_fits(job: Job, base: Plan) -> bool:
    """Whether a split or a uniform plan fits."""
    from simulator.planner.homogeneous import plan_alone

    if job.stack.uneven_batches:
        return bool(plan_gpumix(job, base, Limits(whole_cluster=True)))
    return any(plan_alone(job, base, gpu) for gpu in job.cluster.counts())
