"""``gpumix replay``: runs a plan on this machine, predicted beside measured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from simulator.commands.console import (
    JsonOption,
    print_json,
    print_table,
    stderr_console,
    stdout_console,
)

if TYPE_CHECKING:
    from real_runner.launch import RunFailure
    from real_runner.train import RunSettings
    from simulator.analysis.emulated import Emulation
    from simulator.analysis.prediction import Prediction
    from simulator.spec.layout import Layout
    from simulator.spec.scenario import Scenario

MEASURED, RUNS = "measured.json", "runs.csv"
_TERMINATED = 143


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)


def replay(
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN", help="A scenario with a plan: a file, or a shipped one."),
    ],
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps to measure (the scenario's, or 10).")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", min=0, help="Further steps before them (or 2).")
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help=f"Write {MEASURED} and {RUNS}."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which a hang ends the run.")
    ] = 600.0,
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, or auto: CUDA where there is any.")
    ] = "auto",
) -> None:
    """Run a plan on this machine's devices: predicted beside measured time and memory."""
    from simulator.analysis.emulated import predict_emulated, replay_layout, scenario_emulation

    scenario = _with_plan(plan)
    layout = replay_layout(scenario)
    emulation = scenario_emulation(scenario, layout)
    settings = _settings(scenario, emulation, steps, warmup, device, timeout)
    if out is not None:
        from simulator.report.write import prepare_directory

        prepare_directory(out)
    prediction = predict_emulated(scenario, layout, emulation)
    measured, failure = _run(layout, settings, quiet=json)
    if measured is None and failure is None:
        return  # another rank of a torchrun job reports
    from simulator.analysis.replayed import replay_document

    document = replay_document(layout, prediction, emulation, measured, _failed(failure))
    if out is not None:
        _write(out, layout, emulation, document, failure)
    if json:
        print_json(document)
    if failure is not None:
        _fail(failure)
    if not json:
        _print(document, prediction)
    if out is not None:
        stderr_console().print(f"wrote {out / MEASURED} and {out / RUNS}")


def _with_plan(name: str) -> Scenario:
    from simulator.errors import Problem, UserError
    from simulator.spec.scenario import load_scenario

    loaded = load_scenario(name)
    if loaded.plan is None:
        raise UserError(
            Problem("plan", "missing", "say what is to be run (plan: {sharding: zero3, ...})", name)
        )
    return loaded


def _settings(
    scenario: Scenario,
    emulation: Emulation,
    steps: int | None,
    warmup: int | None,
    device: str,
    timeout_s: float,
) -> RunSettings:
    """Options over the scenario's ``replay`` section. Raises UserError without torch."""
    from simulator.errors import Problem, UserError

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(Problem("--device", f"{device!r} is unknown", "cpu, cuda or auto"))
    try:
        import torch  # noqa: F401
    except ImportError as error:
        text = f"running a plan needs torch, which can't be imported ({error})"
        raise UserError(Problem("", text, "pip install 'gpumix[runner]'")) from None
    from real_runner.train import RunSettings

    section = scenario.replay or {}
    return RunSettings(
        steps=steps if steps is not None else int(section.get("steps", 10)),
        warmup=warmup if warmup is not None else int(section.get("warmup", 2)),
        device=device,
        timeout_s=timeout_s,
        threads=None if section.get("threads") is None else int(section["threads"]),
        slowdown=emulation.slowdown,
        memory_bytes=emulation.memory_bytes,
    )


def _run(
    layout: Layout, settings: RunSettings, *, quiet: bool
) -> tuple[dict[str, Any] | None, RunFailure | None]:
    """What was measured, or how the run failed."""
    from real_runner.launch import RunFailure, context_from_env, out_of_memory
    from real_runner.memory import is_out_of_memory
    from real_runner.train import run_plan

    count = settings.warmup + settings.steps
    text = f"running {count} steps on {layout.n_gpus} ranks, at most {settings.timeout_s:g} s"
    with nullcontext() if quiet else stderr_console().status(text), _ended_by_sigterm():
        try:
            return run_plan(layout, settings), None
        except RunFailure as failure:
            return None, failure
        except Exception as error:
            # Under torchrun this process is a rank itself.
            if context_from_env() is None or not is_out_of_memory(error):
                raise
            return None, out_of_memory(error)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command like an exception, so that the ranks are ended first."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(failure: RunFailure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "rank": failure.rank,
        "cause": failure.cause,
        "message": str(failure),
        "memory": failure.memory,
    }


def _fail(failure: RunFailure) -> NoReturn:
    """Says which rank failed, why and what it held; exits with 3 where memory ran out, else 1."""
    print(f"gpumix: the run ended early: {failure}", file=sys.stderr)
    if failure.memory:
        print(failure.memory, file=sys.stderr)
    elif failure.log:
        print(failure.log.rstrip(), file=sys.stderr)
    raise typer.Exit(failure.exit_code)


def _write(
    out: Path,
    layout: Layout,
    emulation: Emulation,
    document: dict[str, Any],
    failure: RunFailure | None,
) -> None:
    """measured.json and runs.csv, both or neither."""
    import json

    from simulator.interop.replay_row import runs_csv
    from simulator.report.write import write_files

    outcome, notes = "ok", "gpumix replay"
    measured = document["measured"]
    if failure is not None:
        outcome = "oom" if failure.cause == "oom" else "oom_or_failed"
        notes += f": {failure.cause} on rank {failure.rank}"
    else:
        notes += f": median of {len(measured['step_times_s'])} steps on {measured['device']}"
    row = runs_csv(layout, measured, outcome=outcome, notes=notes, emulated=emulation.is_any)
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_files(out, {MEASURED: text, RUNS: row})


def _print(document: dict[str, Any], prediction: Prediction) -> None:
    """Tables for a person: the whole step, then each rank."""
    from simulator.report.words import headline, signed_percent

    console = stdout_console()
    console.print(f"{prediction.title}: predicted {prediction.verdict}")
    console.print(headline(prediction))
    predicted, measured, errors = (document[k] for k in ("predicted", "measured", "errors"))
    rows = [
        (words, show(predicted[key]), show(measured[key]), signed_percent(errors[key]))
        for words, key, show in (
            ("step time", "step_time_s", _milliseconds),
            ("tokens/s", "tokens_per_s", _whole),
            ("peak allocated, fullest rank", "peak_allocated_bytes", _mib),
            ("exposed communication, most", "exposed_communication_s", _milliseconds),
        )
        if key in errors
    ]
    print_table(("", "predicted", "measured", "error"), rows, right=(1, 2, 3))
    print_table(
        ("rank", "device", "slowed", "work", "state", "step", "peak predicted", "measured",
         "error", "limit"),
        [_rank_cells(r) for r in document["ranks"]],
        right=(0, 2, 4, 5, 6, 7, 8, 9),
    )  # fmt: skip
    low, high = min(measured["step_times_s"]), max(measured["step_times_s"])
    console.print(f"steps took {_milliseconds(low)} to {_milliseconds(high)}")
    for line in document["warnings"]:
        stderr_console().print(f"warning: {line}")


def _rank_cells(rank: dict[str, Any]) -> tuple[str, ...]:
    from simulator.report.words import signed_percent

    limit = rank["memory_limit_bytes"]
    return (
        str(rank["rank"]),
        rank["gpu"],
        f"{rank['slowdown']:g}x",
        f"{rank['micro_batches']} x {rank['micro_batch']}",
        f"{rank['state_share']:.3g}",
        _milliseconds(rank["step_time_s"]),
        _mib(rank["predicted_peak_allocated_bytes"]),
        _mib(rank["peak_allocated_bytes"]),
        signed_percent(rank["peak_allocated_error"]),
        "" if limit is None else _mib(limit),
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _whole(value: float) -> str:
    return f"{value:,.0f}"
