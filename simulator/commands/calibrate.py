"""``gpumix calibrate``: fit a stack's calibration to measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.commands.console import JsonOption, print_json, print_table, stderr_console

if TYPE_CHECKING:
    from simulator.interop.fitting import TimedRun


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(calibrate)


def calibrate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="CSV files of measured runs, or folders of them."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Calibration YAML to write.")],
    gpu: Annotated[str | None, typer.Option(help="Fit only rows on this GPU.")] = None,
    stack: Annotated[str | None, typer.Option(help="Fit only rows of this stack.")] = None,
    folds: Annotated[
        bool, typer.Option("--folds/--no-folds", help="Also fit without each source and GPU.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Fit efficiency, network and overhead factors to measured runs, with held-out errors."""
    from simulator.errors import Problem, UserError
    from simulator.interop.calibrating import build_table, held_out, with_spreads, write_table

    if out.is_dir():
        raise UserError(Problem("--out", f"{str(out)!r} is a directory", "name a file"))
    found, skipped = _read(runs, gpu, stack)
    if not found:
        reasons = "; ".join(dict.fromkeys(skipped)) or "none has a measured time"
        raise UserError(Problem("RUNS", "no row can be fitted", reasons[:300]))
    console = stderr_console()
    with console.status("fitting") as status:
        table = build_table(found, status.update)
        if folds:
            sources = held_out(found, table, lambda r: r.source, status.update)
            gpus = held_out(found, table, lambda r: r.gpu, status.update)
            table = with_spreads(table, sources, gpus)
    write_table(out, table)
    if json:
        print_json({"out": str(out), "rows": len(found), "skipped": len(skipped), **table})
        return
    print_table(
        ("group", "rows", "MAPE", "sigma", "gemm", "attention", "memory", "network", "fabric"),
        [_line(name, entry) for name, entry in table["groups"].items()],
        right=(1, 2, 3, 4, 5, 6, 7, 8),
    )
    console.print(f"{len(found)} rows fitted, {len(skipped)} left out; written to {out}")


def _line(name: str, entry: dict[str, object]) -> list[str]:
    cells = entry["parameters"]
    error, rows = entry.get("fit_error"), entry["rows"]
    assert isinstance(cells, dict) and isinstance(rows, dict)
    mape = f"{error['mape']:.1%}" if isinstance(error, dict) else "-"
    factors = [f"{cells[n]['value']:.2f}" for n in
               ("gemm", "attention", "memory", "network", "fabric")]  # fmt: skip
    sigma = entry["sigma"]
    return [name, str(sum(rows.values())), mape, f"{sigma:.3f}", *factors]


def _read(
    paths: list[Path], gpu: str | None, stack: str | None
) -> tuple[list[TimedRun], list[str]]:
    """Rows that can be fitted, and the reasons of those that can't."""
    import hardware_db
    from simulator.interop.calibrating import timed_runs
    from simulator.interop.runs import read_cases

    files = [f for p in paths for f in (sorted(p.glob("*.csv")) if p.is_dir() else [p])]
    wanted = hardware_db.gpu(gpu).name if gpu else None
    found: list[TimedRun] = []
    skipped: list[str] = []
    for path in files:
        cases = list(read_cases(path))
        usable = timed_runs(cases)
        skipped.extend(c.reason or "no measured time or an open micro-batch"
                       for c in cases if c.layout is None)  # fmt: skip
        found.extend(
            r for r in usable
            if (wanted is None or r.gpu == wanted)
            and (stack is None or r.layout.stack.name == stack)
        )  # fmt: skip
    return found, skipped
