"""The timer's steps: what it claims, when it asks, and what keeps it from asking."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Callable

import pytest

from leasecron_sync import at, every
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreRejected
from leasecron_sync.model import LeaseClaim, LeaseReply, RunKey, RunState, Verdict
from leasecron_sync.options import READY_MS
from leasecron_sync.testing import FaultyLease
from tests.fleet import (
    DAY,
    HOUR,
    MIDDAY_MS,
    MINUTE,
    SECOND,
    Fleet,
    Instance,
    minutes,
)

YEARS = 10 * 365 * DAY


def fleet_of(count: int, family: str = "lease", **options: int) -> tuple[Fleet, list[Instance]]:
    fleet = Fleet(family)
    return fleet, [
        fleet.add(label, skew_ms=0, around_run=None, **options) for label in "abc"[:count]
    ]


def start_all(instances: list[Instance], schedule: object, **options: int) -> None:
    for item in instances:
        item.job("job", schedule, None, **options)
        item.start()


def told(fleet: Fleet) -> set[int]:
    times = [event.scheduled_time for event in fleet.missed()]
    return {round(time.timestamp() * 1000) for time in times if time is not None}


# -- when it asks --------------------------------------------------------------------------------


def test_each_run_is_executed_once_by_one_of_three() -> None:
    fleet, instances = fleet_of(3)
    start_all(instances, "* * * * *")
    fleet.advance(5 * MINUTE)
    assert sorted(fleet.started()) == minutes(0, 4)
    assert max(item.calls() for item in instances) < 40


@pytest.mark.parametrize("held_up_ms", [0, 1, 2, 50])
def test_a_run_that_came_a_moment_early_is_not_a_second_late_if_the_timer_is_held_up(
    monkeypatch: pytest.MonkeyPatch, held_up_ms: int
) -> None:
    """The time to ask again may have come by when the timer looks how long to wait."""
    fleet = Fleet()
    only = fleet.add("a", skew_ms=2)
    start_all([only], "* * * * *")
    timer = only.manual._timer
    assert timer is not None
    drop_expired = timer._drop_expired

    def held_up() -> None:
        drop_expired()
        if timer._backlog:
            fleet.let_pass(held_up_ms)

    monkeypatch.setattr(timer, "_drop_expired", held_up)
    fleet.advance(MINUTE)
    [start] = fleet.starts
    assert start.at_ms - start.scheduled_ms <= held_up_ms


def test_an_idle_instance_asks_its_store_nothing() -> None:
    fleet, instances = fleet_of(2)
    start_all(instances, "0 * * * *")
    fleet.advance(10 * MINUTE)
    assert len(fleet.starts) == 1
    before = [item.calls() for item in instances]
    fleet.advance(49 * MINUTE)
    assert [item.calls() for item in instances] == before


def rehearsals_of(item: Instance) -> list[tuple[int, RunKey]]:
    """Note when an instance rehearses which claim."""
    noted: list[tuple[int, RunKey]] = []
    backend = item.backend
    assert isinstance(backend, FaultyLease)
    rehearse = backend.rehearse

    def noting(claims: Sequence[LeaseClaim]) -> None:
        noted.extend((item.clock.now_ms(), claim.key) for claim in claims)
        rehearse(claims)

    backend.rehearse = noting  # type: ignore[method-assign]
    return noted


def test_a_claim_is_rehearsed_shortly_before_a_run_falls_due_after_a_rest() -> None:
    fleet, (only,) = fleet_of(1)
    noted = rehearsals_of(only)
    start_all([only], "* * * * *")
    only.job("jittered", "* * * * *", None, jitter_ms=30 * SECOND)
    fleet.advance(3 * MINUTE)
    due = {start.scheduled_ms + start.at_ms % MINUTE: start.job for start in fleet.starts}
    assert len(due) == 6
    assert {key.job for _at_ms, key in noted} == {"job", "jittered"}
    for at_ms, key in noted:
        [due_ms] = [ms for ms, job in due.items() if job == key.job and 0 < ms - at_ms < SECOND]
        assert due_ms - at_ms <= READY_MS
    assert len({key for _at_ms, key in noted}) == len(noted) >= 4


def test_nothing_is_rehearsed_without_a_rest() -> None:
    fleet, (only,) = fleet_of(1)
    for number in range(20):
        only.job(f"job {number}", every(seconds=1), None, jitter_ms=999)
    only.start()
    fleet.advance(5 * SECOND)
    noted = rehearsals_of(only)
    fleet.advance(5 * SECOND)
    assert len(noted) < len(fleet.started()) // 4


@pytest.mark.parametrize("error", [StoreRejected("no"), OutcomeUnknown("nobody knows")])
def test_a_rehearsal_that_fails_is_told_by_nobody(
    caplog: pytest.LogCaptureFixture, error: StoreError
) -> None:
    fleet, (only,) = fleet_of(1)
    start_all([only], "* * * * *")
    for nth in (1, 2):
        only.backend.faults.raise_at("rehearse", error, nth)
    with caplog.at_level(logging.INFO, "leasecron_sync"):
        fleet.advance(2 * MINUTE)
    assert only.backend.faults.calls("rehearse") == 2
    assert fleet.started() == minutes(0, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not only.named("store_down", "store_back")


def test_a_rehearsal_that_breaks_delays_no_run() -> None:
    fleet, (only,) = fleet_of(1)
    start_all([only], "* * * * *")
    only.backend.faults.raise_at("rehearse", ValueError("x"))
    fleet.advance(MINUTE)
    assert only.backend.faults.calls("rehearse") == 1
    assert [start.at_ms - start.scheduled_ms for start in fleet.starts] == [0]


def test_nothing_is_rehearsed_in_an_outage() -> None:
    fleet, (only,) = fleet_of(1)
    start_all([only], "* * * * *")
    fleet.advance(30 * SECOND)
    only.backend.faults.down = True
    fleet.advance(MINUTE)
    assert only.named("store_down")
    before = only.backend.faults.calls("rehearse")
    fleet.advance(5 * MINUTE)
    assert only.backend.faults.calls("rehearse") == before


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_an_idle_instance_does_not_spin(family: str) -> None:
    fleet, instances = fleet_of(1, family)
    start_all(instances, "0 * * * *")
    fleet.advance(MINUTE)
    assert instances[0].steps < 40


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_an_instance_without_jobs_does_not_spin(family: str) -> None:
    fleet, (only,) = fleet_of(1, family)
    only.start()
    fleet.advance(MINUTE)
    assert only.steps < 40


def test_a_thousand_runs_due_at_once_are_each_executed_once() -> None:
    fleet, instances = fleet_of(3)
    for item in instances:
        for number in range(1_000):
            item.job(f"job {number}", "0 * * * *")
        item.start()
    fleet.advance(MINUTE)
    assert len(fleet.starts) == len({start.job for start in fleet.starts}) == 1_000
    assert max(item.calls("claim") for item in instances) < 200
    assert max(item.steps for item in instances) < 1_500


def test_a_single_moment_is_run_once() -> None:
    fleet, instances = fleet_of(2)
    moment = datetime.fromtimestamp(MIDDAY_MS / 1000, timezone.utc)
    for item in instances:
        item.job("past", at(datetime(2020, 1, 1, tzinfo=timezone.utc)))
    start_all(instances, at(moment))
    fleet.advance(10 * MINUTE)
    assert fleet.started() == [MIDDAY_MS]
    assert not fleet.missed()


def test_a_run_behind_a_deferred_one_is_not_asked_for() -> None:
    # A holds the oldest of thirty; B asked for the other 29 every second, in one burst.
    fleet, (first, second) = fleet_of(2)
    for item in (first, second):
        item.job("job", "* * * * *", catch_up_ms=HOUR)
    first.start()
    fleet.advance(MINUTE)
    first.kill()
    fleet.let_pass(30 * MINUTE)
    fleet.held = {"job"}
    first.start()
    fleet.advance(2 * SECOND)
    assert len(first.manual.runs) == 1
    second.start()
    fleet.advance(2 * SECOND)
    before = second.calls("claim")
    fleet.advance(10 * SECOND)
    assert second.calls("claim") - before <= 12
    fleet.held = set()
    fleet.advance(20 * SECOND)
    assert fleet.started() == sorted(fleet.started())


# -- slots ---------------------------------------------------------------------------------------


def test_an_instance_that_stays_full_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet, (only,) = fleet_of(1, max_concurrent_runs=1)
    only.job("long", "0 * * * *")
    only.job("job", "1-59 * * * *", catch_up_ms=0)
    fleet.held = {"long"}
    only.start()
    with caplog.at_level(logging.WARNING, "leasecron_sync.engine.timer"):
        fleet.advance(6 * MINUTE)
    assert len([line for line in caplog.messages if "every slot" in line]) == 1
    assert {event.reason for event in fleet.missed()} == {"no free slot"}


def test_nothing_is_missed_that_the_store_knows_of() -> None:
    fleet, (free,) = fleet_of(1)
    full = fleet.add("full", max_concurrent_runs=1)
    full.job("long", "0 12 * * *")
    fleet.held = {"long"}
    start_all([free, full], "1-59 * * * *")
    fleet.advance(6 * MINUTE)
    assert fleet.started("job") == minutes(1, 5)
    assert not fleet.missed()


# -- commands that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["prune", "states", "pending", "register"])
@pytest.mark.parametrize("error", [StoreRejected, OutcomeUnknown, ValueError])
def test_a_command_that_always_fails_does_not_stop_the_claims(
    method: str, error: type[Exception]
) -> None:
    fleet, (only,) = fleet_of(1)
    only.job("job", "* * * * *")

    def fail(*_arguments: object) -> None:
        message = "no permission"
        raise error(message)

    setattr(only.backend, method, fail)
    only.start()
    fleet.advance(5 * MINUTE)
    assert set(fleet.started()) >= set(minutes(1, 4))


@pytest.mark.parametrize(
    "method",
    ["claim", "rehearse", "settle", "renew", "pending", "register", "states", "prune", "tend"],
)
@pytest.mark.parametrize("error", [ValueError("x"), StoreRejected("no"), MemoryError()])
def test_an_unforeseen_exception_costs_no_run(method: str, error: Exception) -> None:
    fleet, (only,) = fleet_of(1)
    only.job("job", "*/5 * * * *", lambda _run: fleet.advance(20 * SECOND))
    only.backend.faults.raise_at(method, error)
    only.start()
    fleet.advance(11 * MINUTE)
    assert fleet.started() == [MIDDAY_MS + number * 5 * MINUTE for number in range(3)]


@pytest.mark.parametrize("method", ["claim", "renew", "register", "states"])
@pytest.mark.parametrize("kind", ["none", "short", "long"])
def test_replies_of_a_wrong_number_are_asked_for_again(method: str, kind: str) -> None:
    fleet, (only,) = fleet_of(1)
    for name in ("one", "two"):
        only.job(name, "*/5 * * * *", lambda _run: fleet.advance(20 * SECOND), overlap="allow")
    only.start()
    fleet.advance(4 * MINUTE)
    only.kill()
    fleet.let_pass(90 * SECOND)
    call: Callable[..., Sequence[Any]] = getattr(only.backend, method)
    left = [3]

    def answer(*arguments: object) -> list[Any]:
        replies = list(call(*arguments))
        if not left[0]:
            return replies
        left[0] -= 1
        return {"none": [], "short": replies[:-1], "long": replies + replies}[kind]

    setattr(only.backend, method, answer)
    only.start()
    fleet.advance(10 * MINUTE)
    for name in ("one", "two"):
        assert fleet.started(name) == [MIDDAY_MS + number * 5 * MINUTE for number in range(4)]


def test_a_run_whose_record_cannot_be_read_is_not_started() -> None:
    fleet, (only,) = fleet_of(1)
    only.job("other", "* * * * *")
    call = only.backend.claim

    def claim(claims: Sequence[Any]) -> list[Any]:
        refused = LeaseReply(Verdict.REJECTED, reason="a newer version wrote it")
        return [
            refused if item.key.job == "job" else reply for item, reply in zip(claims, call(claims))
        ]

    only.backend.claim = claim  # type: ignore[method-assign]
    start_all([only], "* * * * *")
    fleet.advance(5 * MINUTE)
    assert fleet.started("job") == []
    assert fleet.started("other") == minutes(0, 4)
    assert only.calls("claim") < 20


def test_what_falls_due_in_an_outage_is_missed_because_the_store_is_down() -> None:
    fleet, (only,) = fleet_of(1)
    start_all([only], "* * * * *")
    fleet.advance(MINUTE)
    only.backend.faults.down = True
    fleet.advance(5 * MINUTE)
    assert fleet.missed()
    assert {event.reason for event in fleet.missed()} == {"store down"}


# -- grants that cannot be used ------------------------------------------------------------------


def test_a_run_whose_thread_cannot_be_started_is_run_by_another_instance() -> None:
    fleet, (first, second) = fleet_of(2)
    first.manual.can_start_threads = False
    start_all([first, second], "0 * * * *")
    fleet.advance(29 * SECOND)
    second.paused = True
    fleet.advance(SECOND)
    second.paused = False
    fleet.advance(1_500)
    assert fleet.who() == ["b"]
    assert fleet.starts[0].attempt == 2


def test_a_run_that_no_instance_can_start_fails_in_the_end() -> None:
    fleet, instances = fleet_of(2)
    for item in instances:
        item.manual.can_start_threads = False
    start_all(instances, "0 * * * *")
    fleet.advance(10 * MINUTE)
    assert fleet.states("job") == {MIDDAY_MS: RunState.FAILED}
    assert sum(item.calls() for item in instances) < 1_000


def test_a_grant_that_arrives_while_stopping_is_handed_back() -> None:
    fleet, (first, second) = fleet_of(2)
    start_all([first, second], "0 * * * *")
    fleet.advance(29 * SECOND)
    second.paused = True
    context = first.manual._context
    assert context is not None
    first.backend.faults.slow("claim", after=context.stopping.set)
    fleet.advance(SECOND)
    first.manual.step_timer()
    first.alive, second.paused = False, False
    fleet.advance(1_500)
    assert fleet.who() == ["b"]
    record = fleet.records()[RunKey("job", MIDDAY_MS)]
    assert (record.attempt, record.failures) == (2, 0)


# -- jobs that change ----------------------------------------------------------------------------


def test_a_removed_job_runs_no_more_and_a_new_schedule_owes_nothing() -> None:
    fleet, (only,) = fleet_of(1)
    start_all([only], "* * * * *")
    fleet.advance(3 * MINUTE)
    only.remove("job")
    fleet.advance(3 * MINUTE)
    before = len(fleet.starts)
    only.job("job", "30 * * * *")
    fleet.advance(10 * MINUTE)
    assert len(fleet.starts) == before == 3
    fleet.advance(20 * MINUTE)
    assert fleet.started()[before:] == minutes(30, 30)


# -- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ms", [15 * SECOND, 90 * SECOND, 10 * MINUTE, HOUR])
@pytest.mark.parametrize("catch_up_ms", [0, 60_000])
def test_a_host_that_is_ahead_runs_everything_in_time(ahead_ms: int, catch_up_ms: int) -> None:
    fleet = Fleet()
    only = fleet.add("a", skew_ms=ahead_ms)
    start_all([only], "* * * * *", catch_up_ms=catch_up_ms)
    fleet.advance(ahead_ms + 10 * MINUTE)
    started = fleet.started()
    # What it had not in its agenda yet when it started, it may leave to others.
    first = ahead_ms // MINUTE + 1
    assert set(started) >= set(minutes(first, first + 8))
    assert len(started) == len(set(started))
    assert all(start.at_ms >= start.scheduled_ms for start in fleet.starts)
    assert not fleet.missed()
    assert only.calls("claim") < 2 * (ahead_ms + 10 * MINUTE) // SECOND


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize("step_ms", [-3, -30 * SECOND, -2 * HOUR, -YEARS])
@pytest.mark.parametrize("count", [1, 3])
def test_a_clock_set_back_repeats_and_silences_nothing(
    family: str, step_ms: int, count: int
) -> None:
    fleet, instances = fleet_of(count, family)
    start_all(instances, "*/5 * * * *")
    fleet.advance(2 * HOUR + 30 * MINUTE)
    fleet.store_clock.step(step_ms)
    began_ms, steps = fleet.store_clock.now_ms(), sum(item.steps for item in instances)
    fleet.advance(3 * HOUR)
    started = fleet.started()
    assert len(started) == len(set(started))
    first_ms = (began_ms // (5 * MINUTE) + 1) * 5 * MINUTE
    assert set(started) >= set(range(first_ms, fleet.store_clock.now_ms(), 5 * MINUTE))
    assert sum(item.steps for item in instances) - steps < count * 4_000
    assert not fleet.missed()


@pytest.mark.parametrize("family", ["lease", "claim"])
@pytest.mark.parametrize("step_ms", [HOUR, YEARS])
@pytest.mark.parametrize("count", [1, 3])
def test_a_false_future_costs_little_and_silences_nothing(
    family: str, step_ms: int, count: int
) -> None:
    fleet, instances = fleet_of(count, family)
    start_all(instances, "* * * * *")
    fleet.advance(30 * MINUTE)
    fleet.store_clock.step(step_ms)
    before = len(fleet.starts)
    fleet.advance(2 * MINUTE)
    assert len(fleet.starts) - before <= 4
    fleet.store_clock.step(-step_ms)
    began_ms = fleet.store_clock.now_ms()
    fleet.advance(HOUR)
    started = fleet.started()
    assert len(started) == len(set(started))
    first_ms = (began_ms // MINUTE + 1) * MINUTE
    assert set(started) >= set(range(first_ms, fleet.store_clock.now_ms(), MINUTE))


def test_missed_runs_are_reported_after_a_false_future() -> None:
    fleet, (only,) = fleet_of(1)
    start_all([only], "* * * * *")
    fleet.advance(5 * MINUTE)
    fleet.store_clock.step(YEARS)
    fleet.advance(2 * MINUTE)
    fleet.store_clock.step(-YEARS)
    fleet.advance(10 * MINUTE)
    only.kill()
    fleet.let_pass(30 * MINUTE)
    before = len(fleet.missed())
    only.start()
    fleet.advance(MINUTE)
    assert len(fleet.missed()) == before + 1


# -- claim backends ------------------------------------------------------------------------------


def test_what_this_instance_won_is_not_missed_when_its_clock_is_set_back() -> None:
    fleet, (only,) = fleet_of(1, "claim")
    clock = fleet.own_clock(only)
    start_all([only], "* * * * *")
    fleet.advance(10 * MINUTE)
    clock.step(-5 * MINUTE)
    fleet.advance(4 * MINUTE)
    assert not fleet.missed()


def test_a_claim_keeps_its_decision_for_the_whole_window() -> None:
    fleet, (only,) = fleet_of(1, "claim")
    start_all([only], "0 * * * *")
    only.backend.faults.lose_reply("claim")
    fleet.advance(30 * SECOND + 50)
    fleet.let_pass(20 * SECOND)
    fleet.advance(2 * MINUTE)
    assert fleet.started() == [MIDDAY_MS]


@pytest.mark.parametrize("jitter_ms", [0, 5 * MINUTE])
def test_the_runs_of_a_job_are_claimed_in_rising_order(jitter_ms: int) -> None:
    fleet, (only,) = fleet_of(1, "claim")
    asked: list[RunKey] = []
    call = only.backend.claim

    def claim(claims: Sequence[Any]) -> Sequence[Any]:
        asked.extend(item.key for item in claims)
        return call(claims)

    only.backend.claim = claim  # type: ignore[method-assign]
    start_all([only], "* * * * *", jitter_ms=jitter_ms)
    fleet.advance(20 * MINUTE)
    assert asked == sorted(asked)
    assert len(set(asked)) > 10


def test_a_claim_beyond_the_window_is_missed() -> None:
    fleet, (only,) = fleet_of(1, "claim")
    start_all([only], "0 * * * *")
    only.backend.faults.down = True
    fleet.advance(5 * MINUTE)
    only.backend.faults.down = False
    fleet.advance(MINUTE)
    assert fleet.started() == []
    assert [event.reason for event in fleet.missed()] == ["store down"]
    assert told(fleet) == {MIDDAY_MS}
