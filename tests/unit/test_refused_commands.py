"""A store that refuses one kind of command: what people are told, and when it is over for them."""

from __future__ import annotations

import logging
from typing import Callable, NoReturn

import pytest

from leasecron_sync.engine.context import TIMER_LANE
from leasecron_sync.errors import StoreRejected
from tests.fleet import HOUR, MIDDAY_MS, MINUTE, SECOND, Fleet, Instance, minutes

EVERY_TWO_HOURS = "0 */2 * * *"


def refuse(item: Instance, method: str) -> None:
    """Let the store refuse one kind of command of an instance until its faults are cleared."""

    def refusal() -> NoReturn:
        message = f"no permission to {method}"
        raise StoreRejected(message)

    item.backend.faults.slow(method, before=refusal)


def outages(item: Instance) -> list[str]:
    return [event.name for event in item.named("store_down", "store_back")]


def alone(family: str, schedule: str) -> tuple[Fleet, Instance]:
    fleet = Fleet(family)
    only = fleet.add("a")
    only.job("job", schedule)
    return fleet, only


def advance_until(fleet: Fleet, reached: Callable[[], object], limit_ms: int) -> None:
    end_ms = fleet.store_clock.steady_ms() + limit_ms
    while not reached():
        assert fleet.store_clock.steady_ms() < end_ms, "it never came"
        fleet.advance(100)


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_claims_that_are_refused_each_time_are_one_outage_until_one_is_answered(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, only = alone(family, EVERY_TWO_HOURS)
    only.start()
    fleet.advance(MINUTE)
    refuse(only, "claim")
    with caplog.at_level(logging.WARNING, "leasecron_sync"):
        fleet.advance(7 * HOUR)  # three times, and rests between in which nothing is claimed
        assert outages(only) == ["store_down"]
        only.backend.faults.clear()
        fleet.advance(30 * MINUTE)
        assert outages(only) == ["store_down"], "no claim was answered yet"
        fleet.advance(10 * HOUR)
    assert outages(only) == ["store_down", "store_back"]
    down, back = only.named("store_down", "store_back")
    assert isinstance(down.error, StoreRejected)
    assert down.reason == "StoreRejected: no permission to claim"
    assert back.delay_ms is not None
    assert back.delay_ms // HOUR == 6  # from the first refusal to the first answer
    assert fleet.started() == [MIDDAY_MS + hours * HOUR for hours in (0, 8, 10, 12, 14, 16)]
    assert [event.reason for event in fleet.missed()] == ["store down"] * 3
    lines = [text.split(" reason=")[0].split(" ms=")[0] for text in caplog.messages]
    assert lines.count("store refuses what is asked, nothing new is started") == 1
    assert lines.count("store answers again") == 1


def test_the_others_go_on_while_the_claims_of_one_instance_are_refused() -> None:
    fleet, one = alone("lease", "*/10 * * * *")
    other = fleet.add("b")
    other.job("job", "*/10 * * * *")
    one.start()
    other.start()
    fleet.advance(MINUTE)
    refuse(one, "claim")
    fleet.advance(HOUR)
    assert fleet.started() == [MIDDAY_MS + number * 10 * MINUTE for number in range(7)]
    assert fleet.missed() == []
    assert outages(one) == ["store_down"]
    one.backend.faults.clear()
    fleet.advance(HOUR)
    assert outages(one) == ["store_down", "store_back"]
    assert outages(other) == []


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_claim_that_is_refused_for_a_moment_ends_its_outage_by_itself(family: str) -> None:
    fleet, only = alone(family, "0 12 * * *")
    only.start()
    refuse(only, "claim")
    fleet.advance(32 * SECOND)
    assert outages(only) == ["store_down"]
    only.backend.faults.clear()
    fleet.advance(10 * SECOND)
    assert outages(only) == ["store_down", "store_back"]
    assert fleet.started() == [MIDDAY_MS]
    assert fleet.missed() == []


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_store_that_is_away_amid_refusals_is_not_told_as_back_in_between(family: str) -> None:
    fleet, only = alone(family, EVERY_TWO_HOURS)
    only.start()
    refuse(only, "claim")
    fleet.advance(HOUR)
    only.backend.faults.down = True
    fleet.advance(2 * HOUR)
    only.backend.faults.down = False
    fleet.advance(2 * HOUR)
    assert outages(only) == ["store_down"]
    only.backend.faults.clear()
    fleet.advance(2 * HOUR)
    assert outages(only) == ["store_down", "store_back"]
    assert fleet.started() == [MIDDAY_MS + 6 * HOUR]


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_an_outage_without_refusals_ends_although_nothing_is_claimed(family: str) -> None:
    """The next claim may come a day later; the probe tells that the store is there."""
    fleet, only = alone(family, "0 12 * * *")
    only.start()
    fleet.advance(29 * SECOND)
    only.backend.faults.down = True
    fleet.advance(5 * MINUTE)
    only.backend.faults.down = False
    calls = only.calls("claim")
    fleet.advance(MINUTE)
    assert outages(only) == ["store_down", "store_back"]
    assert only.calls("claim") == calls


@pytest.mark.parametrize("since", ["the start", "later"])
@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_probe_that_is_refused_all_the_time_keeps_nobody_away(family: str, since: str) -> None:
    """A refusal answers a probe: it says that the store is there, and that is all it asks.

    It is told by ``start()``, where nothing else was asked yet, and never again.
    """
    fleet, only = alone(family, "* * * * *")
    refuse(only, "probe")
    only.start()
    if since == "the start":  # as ``start()`` tells it where it probes
        assert only.manual._context is not None
        only.manual._context.caller.failed(TIMER_LANE, StoreRejected("no permission to probe"))
    fleet.advance(20 * MINUTE)
    assert only.calls("probe") > 10
    assert outages(only) == ["store_down", "store_back"] * (since == "the start")
    assert fleet.started() == minutes(0, 19)
    assert fleet.missed() == []


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_an_outage_ends_although_the_store_refuses_probes(family: str) -> None:
    fleet, only = alone(family, "* * * * *")
    refuse(only, "probe")
    only.start()
    fleet.advance(5 * MINUTE)
    for _ in range(2):
        only.backend.faults.down = True
        fleet.advance(5 * MINUTE)
        only.backend.faults.down = False
        fleet.advance(5 * MINUTE)
    assert outages(only) == ["store_down", "store_back"] * 2


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_probes_and_claims_that_are_refused_together_are_one_outage(family: str) -> None:
    fleet, only = alone(family, EVERY_TWO_HOURS)
    only.start()
    fleet.advance(MINUTE)
    refuse(only, "claim")
    refuse(only, "probe")
    fleet.advance(23 * HOUR)
    assert outages(only) == ["store_down"]
    only.backend.faults.clear()
    refuse(only, "probe")
    fleet.advance(2 * HOUR)
    assert outages(only) == ["store_down", "store_back"]
    assert len(fleet.started()) == 2


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_status_tells_a_refusal_until_it_is_over(family: str) -> None:
    fleet, only = alone(family, EVERY_TWO_HOURS)
    only.start()
    refuse(only, "claim")
    advance_until(fleet, lambda: only.named("store_down"), HOUR)
    context = only.manual._context
    assert context is not None
    since_ms = context.caller.down_since_ms
    assert since_ms is not None
    fleet.advance(3 * HOUR)
    assert context.caller.down_since_ms == since_ms
    only.backend.faults.clear()
    fleet.advance(2 * HOUR)
    assert context.caller.down_since_ms is None


# -- other commands of a lease backend -------------------------------------------------------------


@pytest.mark.parametrize("method", ["pending", "prune"])
def test_what_a_lease_backend_refuses_all_the_time_is_one_outage_and_runs_go_on(
    method: str,
) -> None:
    """It is not asked for in every round; a round without it does not end the outage."""
    fleet, only = alone("lease", "*/5 * * * *")
    only.start()
    fleet.advance(MINUTE)
    refuse(only, method)
    if method == "pending":
        assert only.manual._context is not None
        only.manual._context.note_unsettled(0)
    fleet.advance(HOUR)
    assert outages(only) == ["store_down"]
    [down] = only.named("store_down")
    assert down.reason == f"StoreRejected: no permission to {method}"
    assert fleet.started() == [MIDDAY_MS + number * 5 * MINUTE for number in range(13)]
    assert fleet.missed() == []
    only.backend.faults.clear()
    fleet.advance(5 * MINUTE)
    assert outages(only) == ["store_down", "store_back"]
