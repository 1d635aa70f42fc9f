"""The price list: plausible, sourced, dated, found by date and region."""

from __future__ import annotations

from datetime import date

import pytest

import hardware_db
from hardware_db.price_list import STALE_DAYS, find_price, price, price_faults, prices, regions
from simulator.errors import UserError


@pytest.mark.parametrize("entry", prices(), ids=lambda p: f"{p.name} {p.date}")
def test_every_entry_is_plausible_and_sourced(entry: object) -> None:
    assert price_faults(entry) == []  # type: ignore[arg-type]


def test_no_entry_is_given_twice() -> None:
    keys = [(p.table, p.item, p.tier, p.region, p.date) for p in prices()]
    assert len(keys) == len(set(keys))


def test_priced_hardware_exists() -> None:
    known = {*hardware_db.gpus(), *hardware_db.nodes(), "host-8"}
    assert {p.item for p in prices("purchase")} <= known
    assert {p.item for p in prices("cloud")} <= set(hardware_db.gpus())


def test_the_newest_entry_of_that_day_holds() -> None:
    old = price("purchase", "dgx-h100", on=date(2024, 1, 1))
    new = price("purchase", "dgx-h100", on=date(2026, 12, 1))
    assert old.date < date(2024, 1, 1) < new.date
    # Before the first entry, the oldest there is.
    assert price("purchase", "dgx-h100", on=date(2020, 1, 1)) == old


def test_a_region_of_its_own_comes_before_the_general_one() -> None:
    general = find_price("cloud", "h100-sxm-80gb", tier="on-demand")
    special = find_price("cloud", "h100-sxm-80gb", tier="on-demand", region="us-hyperscaler")
    elsewhere = find_price("cloud", "h100-sxm-80gb", tier="on-demand", region="sweden")
    assert general is not None and special is not None
    assert special.value > general.value
    assert elsewhere == general


def test_entries_older_than_a_year_are_stale() -> None:
    entry = price("electricity", "price", region="us")
    assert not entry.is_stale(entry.date)
    assert not entry.is_stale(date.fromordinal(entry.date.toordinal() + STALE_DAYS))
    assert entry.is_stale(date.fromordinal(entry.date.toordinal() + STALE_DAYS + 1))


def test_regions_have_price_and_co2() -> None:
    for region in regions():
        assert find_price("electricity", "co2", region=region) is not None


def test_unknown_names_list_near_ones() -> None:
    with pytest.raises(UserError, match="dgx-h100"):
        price("purchase", "dgx-h1000")
    with pytest.raises(UserError, match="sweden"):
        price("electricity", "price", region="atlantis")
