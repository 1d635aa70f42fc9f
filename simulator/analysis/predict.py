"""From a layout to the whole answer: time, memory, risk, shares, suggestions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from simulator.analysis.prediction import ClassPrediction, Prediction, Suggestion, Verdict
from simulator.analysis.risk import MemoryRisk, memory_risk, prior_spread
from simulator.analysis.suggest import suggest
from simulator.analysis.uncertainty import layout_time_spread, rate_range, time_range
from simulator.cost.batch import batch_of
from simulator.cost.compute import attention_kernel
from simulator.cost.flops import model_flops_per_token, rank_recompute_flops
from simulator.cost.kernel_rates import rates
from simulator.cost.memory import ClassMemory, layout_breakdown, layout_memory
from simulator.cost.operators import LayerContext
from simulator.cost.pricing import price_layout
from simulator.cost.times import CATEGORIES, ClassTimes
from simulator.evaluate.closed_form import closed_form
from simulator.graph.build import build_step
from simulator.spec.layout import Layout, build_layout
from simulator.spec.parameters import total_parameters
from simulator.units import GIB

if TYPE_CHECKING:
    from simulator.evaluate.engine import EngineOptions, EngineResult
    from simulator.spec.scenario import Scenario

Evaluator = Literal["engine", "closed form"]


@dataclass(frozen=True)
class Evaluation:
    """Step time and, for every rank class, seconds by category."""

    evaluator: Evaluator
    step_time_s: float
    seconds: tuple[dict[str, float], ...]
    engine: EngineResult | None = None


def evaluate(
    layout: Layout,
    times: Sequence[ClassTimes],
    evaluator: Evaluator,
    options: EngineOptions | None = None,
) -> Evaluation:
    """Run one of the two evaluators on a priced layout."""
    if evaluator == "closed form":
        solved = closed_form(layout, times)
        rows = tuple(
            {name: float(row[i]) for i, name in enumerate(CATEGORIES)} for row in solved.seconds
        )
        return Evaluation(evaluator, float(solved.step_time_s), rows)
    from simulator.evaluate.engine import simulate_step

    result = simulate_step(build_step(layout, times), options)
    rows = tuple(result.by_category(i) for i in range(len(layout.classes)))
    return Evaluation(evaluator, result.step_time_s, rows, result)


def predict(
    scenario: Scenario,
    *,
    evaluator: Evaluator = "closed form",
    with_suggestions: bool = True,
    options: EngineOptions | None = None,
) -> tuple[Prediction, Layout, Evaluation]:
    """Answer a scenario that has a plan.

    Raises:
        UserError: the plan can't be laid on the cluster.
    """
    assert scenario.plan is not None
    layout = build_layout(
        scenario.model, scenario.workload, scenario.cluster, scenario.plan, scenario.stack
    )
    times = price_layout(layout)
    evaluation = evaluate(layout, times, evaluator, options)
    prediction = assemble(scenario, layout, times, evaluation, with_suggestions)
    return prediction, layout, evaluation


def assemble(
    scenario: Scenario,
    layout: Layout,
    times: Sequence[ClassTimes],
    evaluation: Evaluation,
    with_suggestions: bool,
) -> Prediction:
    """Put the pieces of the answer together."""
    memory = layout_memory(layout)
    risk = layout_risk(layout)
    classes = tuple(
        _class(layout, i, memory[i], risk, evaluation.seconds[i])
        for i in range(len(layout.classes))
    )
    fullest = max(range(len(classes)), key=lambda i: (classes[i].oom_risk, classes[i].fill))
    oom = classes[fullest].oom_risk
    spread = layout_time_spread(layout)
    step = time_range(evaluation.step_time_s, spread)
    tokens = layout.workload.tokens_per_step
    rate = rate_range(float(tokens), step)
    mfu, hfu = _utilisation(layout, step.p50)
    found: tuple[Suggestion, ...] = ()
    if with_suggestions:
        per_sequence = tuple(_seconds_per_sequence(layout, i, t) for i, t in enumerate(times))
        found = suggest(layout, _quick_price, scenario.risk, per_sequence)
    wanted = layout.workload.tokens
    return Prediction(
        title=scenario.title,
        model=layout.model.name,
        parameters=total_parameters(layout.model),
        n_gpus=layout.n_gpus,
        gpus=layout.cluster.counts(),
        stack=layout.stack.name,
        evaluator=evaluation.evaluator,
        verdict=verdict(oom, scenario.risk),
        oom_risk=oom,
        accepted_risk=scenario.risk,
        fullest=fullest,
        step_time_s=step,
        tokens_per_s=rate,
        tokens_per_step=tokens,
        mfu=mfu,
        hfu=hfu,
        flops_convention="full attention matrix, no recomputation (arXiv 2104.04473 eq. 3)",
        time_to_train_s=wanted / rate.p50 if wanted else None,
        shares=_shares(layout, evaluation),
        classes=classes,
        suggestions=found,
        plan=_plan_mapping(scenario),
        defaults=scenario.defaults,
        warnings=scenario.warnings + layout.model.warnings + _host_warnings(layout),
        assumptions=(*risk.assumptions, _time_assumption(spread.sigma, spread.basis)),
        sources=_sources(layout),
    )


def layout_risk(layout: Layout) -> MemoryRisk:
    """OOM risk of every rank class of a layout, in class order.

    The errors of equal ranks go together, so a class's risk doesn't grow with its ranks.
    """
    usable = np.array([c.gpu.usable_memory_bytes for c in layout.classes], float)
    return memory_risk(layout_breakdown(layout), usable, prior_spread(layout.stack.name))


def verdict(oom_risk: float, accepted: float) -> Verdict:
    """Fits at the accepted risk; does not fit where failing is likelier than not."""
    if oom_risk <= accepted:
        return "fits"
    return "risky" if oom_risk <= 0.5 else "does not fit"


def _class(
    layout: Layout,
    index: int,
    memory: ClassMemory,
    risk: MemoryRisk,
    seconds: dict[str, float],
) -> ClassPrediction:
    c = layout.classes[index]
    return ClassPrediction(
        index=index, gpu=c.gpu.name, group=layout.cluster.groups[c.group].name, stage=c.stage,
        ranks=c.ranks, layers=c.layers, micro_batch=c.micro_batch,
        micro_batches=c.micro_batches, state_share=c.state_share,
        memory_bytes=memory.components, peak_moment=memory.peak_moment,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes, device_bytes=memory.device_bytes,
        device_p10_bytes=memory.device_bytes * float(risk.p10_bytes[index] / risk.p50_bytes[index]),
        device_p90_bytes=memory.device_bytes * float(risk.p90_bytes[index] / risk.p50_bytes[index]),
        usable_bytes=float(c.gpu.usable_memory_bytes), oom_risk=float(risk.oom_risk[index]),
        eighty_percent_rule=bool(risk.safe_by_80_percent_rule[index]), time_s=seconds,
    )  # fmt: skip


def _quick_price(layout: Layout) -> tuple[float, float, float]:
    """Tokens per second, OOM risk and fill of the fullest rank, by the closed form."""
    step = evaluate(layout, price_layout(layout), "closed form").step_time_s
    risk = layout_risk(layout)
    usable = np.array([c.gpu.usable_memory_bytes for c in layout.classes], float)
    fill = float((risk.p50_bytes / usable).max())
    return layout.workload.tokens_per_step / step, float(risk.oom_risk.max()), fill


def _seconds_per_sequence(layout: Layout, index: int, times: ClassTimes) -> float:
    total = sum(
        float(c.forward.total + c.backward_input.total + c.backward_weight.total)
        for c in times.chunks
    )
    return total / layout.classes[index].micro_batch


def _utilisation(layout: Layout, step_time_s: float) -> tuple[float, float]:
    """MFU and HFU over the dense peaks of all GPUs that the plan uses."""
    recipe = layout.stack.recipe(layout.plan.precision)
    peak = sum(c.ranks * c.gpu.peak(recipe.compute_dtype) for c in layout.classes)
    tokens = layout.workload.tokens_per_step
    model = float(model_flops_per_token(layout.model, layout.workload.sequence_length)) * tokens
    gpu = layout.classes[0].gpu
    ctx = LayerContext(
        layout.model, layout.stack.kept, recipe, batch_of(layout),
        attention_kernel(gpu, layout.plan.attention, layout.stack.kept.attention),
        layout.plan.compile,
    )  # fmt: skip
    per_micro_batch = rank_recompute_flops(ctx)
    again = sum(
        c.ranks
        * c.micro_batches
        * float(np.broadcast_to(per_micro_batch, (len(layout.classes),))[i])
        for i, c in enumerate(layout.classes)
    )
    return model / (step_time_s * peak), (model + again) / (step_time_s * peak)


def _shares(layout: Layout, evaluation: Evaluation) -> dict[str, float]:
    """Mean over ranks of each category's share of the step."""
    ranks = np.array([c.ranks for c in layout.classes], float)
    total = {
        name: float(
            np.dot(ranks, [row[name] for row in evaluation.seconds])
            / ranks.sum()
            / evaluation.step_time_s
        )
        for name in CATEGORIES
    }
    return total


def _host_warnings(layout: Layout) -> tuple[str, ...]:
    """A warning for each node group whose host memory can't hold the offloaded layer inputs."""
    if layout.plan.offload != "activations":
        return ()
    width = layout.stack.recipe(layout.plan.precision).activation_bytes
    rows = batch_of(layout)
    per_layer = rows.residual_tokens * layout.model.hidden * width * rows.micro_batches
    needed: dict[int, float] = {}
    for c, size in zip(layout.classes, per_layer * rows.layers, strict=True):
        group = layout.cluster.groups[c.group]
        share = sum(g.name == c.gpu.name for g in group.gpus)
        needed[c.group] = needed.get(c.group, 0.0) + float(size) * share
    return tuple(
        f"offloaded activations need {size / GIB:,.0f} GiB of host memory on each "
        f"{layout.cluster.groups[i].name} node, which has "
        f"{layout.cluster.groups[i].node.host_memory_bytes / GIB:,.0f} GiB"
        for i, size in needed.items()
        if size > layout.cluster.groups[i].node.host_memory_bytes
    )


def _plan_mapping(scenario: Scenario) -> dict[str, object]:
    from simulator.spec.dump import plan_to_mapping

    assert scenario.plan is not None
    return dict(plan_to_mapping(scenario.plan))


def _time_assumption(sigma: float, basis: str) -> str:
    return f"step time: lognormal error, sigma {sigma:.2f} ({basis})"


def _sources(layout: Layout) -> tuple[str, ...]:
    """Where the numbers of this run are from."""
    rows = [
        f"{gpu.name}: kernel rates {rates(gpu).basis} ({rates(gpu).source})"
        for gpu in layout.cluster.gpu_types
    ]
    return (*rows, f"stack {layout.stack.name}: {layout.stack.title}")
