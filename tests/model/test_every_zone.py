"""Schedules against somebody who watches a clock on the wall, around changes of clocks.

An ordinary build compares at each kind of change that zones see from 2020 to 2030, and at the
oddest ones of their history. ``LEASECRON_SYNC_LONG=1`` in the environment compares at every change
of every zone in these years, and at every change that a zone has ever seen: about an hour.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Callable, Optional

import pytest

from leasecron_sync.schedule import cron, zones
from leasecron_sync.schedule.pattern import Pattern
from leasecron_sync.schedule.zones import Stretch
from tests.model.schedule_campaign import (
    EXTREMES,
    Campaign,
    Place,
    distinct_places,
    every_place,
    historic_places,
)
from tests.model.zone_files import changes_of, zone_names

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
SEED = 20_260_329

only_long = pytest.mark.skipif(not LONG, reason="LEASECRON_SYNC_LONG=1 runs it")


def compare(places: Iterable[Place], share: float) -> Campaign:
    campaign = Campaign(SEED)
    print(campaign.compare_all(places, share=share))  # noqa: T201 - the account of a long run
    assert campaign.tally.disagreements == []
    assert campaign.tally.instants > 100 * campaign.tally.changes
    return campaign


@pytest.mark.timeout(7_200)
def test_each_kind_of_change_is_met_as_a_watcher_of_the_clock_meets_it() -> None:
    places = distinct_places()
    kinds = {(place.change.before, place.change.after) for place in places}
    assert {zone for zone, _change in places} >= set(EXTREMES)
    assert len(kinds) > 60
    compare(places, 1.0 if LONG else 0.1)


@only_long
@pytest.mark.timeout(7_200)
def test_each_change_of_each_zone_is_met_as_a_watcher_of_the_clock_meets_it() -> None:
    campaign = compare(every_place(random.Random(SEED)), 1.0)
    assert campaign.tally.zones == set(zone_names())


@only_long
@pytest.mark.timeout(7_200)
def test_each_change_in_history_is_met_as_a_watcher_of_the_clock_meets_it() -> None:
    compare(historic_places(), 0.1)


def test_each_change_of_the_database_is_found_by_looking_once_a_day() -> None:
    # Every zone with a history of its own, at a change in each; everything in a long run.
    rng = random.Random(SEED)
    looked = 0
    for zone in zone_names():
        changes = changes_of(zone)
        for change in changes if LONG else rng.sample(changes, min(2, len(changes))):
            looked += 1
            before = zones.stretch_at(zone, change.at - 1)
            after = zones.stretch_at(zone, change.at)
            assert (before.offset, after.offset) == (change.before, change.after), (zone, change)
            assert (before.end, after.start) == (change.at, change.at), (zone, change)
            assert after.skipped == max(0, change.jump), (zone, change)
    assert looked > 1_000


# -- the comparison finds what is wrong ----------------------------------------------------------


def no_memory(stretch: Stretch) -> Stretch:
    return stretch._replace(reached=stretch.start + stretch.offset)


def no_gap(stretch: Stretch) -> Stretch:
    return stretch._replace(skipped=0)


def an_hour_off(stretch: Stretch) -> Stretch:
    return stretch._replace(reached=stretch.reached - 3_600)


@pytest.mark.parametrize("fault", [no_memory, no_gap, an_hour_off])
def test_a_planted_fault_about_zones_is_found(
    fault: Callable[[Stretch], Stretch], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = zones.stretch_at
    monkeypatch.setattr(cron, "stretch_at", lambda zone, at: fault(right(zone, at)))
    assert found_in_a_few_places()


@pytest.mark.parametrize("hours", [0, 1, 25])
def test_a_planted_fault_about_long_gaps_is_found(
    hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cron, "MAX_MADE_UP", hours * 3_600)
    assert found_in_a_few_places()


@pytest.mark.parametrize("name", ["first", "last"])
def test_a_planted_fault_in_one_direction_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Pattern, name)

    def wrong(self: Pattern, local: int) -> Optional[int]:
        found: Optional[int] = right(self, local)
        if found is not None and found == local and local % 3_600 == 0:
            # A whole hour is overlooked by whoever asks for it itself.
            found = right(self, local + (1 if name == "first" else -1))
        return found

    monkeypatch.setattr(Pattern, name, wrong)
    assert found_in_a_few_places()


def found_in_a_few_places() -> list[str]:
    wanted = {
        "Europe/Athens": 1_743_296_400,
        "America/New_York": 1_762_063_200,
        "Antarctica/Troll": 1_743_296_400,
        "Antarctica/Vostok": 783_648_000,
        "Pacific/Apia": 1_325_239_200,
    }
    places = [
        Place(zone, change)
        for zone, at in wanted.items()
        for change in changes_of(zone)
        if change.at == at
    ]
    assert len(places) == len(wanted)
    campaign = Campaign(SEED)
    for place in places:
        campaign.compare_all([place], share=0.3)
        if campaign.tally.disagreements:
            break
    return campaign.tally.disagreements
