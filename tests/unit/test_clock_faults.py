"""Clocks that are wrong: ahead by years, set back, early, standing still; and long absences.

Steps are made by hand, on a store in memory and on a file, whose clock is the host's own.
``LEASECRON_SYNC_LONG=1`` in the environment plays more histories of wrong clocks.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

import pytest

from leasecron_sync import Scheduler
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.engine.agenda import MAX_SPANS
from leasecron_sync.events import EVENT_NAMES
from leasecron_sync.model import RunRecord, RunState
from leasecron_sync.options import MAX_WAIT_MS
from leasecron_sync.schedule import at, every
from leasecron_sync.testing import FaultyLease, ManualClock, ManualScheduler
from tests.fleet import DAY, HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance, minutes
from tests.model.any_text import Counted

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
TEN_YEARS = 3_652 * DAY
BEYOND_THE_CALENDAR = 9_000 * 365 * DAY
MINUTELY = "* * * * *"


class Hosts(Fleet):
    """Instances on a store in memory, or on a file where a path is given.

    Args:
        path: Of the file; each instance's own clock is the file's clock while it writes.
    """

    def __init__(self, path: Optional[Path] = None) -> None:
        super().__init__()
        self.path = path

    def add(self, label: str = "a", **options: Any) -> Instance:  # noqa: ANN401 - those of a scheduler
        if self.path is None:
            return super().add(label, **options)
        backend = FaultyLease(SQLiteLease(self.path))
        scheduler: Scheduler[Any] = Scheduler(backend, **options)
        clock = self.store_clock
        made = Instance(label, self, scheduler, backend, clock, ManualScheduler(scheduler, clock))
        for name in EVENT_NAMES:
            scheduler.on(name, made.events.append)  # type: ignore[arg-type]
        self.instances.append(made)
        return made

    def own_clock(self, instance: Instance) -> ManualClock:
        if self.path is None:
            return super().own_clock(instance)
        clock = ManualClock(self.store_clock.now_ms(), 7_000_000)
        instance.clock, instance.manual = clock, ManualScheduler(instance.scheduler, clock)
        return clock

    def history(self) -> list[RunRecord]:
        alive = next(item for item in self.instances if item.alive)
        return list(alive.manual.history(limit=100_000))

    def close(self) -> None:
        for item in self.instances:
            item.backend.close()


@pytest.fixture(params=["memory", "sqlite"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(None if request.param == "memory" else tmp_path / "jobs.db")
    yield made
    made.close()


@dataclass
class Weight:
    """What an instance keeps in memory, and the store in records."""

    spans: int
    entries: int
    candidates: int
    records: int

    @classmethod
    def of(cls, hosts: Hosts) -> Weight:
        timers = [item.manual._timer for item in hosts.instances if item.manual._timer is not None]
        return cls(
            max(len(plan.spans) for timer in timers for plan in timer._agenda._plans.values()),
            max(len(timer._agenda._heap) for timer in timers),
            max(len(timer._backlog) for timer in timers),
            len(hosts.history()),
        )


def start_all(instances: list[Instance], schedule: object = MINUTELY, **options: Any) -> None:  # noqa: ANN401 - those of a job
    for item in instances:
        item.job("job", schedule, **options)
        item.start()


def whole_minutes(from_ms: int, to_ms: int) -> set[int]:
    return set(range(-(-from_ms // MINUTE) * MINUTE, to_ms, MINUTE))


def doubled(hosts: Fleet) -> list[int]:
    """Return what was executed twice, except for retries and takeovers."""
    firsts = [start.scheduled_ms for start in hosts.starts if start.attempt == 1]
    return sorted({scheduled_ms for scheduled_ms in firsts if firsts.count(scheduled_ms) > 1})


# -- ten years ahead -----------------------------------------------------------------------------


@contextmanager
def false_future(clock: ManualClock, step_ms: int = TEN_YEARS) -> Iterator[None]:
    clock.step(step_ms)
    yield
    clock.step(-step_ms)


@pytest.mark.timeout(180)  # a busy disk takes its time for so many runs
@pytest.mark.parametrize("catch_up_ms", [0, HOUR, 100 * DAY])
def test_ten_years_ahead_for_two_minutes_is_no_burst_and_silences_nothing(
    hosts: Hosts, catch_up_ms: int
) -> None:
    instances = [hosts.add(label, history_ms=400 * DAY) for label in "ab"]
    start_all(instances, catch_up_ms=catch_up_ms)
    hosts.advance(10 * MINUTE)
    weight, starts = Weight.of(hosts), len(hosts.starts)
    steps, calls = sum(item.steps for item in instances), sum(item.calls() for item in instances)
    with false_future(hosts.store_clock):
        work = Counted()
        work(lambda: hosts.step(instances[0]))
        assert work.lines < 60_000  # a walk over ten years of minutes would be millions
        hosts.advance(2 * MINUTE)
        late = len(hosts.starts) - starts
        assert late <= min(100, catch_up_ms // MINUTE) + 3
        assert sum(item.steps for item in instances) - steps < 4 * late + 200
        assert sum(item.calls() for item in instances) - calls < 8 * late + 60
        heavier = Weight.of(hosts)
        assert heavier.spans <= weight.spans + 1
        assert heavier.entries <= weight.entries + 1
        assert heavier.candidates == 0
        assert heavier.records <= weight.records + late
    began_ms = hosts.store_clock.now_ms()
    steps = sum(item.steps for item in instances)
    hosts.advance(20 * MINUTE)
    assert sum(item.steps for item in instances) - steps < 2 * 20 * 60
    assert not doubled(hosts)
    assert whole_minutes(began_ms, hosts.store_clock.now_ms()) <= set(hosts.started())
    assert Weight.of(hosts).spans <= weight.spans + 2 <= MAX_SPANS
    assert Weight.of(hosts).candidates == 0


def test_a_clock_beyond_the_end_of_the_calendar_silences_nothing_afterwards(hosts: Hosts) -> None:
    instances = [hosts.add(label) for label in "ab"]
    start_all(instances)
    hosts.advance(5 * MINUTE)
    for step_ms in (BEYOND_THE_CALENDAR, -BEYOND_THE_CALENDAR, -MIDDAY_MS - 1_000_000_000_000_000):
        with false_future(hosts.store_clock, step_ms):
            hosts.advance(2 * MINUTE)
        began_ms = hosts.store_clock.now_ms()
        hosts.advance(5 * MINUTE)
        assert whole_minutes(began_ms, hosts.store_clock.now_ms()) <= set(hosts.started())
    assert not doubled(hosts)


@pytest.mark.parametrize("catch_up_ms", [0, HOUR])
def test_one_host_ten_years_ahead_silences_nothing(hosts: Hosts, catch_up_ms: int) -> None:
    instances = [hosts.add(label) for label in "ab"]
    clock = hosts.own_clock(instances[0])
    start_all(instances, catch_up_ms=catch_up_ms)
    hosts.advance(10 * MINUTE)
    starts = len(hosts.starts)
    with false_future(clock):
        hosts.advance(2 * MINUTE)
        false = [item for item in hosts.starts[starts:] if item.scheduled_ms > MIDDAY_MS + DAY]
        if hosts.path is None:
            assert not false  # the store knows better
        assert len(false) <= min(100, catch_up_ms // MINUTE) + 3
        assert sum(item.steps for item in instances) < 4 * len(hosts.starts) + 1_000
    began_ms = hosts.store_clock.now_ms()
    hosts.advance(20 * MINUTE)
    assert not doubled(hosts)
    assert whole_minutes(began_ms, hosts.store_clock.now_ms()) <= set(hosts.started())


@pytest.mark.parametrize("ahead", ["one", "all"])
def test_what_is_pruned_in_a_false_future_silences_nothing_for_ten_years(
    hosts: Hosts, ahead: str
) -> None:
    instances = [hosts.add(label, history_ms=4 * MINUTE) for label in "ab"]
    clock = hosts.own_clock(instances[0]) if ahead == "one" else hosts.store_clock
    start_all(instances)
    hosts.advance(10 * MINUTE)
    with false_future(clock):
        hosts.advance(15 * MINUTE)
    began_ms = hosts.store_clock.now_ms()
    hosts.advance(15 * MINUTE)
    assert not doubled(hosts)
    assert whole_minutes(began_ms, hosts.store_clock.now_ms()) <= set(hosts.started())
    # What is given up is told again, too.
    for item in instances:
        item.kill()
    hosts.let_pass(30 * MINUTE)
    told = len(hosts.missed())
    instances[1].start()
    hosts.advance(MINUTE)
    assert sum(event.count for event in hosts.missed()[told:]) >= 25
    assert len(hosts.missed()) == told + 1


def test_what_was_pruned_is_not_executed_again_when_the_clock_is_set_back(hosts: Hosts) -> None:
    instances = [hosts.add(label, history_ms=4 * MINUTE) for label in "ab"]
    start_all(instances)
    hosts.advance(40 * MINUTE)
    hosts.store_clock.step(-30 * MINUTE)
    hosts.advance(50 * MINUTE)
    assert len(hosts.started()) == len(set(hosts.started()))
    assert hosts.started()[-10:] == minutes(50, 59)


def test_a_host_that_was_ahead_from_the_start_is_not_silent_when_it_is_set_right(
    hosts: Hosts,
) -> None:
    hosts.store_clock.step(TEN_YEARS)
    only = hosts.add("a", history_ms=4 * MINUTE)
    start_all([only])
    hosts.advance(30 * MINUTE)
    hosts.store_clock.step(-TEN_YEARS)
    began_ms = hosts.store_clock.now_ms()
    hosts.advance(15 * MINUTE)
    only.kill()
    only.start()
    hosts.advance(15 * MINUTE)
    assert not doubled(hosts)
    assert whole_minutes(began_ms, hosts.store_clock.now_ms()) <= set(hosts.started())


def test_two_false_futures_one_behind_the_other_silence_nothing(hosts: Hosts) -> None:
    instances = [hosts.add(label, history_ms=4 * MINUTE) for label in "ab"]
    start_all(instances)
    hosts.advance(10 * MINUTE)
    for years in (1, 2, 3):
        with false_future(hosts.store_clock, years * TEN_YEARS):
            hosts.advance(12 * MINUTE)
        began_ms = hosts.store_clock.now_ms()
        hosts.advance(5 * MINUTE)
        assert whole_minutes(began_ms, hosts.store_clock.now_ms()) <= set(hosts.started())
    assert not doubled(hosts)


def test_a_job_registered_in_a_false_future_is_owed_and_executed_afterwards(hosts: Hosts) -> None:
    instances = [hosts.add(label) for label in "ab"]
    start_all(instances, "0 0 1 1 *")
    hosts.advance(MINUTE)
    with false_future(hosts.store_clock):
        for item in instances:
            item.job("new", MINUTELY, catch_up_ms=HOUR)
        hosts.advance(2 * MINUTE)
    hosts.advance(3 * MINUTE)
    for item in instances:
        item.kill()
    hosts.let_pass(10 * MINUTE)
    instances[0].start()
    hosts.advance(MINUTE)
    started = [ms for ms in hosts.started("new") if ms < MIDDAY_MS + DAY]
    assert started[-12:] == minutes(5, 16)


def test_a_definition_displaced_in_a_false_future_is_not_a_rolling_deploy_for_ten_years(
    hosts: Hosts,
) -> None:
    only = hosts.add("a")
    start_all([only], "*/5 * * * *", catch_up_ms=HOUR)
    hosts.advance(10 * MINUTE)
    with false_future(hosts.store_clock):
        only.remove("job")
        only.job("job", "0 0 1 1 *", catch_up_ms=HOUR)
        hosts.advance(MINUTE)
    hosts.advance(40 * MINUTE)
    before = len(hosts.starts)
    only.remove("job")
    only.job("job", "*/5 * * * *", catch_up_ms=HOUR)
    hosts.advance(MINUTE)
    assert len(hosts.starts) == before  # nothing of the forty minutes in which it was another job
    hosts.advance(10 * MINUTE)
    assert len(hosts.starts) >= before + 2


@pytest.mark.parametrize("ends", ["killed", "failed"])
def test_a_run_left_unsettled_in_a_false_future_holds_its_job_up_no_longer_than_a_lease(
    hosts: Hosts, ends: str
) -> None:
    instances = [hosts.add(label) for label in "ab"]
    future_ms = hosts.store_clock.now_ms() + TEN_YEARS // 2
    ended: list[int] = []

    def handler(run: Any) -> None:  # noqa: ANN401 - a run of either family
        if run.scheduled_time.timestamp() * 1000 < future_ms or ended:
            return
        ended.append(run.token)
        if ends == "failed":
            message = "not in this decade"
            raise ValueError(message)
        next(item for item in instances if item.manual._runtime.runs()).kill()

    for item in instances:
        item.job("job", MINUTELY, handler, retry_delay_ms=60_000)
        item.start()
    hosts.advance(5 * MINUTE)
    with false_future(hosts.store_clock):
        hosts.advance(5 * SECOND)
        assert ended
    began_ms = hosts.store_clock.now_ms()
    hosts.advance(10 * MINUTE)
    assert not doubled(hosts)
    missing = whole_minutes(began_ms, hosts.store_clock.now_ms()) - set(hosts.started())
    assert missing <= whole_minutes(began_ms, began_ms + 30 * SECOND)
    assert all(record.state.settled for record in hosts.history())


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_claim_lost_in_a_false_future_is_not_repeated_for_ten_years(
    hosts: Hosts, lost: str
) -> None:
    only = hosts.add("a")
    start_all([only])
    hosts.advance(5 * MINUTE)
    with false_future(hosts.store_clock):
        getattr(only.backend.faults, f"lose_{lost}")("claim", times=1_000)
        hosts.advance(5 * SECOND)
    only.backend.faults.clear()
    hosts.advance(5 * MINUTE)
    assert Weight.of(hosts).candidates == 0
    calls = only.calls("claim")
    hosts.advance(5 * MINUTE)
    assert only.calls("claim") - calls <= 10
    assert hosts.started()[-10:] == minutes(5, 14)
    assert not doubled(hosts)


def test_the_file_tells_the_true_time_again_after_a_false_future(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path / "jobs.db")
    only = hosts.add("a", history_ms=4 * MINUTE)
    start_all([only])
    hosts.advance(10 * MINUTE)
    with false_future(hosts.store_clock):
        only.job("new", MINUTELY)
        hosts.advance(10 * MINUTE)
    hosts.advance(10 * MINUTE)
    now_ms = hosts.store_clock.now_ms()
    connection = sqlite3.connect(hosts.path)  # type: ignore[arg-type]
    try:
        (clock_ms,) = connection.execute(
            "SELECT value FROM leasecron_meta WHERE name = 'clock_ms'"
        ).fetchone()
        owed = [row[0] for row in connection.execute("SELECT owed_from_ms FROM leasecron_job")]
        spans = connection.execute("SELECT first_ms, last_ms FROM leasecron_pruned").fetchall()
        late = connection.execute(
            "SELECT count(*) FROM leasecron_run WHERE settled_ms IS NULL "
            "OR (scheduled_ms <= ? AND until_ms > ? + lease_ms)",
            (now_ms, now_ms),
        ).fetchone()[0]
    finally:
        connection.close()
        hosts.close()
    assert now_ms - MINUTE <= int(clock_ms) <= now_ms
    assert max(owed) <= now_ms
    assert late == 0
    # Of both times something was pruned, and nothing of the time between them.
    assert max(spans)[1] > now_ms + TEN_YEARS // 2
    assert min(spans)[1] < now_ms
    assert not [span for span in spans if span[0] <= now_ms + HOUR <= span[1]]


@pytest.mark.parametrize("whose", ["one", "all"])
def test_a_file_whose_clock_is_wrong_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    hosts = Hosts(tmp_path / "jobs.db")
    instances = [hosts.add(label) for label in "ab"]
    clock = hosts.own_clock(instances[0]) if whose == "one" else hosts.store_clock
    start_all(instances)
    hosts.advance(2 * MINUTE)
    with false_future(clock):
        hosts.advance(4 * MINUTE)
    hosts.advance(MINUTE)
    hosts.close()
    told = [record for record in caplog.records if "behind the newest time" in record.message]
    assert 1 <= len(told) <= 2  # once for each instance: steady time of this host, not of the test


# -- set back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["one", "all"])
def test_two_hours_back_repeats_nothing_and_goes_on(hosts: Hosts, whose: str) -> None:
    instances = [hosts.add(label) for label in "ab"]
    clock = hosts.own_clock(instances[0]) if whose == "one" else hosts.store_clock
    start_all(instances, "*/5 * * * *", catch_up_ms=HOUR)
    hosts.advance(3 * HOUR)
    steps = sum(item.steps for item in instances)
    clock.step(-2 * HOUR)
    began_ms = hosts.store_clock.now_ms()
    hosts.advance(2 * HOUR + 10 * MINUTE)
    assert not doubled(hosts)
    if whose == "one":
        everything = whole_minutes(began_ms, hosts.store_clock.now_ms())
        assert {ms for ms in everything if ms % (5 * MINUTE) == 0} <= set(hosts.started())
    else:  # these two hours have been executed already
        assert len(hosts.starts) == 3 * 12 + 2
        assert hosts.started()[-2:] == [*minutes(180, 180), *minutes(185, 185)]
    assert sum(item.steps for item in instances) - steps < 2 * 130 * 20
    assert all(start.at_ms >= start.scheduled_ms for start in hosts.starts) or whose == "one"


def test_eight_seconds_back_on_a_file_start_nothing_early_and_double_nothing(
    tmp_path: Path,
) -> None:
    hosts = Hosts(tmp_path / "jobs.db")
    instances = [hosts.add(label) for label in "ab"]
    start_all(instances, every(seconds=5))
    hosts.advance(MINUTE)
    calls, starts = sum(item.calls() for item in instances), len(hosts.starts)
    hosts.store_clock.step(-8 * SECOND)
    hosts.advance(MINUTE)
    assert sum(item.calls() for item in instances) - calls < 200
    assert len(hosts.started()) == len(set(hosts.started()))
    assert len(hosts.starts) - starts >= 10
    assert hosts.started() == sorted(hosts.started())
    hosts.close()


@pytest.mark.parametrize("whose", ["one", "all"])
@pytest.mark.parametrize("schedule", ["*/1 * * * * *", MINUTELY])
def test_three_milliseconds_back_right_after_each_start_double_nothing(
    hosts: Hosts, schedule: str, whose: str
) -> None:
    only = hosts.add("a")
    clock = hosts.own_clock(only) if whose == "one" else hosts.store_clock
    only.job("job", schedule, lambda _run: clock.step(-3))
    only.start()
    period_ms, ticks = (SECOND, 300) if schedule.startswith("*/1") else (MINUTE, 300)
    ticks = 60 if hosts.path is not None else ticks
    hosts.advance(ticks * (period_ms + 3))
    started = hosts.started()
    assert len(started) == len(set(started)) >= ticks - 1
    assert started == list(range(started[0], started[-1] + 1, period_ms))
    assert all(start.at_ms >= start.scheduled_ms for start in hosts.starts)


# -- early, late, standing still -----------------------------------------------------------------


class EarlyFleet(Fleet):
    """Its timers wake two milliseconds before they should."""

    early_ms = 2
    woken_ms = 0

    def step(self, item: Instance) -> bool:
        manual, steady_ms = item.manual, item.clock.steady_ms()
        early = 0 < manual._timer_ms - steady_ms <= self.early_ms
        if item.alive and early and self.woken_ms != steady_ms:  # a wait takes a millisecond
            manual._timer_ms = self.woken_ms = steady_ms
        return super().step(item)

    def _wait_ms(self, item: Instance) -> int:
        return max(1, super()._wait_ms(item) - self.early_ms)


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize(("schedule", "period_ms"), [("* * * * * *", SECOND), (MINUTELY, MINUTE)])
def test_a_timer_that_wakes_two_milliseconds_early_starts_nothing_early_or_twice(
    family: str, schedule: str, period_ms: int
) -> None:
    hosts = EarlyFleet(family)
    only = hosts.add("a")
    start_all([only], schedule)
    hosts.advance(300 * period_ms)
    started = hosts.started()
    assert len(started) == len(set(started)) >= 299
    assert started == list(range(started[0], started[-1] + 1, period_ms))
    assert all(0 <= start.at_ms - start.scheduled_ms < 10 for start in hosts.starts)
    assert only.steps < 300 * (period_ms // MAX_WAIT_MS + 2) * 4
    assert only.calls("claim") <= 2 * len(started)


@pytest.mark.parametrize("steady", ["counts it", "stands still"])
@pytest.mark.parametrize(("catch_up_ms", "late"), [(0, 0), (60_000, 1), (600_000, 4)])
def test_a_stop_of_three_and_a_half_minutes_is_made_up_for_within_the_window(
    hosts: Hosts, catch_up_ms: int, late: int, steady: str
) -> None:
    only = hosts.add("a")
    start_all([only], catch_up_ms=catch_up_ms)
    hosts.advance(5 * MINUTE)
    if steady == "counts it":  # SIGSTOP, or a suspension under CLOCK_BOOTTIME
        hosts.let_pass(230 * SECOND)
    else:  # a suspension where the steady clock does not know of it
        hosts.store_clock.step(230 * SECOND)
    before = len(hosts.starts)
    hosts.advance(MAX_WAIT_MS)
    assert hosts.started()[before:] == minutes(9 - late, 8)
    assert sum(event.count for event in hosts.missed()) == 4 - late
    hosts.advance(5 * MINUTE)
    assert hosts.started()[-5:] == minutes(9, 13)
    assert len(hosts.started()) == len(set(hosts.started()))


@pytest.mark.parametrize("suspended_ms", [5 * SECOND, 9 * SECOND, 12 * SECOND, 40 * SECOND])
def test_a_short_suspension_that_no_steady_clock_counts_loses_nothing(
    hosts: Hosts, suspended_ms: int
) -> None:
    only = hosts.add("a")
    start_all([only], every(seconds=5))
    hosts.advance(MINUTE)
    for _ in range(5):
        hosts.store_clock.step(suspended_ms)
        hosts.advance(20 * SECOND)
    started = hosts.started()
    assert len(started) == len(set(started))
    told = {event.scheduled_time for event in hosts.missed()}
    assert not told
    assert sorted(started) == list(range(started[0], started[-1] + 1, 5 * SECOND))


def test_a_holder_suspended_where_no_steady_clock_counts_it_is_fenced(hosts: Hosts) -> None:
    holder, standby = (hosts.add(label) for label in "ab")
    clock = hosts.own_clock(holder)
    outcome: list[str] = []

    def handler(run: Any) -> None:  # noqa: ANN401 - a run of either family
        if run.attempt > 1:
            outcome.append("taken over")
            return
        holder.paused = True  # its steady clock stands still, and the world goes on
        began_ms = hosts.store_clock.now_ms()
        standby.start()
        hosts.advance(MINUTE)
        clock.step(hosts.store_clock.now_ms() - clock.now_ms())
        assert hosts.store_clock.now_ms() - began_ms == MINUTE
        holder.paused = False
        outcome.append("still trusted" if not run.lost else "lost")

    for item in (holder, standby):
        item.job("job", "0 * * * *", handler)
    holder.start()
    steady_ms = clock.steady_ms
    clock.steady_ms = lambda: steady_ms() if not holder.paused else 7_000_000  # type: ignore[method-assign]
    hosts.advance(31 * SECOND)
    hosts.advance(30 * SECOND)
    assert outcome[0] == "taken over"
    (record,) = hosts.history()
    assert (record.state, record.attempt) == (RunState.FINISHED, 2)
    assert [event.name for event in holder.named("run_lost", "run_finished")] == ["run_lost"]
    assert len(standby.named("run_finished")) == 1


@pytest.mark.parametrize("more_ms", [5, 300, 499, 2_000])
def test_a_skew_that_grows_a_little_while_a_job_is_added_hides_no_run(more_ms: int) -> None:
    fleet = Fleet()
    only = fleet.add("a", skew_ms=600)
    only.job("other", "0 0 * * *")
    only.start()
    fleet.advance(20 * SECOND)  # the skew is known, and put right
    only.clock.step(more_ms)  # too little to be looked at, all but the last
    only.backend.faults.down = True  # nobody looks at it in another way
    fleet.advance(MIDDAY_MS - more_ms // 2 - 1 - fleet.store_clock.now_ms())
    only.backend.faults.down = False
    only.job("job", MINUTELY)  # its agenda begins behind midday, which has not come yet
    fleet.advance(2 * MINUTE)
    assert fleet.started("job") == minutes(0, 1)
    assert all(start.at_ms >= start.scheduled_ms for start in fleet.starts)


# -- years away, years gone ----------------------------------------------------------------------


def test_a_job_years_away_is_waited_for_in_pieces_and_keeps_no_other_waiting(hosts: Hosts) -> None:
    only = hosts.add("a")
    start_all([only], "0 0 29 2 *")
    delays = [only.manual.step_timer() for _ in range(5)]
    assert max(delay for delay in delays if delay is not None) <= MAX_WAIT_MS
    steps = only.steps
    hosts.advance(10 * MINUTE)
    assert only.steps - steps <= 10 * MINUTE // MAX_WAIT_MS + 1
    due = datetime.fromtimestamp((hosts.store_clock.now_ms() + 3 * SECOND) / 1000, timezone.utc)
    only.job("new", at(due))
    hosts.advance(4 * SECOND)
    assert [start.job for start in hosts.starts] == ["new"]
    assert hosts.starts[0].at_ms == hosts.starts[0].scheduled_ms


@pytest.mark.parametrize("catch_up_ms", [0, HOUR, 100 * DAY])
def test_however_long_everybody_was_away_the_next_run_comes_and_starting_costs_the_same(
    hosts: Hosts, catch_up_ms: int
) -> None:
    lines, calls = [], []
    for gap in (1_000, 100_000):
        only = hosts.add(f"after {gap}", history_ms=400 * DAY)
        only.job("job", MINUTELY, catch_up_ms=catch_up_ms)
        only.start()
        hosts.advance(2 * MINUTE)
        only.kill()
        hosts.let_pass(gap * MINUTE)
        only.start()
        before, begun, told = len(hosts.starts), only.calls(), len(hosts.missed())
        work = Counted()
        work(lambda: hosts.step(only))  # noqa: B023 - called here
        lines.append(work.lines)
        hosts.advance(10 * SECOND)
        calls.append(only.calls() - begun)
        assert len(hosts.starts) - before == min(100, catch_up_ms // MINUTE)
        assert len(hosts.missed()) == told + 1
        hosts.advance(MINUTE)
        assert hosts.started()[-1] == hosts.store_clock.now_ms() // MINUTE * MINUTE
        only.kill()
    # A missed event counts up to a thousand times; beyond that nothing depends on the time.
    assert lines[1] < 1.2 * lines[0] + 500
    assert lines[1] < 150_000
    assert calls[1] <= calls[0] + 2


# -- deploys -------------------------------------------------------------------------------------

NOON = MIDDAY_MS + 20 * MINUTE  # 12:20, when the new code comes


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize(
    ("schedule", "zone", "first_hours"),
    [
        ("0 16 * * *", "UTC", 4),  # another time
        ("30 13 * * *", "Asia/Tokyo", 16.5),  # another zone only: 04:30 UTC has passed
        ("30 13 * * *", "America/New_York", 6.5),  # 18:30 UTC is to come
        ("30 11 * * *", "UTC", 23.5),  # a time that has passed today
        ("0 12 * * *", "Europe/Athens", 22),  # 10:00 UTC has passed
    ],
)
def test_a_deploy_that_changes_the_time_or_the_zone_starts_nothing_by_itself(
    family: str, schedule: str, zone: str, first_hours: float
) -> None:
    fleet = Fleet(family)
    catch_up: dict[str, Any] = {"catch_up_ms": DAY} if family == "lease" else {}
    old, new = fleet.add("old"), fleet.add("new")
    old.job("job", "30 13 * * *", **catch_up)
    old.start()
    fleet.advance(MINUTE)
    fleet.let_pass(88 * MINUTE)
    fleet.advance(2 * MINUTE)
    assert [start.scheduled_ms for start in fleet.starts] == [MIDDAY_MS + 90 * MINUTE]
    fleet.let_pass(NOON + DAY - fleet.store_clock.now_ms() - MINUTE)
    fleet.advance(MINUTE)
    old.kill()
    new.job("job", schedule, timezone=zone, **catch_up)
    new.job("brand-new", "0 9 * * *", **catch_up)
    new.start()
    before = len(fleet.starts)
    fleet.advance(10 * MINUTE)
    assert len(fleet.starts) == before
    first_ms = MIDDAY_MS + DAY + round(first_hours * HOUR)
    fleet.let_pass(first_ms - MINUTE - fleet.store_clock.now_ms())
    fleet.advance(2 * MINUTE)
    assert [start.scheduled_ms for start in fleet.starts if start.job == "job"][before:] == [
        first_ms
    ]


@pytest.mark.parametrize("host_zone", ["Asia/Tokyo", "America/New_York", "UTC"])
def test_the_zone_of_the_host_may_change_under_a_running_instance(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, host_zone: str
) -> None:
    only = hosts.add("a")
    only.job("job", "*/2 14 * * *", timezone="Europe/Athens")  # 12:00 UTC
    only.start()
    hosts.advance(5 * MINUTE)
    monkeypatch.setenv("TZ", host_zone)
    time.tzset()
    try:
        hosts.advance(5 * MINUTE)
        only.kill()
        only.start()
        hosts.advance(5 * MINUTE)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert hosts.started() == minutes(0, 14)[::2]
    assert not hosts.missed()


# Schedule, zone, and an instant shortly before its clock is changed; what comes in three hours.
CHANGES = [
    ("30 3 * * *", "Europe/Athens", "2025-03-30T00:00:00", ["01:00"]),
    ("*/30 3 * * *", "Europe/Athens", "2025-03-30T00:00:00", []),
    ("30 * * * *", "Europe/Athens", "2025-03-30T00:00:00", ["00:30", "01:30", "02:30"]),
    ("30 3 * * *", "Europe/Athens", "2025-10-26T00:00:00", ["00:30"]),
    ("*/30 3 * * *", "Europe/Athens", "2025-10-26T00:00:00", ["00:00", "00:30", "01:00", "01:30"]),
    ("15 2 * * *", "Australia/Lord_Howe", "2025-10-04T15:00:00", ["15:30"]),
    ("0 1 * * *", "Antarctica/Troll", "2025-03-30T00:00:00", ["01:00"]),
]


@pytest.mark.parametrize(("schedule", "zone", "begin", "times"), CHANGES)
def test_a_change_of_the_clock_of_the_zone_starts_each_run_once_in_its_time(
    schedule: str, zone: str, begin: str, times: list[str]
) -> None:
    fleet = Fleet()
    began_ms = round(datetime.fromisoformat(f"{begin}+00:00").timestamp() * 1000)
    fleet.store_clock.step(began_ms - SECOND - fleet.store_clock.now_ms())
    instances = [fleet.add(label) for label in "ab"]
    start_all(instances, schedule, timezone=zone)
    fleet.advance(3 * HOUR)
    day = begin[:11]
    expected = [
        round(datetime.fromisoformat(f"{day}{time_of_day}:00+00:00").timestamp() * 1000)
        for time_of_day in times
    ]
    assert fleet.started() == expected
    assert all(start.at_ms == start.scheduled_ms for start in fleet.starts)


# -- anything ------------------------------------------------------------------------------------

STEPS = (3, 400, 3 * SECOND, 9 * SECOND, 40 * SECOND, 10 * MINUTE, 2 * HOUR, DAY, TEN_YEARS)


@pytest.mark.parametrize("seed", range(150 if LONG else 8))
def test_whatever_clocks_do_nothing_is_doubled_and_nothing_is_silent_afterwards(
    hosts: Hosts, seed: int
) -> None:
    rng = random.Random(seed)
    instances = [hosts.add(label, history_ms=4 * MINUTE) for label in "ab"]
    clocks = [hosts.store_clock]
    if hosts.path is None:
        clocks.append(hosts.own_clock(instances[0]))
    start_all(instances, every(seconds=20), catch_up_ms=rng.choice((0, MINUTE)))
    off = dict.fromkeys(clocks, 0)
    for _ in range(6):  # a store tells so many times apart from which it has pruned runs
        hosts.advance(rng.randrange(MINUTE))
        clock = rng.choice(clocks)
        step_ms = (
            -off[clock]
            if off[clock] and rng.random() < 0.6
            else rng.choice((-1, 1)) * rng.choice(STEPS)
        )
        off[clock] += step_ms
        clock.step(step_ms)
        if rng.random() < 0.15:
            item = rng.choice(instances)
            item.kill()
            hosts.let_pass(rng.randrange(2 * MINUTE))
            item.start()
    for clock, ms in off.items():
        clock.step(-ms)
    hosts.advance(MINUTE)  # what was left behind by the last step is brought to an end
    began_ms = hosts.store_clock.now_ms()
    hosts.advance(3 * MINUTE)
    assert not doubled(hosts)
    everything = range(-(-began_ms // 20_000) * 20_000, hosts.store_clock.now_ms(), 20_000)
    settled = {record.key.scheduled_ms for record in hosts.history() if record.state.settled}
    # Some may have been executed before, by a clock that was ahead, and be pruned by now.
    assert set(everything) <= settled | set(hosts.started())
    assert set(everything[2:]) <= set(hosts.started())
    weight = Weight.of(hosts)
    assert weight.spans <= MAX_SPANS
    assert weight.candidates == 0
