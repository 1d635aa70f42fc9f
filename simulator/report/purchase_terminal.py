"""The answer of a purchase on one screen: verdict, ranking, what changes it, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simulator.planner.purchase_verdict import compact, range_text, significant
from simulator.report.purchase_page import more_lines
from simulator.report.words import percent
from simulator.units import format_seconds

if TYPE_CHECKING:
    from simulator.planner.purchase_result import CandidateResult, PurchaseResult

_MOST_CHANGES = 3


def print_purchase(result: PurchaseResult, console: Console) -> None:
    """Print the whole answer."""
    console.print(Text(result.verdict, style="bold green" if result.feasible else "bold red"))
    console.print(_ranking(result))
    for c in result.candidates:
        for line in c.violations:
            console.print(Text(f"{c.name}: {line}", style="yellow"))
        if c.missing:
            console.print(Text(f"{c.name}: {c.missing}", style="red"))
    unit = {a.name: a.unit for a in result.assumptions}
    for b in result.break_even[:_MOST_CHANGES]:
        where = "within its range" if b.inside else "outside its range"
        console.print(
            Text(f"break-even: {b.name} {significant(b.value)} {unit.get(b.name, '')} ({where}, "
                 f"taken as {significant(b.median)})")
        )  # fmt: skip
    for line in more_lines(result):
        console.print(Text(line))
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print(
        Text(
            f"{result.horizon_years:g} years from {result.date}, region {result.region}, "
            f"{result.currency}; ranges are p10 to p90; --out DIR writes the report with every "
            "assumption and its source", style="dim",
        )
    )  # fmt: skip


def _ranking(result: PurchaseResult) -> Table:
    """One line for each candidate: ranges of what it is ranked by, medians of the rest."""
    money = result.currency
    heads = {
        "cost_per_1e9_tokens": f"{money}/10^9 tokens",
        "total_cost": f"total {money}",
        "time_to_train_s": "run takes",
        "energy_kwh": "run kWh",
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("candidate")
    for head in (*heads.values(), "goodput", "memory free"):
        table.add_column(head, justify="right", no_wrap=True)
    for place, c in enumerate(result.candidates, 1):
        cells = ["doesn't fit", "", "", "", "", ""]
        if c.fits:
            cells = [_cell(name, c, result) for name in heads]
            cells += [percent(c.ranges["goodput"].p50), percent(max(c.headroom, 0.0))]
        table.add_row(f"{place}. {c.name}", *cells, style="" if c.is_feasible else "dim")
    return table


def _cell(name: str, c: CandidateResult, result: PurchaseResult) -> str:
    show = format_seconds if name == "time_to_train_s" else compact
    r = c.ranges[name]
    return range_text(r, show) if name == result.objective else show(r.p50)
