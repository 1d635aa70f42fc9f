"""Fits recover what made the data, stay inside their bounds and shrug off one bad row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.cost.calibration import BOUNDS, Tuning
from simulator.interop.calibrating import build_table, held_out, spread_of, with_spreads
from simulator.interop.fitting import (
    TimedRun,
    fit,
    local_fit,
    log_residuals,
    predicted_s,
    with_stack_times,
)
from simulator.spec.layout import Layout, build_layout
from simulator.spec.scenario import load_scenario

TRUE = Tuning(gemm=1.2, attention=1.0, memory=1.3)


def layouts() -> list[Layout]:
    s = load_scenario("llama-3.1-8b-dgx-h100")
    assert s.plan is not None
    found = []
    for micro_batch, sequence in ((1, 2048), (1, 8192), (2, 4096), (4, 2048), (1, 16384)):
        workload = replace(s.workload, sequence_length=sequence, global_batch=8 * micro_batch)
        plan = replace(s.plan, micro_batch=micro_batch)
        found.append(build_layout(s.model, workload, s.cluster, plan, s.stack))
    return found


def runs() -> list[TimedRun]:
    made = []
    for i, layout in enumerate(layouts()):
        run = TimedRun(layout, 1.0, f"source {i % 2}", "h100-sxm-80gb")
        made.append(replace(run, measured_s=predicted_s(run, with_stack_times(TRUE, layout))))
    return made


def test_a_fit_explains_what_made_the_rows() -> None:
    rows = runs()
    start = with_stack_times(Tuning(), rows[0].layout)
    before = np.abs(log_residuals(rows, start)).mean()
    result = fit(rows, start, ["gemm", "attention", "memory"])
    after = np.abs(result.residuals).mean()
    assert after < 0.1 * before
    assert result.tuning.gemm == pytest.approx(TRUE.gemm, rel=0.06)


def test_one_bad_row_hardly_moves_the_fit() -> None:
    rows = runs()
    start = with_stack_times(Tuning(), rows[0].layout)
    bad = [*rows[:-1], replace(rows[-1], measured_s=3 * rows[-1].measured_s)]
    clean, bent = (fit(r, start, ["gemm", "memory"]).tuning for r in (rows, bad))
    assert bent.gemm == pytest.approx(clean.gemm, rel=0.1)


def test_values_stay_inside_their_bounds() -> None:
    rows = [replace(r, measured_s=20 * r.measured_s) for r in runs()]
    result = fit(rows, with_stack_times(Tuning(), rows[0].layout), ["gemm", "memory"])
    for name in ("gemm", "memory"):
        low, high = BOUNDS[name]
        assert low <= getattr(result.tuning, name) <= high * 1.000001


def test_local_solution_is_close_to_the_full_fit() -> None:
    rows = runs()
    start = with_stack_times(Tuning(), rows[0].layout)
    names = ["gemm", "attention", "memory"]
    sigma = {name: 0.3 for name in names}
    full = fit(rows, start, names, prior_sigma=sigma).tuning
    local = local_fit(rows, full, names).solve(np.arange(len(rows)), start, sigma)
    assert local.gemm == pytest.approx(full.gemm, rel=0.05)


def test_table_has_groups_folds_and_spreads() -> None:
    rows = runs()
    table = build_table(rows)
    assert {"torchtitan", "torchtitan/h100-sxm-80gb", "any"} <= table["groups"].keys()
    sources = held_out(rows, table, lambda r: r.source)
    assert set(sources.by) == {"source 0", "source 1"}
    done = with_spreads(table, sources, held_out(rows, table, lambda r: r.gpu))
    assert done["spread"]["torchtitan"]["between_sources"] >= 0.03


def test_unknown_parameters_and_empty_fits_are_refused() -> None:
    rows = runs()
    with pytest.raises(ValueError, match="unknown parameters"):
        fit(rows, Tuning(), ["speed"])
    with pytest.raises(ValueError, match="at least one run"):
        fit([], Tuning(), ["gemm"])
    assert spread_of(np.array([0.0, 0.0])) == 0.03
