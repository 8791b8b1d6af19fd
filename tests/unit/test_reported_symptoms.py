"""Symptoms that users of other schedulers reported, played with several instances in one thread.

Those that need a real server or a process are in ``tests/faults``. Which symptom is ruled out by
which test, of all folders, stands in ``docs/reported-faults.rst``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import pytest

from leasecron_sync import every
from leasecron_sync.model import RunState
from leasecron_sync.run import LeaseRun, Run
from tests.fleet import DAY, HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance, minutes

LATE_MS = 700


def start_all(instances: Sequence[Instance], *jobs: tuple[str, object], **options: object) -> None:
    given: dict[str, Any] = dict(options)
    for item in instances:
        for name, schedule in jobs:
            item.job(name, schedule, **given)
        item.start()


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_short_run_is_not_repeated_by_a_slow_clock_nor_lost_to_a_fast_one(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has long ended when the slow host comes to it, and the fast host comes first."""
    fleet = Fleet(family)
    right = fleet.add("right")
    slow = fleet.add("slow", skew_ms=-3 * SECOND)
    fast = fleet.add("fast", skew_ms=10 * MINUTE)
    with caplog.at_level(logging.WARNING):
        start_all([right, slow, fast], ("job", "* * * * *"))
        fleet.advance(30 * MINUTE)
    assert fleet.started() == minutes(0, 29)
    assert all(start.at_ms >= start.scheduled_ms for start in fleet.starts)
    assert not fleet.missed()
    # Nobody but the winner says that it has claimed a run.
    claimed = [event for item in fleet.instances for event in item.named("run_claimed")]
    assert len(claimed) == 30
    # One warning of each whose clock is off, however many times come.
    assert [len(item.named("skew_found")) for item in (right, slow, fast)] == [0, 1, 1]
    told = [line for line in caplog.messages if "this host's clock differs" in line]
    assert len(told) == 2


# -- long runs -------------------------------------------------------------------------------------


def test_a_run_longer_than_its_interval_and_its_lease_meets_no_other_of_its_job() -> None:
    """It takes 12 s, is due every 5 s, and its lease is 6 s long."""
    fleet = Fleet()
    instances = [fleet.add(label, lease_ms=6_000) for label in "abc"]
    start_all(instances, ("long", every(seconds=5)), ("short", every(seconds=5)))
    fleet.held = {"long"}
    begun: list[int] = []
    for _ in range(10):
        while not (runs := _under_way(instances, "long")):
            fleet.advance(100)
        [(_holder, run)] = runs
        begun.append(_scheduled_ms(run))
        fleet.advance(begun[-1] + 12 * SECOND - fleet.store_clock.now_ms())
        assert [it for _holder, it in _under_way(instances, "long")] == [run]
        fleet.held = set()
        fleet.settle_down()
        fleet.held = {"long"}
    assert not [item for item in instances if item.named("run_lost", "run_taken_over")]
    # The next one is the first that comes after the end; those between are seen to be skipped.
    assert begun == [begun[0] + 15 * SECOND * number for number in range(10)]
    assert fleet.started("long") == begun
    states = fleet.states("long")
    for begin in begun[:-1]:
        between = [states[begin + 5 * SECOND], states[begin + 10 * SECOND]]
        assert (states[begin], between) == (RunState.FINISHED, [RunState.SKIPPED] * 2)
    short = fleet.started("short")
    assert short == list(range(short[0], short[-1] + 1, 5 * SECOND))


def _under_way(instances: Sequence[Instance], job: str) -> list[tuple[Instance, Run]]:
    return [(item, run.run) for item in instances for run in item.manual.runs if run.job == job]


def _scheduled_ms(run: Run) -> int:
    return round(run.scheduled_time.timestamp() * 1000)


def test_a_run_that_never_ends_is_seen_with_its_age_and_hinders_no_other_job() -> None:
    fleet = Fleet()
    instances = [fleet.add(label, lease_ms=6_000) for label in "abc"]
    start_all(instances, ("hung", every(seconds=5)), ("good", every(seconds=5)))
    fleet.advance(10 * SECOND)
    fleet.held = {"hung"}
    fleet.advance(2 * MINUTE)
    [(holder, run)] = _under_way(instances, "hung")
    age_ms = fleet.store_clock.now_ms() - _scheduled_ms(run)
    assert age_ms >= 110 * SECOND
    [live] = [live for live in holder.manual._runtime.runs() if live.key.job == "hung"]
    assert holder.clock.steady_ms() - live.began_ms == age_ms
    # Each time that it cost is in the history, with the reason.
    skipped = [it for it in fleet.records("hung").values() if it.state is RunState.SKIPPED]
    assert len(skipped) == age_ms // (5 * SECOND)
    assert {record.reason for record in skipped} == {"overlap"}
    good = fleet.started("good")
    assert good == list(range(good[0], good[-1] + 1, 5 * SECOND))
    assert good[-1] >= fleet.store_clock.now_ms() - 5 * SECOND
    # Nobody waits for ever once its process is gone.
    holder.kill()
    fleet.held = set()
    fleet.advance(7 * SECOND)
    again = [start for start in fleet.starts if start[1:3] == ("hung", _scheduled_ms(run))]
    assert [(start.attempt, start.instance == holder.label) for start in again] == [(2, False)]


def test_a_run_that_hangs_past_its_limit_is_one_warning_and_its_job_goes_on_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    instances = [fleet.add(label) for label in "ab"]
    seen: list[bool] = []

    def handler(run: LeaseRun) -> None:
        if not seen:
            seen.append(False)
            fleet.advance(5 * MINUTE)
            seen.append(run.lost)

    for item in instances:
        item.job("hung", "* * * * *", handler, time_limit_ms=10 * SECOND)
        item.start()
    with caplog.at_level(logging.WARNING):
        fleet.advance(7 * MINUTE)
    assert seen == [False, True]
    told = [line for line in caplog.messages if line.startswith("a handler goes on although")]
    assert len(told) == 1
    assert "job='hung'" in told[0]
    # Taken over when its lease had lapsed, and every time after it came to its turn, too.
    first, again, *later = fleet.starts
    assert (again.scheduled_ms, again.attempt) == (first.scheduled_ms, 2)
    assert again.instance != first.instance
    assert again.at_ms - first.at_ms < 30 * SECOND
    assert [start.scheduled_ms for start in later][:4] == minutes(1, 4)
    assert {start.instance for start in later[:4]} == {again.instance}


# -- deploys and crashes ---------------------------------------------------------------------------


@pytest.mark.parametrize("catch_up_ms", [0, 5_000])
def test_a_deploy_across_a_scheduled_time_makes_up_for_it_or_tells_of_it(catch_up_ms: int) -> None:
    """The only instance ends 2.5 s before a time, and the next one is up 0.7 s after it."""
    fleet = Fleet()
    only = fleet.add("a")
    start_all([only], ("job", "* * * * *"), catch_up_ms=catch_up_ms)
    fleet.advance(MINUTE + 27_500)
    for _ in range(20):
        only.kill()
        fleet.let_pass(2_500 + LATE_MS)
        only.start()
        fleet.advance(MINUTE - 2_500 - LATE_MS)
    crossed = minutes(1, 20)
    if catch_up_ms:
        assert fleet.started() == minutes(0, 20)
        late = [it.at_ms - it.scheduled_ms for it in fleet.starts if it.scheduled_ms in crossed]
        assert set(late) == {LATE_MS}
        assert not fleet.missed()
        return
    assert fleet.started() == minutes(0, 0)
    told = [event.scheduled_time for event in fleet.missed()]
    assert told == [datetime.fromtimestamp(ms / 1000, timezone.utc) for ms in crossed]
    assert {event.reason for event in fleet.missed()} == {"too old"}


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_schedule_longer_than_a_process_lives_is_kept(family: str) -> None:
    """A job of every hour, another of every three, and a restart every 40 s."""
    fleet = Fleet(family)
    only = fleet.add("a")
    start_all([only], ("hourly", "0 * * * *"), ("seldom", every(seconds=3 * 3_600)))
    for _ in range(7 * HOUR // (40 * SECOND)):
        fleet.advance(39 * SECOND)
        only.kill()
        fleet.let_pass(SECOND)
        only.start()
    hours = list(range(MIDDAY_MS, fleet.store_clock.now_ms(), HOUR))
    assert fleet.started("hourly") == hours
    assert fleet.started("seldom") == [ms for ms in hours if ms % (3 * HOUR) == 0]


def test_a_process_that_starts_after_a_crash_waits_for_one_lease_and_no_longer() -> None:
    """With the defaults, right after a renewal, and with nobody else there."""
    fleet = Fleet()
    only = fleet.add("same host")
    lease_ms = only.scheduler._options.lease_ms
    assert lease_ms is not None
    assert lease_ms < MINUTE
    start_all([only], ("job", "0 * * * *"), ("other", every(seconds=5)))
    fleet.held = {"job"}
    fleet.advance(30 * SECOND)
    renewals = only.calls("renew")
    while only.calls("renew") == renewals:
        fleet.advance(50)
    only.kill()
    fleet.held = set()
    killed_ms, others = fleet.store_clock.now_ms(), len(fleet.started("other"))
    only.start()
    fleet.advance(6 * SECOND)
    assert len(fleet.started("other")) > others  # it is at work at once
    fleet.advance(lease_ms)
    [again] = [start for start in fleet.starts if start.job == "job"]
    assert again.attempt == 2
    assert lease_ms - 100 <= again.at_ms - killed_ms <= lease_ms + SECOND


@pytest.mark.parametrize("first", ["old", "new"])
def test_what_one_version_does_not_know_is_left_alone_and_what_was_removed_does_not_run(
    first: str,
) -> None:
    """The new version renames one job, removes one, and adds one; both are restarted in turn."""
    fleet = Fleet()
    old, new = fleet.add("old", history_ms=20 * MINUTE), fleet.add("new", history_ms=20 * MINUTE)
    common = ("kept", "* * * * *")
    start_all([old], common, ("former name", "* * * * *"), ("removed", "* * * * *"))
    fleet.advance(3 * MINUTE)
    start_all([new], common, ("new name", "* * * * *"), ("added", "* * * * *"))
    fleet.advance(5 * MINUTE)
    before = {job: fleet.records(job) for job in ("former name", "removed", "new name", "added")}
    for item in (old, new) if first == "old" else (new, old):
        item.kill()
        item.start()
        fleet.advance(2 * MINUTE)
    for job, records in before.items():
        found = fleet.records(job)
        assert {key: found[key] for key in records} == records, job
    for label, jobs in (("new", ("new name", "added")), ("old", ("former name", "removed"))):
        assert {start.instance for start in fleet.starts if start.job in jobs} == {label}
    old.kill()
    gone_ms = fleet.store_clock.now_ms()
    fleet.advance(HOUR)
    left = [start for start in fleet.starts if start.job in ("former name", "removed")]
    assert max(start.at_ms for start in left) <= gone_ms
    # What nobody knows any more goes with the history.
    assert not fleet.records("removed")
    assert not fleet.records("former name")
    kept = fleet.started("kept")
    assert kept == minutes(0, len(kept) - 1)
    assert kept[-1] >= fleet.store_clock.now_ms() - MINUTE


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize("spaces", [("x", "y"), ("x", "x")])
def test_two_applications_on_one_store_both_run_unless_they_say_that_they_are_one(
    family: str, spaces: tuple[str, str]
) -> None:
    """By mistake they say so: a job of both runs once in all, and the store tells where."""
    fleet = Fleet(family)
    both = [fleet.add(f"of {number}", namespace=space) for number, space in enumerate(spaces)]
    for number, item in enumerate(both):
        item.job("cleanup", "* * * * *")
        item.job(f"own {number}", "* * * * *")
        item.start()
    ids = {item.manual.instance_id: item.label for item in both}
    fleet.advance(20 * MINUTE)
    for number, item in enumerate(both):
        mine = [start for start in fleet.starts if start.job == f"own {number}"]
        assert [start.scheduled_ms for start in mine] == minutes(0, 19)
        assert {start.instance for start in mine} == {item.label}
    common = sorted(fleet.started("cleanup"))
    if len(set(spaces)) == 2:
        assert common == sorted(2 * minutes(0, 19))
        return
    assert common == minutes(0, 19)
    if family == "lease":
        told = {
            key.scheduled_ms: ids[item.holder] for key, item in fleet.records("cleanup").items()
        }
        assert told == {x.scheduled_ms: x.instance for x in fleet.starts if x.job == "cleanup"}


@pytest.mark.parametrize("away_ms", [2 * MINUTE, 2 * HOUR, 3 * DAY])
@pytest.mark.parametrize("schedule", ["30 12 * * *", "45 9 * * *"])
def test_a_name_that_returns_does_not_run_at_once(away_ms: int, schedule: str) -> None:
    """With its former schedule, or with another one and the longest look back."""
    fleet = Fleet()
    only = fleet.add("a")
    start_all([only], ("job", "30 12 * * *"), ("kept", "*/5 * * * *"))
    fleet.advance(32 * MINUTE)
    assert fleet.started("job") == minutes(30, 30)
    only.remove("job")
    only.kill()
    fleet.let_pass(away_ms)
    only.start()
    fleet.advance(10 * MINUTE)
    changed = schedule != "30 12 * * *"
    only.job("job", schedule, catch_up_ms=3 * DAY if changed else MINUTE)
    back_ms = fleet.store_clock.now_ms()
    fleet.advance(10 * MINUTE)
    assert fleet.started("job") == minutes(30, 30)
    # Its next time is one of its own.
    next_ms = min(ms for ms in _daily(schedule) if ms > back_ms)
    fleet.let_pass(next_ms - MINUTE - fleet.store_clock.now_ms())
    fleet.advance(2 * MINUTE)
    assert fleet.started("job")[1:] == [next_ms]


def _daily(schedule: str) -> list[int]:
    minute, hour = map(int, schedule.split()[:2])
    return [MIDDAY_MS + (hour - 12) * HOUR + minute * MINUTE + day * DAY for day in range(9)]
