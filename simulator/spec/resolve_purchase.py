"""``purchase`` and ``economics``: checks beyond kinds and bounds, and the question as data."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import hardware_db
from hardware_db.price_list import TIERS, regions
from simulator.errors import Problem, UserError
from simulator.spec.fields import simplified
from simulator.spec.inputs import GroupInput
from simulator.spec.problems import Collector
from simulator.spec.purchase import (
    Amount,
    BudgetSearch,
    Candidate,
    Constraints,
    Economics,
    Owned,
    Part,
    Purchase,
    PurchaseWorkload,
    Tier,
)
from simulator.spec.purchase_inputs import (
    BudgetSearchInput,
    CandidateInput,
    EconomicsInput,
    OwnedInput,
    PurchaseInput,
    PurchaseWorkloadInput,
)
from simulator.spec.yaml_source import FieldPath, SourceText
from simulator.units import SECONDS_PER_DAY

if TYPE_CHECKING:
    from simulator.spec.scenario import Scenario

_NOT_AMOUNTS = frozenset(
    {"currency", "exchange_rate", "region", "date", "financing_years", "prices", "rents", "resale"}
    | {"price_change_per_year", "spares", "draws", "seed"}
)
#: Fields of a bought or rented part that no ``cluster.groups`` entry has.
_PART_ONLY = frozenset(("price", "price_per_gpu_hour", "tier"))
MAX_HORIZON_YEARS = 30.0


def resolve_purchase(scenario: Scenario, on: date | None = None) -> Purchase:
    """The question of a scenario that has a ``purchase`` section.

    ``on`` replaces ``economics.date`` (default: today): prices are looked up for that day.

    Raises:
        UserError: there is no such section, or it has faults.
    """
    if scenario.purchase is None:
        raise UserError(
            Problem("purchase", "is missing", "say what could be bought or rented: "
                    "purchase: {horizon_years: 3, candidates: [...]}", scenario.source)
        )  # fmt: skip
    text = SourceText(dict(scenario.given), scenario.source)
    report = Collector(text)
    entry = report.validate(PurchaseInput, dict(scenario.purchase), ("purchase",))
    money = report.validate(EconomicsInput, dict(scenario.economics or {}), ("economics",))
    check_purchase(entry, money, scenario.given, report)
    report.raise_if_any()
    assert entry is not None and money is not None
    raw = scenario.given["purchase"]
    return Purchase(
        horizon_years=entry.horizon_years,
        objective=entry.objective,  # type: ignore[arg-type]
        workloads=_workloads(entry, raw, scenario),
        candidates=tuple(
            _candidate(c, raw["candidates"][i], scenario) for i, c in enumerate(entry.candidates)
        ),
        constraints=_constraints(entry),
        owned=None if entry.owned is None else Owned(entry.owned.age_years, entry.owned.value),
        search=_search(entry, raw),
        economics=_economics(money, on),
    )


def check_purchase(
    entry: PurchaseInput | None,
    money: EconomicsInput | None,
    data: Mapping[str, Any],
    report: Collector,
) -> None:
    """Record what is wrong in meaning: names, contradictions, missing currency or tokens."""
    if money is not None:
        _check_money(money, report)
    if entry is None:
        return
    if entry.horizon_years > MAX_HORIZON_YEARS:
        report.error(("purchase", "horizon_years"), f"{entry.horizon_years:g} years is too long",
                     f"at most {MAX_HORIZON_YEARS:g}")  # fmt: skip
    if not entry.candidates and entry.search is None:
        report.error(("purchase",), "there is nothing to compare", "add candidates: or search:")
    _check_workloads(entry, data, report)
    names: set[str] = set()
    for index, candidate in enumerate(entry.candidates):
        path: FieldPath = ("purchase", "candidates", index)
        if candidate.name in names:
            report.error((*path, "name"), f"{candidate.name!r} is taken", "name every candidate")
        names.add(candidate.name)
        _check_candidate(candidate, entry.owned, data, path, report)
    if entry.search is not None:
        _check_search(entry.search, entry, report)


def check_currency(data: Mapping[str, Any], report: Collector) -> None:
    """Record a missing currency, also where other faults keep the sections from being read."""
    money = data.get("economics")
    if data.get("purchase") is None or not (money is None or isinstance(money, dict)):
        return
    if not money or money.get("currency") is None:
        report.error(("economics", "currency"), "the currency is missing",
                     "add economics: {currency: USD}")  # fmt: skip


def _check_money(money: EconomicsInput, report: Collector) -> None:
    if money.currency is not None and money.currency.upper() != "USD":
        if money.exchange_rate is None:
            report.error(("economics", "exchange_rate"), "is missing: the price list is in USD",
                         f"write how many {money.currency} one USD is")  # fmt: skip
    elif money.exchange_rate not in (None, 1.0):
        report.error(("economics", "exchange_rate"), "one USD is one USD", "leave it out")
    given = {"electricity_price_per_kwh", "co2_g_per_kwh"} <= money.model_fields_set
    if money.region not in regions() and not given:
        report.error(("economics", "region"), f"no electricity price for {money.region!r}",
                     f"choose from {', '.join(regions())}, or give electricity_price_per_kwh and "
                     "co2_g_per_kwh")  # fmt: skip
    for name in money.prices:
        report.attempt(("economics", "prices", name), partial(_priced_name, name))
    for gpu, tiers in money.rents.items():
        report.attempt(("economics", "rents", gpu), partial(hardware_db.gpu, gpu))
        for tier in tiers:
            if _tier(tier) is None:
                report.unknown(("economics", "rents", gpu, tier), TIERS, "is no tier")
    for years in money.resale:
        try:
            float(years)
        except ValueError:
            report.error(("economics", "resale", years), "is no number of years", "3: 0.3")


def _tier(word: str) -> Tier | None:
    found = {simplified(t): t for t in TIERS}.get(simplified(word))
    return found  # type: ignore[return-value]


def _priced_name(name: str) -> str:
    """Canonical name of a node or GPU that a price is given for."""
    if len(hardware_db.loader.candidates("node", name)) == 1:
        return hardware_db.node(name).name
    return hardware_db.gpu(name).name


def _check_workloads(entry: PurchaseInput, data: Mapping[str, Any], report: Collector) -> None:
    workload = data.get("workload")
    own = workload.get("tokens") if isinstance(workload, dict) else None
    given = entry.workloads or [PurchaseWorkloadInput()]
    for index, item in enumerate(given):
        path: FieldPath = ("purchase", "workloads", index) if entry.workloads else ("workload",)
        if item.tokens is None and own is None:
            report.error((*path, "tokens"), "is missing: what a run costs depends on it",
                         "write how many tokens one run trains on")  # fmt: skip
    runs = [item.runs_per_year is not None for item in given]
    if any(runs) and not all(runs):
        index = runs.index(False)
        report.error(("purchase", "workloads", index, "runs_per_year"),
                     "is missing here and given elsewhere",
                     "give it for all workloads or for none")  # fmt: skip
    if any(runs) and any(item.weight is not None for item in given):
        report.error(("purchase", "workloads"), "weight and runs_per_year are both given",
                     "runs_per_year already says how much of each is trained")  # fmt: skip


def _check_candidate(
    entry: CandidateInput,
    owned: OwnedInput | None,
    data: Mapping[str, Any],
    path: FieldPath,
    report: Collector,
) -> None:
    keeps = entry.keep != "none"
    if not (keeps or entry.buy or entry.rent):
        report.error(path, f"{entry.name!r} has no hardware", "add keep:, buy: or rent:")
    if (keeps or entry.wait_years) and owned is None:
        report.error((*path, "keep" if keeps else "wait_years"), "nothing is owned",
                     "say that cluster: stands: purchase: {owned: {age_years: 2}}")  # fmt: skip
    groups = _groups_of(data)
    if isinstance(entry.keep, list):
        for index, kept in enumerate(entry.keep):
            where: FieldPath = (*path, "keep", index)
            if kept.group >= len(groups):
                report.error((*where, "group"), f"there is no group {kept.group}",
                             f"cluster has {len(groups)}, counted from 0")  # fmt: skip
            elif kept.count is not None and kept.count > _count(groups[kept.group]):
                report.error((*where, "count"), f"only {_count(groups[kept.group])} stand",
                             "buy the others")  # fmt: skip
    for key in ("buy", "rent"):
        for index, part in enumerate(getattr(entry, key)):
            _check_part(part, (*path, key, index), report)


def _check_part(part: GroupInput, path: FieldPath, report: Collector) -> None:
    stated = [key for key in ("node", "gpu", "gpus") if getattr(part, key) is not None]
    if len(stated) != 1:
        got = " and ".join(stated) if stated else "none of them"
        report.error(path, f"one of node, gpu and gpus is needed, got {got}")
    finders = {"node": hardware_db.node, "gpu": hardware_db.gpu, "intra_node": hardware_db.link}
    for key, find in finders.items():
        name = getattr(part, key)
        if name is not None:
            report.attempt((*path, key), partial(find, name))
    for index, name in enumerate(part.gpus or ()):
        report.attempt((*path, "gpus", index), partial(hardware_db.gpu, name))


def _check_search(entry: BudgetSearchInput, whole: PurchaseInput, report: Collector) -> None:
    path: FieldPath = ("purchase", "search")
    if entry.budget is None and whole.constraints.budget is None:
        report.error((*path, "budget"), "is missing", "write how much may be spent")
    if entry.keep and whole.owned is None:
        report.error((*path, "keep"), "nothing is owned",
                     "say that cluster: stands: purchase: {owned: {age_years: 2}}")  # fmt: skip
    for index, part in enumerate(entry.nodes):
        _check_part(part, (*path, "nodes", index), report)


def _groups_of(data: Mapping[str, Any]) -> list[Any]:
    cluster = data.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, dict) else None
    return groups if isinstance(groups, list) else []


def _count(group: Any) -> int:
    count = group.get("count", 1) if isinstance(group, dict) else 1
    return int(count) if isinstance(count, (int, float)) else 1


def _workloads(
    entry: PurchaseInput, raw: Mapping[str, Any], scenario: Scenario
) -> tuple[PurchaseWorkload, ...]:
    base = scenario.given["workload"]
    items = entry.workloads or [PurchaseWorkloadInput()]
    raws = raw.get("workloads") or [{}]
    found = []
    for index, (item, given) in enumerate(zip(items, raws, strict=True)):
        workload = {**base, **{key: given[key] for key in
                               ("sequence_length", "global_batch", "tokens")
                               if given.get(key) is not None}}  # fmt: skip
        sections: dict[str, Any] = {"workload": workload}
        for key in ("model", "stack", "plan"):
            if given.get(key) is not None:
                sections[key] = given[key]
        # A plan of the scenario is for its own model.
        if "model" in sections and "plan" not in sections:
            sections["plan"] = None
        name = item.name or _model_name(sections.get("model", scenario.model.name), index)
        found.append(
            PurchaseWorkload(name, sections, float(workload["tokens"]), item.weight or 1.0,
                             item.runs_per_year)
        )  # fmt: skip
    return tuple(found)


def _model_name(model: Any, index: int) -> str:
    return model if isinstance(model, str) else f"workload {index + 1}"


def _candidate(entry: CandidateInput, raw: Mapping[str, Any], scenario: Scenario) -> Candidate:
    counts = [_count(group) for group in _groups_of(scenario.given)]
    keep: dict[int, int] = {}
    if entry.keep == "all":
        keep = dict(enumerate(counts))
    elif isinstance(entry.keep, list):
        for kept in entry.keep:
            keep[kept.group] = counts[kept.group] if kept.count is None else kept.count
    buy, rent = raw.get("buy") or (), raw.get("rent") or ()
    return Candidate(
        name=entry.name,
        keep=keep,
        buy=tuple(
            Part(_plain_group(g), part.price) for g, part in zip(buy, entry.buy, strict=True)
        ),
        rent=tuple(
            Part(_plain_group(g), part.price_per_gpu_hour, _tier(part.tier) or "on-demand")
            for g, part in zip(rent, entry.rent, strict=True)
        ),
        sell=entry.sell,
        wait_years=entry.wait_years,
        settings={key: raw[key] for key in ("fabric", "stack", "plan") if raw.get(key) is not None},
    )


def _plain_group(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in _PART_ONLY}


def _constraints(entry: PurchaseInput) -> Constraints:
    c = entry.constraints
    return Constraints(
        budget=c.budget,
        power_limit_w=None if c.power_limit_kw is None else c.power_limit_kw * 1000.0,
        deadline_s=None if c.deadline_days is None else c.deadline_days * SECONDS_PER_DAY,
        memory_headroom=c.memory_headroom,
    )


def _search(entry: PurchaseInput, raw: Mapping[str, Any]) -> BudgetSearch | None:
    s = entry.search
    if s is None:
        return None
    budget = s.budget if s.budget is not None else entry.constraints.budget
    assert budget is not None
    nodes = tuple(
        Part(_plain_group(g), part.price)
        for g, part in zip(raw["search"]["nodes"], s.nodes, strict=True)
    )
    given = raw["search"]
    settings = {key: given[key] for key in ("fabric", "stack") if given.get(key) is not None}
    return BudgetSearch(budget, nodes, s.most, s.keep, settings)


def _economics(money: EconomicsInput, on: date | None) -> Economics:
    amounts: dict[str, Amount] = {
        name: value
        for name in EconomicsInput.model_fields
        if name not in _NOT_AMOUNTS and (value := getattr(money, name)) is not None
    }
    return Economics(
        currency=(money.currency or "USD").upper(),
        exchange_rate=money.exchange_rate or 1.0,
        region=money.region,
        date=on or money.date or date.today(),
        amounts=amounts,
        prices={_priced_name(name): amount for name, amount in money.prices.items()},
        rents={
            (hardware_db.gpu(gpu).name, _tier(tier) or tier): amount
            for gpu, tiers in money.rents.items()
            for tier, amount in tiers.items()
        },
        resale={float(years): amount for years, amount in money.resale.items()},
        financing_years=money.financing_years,
        price_change_per_year=money.price_change_per_year,
        spares=money.spares,
        draws=money.draws,
        seed=money.seed,
    )
