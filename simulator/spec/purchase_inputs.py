"""``purchase`` and ``economics`` as pydantic models: names, kinds and bounds of every field.

An amount is a number, or three of them: tenth percentile, median, ninetieth percentile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from functools import partial
from typing import Annotated, Any

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema

from simulator.spec.fields import (
    Count,
    Flag,
    InputModel,
    Name,
    NodeCount,
    Number,
    PositiveNumber,
    Share,
    SmallCount,
    Text,
    Whole,
    choice_of,
    refusal,
    shown,
    whole,
)
from simulator.spec.inputs import (
    FIELDS_TAG,
    NAME_TAG,
    FabricInput,
    GroupInput,
    ModelInput,
    PlanInput,
    name_or_fields,
)
from simulator.spec.purchase import OBJECTIVES, Amount

_WRITE = "write a number, or [low, median, high]"
_KEYS = ("low", "value", "high")


def _amount(value: Any, most: float, least: float = 0.0) -> Amount:
    """A number, ``[low, median, high]`` or ``{low:, value:, high:}`` -> Amount."""
    if isinstance(value, Mapping):
        if set(value) != set(_KEYS):
            raise refusal(f"expected low, value and high, got {shown(', '.join(map(str, value)))}",
                          _WRITE)  # fmt: skip
        given = [value[key] for key in _KEYS]
    elif isinstance(value, list):
        if len(value) != 3:
            raise refusal(f"expected three numbers, got {len(value)}", _WRITE)
        given = value
    else:
        given = [value] * 3
    for number in given:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise refusal(f"expected a number, got {shown(number)}", _WRITE)
        if not math.isfinite(number):
            raise refusal(f"{number} is not a number to work with", _WRITE)
        if number < least:
            what = "is negative" if number < 0 else "is too small"
            raise refusal(f"{shown(number)} {what}", f"at least {least:g}")
        if number > most:
            raise refusal(f"{shown(number)} is too large", f"at most {most:g}")
    low, middle, high = (float(n) for n in given)
    if not low <= middle <= high:
        raise refusal("low, median and high are not in order", "write them from low to high")
    return Amount(low, middle, high)


def _bounded(most: float, least: float = 0.0) -> tuple[PlainValidator, WithJsonSchema]:
    number = {"type": "number", "minimum": least, "maximum": most}
    schema = {
        "anyOf": [
            number,
            {"type": "array", "items": number, "minItems": 3, "maxItems": 3},
            {"type": "object", "properties": dict.fromkeys(_KEYS, number), "required": list(_KEYS),
             "additionalProperties": False},
        ]
    }  # fmt: skip
    return PlainValidator(partial(_amount, most=most, least=least)), WithJsonSchema(schema)


_MONEY, _RATE, _SHARE, _FACTOR = _bounded(1e12), _bounded(1e6), _bounded(1.0), _bounded(10.0)
_BUSY, _PUE, _SPEED = _bounded(1.0, 1e-3), _bounded(4.0, 1.0), _bounded(10.0, 0.1)
_SECONDS, _BYTES = _bounded(1e8), _bounded(1e13, 1e3)
Money = Annotated[Amount, *_MONEY]
MoneyRate = Annotated[Amount, *_RATE]
ShareAmount = Annotated[Amount, *_SHARE]
Factor = Annotated[Amount, *_FACTOR]
BusyShare = Annotated[Amount, *_BUSY]
Pue = Annotated[Amount, *_PUE]
Speed = Annotated[Amount, *_SPEED]
Seconds = Annotated[Amount, *_SECONDS]
BytesRate = Annotated[Amount, *_BYTES]


def _date(value: Any) -> date:
    try:
        return value if isinstance(value, date) else date.fromisoformat(str(value))
    except ValueError:
        raise refusal(f"{shown(value)} is not a date", "write it as 2026-01-31") from None


Day = Annotated[
    date, PlainValidator(_date), WithJsonSchema({"type": "string", "format": "date"})
]  # fmt: skip


def _change(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -0.9 <= value <= 1.0:
        raise refusal(f"expected a relative change a year, got {shown(value)}",
                      "-0.2 is 20 % cheaper every year; from -0.9 to 1")  # fmt: skip
    return float(value)


def _word_or_list(value: Any) -> str:
    return FIELDS_TAG if isinstance(value, list) else NAME_TAG


DrawCount = Annotated[
    int,
    PlainValidator(partial(whole, low=100, high=100_000)),
    WithJsonSchema({"type": "integer", "minimum": 100, "maximum": 100_000}),
]
_CHANGE_SCHEMA = WithJsonSchema({"type": "number", "minimum": -0.9, "maximum": 1.0})
_KEEP = choice_of({"all": "all", "none": "none"})
_OBJECTIVE = choice_of(
    {name: name for name in OBJECTIVES},
    {
        "cost_per_token": "cost_per_1e9_tokens", "cost": "total_cost", "time": "time_to_train_s",
        "time_to_train": "time_to_train_s", "energy": "energy_kwh",
    },
)  # fmt: skip
_TIER = choice_of({t: t for t in ("on-demand", "reserved", "spot")})
_ModelField = Annotated[
    Annotated[Text, Tag(NAME_TAG)] | Annotated[ModelInput, Tag(FIELDS_TAG)],  # type: ignore[valid-type]
    Discriminator(name_or_fields),
]
_FabricField = Annotated[
    Annotated[Name, Tag(NAME_TAG)] | Annotated[FabricInput, Tag(FIELDS_TAG)],  # type: ignore[valid-type]
    Discriminator(name_or_fields),
]


class PurchaseWorkloadInput(InputModel):
    """One kind of training run; what is left out is the scenario's own.

    ``weight`` is its share of all tokens trained; ``runs_per_year`` fixes how much is trained
    instead (give it for all workloads or for none).
    """

    name: Name | None = None
    model: _ModelField | None = None
    sequence_length: Count | None = None
    global_batch: Count | None = None
    tokens: PositiveNumber | None = None
    weight: PositiveNumber | None = None
    runs_per_year: PositiveNumber | None = None
    stack: Name | None = None
    plan: PlanInput | None = None


class BuyInput(GroupInput):
    """Nodes to buy: as an entry of ``cluster.groups``, and the price of one node."""

    price: Money | None = None


class RentInput(GroupInput):
    """Nodes to rent: as an entry of ``cluster.groups``, the tier and the price per GPU-hour."""

    tier: Annotated[str, *_TIER] = "on-demand"
    price_per_gpu_hour: MoneyRate | None = None


class KeepInput(InputModel):
    """So many nodes of one group of ``cluster.groups``."""

    group: Whole
    count: NodeCount | None = None


class CandidateInput(InputModel):
    """One thing to do: keep, buy, rent, sell, wait, or several of these."""

    name: Name
    keep: Annotated[
        Annotated[str, *_KEEP, Tag(NAME_TAG)]
        | Annotated[list[KeepInput], Field(max_length=1000), Tag(FIELDS_TAG)],
        Discriminator(_word_or_list),
    ] = "none"
    buy: Annotated[list[BuyInput], Field(max_length=100)] = Field([])
    rent: Annotated[list[RentInput], Field(max_length=100)] = Field([])
    sell: Flag = True
    wait_years: Number = 0.0
    fabric: _FabricField | None = None
    stack: Name | None = None
    plan: PlanInput | None = None


class ConstraintsInput(InputModel):
    """What a candidate must keep."""

    budget: PositiveNumber | None = None
    power_limit_kw: PositiveNumber | None = None
    deadline_days: PositiveNumber | None = None
    memory_headroom: Share = 0.0


class OwnedInput(InputModel):
    """``cluster`` stands already: its age and, if known, what it would bring today."""

    age_years: Number
    value: PositiveNumber | None = None


class BudgetSearchInput(InputModel):
    """What should I buy for this budget: node types to try, up to ``most`` of each."""

    budget: PositiveNumber | None = None
    nodes: Annotated[list[BuyInput], Field(min_length=1, max_length=8)]
    most: Annotated[SmallCount, Field(description="at most so many nodes of one type")] = 64
    keep: Flag = False
    fabric: _FabricField | None = None
    stack: Name | None = None


class PurchaseInput(InputModel):
    """``purchase``: what could be bought, rented, added or kept, and for which work."""

    horizon_years: PositiveNumber
    objective: Annotated[str, *_OBJECTIVE] = "cost_per_1e9_tokens"
    workloads: Annotated[list[PurchaseWorkloadInput], Field(max_length=20)] = Field([])
    candidates: Annotated[list[CandidateInput], Field(max_length=50)] = Field([])
    constraints: ConstraintsInput = Field(default_factory=ConstraintsInput)
    owned: OwnedInput | None = None
    search: BudgetSearchInput | None = None


class EconomicsInput(InputModel):
    """``economics``: money, energy and reliability; what is left out is in the price list."""

    currency: Name | None = None
    exchange_rate: Annotated[
        PositiveNumber | None, Field(description="units of the currency for one USD")
    ] = None
    region: Name = "us"
    date: Day | None = None
    utilisation: BusyShare | None = None
    electricity_price_per_kwh: MoneyRate | None = None
    co2_g_per_kwh: MoneyRate | None = None
    pue: Pue | None = None
    hosting_per_kw_month: MoneyRate | None = None
    financing_rate: ShareAmount | None = None
    financing_years: Number = 3.0
    network_share: Factor | None = None
    installation_share: Factor | None = None
    maintenance_share_per_year: Factor | None = None
    staff_share_per_year: Factor | None = None
    staff_per_year: Money | None = None
    busy_power_share: ShareAmount | None = None
    host_idle_share: ShareAmount | None = None
    gpu_failures_per_year: MoneyRate | None = None
    host_failures_per_year: MoneyRate | None = None
    restart_s: Seconds | None = None
    swap_share: ShareAmount | None = None
    repair_s: Seconds | None = None
    checkpoint_bytes_per_s_per_node: BytesRate | None = None
    gpu_speed_sigma: ShareAmount | None = None
    spot_interruptions_per_day: MoneyRate | None = None
    speed: Annotated[Speed | None, Field(description="true over predicted speed")] = None
    prices: dict[str, Money] = Field({})
    rents: dict[str, dict[str, MoneyRate]] = Field({})
    resale: dict[str, ShareAmount] = Field({})
    price_change_per_year: Annotated[float, PlainValidator(_change), _CHANGE_SCHEMA] = 0.0
    spares: Whole | None = None
    draws: DrawCount = 4000
    seed: Whole = 0
