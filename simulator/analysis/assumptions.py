"""The uncertain inputs of a purchase: what the user gave, else the price list, each with source.

Money is in the user's currency; the price list's USD are converted here and only here.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hardware_db.price_list import Price, find_price, prices
from hardware_db.schema import NodeSpec
from simulator.analysis.uncertain import Uncertain
from simulator.errors import Problem, UserError
from simulator.spec.purchase import Amount, Economics

#: Table of the price list that holds the default of a plain amount, and its name for people.
PLAIN: Mapping[str, tuple[str, str, str]] = {
    "pue": ("facility", "PUE", ""),
    "hosting_per_kw_month": ("facility", "hosting", "{currency}/kW/month"),
    "network_share": ("facility", "network", "of the nodes' price"),
    "installation_share": ("facility", "installation", "of the nodes' price"),
    "maintenance_share_per_year": ("facility", "maintenance", "of the nodes' price a year"),
    "staff_share_per_year": ("facility", "staff", "of the nodes' price a year"),
    "financing_rate": ("facility", "interest", "a year"),
    "busy_power_share": ("facility", "GPU power while computing", "of idle to limit"),
    "host_idle_share": ("facility", "host power when idle", "of its power under load"),
    "gpu_failures_per_year": ("reliability", "interruptions per GPU", "a year"),
    "host_failures_per_year": ("reliability", "interruptions per host", "a year"),
    "restart_s": ("reliability", "restart after an interruption", "s"),
    "swap_share": ("reliability", "interruptions that need another node", "of all"),
    "repair_s": ("reliability", "repair of a node", "s"),
    "checkpoint_bytes_per_s_per_node": ("reliability", "checkpoint rate per node", "bytes/s"),
    "gpu_speed_sigma": ("reliability", "spread of GPU speeds", "sigma of log"),
    "spot_interruptions_per_day": ("reliability", "spot interruptions", "a day"),
}  # fmt: skip
_MONEY = frozenset({"hosting_per_kw_month"})
_SHARES = frozenset({"busy_power_share", "host_idle_share", "swap_share", "financing_rate"})

#: Share of all time that the cluster computes, where the user says nothing.
DEFAULT_UTILISATION = Amount(0.6, 0.8, 0.92)

UTILISATION, ELECTRICITY, CO2, RESALE, STAFF = (
    "utilisation", "electricity price", "grid CO2", "resale value", "staff (amount)",
)  # fmt: skip


@dataclass(frozen=True)
class Assumption:
    """One input: its range, unit and where it is from; ``stale`` flags a price over a year old."""

    name: str
    amount: Uncertain
    unit: str
    source: str
    basis: str
    date: datetime.date | None = None
    stale: bool = False


@dataclass
class Assumptions:
    """Inputs by name, collected as candidates need them; equal names are the same input."""

    economics: Economics
    found: dict[str, Assumption] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Uncertain]:
        """The amounts by name."""
        return {name: a.amount for name, a in self.found.items()}

    def plain(self, key: str) -> str:
        """Name of the input for a key of :data:`PLAIN`, which it is collected under."""
        table, name, unit = PLAIN[key]
        if name not in self.found:
            most = 1.0 if key in _SHARES else float("inf")
            least = 1.0 if key == "pue" else 0.0
            given = self.economics.amounts.get(key)
            if key == "staff_share_per_year" and given is None and self._has_staff_amount:
                given = Amount(0.0, 0.0, 0.0)
            default = find_price(table, key, on=self.economics.date)
            money = key in _MONEY
            self._add(name, unit, given, default, money, least, most)
        return name

    @property
    def _has_staff_amount(self) -> bool:
        return "staff_per_year" in self.economics.amounts

    def common(self, horizon_years: float) -> None:
        """Collect what every candidate needs."""
        e = self.economics
        for key in PLAIN:
            self.plain(key)
        given = e.amounts.get("utilisation")
        origin = ("given", "given") if given else ("what busy clusters reach", "assumed")
        amount = _uncertain(given or DEFAULT_UTILISATION, 0.0, 1.0)
        self._put(UTILISATION, amount, "of all time", *origin)
        for name, key, item, unit in (
            (ELECTRICITY, "electricity_price_per_kwh", "price", f"{e.currency}/kWh"),
            (CO2, "co2_g_per_kwh", "co2", "g/kWh"),
        ):
            default = find_price("electricity", item, region=e.region, on=e.date)
            self._add(name, unit, e.amounts.get(key), default, item == "price")
        self._add(STAFF, f"{e.currency}/year",
                  e.amounts.get("staff_per_year", Amount(0.0, 0.0, 0.0)), None, False)  # fmt: skip
        self._resale(horizon_years)

    def resale_curve(self) -> tuple[list[float], list[float]]:
        """Years and median shares of the purchase price; each point the newest on that day."""
        if self.economics.resale:
            points = sorted((y, a.value) for y, a in self.economics.resale.items())
        else:
            points = sorted((float(p.tier), p.value) for p in self._resale_prices())
        return [y for y, _ in points], [s for _, s in points]

    def _resale_prices(self) -> list[Price]:
        tiers = sorted({p.tier for p in prices("resale")})
        found = [find_price("resale", "share", tier=t, on=self.economics.date) for t in tiers]
        return [p for p in found if p is not None]

    def _resale(self, years: float) -> None:
        """One factor on the whole curve, as uncertain as its point nearest to the horizon."""
        if self.economics.resale:
            near = min(self.economics.resale, key=lambda y: abs(y - years))
            amount, default = self.economics.resale[near], None
        else:
            default = min(self._resale_prices(), key=lambda p: abs(float(p.tier) - years))
            amount = Amount(default.low, default.value, default.high)
        middle = amount.value or 1.0
        scaled = Uncertain(amount.low / middle, 1.0, amount.high / middle) if amount.value else (
            Uncertain(1.0, 1.0, 1.0)
        )  # fmt: skip
        self._put(RESALE, scaled, "of the resale curve", *_origin(default, self.economics.date))

    def node_price(self, node: NodeSpec, given: Amount | None) -> str:
        """Name of the input "price of this node": given, listed, or its GPUs and a host.

        Raises:
            UserError: neither the node nor one of its GPUs has a price.
        """
        e = self.economics
        name = f"price of {node.name}"
        amount = given or e.prices.get(node.name)
        # A price given with one candidate is that candidate's own.
        if (
            given is not None
            and name in self.found
            and self.found[name].amount != _uncertain(given)
        ):
            name = f"{name} at {given.value:,.0f}"
        if name in self.found:
            return name
        listed = find_price("purchase", node.name, on=e.date)
        if amount is None and listed is None:
            amount, source, oldest = self._sum_of_parts(node)
            self._put(name, _uncertain(amount), e.currency, source, "assumed", oldest,
                      (e.date - oldest).days > 365)  # fmt: skip
        else:
            self._add(name, e.currency, amount, listed, True)
        return name

    def _sum_of_parts(self, node: NodeSpec) -> tuple[Amount, str, datetime.date]:
        parts: list[tuple[float, float, float]] = []
        dates = []
        for gpu in node.gpus:
            own = self.economics.prices.get(gpu)
            listed = find_price("purchase", gpu, on=self.economics.date)
            if own is not None:
                parts.append((own.low, own.value, own.high))
            elif listed is not None:
                rate = self.economics.exchange_rate
                parts.append((listed.low * rate, listed.value * rate, listed.high * rate))
                dates.append(listed.date)
            else:
                raise UserError(Problem("economics.prices", f"no price of {node.name} or {gpu}",
                                        f"add economics: {{prices: {{{gpu}: ...}}}}"))  # fmt: skip
        host = find_price("purchase", "host-8", on=self.economics.date)
        assert host is not None
        share = max(len(node.gpus) / 8.0, 0.25) * self.economics.exchange_rate
        parts.append((host.low * share, host.value * share, host.high * share))
        low, value, high = (sum(column) for column in zip(*parts, strict=True))
        source = f"{len(node.gpus)} GPUs and {max(len(node.gpus) / 8, 0.25):g} hosts of the list"
        return Amount(low, value, high), source, min([host.date, *dates])

    def rent(self, gpu: str, tier: str, given: Amount | None) -> str:
        """Name of the input "rent of this GPU". Raises UserError where there is no price."""
        e = self.economics
        name = f"rent of {gpu}, {tier}"
        amount = given or e.rents.get((gpu, tier))
        if (
            given is not None
            and name in self.found
            and self.found[name].amount != _uncertain(given)
        ):
            name = f"{name} at {given.value:g}"
        if name not in self.found:
            listed = find_price("cloud", gpu, tier=tier, region=e.region, on=e.date)
            if amount is None and listed is None:
                hint = f"add economics: {{rents: {{{gpu}: {{{tier}: ...}}}}}}"
                raise UserError(Problem("economics.rents", f"no {tier} price of {gpu}", hint))
            self._add(name, f"{e.currency}/GPU/h", amount, listed, True)
        return name

    def on_demand_rent(self, gpu: str) -> float | None:
        """Median price of a GPU-hour on demand, given or listed; None where there is none."""
        e = self.economics
        given = e.rents.get((gpu, "on-demand"))
        if given is not None:
            return given.value
        listed = find_price("cloud", gpu, tier="on-demand", region=e.region, on=e.date)
        return None if listed is None else listed.value * e.exchange_rate

    def _differs(self, name: str, given: Amount) -> bool:
        return name in self.found and self.found[name].amount != _uncertain(given)

    def speed(self, names: Sequence[str], sigma_low: float, sigma_high: float) -> str:
        """Name of the input "true over predicted speed" of a set of GPU types."""
        name = "speed of " + " + ".join(sorted(names)) + " against prediction"
        given = self.economics.amounts.get("speed")
        if given is not None:
            self._put(name, _uncertain(given), "of the prediction", "given", "given")
        elif name not in self.found:
            self._put(name, Uncertain(sigma_low, 1.0, sigma_high), "of the prediction",
                      "error of predicted step times", "assumed")  # fmt: skip
        return name

    def _add(
        self,
        name: str,
        unit: str,
        given: Amount | None,
        default: Price | None,
        money: bool,
        least: float = 0.0,
        most: float = float("inf"),
    ) -> None:
        e = self.economics
        unit = unit.format(currency=e.currency)
        if given is not None:
            self._put(name, _uncertain(given, least, most), unit, "given", "given")
            return
        assert default is not None, name
        rate = e.exchange_rate if money else 1.0
        amount = Amount(default.low * rate, default.value * rate, default.high * rate)
        self._put(name, _uncertain(amount, least, most), unit, *_origin(default, e.date))

    def _put(
        self,
        name: str,
        amount: Uncertain,
        unit: str,
        source: str,
        basis: str,
        date: datetime.date | None = None,
        stale: bool = False,
    ) -> None:
        self.found[name] = Assumption(name, amount, unit, source, basis, date, stale)


def _origin(
    default: Price | None, on: datetime.date
) -> tuple[str, str, datetime.date | None, bool]:
    if default is None:
        return "given", "given", None, False
    # A published measurement doesn't age as a price does.
    is_stale = default.basis != "paper" and default.is_stale(on)
    return default.source, default.basis, default.date, is_stale


def _uncertain(a: Amount, least: float = 0.0, most: float = float("inf")) -> Uncertain:
    return Uncertain(a.low, a.value, a.high, least, most)
