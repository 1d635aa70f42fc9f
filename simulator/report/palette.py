"""Colours and fonts of all figures and pages: one meaning, one colour, everywhere.

Blues are computation and weights, greens the optimiser, yellows to reds activations and
communication, greys what nobody wants. Neighbours in a stack differ in lightness too, so that they
stay apart with red-green blindness (a test simulates it). Text and
grid are the three neutral colours that a page may exchange for its own (dark screens, print).
"""

from __future__ import annotations

#: Neutral colours; ``assets/page.js`` exchanges exactly these for the page's.
INK = "#24292f"
GRID = "#d7dbe0"
SURFACE = "#ffffff"

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

VERDICT_COLOURS = {"fits": "#00795c", "risky": "#a35c00", "does not fit": "#b3261e"}

MEMORY_COLOURS = {
    "parameters": "#1b5299",
    "gradients": "#7fb2e5",
    "optimizer": "#0b7a75",
    "unsharded_units": "#9ad8c6",
    "activations": "#e69f00",
    "recompute_working_set": "#f7dc8b",
    "logits": "#c8501e",
    "temporaries": "#8e4585",
    "fragmentation": "#d3d8de",
    "framework": "#59626d",
}

TIME_COLOURS = {
    "compute": "#1b5299",
    "recompute": "#7fb2e5",
    "dispatch": "#262833",
    "tp": "#e69f00",
    "cp": "#7a3008",
    "ep": "#f7dc8b",
    "pp": "#c8501e",
    "dp": "#e48fbf",
    "fsdp": "#9c2f6d",
    "optimizer": "#4dbb9f",
    "overhead": "#59626d",
    "bubble": "#dde1e6",
}

#: Forward passes in the timeline, where ``compute`` is what backward passes bear.
FORWARD = "#5b9bd5"

#: Lines that are told apart by colour and by dash.
LINE_COLOURS = ("#1b5299", "#c8501e", "#0b7a75", "#e69f00", "#6a4c93", "#b0417f", "#59626d")
LINE_DASHES = ("solid", "dash", "dot", "dashdot")

#: For components and categories that have no colour of their own.
OTHER = "#8a8f98"
