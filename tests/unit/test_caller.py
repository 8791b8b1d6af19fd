"""Calls of the store: outages, the delay until the next try, the skew."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Optional

import pytest

from leasecron_sync.engine.caller import LAST_DELAY_MS, Backoff, Caller
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreRejected, StoreUnavailable
from leasecron_sync.model import StoreInfo
from leasecron_sync.testing import ManualClock
from tests.fleet import MINUTE, SECOND, Fleet, minutes


class Ear:
    """A caller and what it told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.told: list[str] = []
        self.skews: list[int] = []
        self.outages_ms: list[int] = []
        self.caller = Caller(
            self.clock,
            rounds=frozenset({"timer"}),
            on_down=lambda _error: self.told.append("down"),
            on_back=self.back,
            on_skew=self.skews.append,
        )

    def back(self, outage_ms: int) -> None:
        self.told.append("back")
        self.outages_ms.append(outage_ms)

    def fail(self, lane: str, error: BaseException) -> None:
        def work() -> None:
            raise error

        with pytest.raises((StoreError, KeyboardInterrupt)):
            self.caller.call(lane, work)

    def answer(self, lane: str) -> None:
        self.caller.call(lane, lambda: None)


DOWN = StoreUnavailable("down")


def test_an_outage_is_told_once_at_each_end_however_many_lanes_meet_it() -> None:
    ear = Ear()
    for _ in range(3):
        ear.fail("heartbeat", DOWN)
        ear.fail("settle", DOWN)
    assert ear.caller.down_since_ms == ear.clock.now_ms()
    ear.clock.advance(7_000)
    ear.clock.step(-MINUTE)
    ear.answer("heartbeat")
    assert ear.told == ["down"]
    ear.answer("settle")
    assert ear.told == ["down", "back"]
    assert ear.outages_ms == [7_000]  # by the steady clock
    assert ear.caller.down_since_ms is None
    assert ear.caller.back_at_ms == ear.clock.steady_ms()


def test_a_lane_of_rounds_has_its_answer_when_the_round_has_ended() -> None:
    ear = Ear()
    ear.fail("timer", DOWN)
    ear.answer("timer")
    ear.answer("heartbeat")
    assert ear.caller.is_failing("timer")
    ear.caller.round_ended("timer")
    assert not ear.caller.is_failing("timer")
    assert ear.told == ["down", "back"]


def test_a_refusal_is_no_outage_but_in_a_round() -> None:
    ear = Ear()
    ear.fail("settle", StoreRejected("no"))
    assert ear.told == []
    ear.fail("timer", StoreRejected("no"))
    assert ear.told == ["down"]


def ask(ear: Ear, command: str, error: Optional[BaseException] = None) -> None:
    with contextlib.suppress(StoreError), ear.caller.asking(command):
        if error is None:
            ear.answer("timer")
        else:
            ear.fail("timer", error)
            raise error


def test_a_round_that_went_well_without_what_was_refused_ends_no_outage() -> None:
    ear = Ear()
    ask(ear, "claim", StoreRejected("no"))
    for _ in range(3):
        ear.answer("timer")  # a probe
        ear.caller.round_ended("timer")
        ear.answer("heartbeat")
    assert ear.told == ["down"]
    assert not ear.caller.is_failing("timer")
    ask(ear, "pending")  # another one
    assert ear.told == ["down"]
    ear.clock.advance(5_000)
    ask(ear, "claim")
    assert ear.told == ["down", "back"]
    assert ear.outages_ms == [5_000]
    ask(ear, "claim")
    assert ear.told == ["down", "back"]


def test_what_was_refused_and_is_answered_leaves_the_rest_of_its_round_to_be_answered() -> None:
    ear = Ear()
    ask(ear, "claim", StoreRejected("no"))
    ask(ear, "claim")
    assert ear.told == ["down"]
    ear.caller.round_ended("timer")
    assert ear.told == ["down", "back"]


@pytest.mark.parametrize("error", [DOWN, OutcomeUnknown("nobody knows")])
def test_a_command_without_an_answer_is_not_waited_for(error: StoreError) -> None:
    ear = Ear()
    ask(ear, "claim", error)
    ear.caller.round_ended("timer")
    assert ear.told == ["down", "back"]


def test_each_command_that_was_refused_is_waited_for() -> None:
    ear = Ear()
    for command in ("claim", "pending"):
        ask(ear, command, StoreRejected("no"))
    ear.fail("heartbeat", DOWN)
    ear.caller.round_ended("timer")
    ask(ear, "claim", DOWN)  # it was refused before, and was not answered since
    ear.caller.round_ended("timer")
    ask(ear, "pending")
    ear.caller.forget("heartbeat")
    assert not ear.caller.is_failing("timer"), "the next claim finds out"
    assert ear.told == ["down"]
    ask(ear, "claim")
    assert ear.told == ["down", "back"]


def test_a_foreign_error_is_an_unknown_outcome() -> None:
    ear = Ear()
    empty: dict[str, int] = {}
    with pytest.raises(OutcomeUnknown, match="KeyError: 'x'"):
        ear.caller.call("timer", lambda: empty["x"])
    ear.fail("timer", KeyboardInterrupt())


@pytest.mark.parametrize("replies", [[], [1], [1, 2, 3]])
def test_replies_of_a_wrong_number_are_no_answer(replies: Sequence[int]) -> None:
    ear = Ear()
    with pytest.raises(OutcomeUnknown):
        ear.caller.call_all("heartbeat", lambda: replies, 2)
    assert ear.told == ["down"]
    assert ear.caller.call_all("heartbeat", lambda: [1, 2], 2) == [1, 2]
    assert ear.told == ["down", "back"]


def test_the_last_lane_that_fails_is_not_forgotten_with_the_outage_going_on() -> None:
    # A heartbeat failed, then its only run was settled: nobody was left to find the store back.
    ear = Ear()
    ear.fail("heartbeat", DOWN)
    ear.answer("settle")
    ear.caller.forget("heartbeat")
    if ear.caller.down_since_ms is not None:
        assert ear.caller.is_failing("timer")
        ear.caller.round_ended("timer")
    assert ear.caller.down_since_ms is None
    assert ear.told == ["down", "back"]


def test_an_outage_that_a_heartbeat_met_alone_ends_although_its_run_has_ended() -> None:
    fleet = Fleet()
    only = fleet.add("a")
    only.job("job", "0 12 * * *")
    fleet.held = {"job"}
    only.start()
    fleet.advance(32 * SECOND)
    only.backend.faults.lose_reply("renew")
    while not only.named("store_down"):
        fleet.advance(100)
    fleet.held = set()
    fleet.advance(5 * MINUTE)
    assert len(only.named("store_back")) == 1
    context = only.manual._context
    assert context is not None
    assert context.caller.down_since_ms is None


@pytest.mark.parametrize("family", ["lease", "claim"])
def test_a_store_that_refuses_nothing_but_a_probe_is_used_all_the_same(family: str) -> None:
    fleet = Fleet(family)
    only = fleet.add("a")
    only.job("job", "* * * * *")

    def refuse() -> StoreInfo:
        message = "no permission"
        raise StoreRejected(message)

    only.backend.probe = refuse  # type: ignore[method-assign]
    only.start()
    fleet.advance(10 * MINUTE)
    assert set(fleet.started()) >= set(minutes(1, 8))


def test_skew_beyond_the_bound_is_told_once_and_put_right() -> None:
    ear = Ear()
    caller, clock = ear.caller, ear.clock
    caller.compare_clocks(clock.now_ms() + 500, clock.steady_ms())
    assert (ear.skews, caller.now_ms()) == ([], clock.now_ms())
    for _ in range(2):
        caller.compare_clocks(clock.now_ms() - 3_000, clock.steady_ms())
    assert ear.skews == [-3_000]
    assert caller.now_ms() == clock.now_ms() - 3_000
    caller.note_early(1_000)
    assert caller.now_ms() == clock.now_ms() - 4_000
    caller.note_early(500)
    assert caller.skew_ms == -4_000
    caller.compare_clocks(clock.now_ms(), clock.steady_ms())
    assert caller.now_ms() == clock.now_ms()


def test_what_may_come_from_the_way_of_a_call_is_no_skew() -> None:
    ear = Ear()
    sent_ms, steady_ms = ear.clock.now_ms(), ear.clock.steady_ms()
    ear.clock.advance(4_000)
    ear.caller.compare_clocks(sent_ms, steady_ms)
    assert ear.skews == []
    assert ear.caller.now_ms() == ear.clock.now_ms()


@pytest.mark.parametrize("step_ms", [-20_000, 20_000])
def test_a_clock_that_is_set_while_its_reading_is_under_way_is_compared_as_it_is_now(
    step_ms: int,
) -> None:
    ear = Ear()
    clock, steady_ms = ear.clock, ear.clock.steady_ms()
    clock.advance(300)
    store_ms = clock.now_ms()
    clock.step(step_ms)
    clock.advance(300)
    ear.caller.compare_clocks(store_ms, steady_ms)
    assert ear.skews == [-step_ms]
    assert ear.caller.now_ms() == store_ms + 300


def test_delays_double_up_to_their_limit_and_begin_anew() -> None:
    backoff = Backoff()
    delays = [backoff.next_ms() for _ in range(12)]
    assert backoff.failures == 12
    assert all(100 * 2**n <= delay <= 100 * 2**n + 100 for n, delay in enumerate(delays[:5]))
    assert all(LAST_DELAY_MS <= delay <= LAST_DELAY_MS + 100 for delay in delays[-3:])
    backoff.reset()
    assert backoff.next_ms() <= 200
    small = Backoff(50)
    assert all(small.next_ms() <= 100 for _ in range(30))
