"""What is made up for after a start, a pause or an outage, and what is reported instead."""

from __future__ import annotations

import pytest

from leasecron_sync.schedule import jitter_of
from tests.fleet import DAY, HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance, minutes


def one(schedule: str = "* * * * *", **options: int) -> tuple[Fleet, Instance]:
    fleet = Fleet()
    only = fleet.add("a", history_ms=400 * DAY)
    only.job("job", schedule, None, **options)
    return fleet, only.start()


def told(fleet: Fleet) -> set[int]:
    times = [event.scheduled_time for event in fleet.missed()]
    return {round(time.timestamp() * 1000) for time in times if time is not None}


@pytest.mark.parametrize("gap", [101, 1_000, 100_000])
@pytest.mark.parametrize(("catch_up_ms", "most"), [(0, 0), (HOUR, 60), (100 * DAY, 100)])
def test_the_newest_of_the_window_run_oldest_first_and_the_rest_is_one_event(
    gap: int, catch_up_ms: int, most: int
) -> None:
    fleet, only = one(catch_up_ms=catch_up_ms)
    fleet.advance(5 * MINUTE)
    only.kill()
    fleet.let_pass(gap * MINUTE)
    before, calls = len(fleet.starts), only.calls()
    only.start()
    fleet.advance(20 * SECOND)
    late = fleet.started()[before:]
    assert late == minutes(5 + gap - min(most, gap), 4 + gap)
    assert only.calls() - calls < 3 * len(late) + 20
    (event,) = fleet.missed()
    assert event.count == min(1_000, gap - len(late))
    assert event.at_least == (gap - len(late) > 1_000)


@pytest.mark.parametrize(("catch_up_ms", "late"), [(0, 0), (60_000, 1), (600_000, 4)])
def test_a_pause_is_made_up_for_within_the_window(catch_up_ms: int, late: int) -> None:
    fleet, _only = one(catch_up_ms=catch_up_ms)
    fleet.advance(5 * MINUTE)
    fleet.let_pass(230 * SECOND)
    before = len(fleet.starts)
    fleet.advance(5 * SECOND)
    assert fleet.started()[before:] == minutes(9 - late, 8)
    assert sum(event.count for event in fleet.missed()) == 4 - late
    fleet.advance(5 * MINUTE)
    assert len(fleet.started()) == len(set(fleet.started()))


@pytest.mark.parametrize("outage_ms", [35 * SECOND, 20 * MINUTE])
@pytest.mark.parametrize("catch_up_ms", [0, 60_000, HOUR])
def test_after_an_outage_everything_has_run_or_is_reported(
    outage_ms: int, catch_up_ms: int
) -> None:
    fleet = Fleet()
    instances = [fleet.add(label) for label in "ab"]
    for item in instances:
        item.job("job", "* * * * *", catch_up_ms=catch_up_ms)
        item.start()
    fleet.advance(5 * MINUTE + 20 * SECOND)
    for item in instances:
        item.backend.faults.down = True
    fleet.advance(outage_ms)
    for item in instances:
        item.backend.faults.down = False
    fleet.advance(5 * MINUTE)
    started = fleet.started()
    assert len(started) == len(set(started))
    everything = set(range(MIDDAY_MS, fleet.store_clock.now_ms(), MINUTE))
    assert everything - set(started) <= told(fleet)
    assert not told(fleet) & set(started)
    assert catch_up_ms < HOUR or not fleet.missed()
    for item in instances:
        assert len(item.named("store_down")) == len(item.named("store_back")) == 1


def test_a_store_that_is_down_at_the_start_is_asked_until_it_answers() -> None:
    fleet = Fleet()
    only = fleet.add("a")
    only.job("job", "* * * * *")
    only.backend.faults.down = True
    only.start()
    fleet.advance(5 * MINUTE)
    only.backend.faults.down = False
    fleet.advance(5 * MINUTE)
    assert set(fleet.started()) >= set(minutes(5, 9))


def test_a_run_whose_jitter_passed_while_nobody_was_there_is_reported() -> None:
    fleet, only = one("0 * * * *", jitter_ms=HOUR - 1)
    fleet.advance(3 * HOUR)
    scheduled_ms = MIDDAY_MS + 3 * HOUR
    due_ms = scheduled_ms + jitter_of("job", scheduled_ms, HOUR - 1)
    fleet.advance(due_ms - MINUTE - fleet.store_clock.now_ms())
    only.kill()
    fleet.let_pass(5 * MINUTE)
    only.start()
    fleet.advance(3 * HOUR)
    everything = {MIDDAY_MS + number * HOUR for number in range(5)}
    assert everything <= set(fleet.started()) | told(fleet)


@pytest.mark.parametrize("jitter_ms", [30 * SECOND, 5 * MINUTE])
def test_a_restart_inside_the_jitter_loses_and_repeats_nothing(jitter_ms: int) -> None:
    fleet = Fleet()
    instances = [fleet.add(label) for label in "ab"]
    for item in instances:
        item.job("job", "* * * * *", jitter_ms=jitter_ms, overlap="allow")
        item.start()
    fleet.advance(10 * MINUTE)
    for item in instances:
        item.kill()
    fleet.let_pass(3 * SECOND)
    for item in instances:
        item.start()
    fleet.advance(10 * MINUTE + jitter_ms)
    started = fleet.started()
    assert len(started) == len(set(started))
    assert set(minutes(0, 19)) <= set(started)
    for start in fleet.starts:
        due_ms = start.scheduled_ms + jitter_of("job", start.scheduled_ms, jitter_ms)
        assert start.at_ms >= due_ms
    assert not fleet.missed()


def test_a_new_job_does_not_run_for_a_time_before_it_was_registered() -> None:
    fleet, only = one("0 0 * * *")
    fleet.advance(MINUTE)
    only.job("new", "0 12 * * *", jitter_ms=HOUR)
    fleet.advance(2 * HOUR)
    assert fleet.started("new") == []
