"""The answer on one screen: verdict first, then speed, time, memory, what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from simulator.units import GIB, format_seconds

if TYPE_CHECKING:
    from simulator.analysis.prediction import ClassPrediction, Prediction

_COLOURS = {"fits": "green", "risky": "yellow", "does not fit": "red"}
_BAR_WIDTH = 28

#: Words for the categories of time, in the order in which they are shown.
TIME_LABELS = {
    "compute": "compute",
    "recompute": "recomputation",
    "dispatch": "waiting for the host (dispatch)",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "pipeline communication",
    "dp": "gradient reduction",
    "fsdp": "gathering sharded parameters",
    "optimizer": "optimiser step",
    "overhead": "framework overhead",
    "bubble": "idle (pipeline bubble, slower ranks)",
}

#: Smaller shares of the step are not worth a line.
_SMALLEST_SHARE = 0.002


def percent(share: float) -> str:
    """A share for a person: never 0 % or 100 % unless it is."""
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    digits = 1 if share < 0.1 or share > 0.95 else 0
    return f"{100 * share:.{digits}f} %"


def headline(p: Prediction) -> str:
    """The one line that must not mislead: verdict, probability, fullest GPU."""
    cls = p.classes[p.fullest]
    name = p.verdict.upper()
    return (
        f"{name}: {percent(p.oom_risk)} risk of running out of memory; fullest is {cls.gpu}"
        f"{_where(p, cls)}: {cls.device_bytes / GIB:.1f} of {cls.usable_bytes / GIB:.1f} GiB"
    )


def _where(p: Prediction, cls: ClassPrediction) -> str:
    return f" (stage {cls.stage})" if any(c.stage for c in p.classes) else ""


def print_prediction(p: Prediction, console: Console) -> None:
    """Print the whole answer."""
    console.print(Text(headline(p), style=f"bold {_COLOURS[p.verdict]}"))
    console.print(_speed(p))
    console.print(_time(p))
    console.print(_memory(p))
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


def fullest_by_gpu(p: Prediction) -> list[ClassPrediction]:
    """The fullest rank class of each GPU type, in cluster order."""
    best: dict[str, ClassPrediction] = {}
    for cls in p.classes:
        if cls.gpu not in best or cls.fill > best[cls.gpu].fill:
            best[cls.gpu] = cls
    return [best[name] for name in p.gpus if name in best]


def _memory(p: Prediction) -> Table:
    rows = fullest_by_gpu(p)
    table = Table(box=None, pad_edge=False, title="memory of the fullest rank, GiB",
                  title_justify="left", title_style="bold", header_style="dim")  # fmt: skip
    table.add_column("", min_width=36)
    for cls in rows:
        table.add_column(f"{cls.gpu}{_where(p, cls)}", justify="right")
    names = list(dict.fromkeys(name for cls in rows for name in cls.memory_bytes))
    for name in names:
        cells = [cls.memory_bytes.get(name, 0.0) / GIB for cls in rows]
        if max(cells) >= 0.05:
            table.add_row(name.replace("_", " "), *(f"{c:.1f}" for c in cells))
    table.add_row("total on the device", *(f"{c.device_bytes / GIB:.1f}" for c in rows),
                  style="bold")  # fmt: skip
    table.add_row("usable", *(f"{c.usable_bytes / GIB:.1f}" for c in rows))
    table.add_row("risk of running out", *(percent(c.oom_risk) for c in rows))
    return table


def _suggestions(p: Prediction) -> Group:
    lines = [Text("what would help most", style="bold")]
    if not p.suggestions:
        lines.append(Text("none of the single changes tried gains more than 0.5 % and fits"))
    for s in p.suggestions:
        sign = f"{s.gain:+.1%}".replace("%", " %")
        lines.append(
            Text(f"{sign:>9} tokens/s  {s.change} (risk {percent(s.oom_risk)}, {s.fill:.0%} full)")
        )
    return Group(*lines)
