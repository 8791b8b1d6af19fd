"""What simulated histories found, each in a history of its own that shows the symptom."""

from __future__ import annotations

from typing import Any, cast

import pytest

from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.engine.claiming import OnceClaimer
from leasecron_sync.engine.decide import Candidate, Origin
from leasecron_sync.errors import HandOver, StoreRejected, StoreUnavailable
from leasecron_sync.model import LeaseClaim, OnceClaim, OnOverlap, RunKey, RunState, Verdict
from leasecron_sync.options import ON_TIME_MS, STILL_MS
from leasecron_sync.schedule import every
from tests.fleet import DAY, HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance, minutes


def alone(family: str = "lease", **options: Any) -> tuple[Fleet, Instance]:  # noqa: ANN401 - of a scheduler
    fleet = Fleet(family)
    return fleet, fleet.add("a", **options)


def told(fleet: Fleet) -> set[int]:
    """Return every scheduled time that somebody told as missed, by itself or with others."""
    found: set[int] = set()
    for event in fleet.missed():
        assert event.scheduled_time is not None
        last_ms = round(event.scheduled_time.timestamp() * 1000)
        first_ms = round((event.first_time or event.scheduled_time).timestamp() * 1000)
        found |= set(range(first_ms, last_ms + 1, MINUTE))
    return found


def leave_lapsed(fleet: Fleet, job: str, scheduled_ms: int, lease_ms: int = 15_000) -> None:
    """Let somebody claim a run, and crash."""
    inner: Any = fleet.instances[0].backend.inner
    claim = LeaseClaim(
        RunKey(job, scheduled_ms),
        scheduled_ms,
        "gone",
        f"gone {scheduled_ms}",
        lease_ms,
        3,
        OnOverlap.SKIP,
        HOUR,
        HOUR,
    )
    (reply,) = inner.claim([claim])
    assert reply.verdict is Verdict.GRANTED


# -- decisions -------------------------------------------------------------------------------------


def test_a_run_won_by_a_claim_that_arrived_once_more_after_it_was_early_is_executed() -> None:
    fleet = Fleet("claim")
    only = fleet.add("ahead", skew_ms=300)  # too little to be put right
    only.job("job", "* * * * *")
    only.start()
    inner: Any = only.backend.inner
    real, sent = inner.claim, []

    def claim(claims: list[OnceClaim]) -> Any:  # noqa: ANN401 - the replies
        sent.append(claims)
        return real(claims)

    inner.claim = claim
    fleet.advance(30 * SECOND - 200)
    (early,) = sent
    assert fleet.started() == []
    fleet.let_pass(MIDDAY_MS - fleet.store_clock.now_ms())
    assert real(early)[0].verdict is Verdict.GRANTED  # the same request, by another way
    fleet.advance(10 * SECOND)
    assert fleet.started() == minutes(0, 0)


def test_what_may_have_been_won_is_told_at_a_stop_though_the_store_calls_it_early_by_then() -> None:
    """Its clock was set back since: that it is early does not say that it was not won."""
    fleet = Fleet("claim")
    only = fleet.add("a", skew_ms=300)
    only.job("job", "* * * * *")
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.lose_reply("claim")
    back = iter([-20 * SECOND])
    only.backend.faults.slow("claim", after=lambda: fleet.store_clock.step(next(back, 0)))
    fleet.advance(5 * SECOND)
    assert only.calls("claim") > 1
    assert fleet.started() == []
    only.manual.stop()
    [missed] = only.named("run_missed")
    assert missed.reason == "unknown outcome"


def test_a_decision_that_was_too_early_is_kept_when_its_candidate_is_not() -> None:
    fleet, only = alone("claim")
    only.job("job", "* * * * *")
    only.start()
    fleet.advance(SECOND)
    context = only.manual._context
    assert context is not None
    claimer = OnceClaimer(context, cast("ClaimBackend", only.backend))
    job, key = only.scheduler._jobs["job"], RunKey("job", MIDDAY_MS)
    decisions = set()
    for _ in range(2):
        item = Candidate(job, key, MIDDAY_MS, Origin.ON_TIME, only.clock.steady_ms())
        (answer,) = claimer.claim([item], only.clock.steady_ms())
        assert answer.reply.verdict is Verdict.EARLY
        decisions.add(item.decision_id)
    assert len(decisions) == 1


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_store_whose_clock_stands_still_is_not_asked_for_a_run_all_the_time(family: str) -> None:
    """It was set back a little, and says so long that it is what it was then."""
    fleet = Fleet(family)
    only = fleet.add("ahead", skew_ms=50)  # too little to be put right
    only.job("job", "* * * * *")
    only.start()
    inner: Any = only.backend.inner
    right = fleet.store_clock.now_ms
    goes_on_ms = MIDDAY_MS + 2 * STILL_MS

    def stands() -> int:
        return right() if right() >= goes_on_ms else min(right(), MIDDAY_MS - 2)

    inner._now_ms = stands
    before = only.calls("claim")
    fleet.advance(31 * SECOND)
    (start,) = fleet.starts
    assert 0 <= start.at_ms - goes_on_ms <= STILL_MS
    assert only.calls("claim") - before <= 5


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_run_that_was_early_begins_when_the_store_said(family: str) -> None:
    fleet = Fleet(family)
    only = fleet.add("ahead", skew_ms=300)
    only.job("job", "* * * * *")
    only.start()
    fleet.advance(31 * SECOND)
    (start,) = fleet.starts
    assert start.at_ms == MIDDAY_MS


def test_what_may_have_been_won_is_asked_for_again_before_anything_else() -> None:
    fleet, only = alone(max_concurrent_runs=1)
    aged = [f"aged {number}" for number in range(12)]
    for name in aged:
        only.job(name, "*/10 * * * * *", catch_up_ms=HOUR)
    only.job("job", "* * * * *", max_attempts=1)
    only.start()
    fleet.advance(SECOND)
    for name in aged:
        only.remove(name)
    fleet.advance(28 * SECOND)
    inner: Any = only.backend.inner
    real, asked = inner.claim, []

    def claim(claims: list[LeaseClaim]) -> Any:  # noqa: ANN401 - the replies
        asked.append([item.decision_id for item in claims])
        if len(asked) == 1:
            for name in aged:  # they come back, and have something to make up for
                only.job(name, "*/10 * * * * *", catch_up_ms=HOUR)
        return real(claims)

    inner.claim = claim
    only.backend.faults.lose_reply("claim")
    fleet.advance(10 * SECOND)
    assert len(fleet.starts) > 12
    assert asked[0] == asked[1]


# -- overlap and hand-over -------------------------------------------------------------------------


def test_an_instance_does_not_ask_twenty_times_a_second_behind_a_lapsed_run() -> None:
    fleet, only = alone(max_concurrent_runs=1)
    only.job("job", "* * * * *", catch_up_ms=HOUR)
    only.start()
    fleet.advance(SECOND)
    fleet.let_pass(90 * SECOND)
    leave_lapsed(fleet, "job", minutes(0, 0)[0])
    fleet.let_pass(20 * SECOND)
    assert only.manual._timer is not None
    only.manual._timer._standby.hold_off(only.clock.steady_ms() + 10 * SECOND)
    before = only.calls("claim")
    fleet.advance(9 * SECOND)
    assert 1 <= only.calls("claim") - before <= 12
    fleet.advance(30 * SECOND)
    assert fleet.states("job")[minutes(1, 1)[0]] is RunState.FINISHED


def test_what_fell_due_before_an_outage_is_not_taken_over_right_after_it() -> None:
    """It is in the agenda, and beyond the few that are made up for."""
    fleet, only = alone()
    only.job("job", every(seconds=2), overlap="allow", catch_up_ms=HOUR, catch_up_limit=1)
    only.start()
    fleet.advance(29 * SECOND)
    fleet.let_pass(7 * SECOND)  # suspended
    leave_lapsed(fleet, "job", MIDDAY_MS, lease_ms=1_000)
    fleet.let_pass(2 * SECOND)
    only.backend.faults.down = True
    fleet.advance(SECOND // 2)
    only.backend.faults.down = False
    fleet.advance(3 * SECOND)
    assert MIDDAY_MS not in fleet.started()
    fleet.advance(10 * SECOND)
    assert fleet.started().count(MIDDAY_MS) == 1


def test_what_was_handed_over_is_not_claimed_at_once_because_the_agenda_names_it_too() -> None:
    fleet, only = alone()
    times: list[int] = []

    def give_up(_run: object) -> None:
        times.append(fleet.store_clock.now_ms())
        raise HandOver

    only.job("job", "* * * * *", give_up)
    only.start()
    fleet.advance(29 * SECOND)
    assert only.manual._timer is not None
    only.manual._timer._catch_up.look_back(  # type: ignore[union-attr]
        list(only.manual._timer._jobs.values()), forget=False
    )
    # The run falls due while the look back is under way: both find it.
    only.backend.faults.slow("register", before=lambda: fleet.let_pass(1_500))
    only.manual.step_timer()
    only.backend.faults.slow("register")
    fleet.advance(40 * SECOND)
    assert len(times) > 1
    assert min(two - one for one, two in zip(times, times[1:])) >= 15_000


def test_a_run_that_was_handed_back_late_is_left_to_others_for_a_whole_lease() -> None:
    fleet, only = alone()
    only.job("job", "* * * * *")
    only.start()
    fleet.advance(29 * SECOND)
    only.manual.can_start_threads = False
    only.backend.faults.lose_request("settle", times=3)
    fleet.advance(2 * SECOND)
    only.manual.can_start_threads = True
    fleet.advance(30 * SECOND)
    record = fleet.records("job")[RunKey("job", MIDDAY_MS)]
    assert record.hand_overs == 1
    assert record.claimed_ms is not None
    settled_ms = MIDDAY_MS + 500  # no sooner than after three tries
    assert record.claimed_ms >= settled_ms + 15_000


# -- looking back ----------------------------------------------------------------------------------


def test_what_falls_due_during_a_look_back_is_on_time() -> None:
    fleet, only = alone()
    only.job("job", "* * * * *")
    only.start()
    fleet.advance(29 * SECOND)
    inner: Any = only.backend.inner
    real = inner.claim
    wishes: list[OnOverlap] = []

    def claim(claims: list[LeaseClaim]) -> Any:  # noqa: ANN401 - the replies
        wishes.extend(item.on_overlap for item in claims)
        return real(claims)

    inner.claim = claim
    assert only.manual._timer is not None
    only.manual._timer._catch_up.look_back(  # type: ignore[union-attr]
        list(only.manual._timer._jobs.values()), forget=False
    )
    only.backend.faults.slow("register", before=lambda: fleet.let_pass(1_500))
    only.manual.step_timer()
    only.backend.faults.slow("register")
    fleet.advance(SECOND)
    assert wishes == [OnOverlap.SKIP]


def test_a_job_that_was_removed_during_an_outage_is_not_made_up_for() -> None:
    fleet, only = alone()
    only.job("job", "* * * * *", catch_up_ms=HOUR)
    only.job("other", "0 0 1 1 *")
    only.start()
    fleet.advance(MINUTE)
    only.kill()
    fleet.let_pass(5 * MINUTE)
    only.backend.faults.down = True
    only.start()
    fleet.advance(10 * SECOND)
    before = len(fleet.starts)
    only.remove("job")
    fleet.advance(SECOND)
    only.backend.faults.down = False
    fleet.advance(30 * SECOND)
    assert len(fleet.starts) == before


def test_what_passed_in_a_pause_is_told_although_a_later_run_was_missed_by_itself() -> None:
    fleet, only = alone(history_ms=400 * DAY)
    only.job("job", "* * * * *", catch_up_ms=0)
    only.start()
    fleet.advance(MINUTE)
    fleet.let_pass(20 * MINUTE)
    only.backend.faults.down = True  # it wakes up in an outage
    fleet.advance(5 * MINUTE)
    only.backend.faults.down = False
    fleet.advance(2 * MINUTE)
    executed = set(fleet.started())
    last = max(executed)
    expected = {ms for ms in minutes(0, 60) if ms <= last}
    assert expected - executed == told(fleet) - {ms for ms in told(fleet) if ms > last}
    assert sum(event.count for event in fleet.missed()) == len(told(fleet))


def test_what_passed_in_a_pause_amid_an_outage_is_told() -> None:
    fleet, only = alone(history_ms=400 * DAY)
    only.job("job", "* * * * *", catch_up_ms=0)
    only.start()
    fleet.advance(MINUTE)
    only.backend.faults.down = True
    for _ in range(3):
        fleet.advance(5 * MINUTE)  # missed one by one
        fleet.let_pass(20 * MINUTE)
    fleet.advance(5 * MINUTE)
    only.backend.faults.down = False
    fleet.advance(2 * MINUTE)
    executed = set(fleet.started())
    last = max(executed)
    expected = {ms for ms in minutes(0, 120) if ms <= last}
    assert expected - executed == told(fleet) - {ms for ms in told(fleet) if ms > last}
    assert sum(event.count for event in fleet.missed()) == len(told(fleet))


def test_a_run_that_is_claimed_is_not_told_as_missed_before() -> None:
    fleet, only = alone()
    only.job("job", "* * * * *", catch_up_ms=0)
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.down = True
    fleet.advance(5 * SECOND)
    only.backend.faults.down = False
    fleet.advance(ON_TIME_MS)
    assert fleet.started() == minutes(0, 0)
    assert fleet.missed() == []


def test_what_falls_due_while_a_look_back_is_slow_is_not_told_as_missed_before() -> None:
    """It falls due, and is late by more than what is on time, before the store has answered."""
    fleet, only = alone()
    only.job("job", "* * * * *", catch_up_ms=0)
    only.start()
    fleet.advance(SECOND)
    inner: Any = only.backend.inner
    real = inner.register

    def register(stamps: Any) -> Any:  # noqa: ANN401 - of the backend
        inner.register = real
        answers = real(stamps)
        fleet.let_pass(ON_TIME_MS - 100)
        return answers

    inner.register = register
    fleet.let_pass(MIDDAY_MS - 300 - fleet.store_clock.now_ms())
    loop = only.manual._timer
    assert loop is not None
    with loop._lock:
        loop._look_back(forget=False)
    only.manual.step_timer()
    fleet.advance(SECOND)
    assert fleet.started() == minutes(0, 0)
    assert fleet.missed() == []


def test_what_passed_before_a_claim_that_came_before_the_look_back_is_told() -> None:
    """A store that refuses to register at first is used for claims; their records are its own."""
    fleet, only = alone(history_ms=400 * DAY)
    only.job("job", "* * * * *", catch_up_ms=0)
    only.start()
    fleet.advance(MINUTE)
    only.kill()
    fleet.let_pass(20 * MINUTE)
    inner: Any = only.backend.inner
    real = inner.register

    def register(_stamps: Any) -> Any:  # noqa: ANN401 - of the backend
        message = "not now"
        raise StoreRejected(message)

    inner.register = register
    only.start()
    fleet.advance(2 * MINUTE)
    inner.register = real
    fleet.advance(2 * MINUTE)
    executed = set(fleet.started())
    last = max(executed)
    assert {ms for ms in minutes(0, 60) if ms <= last} - executed == told(fleet)
    assert sum(event.count for event in fleet.missed()) == len(told(fleet)) > 15


def test_what_may_have_been_won_before_a_stop_is_told_on_a_claim_backend() -> None:
    fleet, only = alone("claim")
    only.job("job", "* * * * *")
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.lose_reply("claim")
    fleet.let_pass(SECOND)
    only.manual.step_timer()
    assert fleet.missed() == []
    only.manual.stop()
    (event,) = fleet.missed()
    assert event.reason == "unknown outcome"
    assert event.scheduled_time is not None
    assert round(event.scheduled_time.timestamp() * 1000) == MIDDAY_MS


def test_the_skew_is_known_from_the_first_answer_after_an_outage() -> None:
    fleet = Fleet()
    behind = fleet.add("behind", skew_ms=-40 * SECOND)
    behind.job("job", "* * * * *", catch_up_ms=HOUR)
    behind.backend.faults.raise_at("register", StoreRejected("not now"))
    behind.start()
    behind.manual.step_timer()
    fleet.let_pass(5 * SECOND)
    behind.backend.faults.raise_at("register", StoreRejected("not now"))
    behind.manual.step_timer()  # the probe is answered, and claims go on
    context = behind.manual._context
    assert context is not None
    assert context.caller.skew_ms == 40 * SECOND


def test_a_run_named_before_an_outage_is_not_taken_over_right_after_it() -> None:
    fleet, only = alone()
    only.job("job", "* * * * *", catch_up_ms=HOUR)
    only.start()
    fleet.advance(SECOND)
    fleet.let_pass(30 * SECOND)
    leave_lapsed(fleet, "job", MIDDAY_MS)
    fleet.let_pass(15 * SECOND)
    # It is named as claimable, and the next call of the same step meets the outage.
    only.manual._context.note_unsettled(0)  # type: ignore[union-attr]
    fleet.let_pass(SECOND)
    only.backend.faults.raise_at("prune", StoreUnavailable("down"))
    assert only.manual._timer is not None
    only.manual._timer._upkeep.note_claim()  # type: ignore[union-attr]
    only.manual._timer._upkeep._next_ms = 0  # type: ignore[union-attr]
    only.manual.step_timer()
    assert only.calls("prune") >= 1
    back_ms = fleet.store_clock.now_ms()
    fleet.advance(30 * SECOND)
    (record,) = (
        item for key, item in fleet.records("job").items() if key.scheduled_ms == MIDDAY_MS
    )
    assert record.attempt == 2
    assert record.claimed_ms is not None
    assert record.claimed_ms >= back_ms + 5_000  # heartbeat_ms


@pytest.mark.parametrize("overlap", ["skip", "allow"])
def test_the_next_run_that_is_made_up_for_follows_the_end_of_the_one_before(overlap: str) -> None:
    """Also where the timer asks between the end of a handler and its settlement."""
    fleet, only = alone()
    only.job("job", "* * * * *", catch_up_ms=HOUR, overlap=overlap)
    only.start()
    fleet.advance(MINUTE)
    only.kill()
    fleet.let_pass(5 * MINUTE)
    only.manual.start()
    for _ in range(5):
        while not only.manual.runs:
            assert only.manual.step_timer() == 0
        (run,) = only.manual.runs
        run.call_handler()
        only.manual.step_timer()
        assert only.manual.runs == [run]
        assert run.settle() is None
        only.manual.runs.remove(run)
    assert fleet.started() == minutes(0, 5)


def test_a_run_that_may_have_been_won_costs_no_attempt_by_growing_too_old() -> None:
    fleet, only = alone(lease_ms=40_000)
    only.job("job", "0 12 * * *", catch_up_ms=0, max_attempts=1)
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.lose_reply("claim")
    only.backend.faults.lose_request("probe", times=8)
    fleet.advance(45 * SECOND)
    (start,) = fleet.starts
    assert start.at_ms - MIDDAY_MS > ON_TIME_MS  # too old to be won by now
    [record] = fleet.records("job").values()
    assert (record.state, record.attempt) == (RunState.FINISHED, 1)
    assert fleet.missed() == []


def test_a_run_that_may_have_been_won_is_given_up_when_its_lease_must_have_lapsed() -> None:
    fleet, only = alone()
    only.job("job", "0 12 * * *", catch_up_ms=0)
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.lose_request("claim", times=100)
    only.backend.faults.lose_request("probe", times=100)
    fleet.advance(2 * MINUTE)
    assert [event.reason for event in fleet.missed()] == ["unknown outcome"]


def test_what_fell_due_in_an_outage_is_told_by_a_stop_where_nobody_looks_back() -> None:
    fleet, only = alone("claim")
    only.job("job", every(seconds=10))
    only.start()
    fleet.advance(5 * SECOND)
    before = len(fleet.starts)
    only.backend.faults.raise_at("claim", StoreUnavailable("down"))
    only.backend.faults.lose_request("probe", times=100)
    fleet.advance(35 * SECOND)
    assert len(fleet.starts) == before
    assert fleet.missed() == []
    only.manual.stop()
    assert {event.reason for event in fleet.missed()} == {"store down"}
    times = [event.scheduled_time for event in fleet.missed() if event.scheduled_time is not None]
    after_ms = [round(time.timestamp() * 1000) - MIDDAY_MS for time in times]
    assert after_ms == [-20_000, -10_000, 0, 10_000]
