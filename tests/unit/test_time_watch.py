"""Steps of the wall clock, pauses, and the skew that is put right."""

from __future__ import annotations

from datetime import datetime, timezone
from unittest import mock

import pytest

from leasecron_sync.engine.context import TIMER_LANE
from leasecron_sync.engine.time_watch import Passage, TimeWatch
from leasecron_sync.errors import StoreRejected
from tests.fleet import HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance, minutes


def skewed(skew_ms: int, schedule: object, family: str = "lease") -> tuple[Fleet, Instance]:
    fleet = Fleet(family)
    only = fleet.add("a", skew_ms=skew_ms)
    only.job("job", schedule)
    return fleet, only


@pytest.mark.parametrize(
    ("now_ms", "steady_ms", "passage"),
    [
        (0, 0, Passage.ORDINARY),
        (5_000, 5_000, Passage.ORDINARY),
        (-3, 0, Passage.ORDINARY),
        (20_000, 20_000, Passage.JUMPED),  # paused
        (20_000, 5_000, Passage.JUMPED),  # set ahead
        (-20_000, 5_000, Passage.SET_BACK),
        (-HOUR, 60_000, Passage.SET_BACK),  # both: what was handed out comes first
    ],
)
def test_both_clocks_are_compared(now_ms: int, steady_ms: int, passage: Passage) -> None:
    watch = TimeWatch(1_000_000, 7_000)
    watch.plan(7_000 + 5_000)
    assert watch.look(1_000_000 + now_ms, 7_000 + steady_ms) is passage
    watch.plan(7_000 + steady_ms)
    assert watch.look(1_000_000 + now_ms, 7_000 + steady_ms) is Passage.ORDINARY


def test_a_small_step_back_counts_where_the_agenda_has_left_something_behind() -> None:
    watch = TimeWatch(1_000_000, 7_000)
    assert not watch.is_behind(0)
    watch.agenda_is_at(1_000_000)
    watch.agenda_is_at(999_000)  # of several the last one counts
    assert not watch.is_behind(1_000_000)
    assert watch.is_behind(999_999)
    assert watch.look(999_999, 7_000) is Passage.BEHIND
    assert watch.look(999_998, 7_000) is Passage.BEHIND  # it began anew, a moment before
    assert watch.look(999_998, 7_000) is Passage.ORDINARY
    assert watch.look(999_500, 7_000) is Passage.ORDINARY  # all since then was handed out


def test_a_pause_counts_from_what_was_planned() -> None:
    watch = TimeWatch(0, 0)
    watch.plan(50_000)
    assert watch.look(60_000, 60_000) is Passage.ORDINARY
    watch.plan(60_000)
    assert watch.look(70_001, 70_001) is Passage.JUMPED


@pytest.mark.parametrize("ahead_ms", [400, 700, 3 * SECOND, 9 * SECOND, 30 * SECOND])
@pytest.mark.parametrize("before_ms", [200, 2 * SECOND, 8 * SECOND])
def test_a_restart_just_before_a_run_loses_nothing_on_a_host_that_is_ahead(
    ahead_ms: int, before_ms: int
) -> None:
    # Registering tells that it is ahead; by then it had its agenda begin behind the run.
    fleet, only = skewed(ahead_ms, "*/5 * * * *")
    only.start()
    fleet.advance(3 * MINUTE)
    only.kill()
    fleet.let_pass(MIDDAY_MS + 5 * MINUTE - before_ms - fleet.store_clock.now_ms())
    only.start()
    fleet.advance(5 * MINUTE)
    assert fleet.started() == [MIDDAY_MS, MIDDAY_MS + 5 * MINUTE]


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize("skew_ms", [-90 * SECOND, -4 * SECOND, 4 * SECOND, 90 * SECOND])
@pytest.mark.parametrize("step_ms", [-20 * MINUTE, -5 * SECOND, 5 * SECOND, 20 * MINUTE])
def test_a_clock_stepped_while_it_is_wrong_already_costs_no_run(
    family: str, skew_ms: int, step_ms: int
) -> None:
    fleet, only = skewed(skew_ms, "* * * * *", family)
    only.start()
    fleet.advance(4 * MINUTE)
    only.clock.step(step_ms)
    fleet.advance(MINUTE)
    steps = only.steps
    fleet.advance(9 * MINUTE)
    assert only.steps - steps < 9 * 60 * 3
    started = fleet.started()
    assert len(started) == len(set(started))
    assert set(started) >= set(minutes(6, 12))
    assert all(start.at_ms >= start.scheduled_ms for start in fleet.starts)


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_clock_that_wanders_about_the_bound_does_not_spin(family: str) -> None:
    fleet, only = skewed(510, "* * * * *", family)
    only.start()
    fleet.advance(MINUTE)
    for number in range(60):
        only.clock.step(25 if number % 2 else -25)
        fleet.advance(10 * SECOND)
    assert only.steps < 61 * 20
    assert only.calls() < 200
    assert set(fleet.started()) >= set(minutes(1, 9))
    assert len(only.named("skew_found")) <= 1


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize("skew_ms", [-2 * HOUR, 0, 2 * HOUR])
@pytest.mark.parametrize("step_ms", [-2 * HOUR, 2 * HOUR])
def test_a_clock_set_in_an_outage_calls_no_run_missed_before_its_time(
    family: str, skew_ms: int, step_ms: int
) -> None:
    """Nobody can compare it then; the steady clock goes on from the newest comparison."""
    fleet = Fleet(family)
    only = fleet.add(skew_ms=skew_ms)
    clock = only.clock if skew_ms else fleet.own_clock(only)
    only.job("job", "*/10 * * * *", None)
    only.start()
    fleet.advance(15 * MINUTE)
    only.backend.faults.down = True
    fleet.advance(10 * MINUTE)
    assert only.named("store_down")
    clock.step(step_ms)
    fleet.advance(20 * MINUTE)
    only.backend.faults.down = False
    fleet.advance(20 * MINUTE)
    missed = {event.scheduled_time for event in fleet.missed()}
    passed = (MIDDAY_MS // 1_000 + number * 60 for number in (20, 30, 40))
    assert missed <= {datetime.fromtimestamp(time_s, timezone.utc) for time_s in passed}
    assert fleet.started()[-2:] == [MIDDAY_MS + 50 * MINUTE, MIDDAY_MS + 60 * MINUTE]


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_an_instance_whose_clock_was_wrong_at_its_start_calls_nothing_before_that_missed(
    family: str,
) -> None:
    fleet, only = skewed(-2 * HOUR, "*/10 * * * *", family)
    only.start()
    fleet.advance(15 * MINUTE)
    assert fleet.started() == [MIDDAY_MS, MIDDAY_MS + 10 * MINUTE]
    assert not fleet.missed()


@pytest.mark.parametrize("step_ms", [0, -2 * HOUR])
def test_what_passed_in_a_pause_is_told_also_after_the_clock_was_set_back(step_ms: int) -> None:
    fleet = Fleet("claim")
    only = fleet.add()
    only.job("job", "* * * * *", None)
    only.start()
    fleet.advance(20 * MINUTE)
    fleet.store_clock.step(step_ms)
    fleet.advance(10 * MINUTE)
    before = len(fleet.missed())
    fleet.let_pass(20 * MINUTE)
    fleet.advance(2 * MINUTE)
    assert [event.count for event in fleet.missed()[before:]] == [19]


def test_a_clock_set_while_claims_are_refused_counts_in_an_outage_that_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal that goes on is no reason to go by a comparison of hours ago."""
    fleet = Fleet()
    only = fleet.add()
    clock = fleet.own_clock(only)
    only.job("job", "0 * * * *", None)
    only.start()
    fleet.advance(10 * SECOND)
    monkeypatch.setattr(only.backend, "claim", mock.Mock(side_effect=StoreRejected("no")))
    fleet.advance(10 * MINUTE)
    context = only.manual._context
    assert context is not None
    assert context.caller.is_down()
    assert not context.caller.is_failing(TIMER_LANE)
    fleet.store_clock.step(HOUR)
    clock.step(HOUR)
    fleet.advance(10 * SECOND)
    only.backend.faults.down = True
    fleet.advance(MINUTE)
    fleet.advance(HOUR)
    assert context.caller.is_failing(TIMER_LANE)
    assert abs(context.caller.now_ms() - clock.now_ms()) <= SECOND
