"""The runs that an instance means to claim: found once, kept until decided or too old."""

from __future__ import annotations

from typing import Any

import pytest

from leasecron_sync import every
from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.backlog import Backlog, Expiry
from leasecron_sync.engine.decide import Candidate, Origin
from leasecron_sync.engine.job import Job
from leasecron_sync.model import RunKey
from leasecron_sync.options import job_options, scheduler_options
from tests.fleet import MIDDAY_MS, MINUTE, SECOND, Fleet

SCHEDULER = scheduler_options({}, "lease", "Test")
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
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000), 5)
    item = only(backlog)
    item.decision_id = "d"
    backlog.add_due(due_of(job, 1_000), 9)
    backlog.add_owed([found(job, 1_000, Origin.CAUGHT_UP, 9)], 2_000, 9)
    assert only(backlog) is item
    assert (item.origin, item.decision_id, item.found_ms) == (Origin.ON_TIME, "d", 5)


def test_what_is_late_by_now_is_caught_up_from_when_it_was_found() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000), 5)
    backlog.add_owed([found(job, 1_000, Origin.CAUGHT_UP, 70)], 11_001, 70)
    assert (only(backlog).origin, only(backlog).found_ms) == (Origin.CAUGHT_UP, 70)


def test_what_somebody_has_claimed_is_left_out_but_not_what_may_be_its_own() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000, 2_000), 5)
    backlog.add_unsettled([RunKey("job", 3_000)], {"job": job}, 5)
    for item in backlog.filtered(lambda item: item.due_ms == 1_000):
        item.unknown = True
    backlog.drop_known([RunKey("job", ms) for ms in (1_000, 2_000, 3_000, 4_000)])
    left = backlog.filtered(lambda _item: True)
    assert sorted(item.due_ms for item in left) == [1_000, 3_000]


def test_what_pending_names_goes_first_also_when_it_was_known() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000), 5)
    only(backlog).ask_ms = 99_000
    backlog.add_unsettled([RunKey("job", 1_000), RunKey("unknown", 1)], {"job": job}, 50)
    assert (only(backlog).origin, only(backlog).ask_ms) == (Origin.UNSETTLED, 50)
    backlog.add_unsettled([RunKey("job", 1_000)], {"job": job}, 70)
    assert only(backlog).found_ms == 50


def test_a_candidate_that_has_taken_anothers_place_is_not_discarded() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000), 5)
    old = only(backlog)
    backlog.replace_job("other", None)
    backlog.replace_job("job", None)
    assert len(backlog) == 0
    backlog.add_due(due_of(job, 1_000), 6)
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
    backlog, job = Backlog(), job_of()
    backlog.add_owed([found(job, 1_000, origin)], 1_000, 0)
    expired = backlog.take_expired(expiry, 1_000 + age_ms, age_ms)
    assert bool(expired) is gone
    assert len(backlog) == 1 - gone


def test_the_age_is_the_stores_where_it_is_known() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000), 0)
    only(backlog).due_steady_ms = 5_000
    assert not backlog.take_expired(LEASE, 10_000_000, 65_000)
    assert backlog.take_expired(LEASE, 1_000, 65_001)


def test_of_more_than_the_limit_the_oldest_are_given_up() -> None:
    backlog, job = Backlog(), job_of(catch_up_limit=2)
    backlog.add_owed([found(job, ms, Origin.CAUGHT_UP) for ms in (3, 1, 2, 4)], 5, 0)
    backlog.add_unsettled([RunKey("job", 0)], {"job": job}, 0)
    assert sorted(item.due_ms for item in backlog.take_expired(LEASE, 5, 0)) == [1, 2]
    assert len(backlog) == 3


def test_the_next_that_waits_is_the_next_to_ask_for() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1, 2, 3), 0)
    for item, ask_ms in zip(backlog.filtered(lambda _item: True), (10, 30, 20)):
        item.ask_ms = ask_ms
    assert backlog.next_ask_ms(5) == 10
    assert backlog.next_ask_ms(10) == 20
    assert backlog.next_ask_ms(30) is None


def test_after_a_step_back_the_future_is_left_out_but_not_what_may_be_won() -> None:
    backlog, job = Backlog(), job_of()
    backlog.add_due(due_of(job, 1_000, 2_000, 3_000), 0)
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
