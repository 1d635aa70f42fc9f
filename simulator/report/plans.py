"""The planner's answer: one JSON document, YAML scenarios, and a screen for a person."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simulator.analysis.uncertainty import layout_time_spread, rate_range, time_range
from simulator.report.words import percent, probability
from simulator.spec.dump import dump_yaml, plan_to_mapping, scenario_to_mapping
from simulator.units import format_seconds

if TYPE_CHECKING:
    from simulator.planner.baselines import Baseline
    from simulator.planner.candidate import Candidate
    from simulator.planner.recommend import Ranked, Recommendation


def plan_document(answer: Recommendation) -> dict[str, Any]:
    """What ``--json`` prints: ``plans`` best first, ``baselines``, ``pareto_front``."""
    plans = [_ranked(r) for r in answer.plans]
    single = _best_alone(answer)
    return {
        "title": answer.scenario.title,
        "objective": answer.request.objective,
        "accepted_risk": answer.scenario.risk,
        "evaluator": answer.evaluator,
        "verdict": answer.sentences[0] if answer.sentences else "",
        "sentences": list(answer.sentences),
        "plans": plans,
        "pareto_front": [
            {key: row[key] for key in ("kind", "tokens_per_s", "headroom", "plan")}
            | ({"cost_per_1e9_tokens": row["cost_per_1e9_tokens"]}
               if "cost_per_1e9_tokens" in row else {})
            for row in map(_ranked, answer.front)
        ],
        "baselines": {
            **{name: _baseline(b) for name, b in answer.baselines.items()},
            "best_homogeneous": None if single is None else _candidate(single),
        },
        "each_gpu_type_alone": {
            gpu: None if c is None else _candidate(c) for gpu, c in answer.alone.items()
        },
        "smallest_change": answer.smallest_change or None,
    }  # fmt: skip


def _best_alone(answer: Recommendation) -> Candidate | None:
    return max(
        (c for c in answer.alone.values() if c is not None),
        key=lambda c: c.tokens_per_s,
        default=None,
    )


def _candidate(c: Candidate) -> dict[str, Any]:
    step = time_range(c.step_time_s, layout_time_spread(c.layout))
    rate = rate_range(float(c.layout.workload.tokens_per_step), step)
    return {
        "kind": c.kind,
        "gpus": c.gpus,
        "step_time_s": step.p50,
        "step_time_s_p10": step.p10,
        "step_time_s_p90": step.p90,
        "tokens_per_s": rate.p50,
        "tokens_per_s_p10": rate.p10,
        "tokens_per_s_p90": rate.p90,
        "oom_risk": c.oom_risk,
        "headroom": c.headroom,
        "step_time_bound_s": c.bound_s,
        "gap": c.gap,
        "plan": plan_to_mapping(c.layout.plan),
    }


def _ranked(r: Ranked) -> dict[str, Any]:
    data = _candidate(r.candidate) | {k: v for k, v in asdict(r.measures).items() if v is not None}
    data["tokens_per_s"] = r.candidate.tokens_per_s
    data["why_not_first"] = r.why_not_first or None
    return data


def _baseline(b: Baseline) -> dict[str, Any]:
    data: dict[str, Any] = {"fits": b.fits, "reason": b.reason or None}
    return data if b.plan is None else data | _candidate(b.plan)


def plan_files(answer: Recommendation) -> dict[str, str]:
    """``plans.json`` and for every plan a scenario that simulate, replay and export take."""
    document = json.dumps(plan_document(answer), indent=2, allow_nan=False, ensure_ascii=False)
    files = {"plans.json": document + "\n"}
    for number, r in enumerate(answer.plans, start=1):
        title = f"{answer.scenario.title}: plan {number}, {r.candidate.kind}"
        made = replace(answer.scenario, plan=r.candidate.layout.plan, title=title, sweep={})
        files[f"plan-{number}.yaml"] = dump_yaml(scenario_to_mapping(made))
    return files


def print_plans(answer: Recommendation, console: Console) -> None:
    """Verdict first, then the plans, the baselines and what each GPU type does alone."""
    style = "bold green" if answer.plans else "bold red"
    console.print(Text(answer.sentences[0], style=style))
    for sentence in answer.sentences[1:]:
        console.print(Text(sentence))
    if answer.smallest_change:
        console.print(Text(f"smallest change: {answer.smallest_change}"))
    console.print(_table(answer))
    for number, r in enumerate(answer.plans, start=1):
        console.print(Text(f"plan {number}: {plan_words(r.candidate)}"))
        if r.why_not_first:
            console.print(Text(f"        {r.why_not_first}", style="dim"))


def _table(answer: Recommendation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("tokens/s", "range", "step", "risk", "free", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, r in enumerate(answer.plans, start=1):
        table.add_row(f"{number}  {r.candidate.kind}", *_cells(r.candidate), style="bold")
    for name, b in answer.baselines.items():
        label = name.replace("_", " ")
        if b.plan is None:
            table.add_row(f"   {label}: {b.reason}")
        else:
            table.add_row(f"   {label}" + ("" if b.fits else " (does not fit)"), *_cells(b.plan))
    single = answer.alone if answer.scenario.cluster.is_mixed else {}
    for gpu, c in single.items():
        if c is None:
            table.add_row(f"   {gpu} alone: nothing fits")
        else:
            table.add_row(f"   {c.kind}", *_cells(c))
    return table


def _cells(c: Candidate) -> list[str]:
    step = time_range(c.step_time_s, layout_time_spread(c.layout))
    rate = rate_range(float(c.layout.workload.tokens_per_step), step)
    return [
        f"{rate.p50:,.0f}",
        f"{rate.p10:,.0f} to {rate.p90:,.0f}",
        format_seconds(step.p50),
        probability(c.oom_risk),
        percent(max(c.headroom, 0.0)),
        "-" if c.gap is None else f"within {percent(c.gap)}",
    ]


def plan_words(c: Candidate) -> str:
    """A plan in one line."""
    plan = c.layout.plan
    degrees = {"dp": c.layout.dp, "tp": plan.tp, "pp": c.layout.classes[0].pp, "cp": plan.cp,
               "ep": plan.ep, "vpp": plan.vpp}  # fmt: skip
    head = [f"{name} {n}" for name, n in degrees.items() if n > 1 or name == "dp"]
    head += [plan.sharding.name.lower(), f"recompute {plan.recompute.name.lower()}"]
    if plan.offload != "none":
        head.append(f"offload {plan.offload}")
    rows = []
    for cls in c.layout.classes:
        text = f"{cls.ranks:,} {cls.gpu.name}: "
        if cls.pp > 1:
            text += f"stage {cls.stage}, {cls.layers} layers, "
        text += f"{cls.micro_batches} x {cls.micro_batch}"
        if cls.pp == 1:
            text += f", {cls.state_share:.2%} of the state each"
        rows.append(text)
    shown = rows if len(rows) <= 6 else [*rows[:5], f"... {len(rows) - 5} more"]
    return ", ".join(head) + "; " + "; ".join(shown)
