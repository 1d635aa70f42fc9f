"""``gpumix simulate`` and ``gpumix estimate``: a scenario in, throughput and OOM risk out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.commands.console import JsonOption, print_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from simulator.analysis.prediction import Prediction
    from simulator.evaluate.engine import EngineOptions
    from simulator.spec.scenario import Scenario

EXIT_DOES_NOT_FIT = 3

#: Largest slow-down of a rank class that the engine is asked for.
_SLOWEST = 1000.0

ScenarioArgument = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A scenario file, or a shipped one by name.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write report.html, result.json, trace.json, CSVs."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("simulate")(simulate)
    app.command("estimate")(estimate)


def simulate(
    scenario: ScenarioArgument,
    json: JsonOption = False,
    out: OutOption = None,
    jitter: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Sigma of lognormal noise on every task.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(help="CLASS=FACTOR: rank class that computes slower, for example 3=1.5."),
    ] = None,
    contention: Annotated[
        bool, typer.Option("--contention", help="Let flows that share a link share its rate.")
    ] = False,
) -> None:
    """Run one step in the discrete-event engine: step time, tokens/s, memory, OOM risk."""
    from simulator.evaluate.engine import EngineOptions

    loaded = _with_plan(scenario)
    options = EngineOptions(
        seed=seed, jitter=jitter, stragglers=_stragglers(straggler or []), contention=contention
    )
    _answer(loaded, json, out, options)


def estimate(
    scenario: ScenarioArgument,
    json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Price one plan in closed form, without the engine: the fast answer."""
    _answer(_with_plan(scenario), json, out, None)


def _with_plan(name: str) -> Scenario:
    from simulator.errors import Problem, UserError
    from simulator.spec.scenario import load_scenario

    loaded = load_scenario(name)
    if loaded.plan is None:
        raise UserError(
            Problem("plan", "missing", "say how the work is laid out (plan: {tp: 1, ...})", name)
        )
    return loaded


def _stragglers(given: list[str]) -> dict[int, float]:
    from simulator.errors import Problem, UserError

    found = {}
    for text in given:
        left, _, right = text.partition("=")
        try:
            number, factor = int(left), float(right)
        except ValueError:
            number, factor = -1, 0.0
        if number < 0 or not 0.0 < factor <= _SLOWEST:
            hint = f"a rank class and a factor above 0, at most {_SLOWEST:g}, for example 3=1.5"
            raise UserError(Problem("--straggler", f"{text!r} isn't CLASS=FACTOR", hint))
        found[number] = factor
    return found


def _answer(
    scenario: Scenario, as_json: bool, out: Path | None, options: EngineOptions | None
) -> None:
    """Predict, print, write the report, and say by exit code whether the plan fits."""
    from contextlib import nullcontext

    from simulator.analysis.predict import Evaluator, predict

    if out is not None:
        from simulator.report.write import prepare_directory

        prepare_directory(out)
    # Suggestions price a dozen other plans: only where somebody reads them.
    evaluator: Evaluator = "closed form" if options is None else "engine"
    with_suggestions = options is not None or out is not None
    # Rich is loaded only for a person: machines shouldn't wait for it.
    with nullcontext() if as_json else stderr_console().status(f"{evaluator}: {scenario.title}"):
        prediction, layout, evaluation = predict(
            scenario, evaluator=evaluator, options=options, with_suggestions=with_suggestions
        )
    if as_json:
        print_json(prediction.to_json())
    else:
        from simulator.report.terminal import print_prediction

        print_prediction(prediction, stdout_console())
    if out is not None:
        from simulator.report.write import write_report

        report = write_report(out, scenario, prediction, layout, evaluation)
        stderr_console().print(f"report: {report}")
    _exit(prediction)


def _exit(prediction: Prediction) -> None:
    if prediction.verdict == "does not fit":
        raise typer.Exit(EXIT_DOES_NOT_FIT)
