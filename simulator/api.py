"""The functions that scripts call; the command line is built on the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.analysis.predict import predict
from simulator.analysis.prediction import Prediction
from simulator.errors import Problem, UserError
from simulator.spec.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from simulator.evaluate.engine import EngineOptions
    from simulator.planner.search import SearchResult

__all__ = ["estimate", "load_scenario", "search", "simulate"]


def estimate(scenario: Scenario | str | Path) -> Prediction:
    """Price one plan in closed form: step time, memory by component, OOM risk.

    ``scenario`` is a :class:`Scenario`, a file, or the name of a shipped one.

    Raises:
        UserError: the scenario is faulty, has no plan, or its plan can't be laid on the cluster.
    """
    return predict(_with_plan(scenario), with_suggestions=False)[0]


def simulate(scenario: Scenario | str | Path, options: EngineOptions | None = None) -> Prediction:
    """Run one step in the discrete-event engine, with suggestions.

    Raises:
        UserError: as :func:`estimate`.
    """
    return predict(_with_plan(scenario), evaluator="engine", options=options)[0]


def search(scenario: Scenario | str | Path, **constraints: Any) -> SearchResult:
    """Find the best plans for a scenario; constraints as ``simulator.planner.search.search``.

    Raises:
        UserError: the scenario is faulty.
    """
    from simulator.planner.search import search as search_plans

    return search_plans(_loaded(scenario), **constraints)


def _loaded(scenario: Scenario | str | Path) -> Scenario:
    return scenario if isinstance(scenario, Scenario) else load_scenario(scenario)


def _with_plan(scenario: Scenario | str | Path) -> Scenario:
    loaded = _loaded(scenario)
    if loaded.plan is None:
        raise UserError(Problem("plan", "missing", "say how the work is laid out, or search"))
    return loaded
