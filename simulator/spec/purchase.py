"""What ``purchase`` asks, as plain frozen data: workloads, candidates, constraints, economics."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Objective = Literal["cost_per_1e9_tokens", "total_cost", "time_to_train_s", "energy_kwh"]
OBJECTIVES: tuple[Objective, ...] = (
    "cost_per_1e9_tokens",
    "total_cost",
    "time_to_train_s",
    "energy_kwh",
)
Tier = Literal["on-demand", "reserved", "spot"]


@dataclass(frozen=True)
class Amount:
    """A number that may be uncertain: tenth, fiftieth and ninetieth percentile."""

    low: float
    value: float
    high: float


@dataclass(frozen=True)
class PurchaseWorkload:
    """One kind of training run: ``given`` are the scenario sections that it replaces.

    ``weight`` is its share of the tokens; ``runs_per_year`` (None: as much as the cluster can do)
    says how often it must be run.
    """

    name: str
    given: Mapping[str, Any]
    tokens: float
    weight: float = 1.0
    runs_per_year: float | None = None


@dataclass(frozen=True)
class Part:
    """Equal nodes of a candidate that are bought or rented.

    ``group`` is an entry of ``cluster.groups``; ``price`` per node (bought) or per GPU-hour
    (rented), None: from the price list. ``tier`` is empty for bought nodes.
    """

    group: Mapping[str, Any]
    price: Amount | None = None
    tier: Tier | Literal[""] = ""


@dataclass(frozen=True)
class Candidate:
    """One thing to do: nodes kept (group of the standing cluster -> count), bought, rented.

    What stands and isn't kept is sold unless ``sell`` is false. ``wait_years``: the standing
    cluster goes on alone for so long before anything is bought or rented. ``settings`` are the
    scenario's ``stack``, ``plan`` and ``fabric`` where they differ.
    """

    name: str
    keep: Mapping[int, int] = field(default_factory=dict)
    buy: tuple[Part, ...] = ()
    rent: tuple[Part, ...] = ()
    sell: bool = True
    wait_years: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Constraints:
    """What a candidate must keep; None where nothing is asked.

    ``budget`` is what is spent on hardware (less what is sold) and on rent over the horizon.
    """

    budget: float | None = None
    power_limit_w: float | None = None
    deadline_s: float | None = None
    memory_headroom: float = 0.0


@dataclass(frozen=True)
class Owned:
    """The standing cluster: its age, and what it would bring today (None: from the price list)."""

    age_years: float
    value: float | None = None


@dataclass(frozen=True)
class BudgetSearch:
    """Which node types to try, up to how many of each, for how much money.

    ``settings`` are as a candidate's.
    """

    budget: float
    nodes: tuple[Part, ...]
    most: int
    keep: bool
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Economics:
    """Money and machines' habits: what the user gave; the rest comes from the price list.

    ``amounts`` are by name (``pue``, ``financing_rate``, ...), ``prices`` by node or GPU,
    ``rents`` by GPU and tier, ``resale`` by years. ``exchange_rate`` is the currency's units per
    USD. ``spares`` None: as many as pay.
    """

    currency: str
    exchange_rate: float
    region: str
    date: datetime.date
    amounts: Mapping[str, Amount]
    prices: Mapping[str, Amount]
    rents: Mapping[tuple[str, str], Amount]
    resale: Mapping[float, Amount]
    financing_years: float
    price_change_per_year: float
    spares: int | None
    draws: int
    seed: int


@dataclass(frozen=True)
class Purchase:
    """The whole question."""

    horizon_years: float
    objective: Objective
    workloads: tuple[PurchaseWorkload, ...]
    candidates: tuple[Candidate, ...]
    constraints: Constraints
    owned: Owned | None
    search: BudgetSearch | None
    economics: Economics
