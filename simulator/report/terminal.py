"""The answer on one screen: verdict first, then speed, time, memory, what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from simulator.report.words import (
    TIME_LABELS,
    fullest_by_gpu,
    headline,
    memory_label,
    percent,
    probability,
    signed_percent,
    stage_suffix,
)
from simulator.units import GIB, format_seconds

if TYPE_CHECKING:
    from simulator.analysis.prediction import Prediction

_COLOURS = {"fits": "green", "risky": "yellow", "does not fit": "red"}
_BAR_WIDTH = 28

#: Smaller shares of the step are not worth a line.
_SMALLEST_SHARE = 0.002


def print_prediction(p: Prediction, console: Console) -> None:
    """Print the whole answer."""
    console.print(Text(headline(p), style=f"bold {_COLOURS[p.verdict]}"))
    console.print(_speed(p))
    console.print(_time(p))
    console.print(_memory(p))
    if p.suggestions or p.evaluator == "engine":  # the closed form alone doesn't look for any
        console.print(_suggestions(p))
    for warning in p.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if p.defaults:
        console.print(Text("defaults: " + "; ".join(p.defaults), style="dim"))
    console.print(Text("assumed: " + "; ".join(p.assumptions), style="dim"))


def _speed(p: Prediction) -> Text:
    rate, step = p.tokens_per_s, p.step_time_s
    gpus = ", ".join(f"{n} {name}" for name, n in p.gpus.items())
    lines = [
        f"{p.model} ({p.parameters / 1e9:.2f}B) on {gpus}, {p.stack}",
        f"{rate.p50:,.0f} tokens/s ({rate.p10:,.0f} to {rate.p90:,.0f}), "
        f"{p.tokens_per_s_per_gpu:,.0f} per GPU; step {format_seconds(step.p50)} "
        f"({format_seconds(step.p10)} to {format_seconds(step.p90)}); "
        f"MFU {percent(p.mfu)}, HFU {percent(p.hfu)}",
    ]
    if p.time_to_train_s:
        lines.append(f"whole training run: {format_seconds(p.time_to_train_s)} without failures")
    return Text("\n".join(lines))


def _bar(share: float) -> str:
    return "█" * max(round(share * _BAR_WIDTH), 1 if share > _SMALLEST_SHARE else 0)


def _time(p: Prediction) -> Table:
    table = Table(box=None, pad_edge=False, title="where the step goes", title_justify="left",
                  show_header=False, title_style="bold")  # fmt: skip
    table.add_column(min_width=36)
    table.add_column(justify="right")
    table.add_column()
    for name, label in TIME_LABELS.items():
        share = p.shares.get(name, 0.0)
        if share > _SMALLEST_SHARE:
            table.add_row(label, percent(share), _bar(share))
    return table


def _memory(p: Prediction) -> Table:
    rows = fullest_by_gpu(p)
    table = Table(box=None, pad_edge=False, title="memory of the fullest rank, GiB",
                  title_justify="left", title_style="bold", header_style="dim")  # fmt: skip
    table.add_column("", min_width=36)
    for cls in rows:
        table.add_column(f"{cls.gpu}{stage_suffix(p, cls)}", justify="right")
    names = list(dict.fromkeys(name for cls in rows for name in cls.memory_bytes))
    for name in names:
        cells = [cls.memory_bytes.get(name, 0.0) / GIB for cls in rows]
        if max(cells) >= 0.05:
            table.add_row(memory_label(name), *(f"{c:.1f}" for c in cells))
    table.add_row("total on the device", *(f"{c.device_bytes / GIB:.1f}" for c in rows),
                  style="bold")  # fmt: skip
    table.add_row("usable", *(f"{c.usable_bytes / GIB:.1f}" for c in rows))
    table.add_row("risk of running out", *(probability(c.oom_risk) for c in rows))
    return table


def _suggestions(p: Prediction) -> Group:
    lines = [Text("what would help most", style="bold")]
    if not p.suggestions:
        lines.append(Text("none of the single changes tried gains more than 0.5 % and fits"))
    for s in p.suggestions:
        sign = signed_percent(s.gain)
        lines.append(
            Text(
                f"{sign:>9} tokens/s  {s.change} "
                f"(risk {probability(s.oom_risk)}, {percent(s.fill)} full)"
            )
        )
    return Group(*lines)
