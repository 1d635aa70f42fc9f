"""The report of a purchase: verdict, comparison, figures, what would change it, its basis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.planner.purchase_verdict import compact, range_text, significant
from simulator.report import html
from simulator.report.prediction_page import versions_line
from simulator.report.purchase_figures import (
    cash_figure,
    colour_of,
    cost_time_figure,
    costs_figure,
    headroom_figure,
    tornado_figure,
)
from simulator.report.words import percent
from simulator.report.write import REPORT, RESULT, prepare_directory, write_files
from simulator.spec.dump import dump_yaml
from simulator.units import format_seconds

if TYPE_CHECKING:
    from simulator.analysis.prediction import Range
    from simulator.planner.purchase_result import CandidateResult, PurchaseResult
    from simulator.spec.scenario import Scenario

RANKED_BY = {
    "cost_per_1e9_tokens": "cost per token",
    "total_cost": "total cost",
    "time_to_train_s": "time",
    "energy_kwh": "energy",
}


def write_purchase(out: Path, scenario: Scenario, result: PurchaseResult) -> Path:
    """Write report.html and result.json; returns the path of the page.

    Raises:
        UserError: ``out`` is a file or can't be written.
    """
    prepare_directory(out)
    document = json.dumps(result.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
    write_files(out, {RESULT: document + "\n", REPORT: purchase_page(scenario, result)})
    return out / REPORT


def purchase_page(scenario: Scenario, result: PurchaseResult) -> str:
    """The whole page as text."""
    fits = any(c.fits for c in result.candidates)
    sections = [html.Section("compare", "Comparison", [_comparison(result), _broken(result)])]
    if fits:
        sections += [
            html.Section("time", "Cost against time",
                         [html.figure(cost_time_figure(result), "figure-cost-time"),
                          _chances(result)]),
            html.Section("cash", "Cash flow and costs",
                         [html.figure(cash_figure(result), "figure-cash"),
                          html.figure(costs_figure(result), "figure-costs"), _costs(result)]),
            html.Section("decides", "What drives the decision",
                         [html.figure(tornado_figure(result), "figure-tornado")]),
            html.Section("change", "What would change the answer", [_changes(result)]),
        ]  # fmt: skip
    sections.append(
        html.Section("memory", "Memory headroom and plans",
                     [html.figure(headroom_figure(result), "figure-headroom"), _plans(result)])
    )  # fmt: skip
    if fits:
        sections.append(html.Section("goodput", "Interruptions", [_goodput(result)]))
    if result.search is not None or result.old_worth is not None:
        sections.append(html.Section("more", "Budget and old cluster", _more(result)))
    sections += [
        html.Section("assumed", "What this rests on", [_assumptions(result)]),
        html.Section("inputs", "Inputs", [html.code("Scenario as given",
                                                    dump_yaml(dict(scenario.given)))]),
    ]  # fmt: skip
    subtitle = (
        f"{', '.join(result.workload_names)}; {result.horizon_years:g} years from {result.date}, "
        f"prices of region {result.region!r} in {result.currency}"
    )
    lead = "\n".join([_banner(result), html.notice("Warnings", result.warnings)])
    return html.page(result.title, sections, subtitle=subtitle, lead=lead, footer=versions_line())


def _banner(result: PurchaseResult) -> str:
    first, _, rest = result.verdict.partition(". ")
    tone = "fits" if result.feasible else "does not fit"
    return html.banner(tone, first if first.endswith(".") else first + ".", rest)


def _range(r: Range | None) -> str:
    return "–" if r is None else range_text(r, compact)


def _times(r: Range | None) -> str:
    return "–" if r is None else range_text(r, format_seconds)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if round(value) else "–"


def _comparison(result: PurchaseResult) -> str:
    money = result.currency
    heads = ["candidate", f"{money} per 10⁹ tokens", f"total, {money}", "time of a run",
             "energy of a run, kWh", "in the way"]  # fmt: skip
    rows, colours = [], {}
    for place, c in enumerate(result.candidates):
        r = c.ranges
        colours[place] = colour_of(place)
        rows.append(
            [f"{place + 1}. {c.name}", _range(r.get("cost_per_1e9_tokens")),
             _range(r.get("total_cost")), _times(r.get("time_to_train_s")),
             _range(r.get("energy_kwh")), _status(c)]
        )  # fmt: skip
    note = html.paragraph(
        "Medians, with the tenth to ninetieth percentile. A run is one run of every workload; "
        "its time counts interruptions. Ranked by "
        f"{RANKED_BY[result.objective]}, what breaks a constraint below."
    )
    return html.table(heads, rows, numbers=range(1, 5), colours=colours) + note


def _status(c: CandidateResult) -> str:
    if not c.fits:
        return "doesn't fit"
    return "; ".join(c.violations) or "nothing"


def _broken(result: PurchaseResult) -> str:
    lines = [f"{c.name}: {c.missing}" for c in result.candidates if not c.fits]
    return html.notice("Doesn't fit", lines)


def _chances(result: PurchaseResult) -> str:
    names = [c.name for c in result.candidates if c.fits]
    chance = {(c.a, c.b): c.probability for c in result.comparisons}
    rows = []
    for a in names:
        cells = [a]
        for b in names:
            p = chance.get((a, b), 1.0 - chance[b, a] if (b, a) in chance else None)
            cells.append("" if p is None else f"{100 * min(max(p, 0.01), 0.99):.0f} %")
        rows.append(cells)
    if len(names) < 2:
        return ""
    heads = ["better than →", *names]
    return html.table(heads, rows, numbers=range(1, len(heads)),
                      caption="Probability that the row beats the column")  # fmt: skip


def _costs(result: PurchaseResult) -> str:
    shown = [c for c in result.candidates if c.fits]
    names = [n for n in shown[0].costs if any(c.costs.get(n) for c in shown)]
    rows = [[n, *(_amount(c.costs.get(n, 0.0)) for c in shown)] for n in names]
    rows.append(["sum", *(_amount(sum(c.costs.values())) for c in shown)])
    rows += [
        ["paid for hardware", *(_range(c.ranges["upfront_cost"]) for c in shown)],
        ["worth today", *(_amount(c.present_cost or 0.0) for c in shown)],
        ["a run", *(_range(c.ranges["cost_per_run"]) for c in shown)],
        ["idle time", *(_range(c.ranges["idle_cost"]) for c in shown)],
        ["PFLOP/s-day", *(_range(c.ranges["cost_per_pflop_day"]) for c in shown)],
        ["break-even, h/year", *("–" if c.break_even_hours_per_year is None
                                else f"{c.break_even_hours_per_year:,.0f}" for c in shown)],
        ["CO₂ of a run, kg", *(_range(c.ranges["co2_kg"]) for c in shown)],
    ]  # fmt: skip
    heads = [result.currency, *(c.name for c in shown)]
    note = html.paragraph(
        "Components at the medians. Worth today: all payments at the rate of interest. Idle time: "
        "the share of what is paid in any case. PFLOP/s-day: of model FLOPs, no recomputation. "
        "Break-even: busy hours a year from which owning beats renting the same GPUs on demand."
    )
    return html.table(heads, rows, numbers=range(1, len(heads)), totals=[len(names)]) + note


def _changes(result: PurchaseResult) -> str:
    rivals = result.feasible
    if len(rivals) < 2:
        return html.paragraph("There is no second candidate that meets the constraints.")
    if not result.break_even:
        return html.paragraph(
            f"No single input, from a tenth to ten times its median, puts {rivals[1].name!r} ahead "
            f"of {rivals[0].name!r}."
        )
    unit = {a.name: a.unit for a in result.assumptions}
    rows = [
        [b.name, f"{significant(b.median)} {unit.get(b.name, '')}".strip(), significant(b.value),
         percent(abs(b.value / b.median - 1)), "yes" if b.inside else "no"]
        for b in result.break_even
    ]  # fmt: skip
    note = html.paragraph(
        f"At these values {rivals[0].name!r} and {rivals[1].name!r} are equal, the other inputs at "
        "their medians."
    )
    heads = ["input", "taken as", "break-even at", "away", "within its range"]
    return note + html.table(heads, rows, numbers=(1, 2, 3))


def _plans(result: PurchaseResult) -> str:
    rows = []
    for c in result.candidates:
        for w in c.workloads:
            p = w.prediction
            keys = ("tp", "pp", "dp", "micro_batch", "sharding", "recompute")
            plan = ", ".join(f"{k} {p.plan[k]}" for k in keys if k in p.plan)
            gpus = " + ".join(f"{n:,} {name}" for name, n in p.gpus.items())
            rows.append(
                [
                    c.name, w.name, gpus, f"{p.stack}: {plan}", f"{p.tokens_per_s.p50:,.0f}",
                    percent(p.mfu), percent(max(w.headroom, 0.0)), _times(w.time_to_train_s),
                ]
            )  # fmt: skip
    heads = ["candidate", "workload", "on", "plan", "tokens/s", "MFU", "memory free", "run"]
    return html.table(heads, rows, numbers=(4, 5, 6, 7))


def _goodput(result: PurchaseResult) -> str:
    rows = []
    for c in result.candidates:
        if not c.fits:
            continue
        r, s = c.ranges["goodput"], c.goodput_runs
        rows.append(
            [c.name, f"{percent(r.p50)} ({percent(r.p10)} to {percent(r.p90)})",
             "–" if s is None else f"{percent(s.p10)} to {percent(s.p90)}",
             format_seconds(c.checkpoint_interval_s or 0.0), str(c.spares),
             f"{c.rated_power_w / 1e3:,.1f}"]
        )  # fmt: skip
    heads = ["candidate", "expected goodput", "single runs (simulated)", "checkpoint every",
             "spare nodes", "rated power, kW"]  # fmt: skip
    note = html.paragraph(
        "Goodput is the share of the clock that becomes training progress: interruptions, work "
        "lost since the last checkpoint (Daly's interval), restarts and waits for repairs counted."
    )
    return html.table(heads, rows, numbers=range(1, 6)) + note


def _more(result: PurchaseResult) -> list[str]:
    return [html.paragraph(line) for line in more_lines(result)]


def more_lines(result: PurchaseResult) -> list[str]:
    """Sentences about the budget search and the standing cluster."""
    lines = []
    s, o, money = result.search, result.old_worth, result.currency
    if s is not None:
        best = " or ".join(repr(name) for name in s.best) or "nothing that can do the work"
        lines.append(
            f"For {s.budget:,.0f} {money}: {best} trains most ({s.combinations:,} mixes, "
            f"{s.planned:,} of them planned, the others ruled out by their bounds)."
        )
    if o is not None:
        keep = o.value_in_use > o.resale_value
        lines.append(
            f"Beside {o.beside!r} the standing cluster is worth {o.value_in_use:,.0f} {money} in "
            f"use over the horizon (its work at the new one's cost, less {o.running_cost:,.0f} to "
            f"run it), against {o.resale_value:,.0f} from selling it today: "
            f"{'keep it running for itself' if keep else 'sell it'}."
        )
    return lines


def _assumptions(result: PurchaseResult) -> str:
    rows = []
    for a in result.assumptions:
        value = significant(a.amount.value)
        spread = (
            "" if a.amount.is_certain
            else f"{significant(a.amount.low)} to {significant(a.amount.high)}"
        )  # fmt: skip
        day = "" if a.date is None else a.date.isoformat() + (" (old)" if a.stale else "")
        rows.append([a.name, value, spread, a.unit, a.basis, day, a.source])
    heads = ["input", "median", "p10 to p90", "unit", "basis", "date", "source"]
    return html.table(heads, rows, numbers=(1, 2))
