"""``gpumix purchase``: candidates in, a ranking with costs and a verdict out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.commands.console import JsonOption, print_json, stderr_console, stdout_console

if TYPE_CHECKING:
    import datetime

    from simulator.planner.purchase_result import PurchaseResult
    from simulator.spec.scenario import Scenario

EXIT_DOES_NOT_FIT = 3


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("purchase")(purchase)


def purchase(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A scenario file, or a shipped one by name.")
    ],
    json: JsonOption = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write report.html, result.json.")
    ] = None,
    date: Annotated[
        str | None,
        typer.Option("--date", metavar="YYYY-MM-DD", help="Day whose prices count; today."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", help="What may be spent; also searches what to buy for it."),
    ] = None,
) -> None:
    """Compare what could be bought, rented, added or kept: cost, time, energy, and how sure."""
    from simulator.planner.purchase import evaluate_purchase
    from simulator.spec.scenario import load_scenario

    loaded = load_scenario(scenario)
    on = _day(date)

    def answer(notify: Callable[[str], None]) -> PurchaseResult:
        return evaluate_purchase(loaded, on=on, budget=budget, notify=notify)

    result = answer(lambda _: None) if json else _with_progress(answer, loaded)
    if json:
        print_json(result.to_json())
    else:
        from simulator.report.purchase_terminal import print_purchase

        print_purchase(result, stdout_console())
    if out is not None:
        from simulator.report.purchase_page import write_purchase

        report = write_purchase(out, loaded, result)
        stderr_console().print(f"report: {report}")
    if not any(c.fits for c in result.candidates):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _with_progress(
    answer: Callable[[Callable[[str], None]], PurchaseResult], scenario: Scenario
) -> PurchaseResult:
    """Run with a progress bar on standard error that names what is being planned."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    given = scenario.purchase or {}
    total = len(given.get("candidates") or ())
    columns = (
        TextColumn("planning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def notify(name: str) -> None:
            # What a budget search looks at isn't known beforehand: the total grows with it.
            nonlocal done
            bar.update(task, description=name, completed=done, total=max(total, done + 1))
            done += 1

        return answer(notify)


def _day(text: str | None) -> datetime.date | None:
    import datetime

    from simulator.errors import Problem, UserError

    if text is None:
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise UserError(
            Problem("--date", f"{text[:40]!r} is not a date", "write it as 2026-01-31")
        ) from None
