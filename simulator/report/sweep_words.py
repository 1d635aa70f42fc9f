"""A sweep in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.planner.sweep import best_row, differences, is_priced
from simulator.report.words import percent, probability, signed_percent

if TYPE_CHECKING:
    from simulator.planner.sweep import Row, Sweep


def values_words(row: Row) -> str:
    """``tp 4, micro_batch 2``: the point by the last part of each field's name."""
    return ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in row["values"].items())


def best_sentence(sweep: Sweep, rows: Sequence[Row]) -> str:
    """What is best at the accepted risk and what it changes; or that nothing fits."""
    best = best_row(rows, sweep.risk)
    if best is None:
        priced = [r for r in rows if is_priced(r)]
        if not priced:
            return "NOTHING FITS: every point is impossible."
        least = min(priced, key=lambda r: float(r["oom_risk"]))
        return (
            f"NOTHING FITS at {percent(sweep.risk)} risk of running out of memory; the least is "
            f"{probability(least['oom_risk'])} with {values_words(least)}."
        )
    head = (
        f"BEST: {values_words(best)}: {best['tokens_per_s']:,.0f} tokens/s, MFU "
        f"{percent(best['mfu'])}, {probability(best['oom_risk'])} risk of running out of memory."
    )
    return f"{head} {_change_words(sweep, rows, best)}".rstrip()


def _change_words(sweep: Sweep, rows: Sequence[Row], best: Row) -> str:
    changes = {k: v for k, v in differences(sweep, best).items() if v[0] is not None}
    if not changes:
        return ""
    own = _own_row(sweep, rows)
    gain = ""
    if own is not None and is_priced(own):
        change = signed_percent(best["tokens_per_s"] / own["tokens_per_s"] - 1.0)
        fits = "" if own["oom_risk"] <= sweep.risk else ", which does not fit at the accepted risk"
        gain = f" ({change} tokens/s against the file's own point{fits})"
    words = ", ".join(f"{k} from {a} to {b}" for k, (a, b) in changes.items())
    return f"It changes {words}{gain}."


def _own_row(sweep: Sweep, rows: Sequence[Row]) -> Row | None:
    """The point that the scenario's file itself describes, if the sweep has it."""
    from simulator.planner.sweep import given_values

    wanted = given_values(sweep)
    return next((row for row in rows if row["values"] == wanted), None)
