"""Prices and rates with source and date: what hardware, rent, power and failures cost.

``prices/*.yaml`` hold one table each (the file's name is the table's). An entry is an amount with
a plausible range, its date and, where it depends on them, a tier (on-demand, reserved, spot; years
of a resale curve) and a region. Money is in USD. Nothing here is a quotation: every user is meant
to put in his own prices, and the report lists those that he did not.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from simulator.errors import Problem, UserError, nearest

#: Tables, by file name, with the unit of an entry (an item's own where it differs).
TABLES = {
    "purchase": "USD",
    "cloud": "USD per GPU-hour",
    "electricity": "USD per kWh",
    "facility": "",
    "resale": "share of the purchase price",
    "reliability": "",
}
_ITEM_UNITS = {
    "co2": "g per kWh",
    "pue": "facility power over IT power",
    "hosting_per_kw_month": "USD per kW and month",
    "network_share": "share of the nodes' price",
    "installation_share": "share of the nodes' price",
    "maintenance_share_per_year": "share of the nodes' price a year",
    "staff_share_per_year": "share of the nodes' price a year",
    "financing_rate": "per year",
    "busy_power_share": "share of the way from idle power to the limit",
    "host_idle_share": "share of the host's power under load",
    "gpu_failures_per_year": "interruptions per GPU and year",
    "host_failures_per_year": "interruptions per host and year",
    "restart_s": "s",
    "swap_share": "share of failures",
    "repair_s": "s",
    "checkpoint_bytes_per_s_per_node": "bytes/s",
    "gpu_speed_sigma": "standard deviation of log speed",
    "spot_interruptions_per_day": "per day",
}
#: What an amount rests on, best first.
PRICE_BASES = ("listed", "paper", "survey", "reported", "assumed")
TIERS = ("on-demand", "reserved", "spot")
#: An entry older than this is flagged.
STALE_DAYS = 365


@dataclass(frozen=True, slots=True)
class Price:
    """One amount: ``low`` and ``high`` are about the tenth and ninetieth percentile.

    ``tier`` and ``region`` are empty where the amount doesn't depend on them.
    """

    table: str
    item: str
    tier: str
    region: str
    value: float
    low: float
    high: float
    unit: str
    source: str
    date: datetime.date
    basis: str

    @property
    def name(self) -> str:
        """``purchase dgx-h100``, ``cloud h100-sxm-80gb reserved``."""
        return " ".join(part for part in (self.table, self.item, self.tier, self.region) if part)

    def age_days(self, on: datetime.date) -> int:
        """Days from the entry's date to ``on``; 0 where it is younger."""
        return max((on - self.date).days, 0)

    def is_stale(self, on: datetime.date | None = None) -> bool:
        """Whether the entry is more than a year old on that day (today)."""
        return self.age_days(on or datetime.date.today()) > STALE_DAYS


def prices(table: str | None = None) -> tuple[Price, ...]:
    """All entries of a table, or of all tables, in the order of the files."""
    if table is None:
        return tuple(entry for name in TABLES for entry in _table(name))
    if table not in TABLES:
        raise UserError(Problem("prices", f"no table {table!r}", f"choose: {', '.join(TABLES)}"))
    return _table(table)


def find_price(
    table: str, item: str, *, tier: str = "", region: str = "", on: datetime.date | None = None
) -> Price | None:
    """The entry that holds on a day, or None.

    Of the entries for the region (else of those for no region in particular), the newest that is
    not younger than ``on`` (default: today); where all are younger, the oldest.
    """
    day = on or datetime.date.today()
    found = [p for p in prices(table) if p.item == item and p.tier == tier]
    near = [p for p in found if region and p.region == region] or [p for p in found if not p.region]
    if not near:
        return None
    known = [p for p in near if p.date <= day]
    return max(known, key=lambda p: p.date) if known else min(near, key=lambda p: p.date)


def price(
    table: str, item: str, *, tier: str = "", region: str = "", on: datetime.date | None = None
) -> Price:
    """As :func:`find_price`.

    Raises:
        UserError: there is no such entry; near items, and the regions there are, are listed.
    """
    found = find_price(table, item, tier=tier, region=region, on=on)
    if found is not None:
        return found
    items = [p.item for p in prices(table)]
    if item not in items:
        close = nearest(item, list(dict.fromkeys(items)))
        hint = f"near ones: {', '.join(close)}" if close else "give it under economics"
        raise UserError(Problem(table, f"no price of {item}", hint))
    known = sorted({" ".join(filter(None, (p.tier, p.region))) for p in prices(table)
                    if p.item == item})  # fmt: skip
    wanted = " ".join(part for part in (tier, region) if part) or "no region in particular"
    hint = f"known: {', '.join(k or 'any' for k in known)}, or give it under economics"
    raise UserError(Problem(table, f"no price of {item} for {wanted}", hint))


def regions() -> tuple[str, ...]:
    """Regions with an electricity price, sorted."""
    return tuple(sorted({p.region for p in prices("electricity")}))


def price_faults(entry: Price) -> list[str]:
    """What is not believable about an entry, a sentence each; empty when all is well."""
    return [f"{entry.name}: {fault}" for fault in _faults(entry)]


_RANGES = {
    "purchase": (50, 5e6), "cloud": (0.02, 50), "resale": (0, 1), "price": (0.02, 0.6),
    "co2": (5, 1200), "pue": (1, 2.5), "hosting_per_kw_month": (20, 600), "financing_rate": (0, .3),
    "restart_s": (10, 7200), "repair_s": (3600, 60 * 86400), "gpu_speed_sigma": (0, 0.1),
    "gpu_failures_per_year": (0.005, 1), "host_failures_per_year": (0.01, 5),
    "checkpoint_bytes_per_s_per_node": (1e7, 1e11), "spot_interruptions_per_day": (0, 48),
}  # fmt: skip


def _faults(entry: Price) -> Iterator[str]:
    low, high = _RANGES.get(entry.item, _RANGES.get(entry.table, (0, 1)))
    if not low <= entry.value <= high:
        yield f"{entry.value:g} is outside {low:g} to {high:g}"
    if not entry.low <= entry.value <= entry.high:
        yield f"{entry.value:g} is outside its own range {entry.low:g} to {entry.high:g}"
    if entry.basis not in PRICE_BASES:
        yield f"basis {entry.basis!r} is none of {', '.join(PRICE_BASES)}"
    if len(entry.source) < 10:
        yield "has no source"
    if not datetime.date(2015, 1, 1) <= entry.date <= datetime.date(2100, 1, 1):
        yield f"date {entry.date} is out of range"
    if entry.table == "cloud" and entry.tier not in TIERS:
        yield f"tier {entry.tier!r} is none of {', '.join(TIERS)}"


@cache
def _table(name: str) -> tuple[Price, ...]:
    file = f"hardware_db/prices/{name}.yaml"
    text = files("hardware_db").joinpath("prices", f"{name}.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    sources = data.get("sources", {})
    return tuple(_entry(name, row, sources, file) for row in data["entries"])


def _entry(table: str, row: dict[str, Any], sources: dict[str, str], file: str) -> Price:
    item = str(row.get("item"))
    numbers = [row.get(key) for key in ("value", "low", "high")]
    if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
        raise UserError(Problem(item, "value, low and high must be numbers", source=file))
    value, low, high = (float(n) for n in numbers if n is not None)
    day = row.get("date")
    if not isinstance(day, datetime.date):
        raise UserError(Problem(item, f"date {day!r} is no date", "write 2026-01-31", file))
    source = str(row.get("source", ""))
    return Price(
        table=table, item=item, tier=str(row.get("tier", "")), region=str(row.get("region", "")),
        value=value, low=low, high=high, unit=_ITEM_UNITS.get(item, TABLES[table]),
        source=sources.get(source, source), date=day, basis=str(row.get("basis", "")),
    )  # fmt: skip
