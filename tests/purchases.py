"""Candidates with round numbers, for tests of what a purchase costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.analysis.assumptions import CO2, ELECTRICITY, PLAIN, RESALE, STAFF, UTILISATION
from simulator.analysis.candidate_facts import CandidateFacts, Nodes, Phase, Terms, Work
from simulator.analysis.uncertain import Inputs

#: Values by key of the economics section; money in one currency.
VALUES: Mapping[str, float] = {
    "pue": 1.5,
    "hosting_per_kw_month": 100.0,
    "network_share": 0.10,
    "installation_share": 0.05,
    "maintenance_share_per_year": 0.02,
    "staff_share_per_year": 0.03,
    "financing_rate": 0.06,
    "busy_power_share": 0.8,
    "host_idle_share": 0.5,
    "gpu_failures_per_year": 0.0,
    "host_failures_per_year": 0.0,
    "restart_s": 600.0,
    "swap_share": 0.3,
    "repair_s": 172_800.0,
    "checkpoint_bytes_per_s_per_node": 1e9,
    "gpu_speed_sigma": 0.0,
    "spot_interruptions_per_day": 1.0,
}

TERMS = Terms(
    financing_years=2.0,
    price_change_per_year=0.0,
    resale_years=(0.0, 2.0, 4.0),
    resale_shares=(0.9, 0.5, 0.2),
)


def inputs(**changes: Any) -> Inputs:
    """Values of all inputs; keyword names are the economics section's or those below."""
    named = {
        UTILISATION: changes.pop("utilisation", 0.5),
        ELECTRICITY: changes.pop("electricity", 0.10),
        CO2: changes.pop("co2", 400.0),
        RESALE: changes.pop("resale", 1.0),
        STAFF: changes.pop("staff_amount", 10_000.0),
        "price": changes.pop("price", 300_000.0),
        "rent": changes.pop("rent", 2.0),
        "speed": changes.pop("speed", 1.0),
    }
    plain = {PLAIN[key][1]: value for key, value in {**VALUES, **changes}.items()}
    return {name: np.asarray(value, float) for name, value in {**named, **plain}.items()}


def nodes(how: str = "bought", count: int = 2) -> Nodes:
    """Nodes of eight GPUs, 100 W idle and 700 W at the limit each, and a host of 2 kW."""
    price = "price" if how in ("bought", "kept") else "rent"
    return Nodes("node", how, count, 8, 800.0, 5600.0, 2000.0, price)


def work(**changes: Any) -> Work:
    """A million tokens per second; a run of 10**10; a model of a billion parameters."""
    base = Work("work", 1e10, 1.0, None, 1e6, "speed", 1.0, 6e9, 1e9)
    return replace(base, **changes)


def facts(*parts: Nodes, years: float = 2.0, spares: int = 0, **changes: Any) -> CandidateFacts:
    """A candidate of one phase."""
    phase = Phase(years, parts or (nodes(),), (changes.pop("work", work()),), spares)
    return CandidateFacts("candidate", (phase,), **changes)
