"""Many jobs at once: what a step costs, how runs spread, and how often the store is asked."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import pytest

from leasecron_sync.backends.memory import MemoryLease, MemoryTables
from leasecron_sync.engine import backlog, look_ahead
from leasecron_sync.engine.agenda import POP_LIMIT, Due
from leasecron_sync.engine.claiming import Answer
from leasecron_sync.engine.decide import Candidate, Origin
from leasecron_sync.engine.picking import turn_of
from leasecron_sync.engine.worker import STARTS_FIRST_MS, execute
from leasecron_sync.model import (
    JobSpan,
    LeaseReply,
    Outcome,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    Verdict,
)
from leasecron_sync.options import MIN_SLICE, PENDING_LIMIT
from leasecron_sync.testing import FaultyLease
from tests.fleet import MIDDAY_MS, SECOND, STORE_CALLS, Fleet, Instance

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
MANY = 10_000 if LONG else 2_000
SLOTS = 32
OTHER_CALLS = [name for name in STORE_CALLS if name != "settle"]


def fleet_of(
    count: int,
    jobs: int,
    family: str = "lease",
    **options: Any,  # noqa: ANN401 - of a scheduler
) -> tuple[Fleet, list[Instance]]:
    """Return instances that have registered their jobs, just before all of these are due."""
    fleet = Fleet(family)
    instances = [
        fleet.add(label, skew_ms=0, around_run=None, **options) for label in "abcd"[:count]
    ]
    for item in instances:
        for number in range(jobs):
            item.job(f"job {number:05d}", "0 * * * *")
        item.start()
    fleet.advance(29 * SECOND)
    return fleet, instances


def free(item: Instance) -> int:
    return item.scheduler._options.max_concurrent_runs - item.manual._runtime.taken()


def is_due(item: Instance) -> bool:
    """Tell whether an instance knows of a run that it has not asked for."""
    timer, now_ms = item.manual._timer, item.clock.now_ms()
    assert timer is not None
    next_ms = timer._agenda.next_ms()
    return bool(timer._backlog) or (next_ms is not None and next_ms <= now_ms)


# -- all at once -----------------------------------------------------------------------------------


@pytest.mark.timeout(120 if LONG else 30)
def test_many_jobs_of_one_minute_run_once_each_with_few_calls_and_nobody_idles() -> None:
    fleet, instances = fleet_of(4, MANY)
    idle: list[str] = []

    def watched(item: Instance, step: Callable[[], Optional[int]]) -> Callable[[], Optional[int]]:
        def stepped() -> Optional[int]:
            could = free(item) > 0 and is_due(item)
            calls = item.calls("claim")
            delay_ms = step()
            asked = item.calls("claim") > calls
            if could and not asked and is_due(item) and free(item) > 0:
                idle.append(item.label)
            return delay_ms

        return stepped

    for item in instances:
        item.manual.step_timer = watched(item, item.manual.step_timer)  # type: ignore[method-assign]
    before = sum(item.calls(name) for item in instances for name in OTHER_CALLS)
    fleet.advance(2 * SECOND)
    assert Counter(start.job for start in fleet.starts) == Counter(
        f"job {number:05d}" for number in range(MANY)
    )
    assert not idle
    assert not fleet.missed()
    asked = sum(item.calls(name) for item in instances for name in OTHER_CALLS) - before
    assert asked < MANY / 8
    shares = Counter(fleet.who())
    assert min(shares.values()) > MANY / 4 / 2
    # Nobody was left with the rest.
    assert {start.at_ms for start in fleet.starts} == {MIDDAY_MS}


def test_an_instance_asks_for_no_more_than_it_has_slots_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, (only,) = fleet_of(1, 300, max_concurrent_runs=10)
    sizes: list[int] = []
    call = only.backend.claim

    def claim(asked: Sequence[Any]) -> Sequence[Any]:
        sizes.append(len(asked))
        assert len(asked) <= free(only)
        return call(asked)

    monkeypatch.setattr(only.backend, "claim", claim)
    fleet.advance(2 * SECOND)
    assert sum(sizes) == len(fleet.starts) == 300
    assert max(sizes) == 10


def test_a_slot_that_becomes_free_is_filled() -> None:
    fleet, (only,) = fleet_of(1, 100)
    fleet.held = {f"job {number:05d}" for number in range(100)}
    fleet.advance(2 * SECOND)
    assert len(only.manual.runs) == SLOTS
    held = [run.job for run in only.manual.runs[:3]]
    fleet.held -= set(held)
    fleet.advance(1)
    assert sorted(fleet.who()) == ["a"] * 3
    assert len(only.manual.runs) == SLOTS


def told_of_slots(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often it was told that runs wait for a slot."""
    return sum("slot" in record.getMessage() for record in caplog.records)


def test_runs_that_are_skipped_wait_for_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    """Though there are more of them than free slots, and as many slots as are asked for at once."""
    fleet = Fleet("lease")
    only = fleet.add("a", skew_ms=0)
    names = [f"job {number}" for number in range(SLOTS - MIN_SLICE)]
    for name in names:
        only.job(name, "* * * * *")
    only.start()
    fleet.held = set(names)
    fleet.advance(150 * SECOND)
    assert free(only) == MIN_SLICE < len(names)
    assert {event.job for event in only.named("run_skipped")} == set(names)
    assert told_of_slots(caplog) == 0


def test_runs_that_wait_for_a_slot_are_told_once_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, (only,) = fleet_of(1, 100)
    for number in range(100):
        only.job(f"other {number:05d}", "30 * * * *")
    fleet.held = {f"{kind} {number:05d}" for kind in ("job", "other") for number in range(100)}
    fleet.advance(2 * SECOND)
    assert told_of_slots(caplog) == 1
    for number in range(0, 100, 7):  # slots become free, and are taken at once
        fleet.held -= {f"job {one:05d}" for one in range(number, number + 7)}
        fleet.advance(1)
    assert len(fleet.starts) == 100
    assert free(only) == SLOTS
    assert told_of_slots(caplog) == 1
    fleet.advance(1_800 * SECOND)
    assert free(only) == 0
    assert told_of_slots(caplog) == 2


# -- what a step costs -----------------------------------------------------------------------------


def work_of(jobs: int) -> int:
    """Return how many functions are called until each of many runs has come to its end."""
    fleet, _instances = fleet_of(1, jobs)
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fleet.advance(SECOND)
    finally:
        sys.setprofile(before)
    assert len(fleet.starts) == jobs
    return count


def test_the_work_for_a_run_does_not_grow_with_how_many_wait() -> None:
    few, many = work_of(150), work_of(1_200)
    assert many < 8 * few * 1.25


def test_a_step_looks_at_what_it_takes_not_at_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(entries: Sequence[Any], *arguments: Any, **options: Any) -> object:  # noqa: ANN401 - passed on
        looks.append(len(entries))
        return turn_of(entries, *arguments, **options)

    fleet, (only,) = fleet_of(1, 1_000)
    fleet.held = {f"job {number:05d}" for number in range(1_000)}
    fleet.advance(2 * SECOND)
    assert len(only.manual.runs) == SLOTS
    monkeypatch.setattr(backlog, "turn_of", counted)
    fleet.held -= {only.manual.runs[0].job}
    fleet.advance(1)
    assert len(fleet.starts) == 1
    # The jobs whose handlers are here, and the few that came or went, in two steps or three.
    assert sum(looks) < 10
    assert len(looks) < 4 * SLOTS


def test_the_first_of_many_is_claimed_before_the_last_is_looked_at() -> None:
    fleet, (only,) = fleet_of(1, 4 * POP_LIMIT)
    timer = only.manual._timer
    assert timer is not None
    fleet.let_pass(SECOND)
    only.manual.step_timer()
    assert len(only.manual.runs) == SLOTS
    assert len(timer._backlog) == POP_LIMIT - SLOTS
    assert only.manual._timer_ms <= only.clock.steady_ms()
    for _step in range(3):
        only.manual.step_timer()
    assert len(timer._backlog) == 4 * POP_LIMIT - SLOTS
    assert only.manual._timer_ms > only.clock.steady_ms()


def test_what_is_in_the_agenda_is_on_time_although_a_look_back_comes_first() -> None:
    fleet, (only,) = fleet_of(1, 2 * POP_LIMIT)
    timer = only.manual._timer
    assert timer is not None
    timer._look_back(forget=False)
    fleet.let_pass(SECOND)
    only.manual.step_timer()
    found = timer._backlog.filtered(lambda _item: True)
    assert {item.origin.value for item in found} == {"on time"}


def test_the_heartbeat_is_woken_once_for_a_batch() -> None:
    fleet, (only,) = fleet_of(1, SLOTS)
    woken = 0

    def wake() -> None:
        nonlocal woken
        woken += 1

    assert only.manual._context is not None
    only.manual._context.wake_heartbeat = wake
    fleet.held = {f"job {number:05d}" for number in range(SLOTS)}
    fleet.advance(SECOND)
    assert len(only.manual.runs) == SLOTS
    assert 1 <= woken <= only.calls("claim")


class Looked(dict[int, RunRecord]):
    """Records that note which of them are looked at."""

    def __init__(self, records: dict[int, RunRecord]) -> None:
        super().__init__(records)
        self.at: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        for scheduled_ms in super().__iter__():
            self.at.add(scheduled_ms)
            yield scheduled_ms

    def __getitem__(self, scheduled_ms: int) -> RunRecord:
        self.at.add(scheduled_ms)
        return super().__getitem__(scheduled_ms)


def test_in_memory_too_a_look_at_a_few_runs_does_not_walk_a_long_history() -> None:
    tables = MemoryTables()
    for number in (*range(500, 1_000), *range(500)):  # whatever order they were recorded in
        tables.put_run(RunRecord(RunKey("job", number * SECOND), RunState.FINISHED))
    looked = tables.runs["job"] = Looked(tables.runs["job"])
    few = dict.fromkeys((499_000, 500_000, 501_000), RunState.FINISHED)
    assert tables.states(JobSpan("job", 499_000, 501_000)) == few
    assert list(tables.states(JobSpan("job", 498_001, 501_999))) == list(few)
    assert looked.at == set(few)
    assert tables.states(JobSpan("job", 1_000_000, 2_000_000)) == {}
    assert tables.states(JobSpan("unknown", 0, 1_000_000)) == {}


# -- starts before ends ----------------------------------------------------------------------------


def test_an_end_is_told_when_there_is_nothing_more_to_claim_or_soon_after() -> None:
    fleet, (only,) = fleet_of(1, 2 * SLOTS)
    fleet.let_pass(SECOND)
    only.manual.step_timer()
    first, second, *_others = only.manual.runs
    context, clock = only.manual._context, only.clock
    assert context is not None
    assert not context.claimed.is_set()
    began_ms = clock.steady_ms()
    execute(context, first._live)
    assert clock.steady_ms() - began_ms == STARTS_FIRST_MS
    while not context.claimed.is_set():  # the slots are taken by now
        only.manual.step_timer()
    began_ms = clock.steady_ms()
    execute(context, second._live)
    assert clock.steady_ms() == began_ms
    assert only.calls("settle") == 2


@pytest.mark.parametrize("what", ["an outage", "a stop"])
def test_an_end_is_told_at_once_when_nothing_is_claimed(what: str) -> None:
    fleet, (only,) = fleet_of(1, 2 * SLOTS)
    context = only.manual._context
    assert context is not None
    context.claimed.clear()
    fleet.let_pass(SECOND)
    if what == "a stop":
        context.stopping.set()
    else:
        only.backend.faults.down = True
    only.manual.step_timer()
    assert context.claimed.is_set()


# -- what others have ------------------------------------------------------------------------------


def two_of_which_one_has_claimed(jobs: int) -> tuple[Fleet, Instance, Instance]:
    """Let one of two instances claim everything, before the other takes a step."""
    fleet, (first, second) = fleet_of(2, jobs)
    second.paused = True
    fleet.advance(SECOND)
    assert len(fleet.starts) == jobs
    second.paused = False
    return fleet, first, second


def test_what_others_have_is_learned_by_the_hundreds() -> None:
    jobs = 2 * POP_LIMIT
    fleet, _first, second = two_of_which_one_has_claimed(jobs)
    before = second.calls("claim"), second.calls("states")
    fleet.advance(SECOND)
    assert len(fleet.starts) == jobs
    # Two slices that came too late; by claims alone it would be sixteen.
    assert second.calls("claim") - before[0] <= 4
    assert 1 <= second.calls("states") - before[1] <= 4
    timer = second.manual._timer
    assert timer is not None
    assert len(timer._backlog) == 0


def test_a_few_that_others_have_are_learned_by_a_claim() -> None:
    fleet, _first, second = two_of_which_one_has_claimed(MIN_SLICE)
    before = second.calls("states")
    fleet.advance(SECOND)
    assert second.calls("states") == before


def test_an_instance_that_meets_nobody_looks_at_nothing() -> None:
    fleet, (only,) = fleet_of(1, 200)
    before = only.calls("states")
    fleet.advance(2 * SECOND)
    assert len(fleet.starts) == 200
    assert only.calls("states") == before


def test_who_has_met_others_looks_at_few_runs_before_it_claims_more() -> None:
    fleet, (first, second) = fleet_of(2, 3)
    second.paused = True
    fleet.advance(SECOND)
    timer, context = first.manual._timer, first.manual._context
    assert timer is not None
    assert context is not None
    assert isinstance(first.backend, FaultyLease)
    ahead = look_ahead.LookAhead(context, first.backend)
    job = first.scheduler._jobs["job 00000"]

    def answered(*verdicts: Verdict, left: int) -> bool:
        item = Candidate(job, RunKey(job.name, 1), 1, Origin.ON_TIME, 0)
        ahead.note([Answer(item, LeaseReply(verdict)) for verdict in verdicts], left)
        return ahead.wanted

    won, lost, few = Verdict.GRANTED, Verdict.HELD, look_ahead.FEW
    assert not answered(won, won, won, left=few)
    assert answered(won, won, lost, left=few)
    assert not answered(won, won, lost, left=few + 1)
    assert answered(won, lost, left=few + 1)
    assert not answered(lost, lost, left=0)
    assert answered(won, left=few)
    key = RunKey(job.name, MIDDAY_MS)
    assert ahead.step([Candidate(job, key, MIDDAY_MS, Origin.ON_TIME, 0)]).keys == [key]
    assert answered(won, left=few)
    free = Candidate(job, RunKey(job.name, MIDDAY_MS + 1), MIDDAY_MS + 1, Origin.ON_TIME, 0)
    assert ahead.step([free]).keys == []
    assert not answered(won, left=few)


def test_on_a_claim_backend_every_run_is_asked_for() -> None:
    fleet, instances = fleet_of(2, 100, "claim")
    fleet.advance(2 * SECOND)
    assert len(fleet.starts) == 100
    assert all(item.calls("claim") < 20 for item in instances)


def test_a_run_that_others_have_and_lose_is_taken_over() -> None:
    fleet, (first, second) = fleet_of(2, 60, max_concurrent_runs=60)
    fleet.held = {f"job {number:05d}" for number in range(60)}
    second.paused = True
    fleet.advance(SECOND)
    assert len(first.manual.runs) == 60
    second.paused = False
    fleet.advance(SECOND)
    timer = second.manual._timer
    assert timer is not None
    assert len(timer._backlog) == 0
    assert second.calls("claim") < 60 / MIN_SLICE
    first.kill()
    fleet.held = set()
    fleet.advance(20 * SECOND)
    assert Counter(fleet.who()) == {"b": 60}
    assert {start.attempt for start in fleet.starts} == {2}


@pytest.mark.parametrize(
    ("outcome", "known", "unsettled"),
    [
        (Outcome.FINISHED, True, False),
        (Outcome.FAILED, False, False),  # it waits: a claim may have it by now
        (None, True, True),
    ],
)
def test_what_somebody_has_is_left_out_and_what_nobody_has_stays(
    outcome: Optional[Outcome], *, known: bool, unsettled: bool
) -> None:
    fleet, (first, second) = fleet_of(2, 3)
    second.paused = True
    fleet.held = {f"job {number:05d}" for number in range(3)}
    fleet.advance(SECOND)
    for run in first.manual.runs:
        lease, ended = run._live.lease, Outcome.FINISHED if run.job != "job 00000" else outcome
        assert lease is not None
        if ended is not None:
            assert isinstance(first.backend.inner, MemoryLease)
            first.backend.inner.settle(lease.ref, Settlement(ended))
    timer = second.manual._timer
    assert timer is not None
    assert timer._claims._ahead is not None
    due, _gaps = timer._agenda.pop(second.clock.now_ms())
    nobodys = Due(due[0].job, MIDDAY_MS + 1, MIDDAY_MS + 1)
    timer._backlog.add_due([*due, nobodys], MIDDAY_MS, second.clock.steady_ms())
    timer._backlog.offers(timer._claims._asker())
    assert timer._standby.ask_ms() is None
    timer._claims._ahead._wanted = True
    timer._claims.look_ahead()
    left = [RunKey("job 00000", MIDDAY_MS + 1)]
    left += [] if known else [RunKey("job 00000", MIDDAY_MS)]
    assert {item.key for item in timer._backlog.filtered(lambda _item: True)} == set(left)
    assert (timer._standby.ask_ms() is not None) is unsettled


def test_what_may_have_been_won_is_asked_for_again_whoever_seems_to_have_it() -> None:
    fleet, (only,) = fleet_of(1, 60)
    only.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    timer = only.manual._timer
    assert timer is not None
    won = timer._backlog.filtered(lambda item: item.unknown)
    assert won
    coming = timer._backlog.ahead(timer._claims._asker(), look_ahead.LOOK_AHEAD)
    assert not {item.key for item in won} & {item.key for item in coming}
    timer._backlog.drop_known([RunKey(item.key.job, item.key.scheduled_ms) for item in won])
    fleet.advance(2 * SECOND)
    assert Counter(start.attempt for start in fleet.starts) == {1: 60}


def test_what_others_ran_is_not_told_as_missed_by_a_full_instance_however_many_it_is() -> None:
    fleet, jobs = Fleet(), 2 * PENDING_LIMIT + 50
    full = fleet.add("full", max_concurrent_runs=1)
    other = fleet.add("other", max_concurrent_runs=jobs)
    full.job("long", "0 12 * * *")
    fleet.held = {"long"}
    for item in (full, other):
        for number in range(jobs):
            item.job(f"job {number:03d}", "1 12 * * *")
        item.start()
    full.job("known to one only", "1 12 * * *")
    fleet.advance(4 * 60 * SECOND)
    assert [run.job for run in full.manual.runs] == ["long"]
    assert Counter(fleet.who()) == {"other": jobs}
    assert [event.job for event in fleet.missed()] == ["known to one only"]
