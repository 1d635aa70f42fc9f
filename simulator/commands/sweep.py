"""``gpumix sweep``: every combination of some fields' values, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.commands.console import JsonOption, print_json, print_table, stderr_console
from simulator.commands.predict import EXIT_DOES_NOT_FIT, ScenarioArgument

if TYPE_CHECKING:
    from simulator.planner.executors import Executor
    from simulator.planner.results import ResultLog
    from simulator.planner.sweep import Row, Sweep

EXIT_INTERRUPTED = 130

#: Points that one process prices faster than workers start.
_FEW_POINTS = 64
_POINTS_FILE = "points.jsonl"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep")(sweep)


def sweep(
    scenario: ScenarioArgument,
    axis: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=VALUE,VALUE,...: for example plan.tp=1,2,4; may be repeated."),
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write report.html, points.csv, points.jsonl."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what an earlier run left in --out.")
    ] = False,
    engine: Annotated[
        bool, typer.Option("--engine", help="Run every point in the discrete-event engine.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine (default: by need).")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler: tcp://host:port.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 20,
) -> None:
    """Price every combination of values; impossible ones stay, with the reason."""
    from simulator.errors import Problem, UserError
    from simulator.planner.axes import parse_axis
    from simulator.planner.sweep import make_sweep
    from simulator.spec.scenario import load_scenario

    if resume and out is None:
        raise UserError(Problem("--resume", "needs the --out of the earlier run"))
    asked = make_sweep(
        load_scenario(scenario),
        [parse_axis(text) for text in axis or []],
        "engine" if engine else "closed form",
    )
    rows, is_complete = _run(asked, _executor(asked, jobs, dask), out, resume, quiet=json)
    _answer(asked, rows, json, top)
    if out is not None:
        from simulator.report.sweep_files import write_sweep

        for line in write_sweep(out, asked, rows):
            stderr_console().print(line)
    _exit(asked, rows, is_complete, out)


def _executor(asked: Sweep, jobs: int | None, dask: str | None) -> Executor:
    from simulator.planner.executors import DaskCluster, Here, LocalProcesses

    if dask is not None:
        return DaskCluster(dask)
    if jobs == 1 or (jobs is None and asked.n_points <= _FEW_POINTS):
        return Here()
    return LocalProcesses(jobs)


def _run(
    asked: Sweep, executor: Executor, out: Path | None, resume: bool, quiet: bool
) -> tuple[list[Row], bool]:
    """All rows in order, and whether none is missing (Ctrl-C ends early and keeps the rest)."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from simulator.planner.sweep import run_sweep

    log = _log(asked, out, resume)
    rows: dict[int, Row] = dict(log.rows) if log else {}
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=stderr_console(), transient=True, disable=quiet)
    is_complete = True
    try:
        with progress:
            bar = progress.add_task("points", total=asked.n_points, completed=len(rows))
            for row in run_sweep(asked, executor, rows):
                rows.setdefault(row["index"], row)
                if log:
                    log.add(row)
                progress.update(bar, completed=len(rows))
    except KeyboardInterrupt:
        is_complete = False
    finally:
        if log:
            log.close()
    return [rows[index] for index in sorted(rows)], is_complete


def _log(asked: Sweep, out: Path | None, resume: bool) -> ResultLog | None:
    if out is None:
        return None
    from simulator.planner.results import ResultLog, fingerprint
    from simulator.report.write import prepare_directory

    prepare_directory(out)
    log = ResultLog(out / _POINTS_FILE, fingerprint(asked.question()))
    log.open(resume=resume)
    return log


def _answer(asked: Sweep, rows: Sequence[Row], as_json: bool, top: int) -> None:
    from simulator.planner.sweep import ranked

    ordered = ranked(rows, asked.risk)
    if as_json:
        print_json(_document(asked, ordered))
        return
    console = _print_lead(asked, ordered)
    names = [axis.name for axis in asked.axes]
    columns = [*names, "tokens/s", "per GPU", "step", "MFU", "GiB", "OOM risk", "verdict"]
    table = [_cells(row, names) for row in ordered[:top]]
    print_table(columns, table, right=range(len(names), len(columns) - 1))
    if len(ordered) > top:
        console.print(f"{len(ordered) - top:,} more points (--top, --out)")


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    from simulator.planner.sweep import is_priced
    from simulator.report.words import gib, percent, probability
    from simulator.units import format_seconds

    values = [_text(row["values"][name]) for name in names]
    if not is_priced(row):
        return [*values, "", "", "", "", "", "", row["reason"]]
    return [
        *values,
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        format_seconds(row["step_time_s"]),
        percent(row["mfu"]),
        gib(row["device_bytes"]),
        probability(row["oom_risk"]),
        row["status"],
    ]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _print_lead(asked: Sweep, ordered: Sequence[Row]) -> Any:
    """The first lines: what is best, what it changes, how many points are impossible and why."""
    from simulator.commands.console import stdout_console
    from simulator.planner.sweep import reasons
    from simulator.report.sweep_words import best_sentence

    console = stdout_console()
    console.print(best_sentence(asked, ordered), markup=False)
    for note in asked.notes:
        console.print(note, markup=False)
    why = reasons(ordered)
    total = sum(why.values())
    if total:
        console.print(f"{total:,} of {asked.n_points:,} points are impossible:")
        for reason, count in list(why.items())[:5]:
            console.print(f"  {count:>6,} × {reason}", markup=False)
        if len(why) > 5:
            console.print(f"  and {len(why) - 5} other reasons")
    return console


def _document(asked: Sweep, ordered: Sequence[Row]) -> dict[str, Any]:
    from simulator.planner.sweep import best_row, differences, reasons

    best = best_row(ordered, asked.risk)
    changes = differences(asked, best) if best else {}
    return {
        "title": asked.title,
        "evaluator": asked.evaluator,
        "axes": {axis.name: list(axis.values) for axis in asked.axes},
        "accepted_risk": asked.risk,
        "n_points": asked.n_points,
        "n_done": len(ordered),
        "infeasible": reasons(ordered),
        "notes": list(asked.notes),
        "best": best,
        "best_changes": {k: {"from": a, "to": b} for k, (a, b) in changes.items()},
        "points": list(ordered),
    }


def _exit(asked: Sweep, rows: Sequence[Row], is_complete: bool, out: Path | None) -> None:
    from simulator.planner.sweep import best_row

    if not is_complete:
        kept = f"; --resume --out {out} goes on" if out else " (with --out they would be kept)"
        stderr_console().print(
            f"interrupted: {len(rows):,} of {asked.n_points:,} points done{kept}", markup=False
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    if best_row(rows, asked.risk) is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
