"""``gpumix plan``: a scenario in, the best plans and what they gain out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.commands.console import JsonOption, print_json, stderr_console, stdout_console
from simulator.commands.predict import EXIT_DOES_NOT_FIT, ScenarioArgument

if TYPE_CHECKING:
    from simulator.planner.recommend import Recommendation, Request


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    scenario: ScenarioArgument,
    objective: Annotated[
        str, typer.Option(help="throughput, cost (per token), deadline or energy.")
    ] = "throughput",
    risk: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Accepted risk of running out.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=50, help="How many plans.")] = 3,
    max_gpus: Annotated[int | None, typer.Option(min=1, help="Use at most so many GPUs.")] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="FIELD=VALUE of the plan: plan.tp=8; repeatable.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.0, help="Days for workload.tokens (objective deadline).")
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Run the best plans in the engine.")
    ] = True,
    json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write plans.json and a YAML for each plan."),
    ] = None,
) -> None:
    """Find the best plans: GPUMix splits, mixed pipelines, each GPU type alone."""
    from simulator.planner.recommend import recommend
    from simulator.spec.scenario import load_scenario

    request = _request(objective, risk, top, max_gpus, fix or [], deadline, engine)
    loaded = load_scenario(scenario)
    if json:
        answer = recommend(loaded, request)
    else:
        with stderr_console().status(f"planning: {loaded.title}"):
            answer = recommend(loaded, request)
    _show(answer, json, out)
    if not answer.plans:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _request(
    objective: str,
    risk: float | None,
    top: int,
    max_gpus: int | None,
    fix: list[str],
    deadline: float | None,
    engine: bool,
) -> Request:
    from simulator.errors import Problem, UserError
    from simulator.planner.objectives import OBJECTIVES
    from simulator.planner.recommend import Request

    chosen = next((o for o in OBJECTIVES if o == objective), None)
    if chosen is None:
        known = ", ".join(OBJECTIVES)
        raise UserError(Problem("--objective", f"{objective!r} is unknown", f"choose: {known}"))
    days = None if deadline is None else deadline * 86_400.0
    return Request(chosen, risk, top, max_gpus, _fixed(fix), days, engine)


def _fixed(given: list[str]) -> dict[str, Any]:
    import yaml

    from simulator.errors import Problem, UserError
    from simulator.spec.inputs import PlanInput

    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        key = name.strip().removeprefix("plan.")
        if not sign or key not in PlanInput.model_fields or key in ("assignment", "stage_layers"):
            problem = f"{text!r} fixes no field of the plan"
            raise UserError(Problem("--fix", problem, "for example --fix plan.tp=8"))
        found[key] = yaml.safe_load(value)
    return found


def _show(answer: Recommendation, as_json: bool, out: Path | None) -> None:
    from simulator.report.plans import plan_document, plan_files, print_plans

    if as_json:
        print_json(plan_document(answer))
    else:
        print_plans(answer, stdout_console())
    if out is not None:
        from simulator.report.write import prepare_directory, write_files

        prepare_directory(out)
        files = plan_files(answer)
        write_files(out, files)
        stderr_console().print(f"plans: {out}")
