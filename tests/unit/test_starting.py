"""A granted run gets its worker, or goes back."""

from __future__ import annotations

import logging

import pytest

from leasecron_sync.engine.context import Context
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.engine.starting import NO_THREAD, STOPPING
from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.events import Event
from leasecron_sync.model import RunKey, RunState
from leasecron_sync.run import LeaseRun
from tests.fleet import MIDDAY_MS, MINUTE, SECOND, Fleet, Instance


def ready(family: str = "lease", **options: int) -> tuple[Fleet, Instance]:
    """Return an instance a second before its run."""
    fleet = Fleet(family)
    only = fleet.add("a", skew_ms=0, around_run=None, **options)
    only.job("job", "0 12 * * *")
    only.start()
    fleet.advance(29 * SECOND)
    return fleet, only


def test_trust_counts_from_before_the_claim_was_sent() -> None:
    fleet, only = ready()
    fleet.held = {"job"}
    only.backend.faults.slow("claim", before=lambda: fleet.let_pass(2_000))
    sent_ms = fleet.store_clock.steady_ms() + SECOND
    fleet.advance(SECOND)
    (run,) = only.manual.runs
    assert run._live.control.trusted_until_ms == sent_ms + 15_000 - 1_500


def test_a_repeated_grant_is_trusted_for_what_is_left() -> None:
    fleet, only = ready()
    fleet.held = {"job"}
    only.backend.faults.lose_reply("claim", 6)
    fleet.advance(11 * SECOND)
    (run,) = only.manual.runs
    control, store = run._live.control, fleet.records()[RunKey("job", MIDDAY_MS)]
    assert isinstance(run.run, LeaseRun)
    assert run.run.attempt == 1
    left_ms = store.until_ms - fleet.store_clock.now_ms()
    assert control.trusted_until_ms - fleet.store_clock.steady_ms() <= left_ms - 1_500


def test_no_grant_is_trusted_for_more_than_a_lease() -> None:
    fleet, only = ready()
    fleet.held = {"job"}
    only.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    fleet.store_clock.step(-5 * SECOND)  # the store shows 20 s now
    fleet.advance(SECOND)
    (run,) = only.manual.runs
    left_ms = run._live.control.trusted_until_ms - fleet.store_clock.steady_ms()
    assert left_ms <= 15_000 - 1_500


def test_what_goes_back_is_told_until_the_store_answers() -> None:
    fleet, only = ready()
    only.manual.can_start_threads = False
    only.backend.faults.lose_request("settle", 3)
    fleet.advance(3 * SECOND)
    (event,) = only.named("run_handed_over")
    assert event.reason == NO_THREAD
    assert fleet.states("job") == {MIDDAY_MS: RunState.WAITING}
    assert not only.named("run_started")
    assert only.manual._runtime.taken() == 0
    assert only.manual._timer is not None
    assert not only.manual._timer._starter.handing_back


def test_what_the_store_does_not_take_back_is_forgotten_when_its_lease_has_lapsed() -> None:
    fleet, only = ready()
    only.manual.can_start_threads = False

    def down(*_arguments: object) -> None:
        message = "down"
        raise StoreUnavailable(message)

    only.backend.settle = down  # type: ignore[union-attr, method-assign]
    fleet.advance(16 * SECOND)
    del only.backend.settle  # type: ignore[union-attr]
    only.manual.can_start_threads = True
    steps = only.steps
    fleet.advance(40 * SECOND)
    assert [start.attempt for start in fleet.starts] == [2]
    assert only.steps - steps < 200


def test_what_may_have_gone_back_is_left_to_others_for_a_lease() -> None:
    fleet, only = ready()
    only.manual.can_start_threads = False
    only.backend.faults.lose_reply("settle", 1_000)  # the first one was applied
    fleet.advance(15 * SECOND)
    assert fleet.states("job") == {MIDDAY_MS: RunState.WAITING}
    only.backend.faults.clear()
    only.manual.can_start_threads = True
    fleet.advance(10 * SECOND)
    assert fleet.starts == []
    fleet.advance(10 * SECOND)
    assert [start.attempt for start in fleet.starts] == [2]


def test_a_thread_for_which_there_is_no_memory_does_not_block_its_job_for_ever() -> None:
    fleet, only = ready()
    only.job("another", "0 12 * * *")
    context = only.manual._context
    assert context is not None
    spawn, failed = context.spawn, list[str]()

    def spawn_later(context: Context, live: LiveRun) -> None:
        if not failed:
            failed.append(live.key.job)
            raise MemoryError
        spawn(context, live)

    context.spawn = spawn_later
    with pytest.raises(MemoryError):
        fleet.advance(SECOND)
    assert only.manual._runtime.taken() == 0, "its slot is free again"
    assert only.manual._runtime.by_job() == {}
    only.manual._wake_timer()
    fleet.advance(MINUTE)
    assert sorted(start.job for start in fleet.starts) == ["another", "job"]
    assert fleet.states("job") == fleet.states("another") == {MIDDAY_MS: RunState.FINISHED}


def test_that_no_thread_can_be_started_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, only = ready()
    only.job("often", "* * * * *")
    only.manual.can_start_threads = False
    with caplog.at_level(logging.ERROR, "leasecron_sync.engine.starting"):
        fleet.advance(3 * MINUTE)
    assert len([line for line in caplog.messages if "no thread can be started" in line]) == 1


def test_a_claim_that_cannot_be_started_is_reported_as_failed() -> None:
    fleet, only = ready("claim")
    only.manual.can_start_threads = False
    fleet.advance(3 * SECOND)
    assert [event.reason for event in only.named("run_failed")] == [NO_THREAD]


def test_a_stop_that_begins_while_the_run_is_announced_hands_it_back() -> None:
    fleet, only = ready()
    context = only.manual._context
    assert context is not None
    only.scheduler.on("run_claimed", lambda _event: context.stopping.set())
    fleet.advance(SECOND)
    assert [event.reason for event in only.named("run_handed_over")] == [STOPPING]
    assert fleet.starts == []
    assert fleet.states("job") == {MIDDAY_MS: RunState.WAITING}


def test_a_claim_that_is_won_as_a_stop_begins_is_executed_while_the_stop_waits() -> None:
    """Nobody else can have it."""
    fleet, only = ready("claim")
    context = only.manual._context
    assert context is not None
    only.scheduler.on("run_claimed", lambda _event: context.stopping.set())
    fleet.advance(SECOND)
    assert only.named("run_failed") == []
    assert len(fleet.starts) == 1


def test_a_claim_that_is_won_when_the_stop_waits_no_more_is_told_as_failed() -> None:
    fleet, only = ready("claim")
    context = only.manual._context
    assert context is not None

    def stop(_event: Event) -> None:
        context.stopping.set()
        context.given_up.set()

    only.scheduler.on("run_claimed", stop)
    fleet.advance(SECOND)
    assert [event.reason for event in only.named("run_failed")] == [STOPPING]
    assert fleet.starts == []


def test_a_lease_that_is_over_before_the_handler_begins_goes_back() -> None:
    fleet, only = ready()
    fleet.held = {"job"}
    fleet.advance(SECOND)
    (run,) = only.manual.runs
    fleet.let_pass(14 * SECOND)
    ending = run.call_handler()
    run.settle()
    only.manual.runs.clear()
    assert ending.reason == "not started in time"
    assert fleet.starts == []
    assert not only.named("run_started")
    assert fleet.states("job") == {MIDDAY_MS: RunState.WAITING}


def test_a_lease_that_is_over_once_the_start_is_logged_goes_back() -> None:
    """A log handler may block, and nothing comes between the last look and the handler."""
    fleet, only = ready()
    logger = logging.getLogger("leasecron_sync.events")

    class Blocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("run started"):
                fleet.let_pass(14 * SECOND)

    blocking, level = Blocking(), logger.level
    logger.addHandler(blocking)
    logger.setLevel(logging.DEBUG)
    try:
        fleet.advance(SECOND)
    finally:
        logger.removeHandler(blocking)
        logger.setLevel(level)
    assert fleet.starts == []
    assert len(only.named("run_started")) == 1
    assert [event.reason for event in only.named("run_handed_over")] == ["not started in time"]
    assert fleet.states("job") == {MIDDAY_MS: RunState.WAITING}


def test_the_time_limit_counts_from_the_handler_and_not_from_the_log_line() -> None:
    fleet = Fleet()
    only = fleet.add("a", skew_ms=0, around_run=None)
    only.job("job", "0 12 * * *", time_limit_ms=2_000)
    only.start()
    only.scheduler.on("run_started", lambda _event: fleet.let_pass(3 * SECOND))
    fleet.advance(30 * SECOND)
    assert only.named("run_retried") == []
    assert fleet.states("job") == {MIDDAY_MS: RunState.FINISHED}
