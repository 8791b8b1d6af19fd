"""Takeover, hand-over and retries: who looks for runs that others left, and when."""

from __future__ import annotations

from leasecron_sync.engine.standby import Standby
from leasecron_sync.errors import HandOver
from leasecron_sync.model import Pending, RunState
from leasecron_sync.options import STILL_MS
from leasecron_sync.run import Run
from tests.fleet import HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance


def pair() -> tuple[Fleet, Instance, Instance]:
    fleet = Fleet()
    return fleet, fleet.add("a"), fleet.add("b")


def test_a_crashed_holder_is_replaced_within_a_lease_and_a_fraction() -> None:
    fleet, first, second = pair()
    for item in (first, second):
        item.job("job", "0 * * * *")
        item.start()
    fleet.held = {"job"}
    fleet.advance(40 * SECOND)
    holder, other = (first, second) if first.manual.runs else (second, first)
    holder.kill()
    fleet.held = set()
    killed_ms = fleet.store_clock.now_ms()
    fleet.advance(20 * SECOND)
    assert fleet.who() == [other.label]
    assert fleet.starts[0].at_ms - killed_ms <= 15_500


def _back(fleet: Fleet, first: Instance, second: Instance) -> None:
    """Let one instance reach the store three seconds before the other."""
    first.backend.faults.down = False
    for _ in range(200):
        fleet.advance(50)
        if first.named("store_back"):
            break
    fleet.advance(3 * SECOND)
    second.backend.faults.down = False
    fleet.advance(30 * SECOND)


def test_holders_may_renew_before_a_standby_takes_over_after_an_outage() -> None:
    fleet, first, second = pair()
    for item in (first, second):
        item.job("job", "0 * * * *")
        item.start()
    fleet.held = {"job"}
    fleet.advance(40 * SECOND)
    holder, other = (first, second) if first.manual.runs else (second, first)
    for item in (first, second):
        item.backend.faults.down = True
    fleet.advance(30 * SECOND)
    _back(fleet, other, holder)
    assert holder.manual.runs
    assert not other.manual.runs
    fleet.held = set()
    fleet.advance(SECOND)
    assert len(fleet.starts) == 1
    assert fleet.states("job") == {MIDDAY_MS: RunState.FINISHED}


def test_a_run_that_fell_due_in_an_outage_is_not_taken_over_at_once() -> None:
    fleet, first, second = pair()
    for item in (first, second):
        item.job("job", "0 * * * *")
        item.start()
    fleet.held = {"job"}
    fleet.advance(29 * SECOND)
    second.backend.faults.down = True
    fleet.advance(3 * SECOND)
    assert first.manual.runs
    first.backend.faults.down = True
    fleet.advance(20 * SECOND)
    _back(fleet, second, first)
    assert first.manual.runs
    assert not second.manual.runs


def test_a_full_instance_takes_over_what_it_could_not_claim() -> None:
    fleet = Fleet()
    first, full = fleet.add("a"), fleet.add("b", max_concurrent_runs=1)
    full.job("long", "0 12 * * *")
    fleet.held = {"long", "job"}
    full.start()
    fleet.advance(10 * MINUTE)
    for item in (first, full):
        item.job("job", "20 12 * * *")
    first.start()
    # Its own claim has become too old by now, and the store said that somebody holds the run.
    fleet.advance(13 * MINUTE)
    assert first.manual.runs
    first.kill()
    fleet.held = {"long"}
    fleet.advance(17 * SECOND)
    assert fleet.who("job") == ["b"]


def test_a_lapsed_run_needs_no_ordinary_slot_although_it_was_due_here_too() -> None:
    fleet = Fleet()
    first, full = fleet.add("a"), fleet.add("b", max_concurrent_runs=1)
    full.job("long", "0 12 * * *")
    fleet.held = {"long", "job"}
    full.start()
    fleet.advance(10 * MINUTE)
    for item in (first, full):
        item.job("job", "20 12 * * *")
    first.start()
    fleet.advance(10 * MINUTE + 31 * SECOND)
    assert first.manual.runs
    first.kill()
    fleet.held = {"long"}
    assert full.manual._timer is not None
    full.manual._timer.note_unsettled(0)
    fleet.advance(20 * SECOND)
    assert fleet.who("job") == ["b"]


def test_a_retry_noted_while_pending_is_under_way_is_not_forgotten() -> None:
    fleet = Fleet()
    only = fleet.add("a")

    def fail_once(run: Run) -> None:
        if len(fleet.starts) == 1:
            message = f"no luck with {run!r}"
            raise ValueError(message)

    only.job("job", "0 * * * *", fail_once)
    fleet.held = {"job"}
    only.start()
    fleet.advance(5 * MINUTE)
    (run,) = only.manual.runs
    timer = only.manual._timer
    assert timer is not None

    def fail_meanwhile() -> None:
        only.backend.faults.slow("pending")
        fleet.held = set()
        fleet.work(only, run)

    only.backend.faults.slow("pending", after=fail_meanwhile)
    timer.note_unsettled(0)
    fleet.advance(10 * SECOND)
    assert len(fleet.starts) == 2


def test_a_lease_won_by_a_decision_that_was_given_up_is_taken_over() -> None:
    fleet = Fleet()
    only = fleet.add("a", lease_ms=60_000)
    only.job("job", "0 12 * * *", catch_up_ms=0)
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    only.backend.faults.down = True
    fleet.advance(12 * SECOND)
    only.backend.faults.down = False
    fleet.advance(10 * MINUTE)
    assert fleet.states("job") == {MIDDAY_MS: RunState.FINISHED}


def test_a_run_that_everybody_hands_over_does_not_spin() -> None:
    fleet, first, second = pair()

    def refuse(_run: Run) -> None:
        raise HandOver

    for item in (first, second):
        item.job("job", "0 0 * * *", refuse)
        item.job("other", "0 12 * * *", refuse)
        item.start()
    fleet.advance(10 * MINUTE)
    assert fleet.states("other") == {MIDDAY_MS: RunState.FAILED}
    assert len(fleet.starts) == 12
    assert first.calls() + second.calls() < 400


def test_who_handed_a_run_over_stands_back_for_a_lease() -> None:
    fleet = Fleet()
    only = fleet.add("a")

    def refuse_once(_run: Run) -> None:
        if len(fleet.starts) == 1:
            raise HandOver

    only.job("job", "0 * * * *", refuse_once)
    only.start()
    fleet.advance(HOUR // 6)
    one, two = fleet.starts
    assert 15 * SECOND <= two.at_ms - one.at_ms <= 17 * SECOND


def test_a_store_whose_clock_stands_still_is_not_asked_all_the_time() -> None:
    """An SQLite store's does, while the host's clock is a few seconds behind the file's."""
    standby, asked_ms = Standby(), [0]
    while asked_ms[-1] < 10 * STILL_MS:
        standby.asking(asked_ms[-1])
        standby.answered(Pending((), 3, unsettled=True), 100, asked_ms[-1])
        next_ms = standby.ask_ms()
        assert next_ms is not None
        asked_ms.append(next_ms)
    assert asked_ms[:2] == [0, 4], "the first time it may be as the store says"
    assert len(asked_ms) <= 13


def test_a_store_whose_clock_goes_on_is_asked_when_it_says() -> None:
    standby = Standby()
    for steady_ms, next_in_ms in ((0, 500), (501, 3), (505, 7), (513, 2)):
        standby.asking(steady_ms)
        standby.answered(Pending((), next_in_ms, unsettled=True), 100, steady_ms)
        assert standby.ask_ms() == steady_ms + next_in_ms + 1
