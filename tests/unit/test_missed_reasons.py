"""What an instance gives as the reason when it gives a run up that it never asked for."""

from __future__ import annotations

import pytest

from leasecron_sync import every
from tests.fleet import HOUR, MINUTE, SECOND, Fleet, Instance

WINDOW_MS = 2_000


def fleet_of_one(family: str, **options: int) -> tuple[Fleet, Instance]:
    fleet = Fleet(family)
    return fleet, fleet.add("a", skew_ms=0, around_run=None, **options)


def reasons(fleet: Fleet) -> set[str]:
    return {event.reason for event in fleet.missed()}


@pytest.mark.parametrize("took_ms", [WINDOW_MS + 500, 4_500])
def test_what_fell_due_while_a_call_took_longer_than_the_window_is_too_old(took_ms: int) -> None:
    """Every slot was free all the time: it says nothing of slots."""
    fleet, only = fleet_of_one("claim", claim_window_ms=WINDOW_MS)
    only.job("job", every(seconds=1))
    only.start()
    fleet.advance(3 * SECOND)
    calls = iter([took_ms] * 3)
    only.backend.faults.slow("claim", before=lambda: fleet.let_pass(next(calls, 0)))
    fleet.advance(30 * SECOND)
    assert fleet.missed()
    assert reasons(fleet) == {"too old"}


def test_what_passed_while_the_process_stood_still_is_too_old() -> None:
    fleet, only = fleet_of_one("claim", claim_window_ms=WINDOW_MS)
    only.job("job", every(seconds=1))
    only.start()
    fleet.advance(3 * SECOND)
    for pause_ms in (WINDOW_MS + 1, 5 * SECOND, MINUTE):
        fleet.let_pass(pause_ms)
        fleet.advance(3 * SECOND)
    assert fleet.missed()
    assert reasons(fleet) == {"too old"}


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_what_waited_for_a_slot_all_the_time_is_missed_for_that(family: str) -> None:
    fleet, only = fleet_of_one(family, max_concurrent_runs=1)
    only.job("long", "0 * * * *")
    if family == "lease":
        only.job("job", "1-59 * * * *", catch_up_ms=0)
    else:
        only.job("job", "1-59 * * * *")
    fleet.held = {"long"}
    only.start()
    fleet.advance(6 * MINUTE)
    assert fleet.missed()
    assert reasons(fleet) == {"no free slot"}


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_clock_that_is_set_right_while_a_claim_is_under_way_costs_no_run(family: str) -> None:
    """What is known of the skew is wrong then: who waited for the next claim seemed too old.

    On a claim backend nobody looks back: instances whose hosts are set right together, as after an
    outage of their time server, would all have given up what was due.
    """
    fleet, only = fleet_of_one(family)
    clock = fleet.own_clock(only)
    clock.step(-HOUR)
    for number in range(40):
        only.job(f"job-{number}", every(seconds=10))
    only.start()
    fleet.advance(15 * SECOND)
    before_ms = fleet.store_clock.now_ms()
    calls = iter([HOUR])
    only.backend.faults.slow("claim", before=lambda: clock.step(next(calls, 0)))
    fleet.advance(60 * SECOND)
    assert next(calls, None) is None, "it was set"
    times = {ms for ms in fleet.started() if ms >= before_ms}
    assert len(times) == 6
    executed = {(start.job, start.scheduled_ms) for start in fleet.starts}
    assert [ms for ms in times for n in range(40) if (f"job-{n}", ms) not in executed] == []
    due = [ms for ms in times if ms <= before_ms + 10 * SECOND]
    told = [
        round(event.scheduled_time.timestamp() * 1_000)
        for event in only.named("run_missed")
        if event.scheduled_time is not None and event.first_time is None
    ]
    assert not set(told) & set(due)
