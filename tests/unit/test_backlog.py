"""The runs that an instance means to claim: found once, kept until decided or too old."""

from __future__ import annotations

from typing import Any

import pytest

from leasecron_sync import every
from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.backlog import Backlog
from leasecron_sync.engine.decide import Asker, Candidate, Origin
from leasecron_sync.engine.expiry import Expiry
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.picking import pick
from leasecron_sync.model import RunKey
from leasecron_sync.options import job_options, scheduler_options
from tests.fleet import DAY, MIDDAY_MS, MINUTE, SECOND, Fleet

SCHEDULER = scheduler_options({"history_ms": 400 * DAY}, "lease", "Test")
LEASE, CLAIM = Expiry(None, 15_000), Expiry(60_000, 0)


def job_of(name: str = "job", **given: Any) -> Job:  # noqa: ANN401 - options of a job
    options = job_options({"name": name, **given}, SCHEDULER, "lease", "Test")
    schedule = every(seconds=60)
    return Job(lambda: None, wants_run=False, schedule=schedule, options=options, takeover_ms=1)


def due_of(job: Job, *times: int) -> list[Due]:
    return [Due(job, ms, ms) for ms in times]


def found(job: Job, ms: int, origin: Origin, found_ms: int = 0) -> Candidate:
    return Candidate(job, RunKey(job.name, ms), ms, origin, found_ms)


def only(backlog: Backlog) -> Candidate:
    (item,) = backlog.filtered(lambda _item: True)
    return item


def test_what_is_known_already_stays_as_it_is() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000), 0, 5)
    item = only(backlog)
    item.decision_id = "d"
    backlog.add_due(due_of(job, 1_000), 0, 9)
    backlog.add_owed([found(job, 1_000, Origin.CAUGHT_UP, 9)], 2_000, 9)
    assert only(backlog) is item
    assert (item.origin, item.decision_id, item.found_ms) == (Origin.ON_TIME, "d", 5)


def test_what_is_late_by_now_is_caught_up_from_when_it_was_found() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000), 0, 5)
    backlog.add_owed([found(job, 1_000, Origin.CAUGHT_UP, 70)], 11_001, 70)
    assert (only(backlog).origin, only(backlog).found_ms) == (Origin.CAUGHT_UP, 70)


def test_what_somebody_has_claimed_is_left_out_but_not_what_may_be_its_own() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000, 2_000), 0, 5)
    backlog.add_unsettled([RunKey("job", 3_000)], {"job": job}, 5)
    for item in backlog.filtered(lambda item: item.due_ms == 1_000):
        item.unknown = True
    backlog.drop_known([RunKey("job", ms) for ms in (1_000, 2_000, 3_000, 4_000)])
    left = backlog.filtered(lambda _item: True)
    assert sorted(item.due_ms for item in left) == [1_000, 3_000]


def test_what_pending_names_goes_first_also_when_it_was_known() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000), 0, 5)
    backlog.ask_again(only(backlog), 99_000)
    backlog.add_unsettled([RunKey("job", 1_000), RunKey("unknown", 1)], {"job": job}, 50)
    assert (only(backlog).origin, only(backlog).ask_ms) == (Origin.UNSETTLED, 50)
    backlog.add_unsettled([RunKey("job", 1_000)], {"job": job}, 70)
    assert only(backlog).found_ms == 50


def test_a_candidate_that_has_taken_anothers_place_is_not_discarded() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000), 0, 5)
    old = only(backlog)
    backlog.replace_job("other", None)
    backlog.replace_job("job", None)
    assert len(backlog) == 0
    backlog.add_due(due_of(job, 1_000), 0, 6)
    backlog.discard(old)
    assert len(backlog) == 1
    backlog.discard(only(backlog))
    assert len(backlog) == 0


@pytest.mark.parametrize(
    ("origin", "expiry", "age_ms", "gone"),
    [
        (Origin.ON_TIME, LEASE, 60_000, False),
        (Origin.ON_TIME, LEASE, 60_001, True),
        (Origin.CAUGHT_UP, LEASE, 60_001, False),  # its window is judged when it was found
        (Origin.UNSETTLED, LEASE, 15_000, False),
        (Origin.UNSETTLED, LEASE, 15_001, True),
        (Origin.ON_TIME, CLAIM, 60_000, False),
        (Origin.ON_TIME, CLAIM, 60_001, True),
    ],
)
def test_a_run_is_given_up_when_it_is_older_than_it_may_be(
    origin: Origin, expiry: Expiry, age_ms: int, *, gone: bool
) -> None:
    backlog, job = Backlog(expiry), job_of()
    backlog.add_owed([found(job, 1_000, origin)], 1_000, 0)
    expired = backlog.take_expired(1_000 + age_ms, age_ms)
    assert bool(expired) is gone
    assert len(backlog) == 1 - gone


def test_the_age_is_the_stores_where_it_is_known() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000), 0, 0)
    backlog.ask_again(only(backlog), 0, due_steady_ms=5_000)
    assert not backlog.take_expired(10_000_000, 65_000)
    assert backlog.take_expired(1_000, 65_001)


def test_of_more_than_the_limit_the_oldest_are_given_up() -> None:
    backlog, job = Backlog(LEASE), job_of(catch_up_limit=2)
    backlog.add_owed([found(job, ms, Origin.CAUGHT_UP) for ms in (3, 1, 2, 4)], 5, 0)
    backlog.add_unsettled([RunKey("job", 0)], {"job": job}, 0)
    assert sorted(item.due_ms for item in backlog.take_expired(5, 0)) == [1, 2]
    assert len(backlog) == 3


def test_the_next_that_waits_is_the_next_to_ask_for() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1, 2, 3), 0, 0)
    for item, ask_ms in zip(backlog.filtered(lambda _item: True), (10, 30, 20)):
        backlog.ask_again(item, ask_ms)
    assert backlog.next_ask_ms(5) == 10
    assert backlog.next_ask_ms(10) == 20
    assert backlog.next_ask_ms(30) is None


def asked(backlog: Backlog, now_ms: int, steady_ms: int) -> list[int]:
    asker = Asker("a", 32, now_ms, steady_ms)
    return [item.due_ms for item in pick(backlog.offers(asker), asker).candidates]


def test_one_on_time_goes_before_one_that_waits_until_that_one_is_late() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000, 2_000), 0, 0)
    waits = backlog.filtered(lambda item: item.due_ms == 1_000)[0]
    backlog.ask_again(waits, 99_000)
    assert asked(backlog, 11_000, 1) == [2_000]
    assert asked(backlog, 11_001, 2) == []
    backlog.drop_future(20_000)  # the clock was set back
    assert asked(backlog, 11_000, 3) == [2_000]
    assert asked(backlog, 20_000, 99_000) == [1_000]


def test_a_run_that_was_caught_up_is_given_up_when_the_clock_is_set_ahead() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_owed([found(job, 1_000, Origin.CAUGHT_UP, 500)], 1_000, 500)
    assert not backlog.take_expired(61_000 + 70_000, 500 + 70_000)
    assert backlog.take_expired(61_001 + 70_000, 500 + 70_000)
    backlog.add_owed([found(job, 1_000, Origin.CAUGHT_UP, 500)], 1_000, 500)
    backlog.ask_again(only(backlog), 0, due_steady_ms=-59_501)
    assert backlog.take_expired(1_000, 500)


def test_what_is_gone_leaves_nothing_behind() -> None:
    backlog, job = Backlog(LEASE), job_of(catch_up_ms=100 * DAY)
    for number in range(1_000):
        backlog.add_owed([found(job, number, Origin.CAUGHT_UP)], number, 0)
        backlog.ask_again(only(backlog), 1_000_000 + number)
        backlog.discard(only(backlog))
        backlog.take_expired(number, 0)
    left = [backlog._asks, backlog._ends._by_both]
    assert max(len(moments) for moments in left) < 200
    assert not asked(backlog, 1, 1)


def test_after_a_step_back_the_future_is_left_out_but_not_what_may_be_won() -> None:
    backlog, job = Backlog(LEASE), job_of()
    backlog.add_due(due_of(job, 1_000, 2_000, 3_000), 0, 0)
    for item in backlog.filtered(lambda item: item.due_ms == 3_000):
        item.unknown = True
    assert backlog.drop_future(1_500) == [RunKey("job", 2_000)]
    assert sorted(item.due_ms for item in backlog.filtered(lambda _item: True)) == [1_000, 3_000]


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_what_was_won_unknown_to_it_is_run_although_the_clock_is_set_back(family: str) -> None:
    fleet = Fleet(family)
    only_one = fleet.add("a")
    clock = fleet.own_clock(only_one)
    only_one.job("job", "0 * * * *")
    only_one.start()
    fleet.advance(29 * SECOND)
    only_one.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    clock.step(-MINUTE)
    fleet.advance(5 * MINUTE)
    assert fleet.started() == [MIDDAY_MS]
    assert fleet.starts[0].attempt == 1


def test_what_was_won_unknown_to_it_is_run_although_its_job_is_replaced() -> None:
    fleet = Fleet()
    one = fleet.add("a")
    one.job("job", "0 * * * *")
    one.start()
    fleet.advance(29 * SECOND)
    one.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    one.remove("job")
    one.job("job", "0 * * * *")
    fleet.advance(5 * MINUTE)
    assert fleet.started() == [MIDDAY_MS]


def test_what_was_won_unknown_to_it_is_run_after_a_pause_longer_than_the_window() -> None:
    fleet = Fleet("claim")
    only_one = fleet.add("a")
    only_one.job("job", "0 12 * * *")
    only_one.start()
    fleet.advance(29 * SECOND)
    only_one.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    fleet.let_pass(70 * SECOND)
    fleet.advance(MINUTE)
    assert fleet.started() == [MIDDAY_MS] or fleet.missed()
