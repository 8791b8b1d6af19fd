"""Real threads under clocks that wake early, jump, or have a longest wait."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from leasecron_sync import MemoryLease, Scheduler, SQLiteLease, at, every
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.options import MAX_WAIT_MS
from leasecron_sync.testing import FaultyLease
from tests.threads.leftovers import eventually, own_threads

TEN_YEARS = 3_652 * 86_400_000
SECONDLY = every(seconds=1)
CALLS = ("register", "claim", "settle", "pending", "states", "prune", "renew", "probe")


class WrongClock(SystemClock):
    """The host's clocks, with a wall clock that is set and waits that end early.

    Args:
        early_ms: How much too early a wait ends.
    """

    def __init__(self, early_ms: int = 0) -> None:
        self.offset_ms = 0
        self.waits: list[int] = []
        self._early_ms = early_ms

    def now_ms(self) -> int:
        return super().now_ms() + self.offset_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        self.waits.append(timeout_ms)
        return super().wait(event, max(1, timeout_ms - self._early_ms))


def scheduler_under(
    clock: WrongClock, monkeypatch: pytest.MonkeyPatch, path: Optional[Path] = None
) -> tuple[Scheduler[LeaseBackend], FaultyLease]:
    """Make a scheduler and a store that go by a clock."""
    monkeypatch.setattr("leasecron_sync.scheduler.SystemClock", lambda: clock)
    inner = MemoryLease() if path is None else SQLiteLease(path)
    inner._now_ms = clock.now_ms
    backend = FaultyLease(inner)
    return Scheduler(backend), backend


class Starts:
    """Notes when handlers are called, by a clock."""

    def __init__(self, clock: WrongClock) -> None:
        self._clock = clock
        self.seen: list[tuple[int, int]] = []

    def __call__(self, run: Any) -> None:  # noqa: ANN401 - a run of either family
        now_ms = self._clock.now_ms()
        self.seen.append((round(run.scheduled_time.timestamp() * 1000), now_ms))

    @property
    def scheduled(self) -> list[int]:
        return [scheduled_ms for scheduled_ms, _now_ms in self.seen]


def test_no_wait_is_longer_than_the_platform_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    longest_s = MAX_WAIT_MS / 1000 + 1
    monkeypatch.setattr(threading, "TIMEOUT_MAX", longest_s)

    def bounded(wait: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: object, timeout: Optional[float] = None) -> object:
            if timeout is not None and timeout > longest_s:
                message = "timeout value is too large"
                raise OverflowError(message)
            return wait(self, timeout)

        return checked

    for owner, name in (
        (threading.Event, "wait"),
        (threading.Condition, "wait"),
        (threading.Thread, "join"),
    ):
        monkeypatch.setattr(owner, name, bounded(getattr(owner, name)))
    clock = WrongClock()
    scheduler, _backend = scheduler_under(clock, monkeypatch)
    scheduler.add_job(lambda: None, "0 0 29 2 *", name="years away")
    ran, waited = threading.Event(), threading.Event()

    def handler(run: Any) -> None:  # noqa: ANN401 - a run of either family
        ran.set()
        try:
            run.wait(10**9)
        finally:
            waited.set()

    with caplog.at_level(logging.WARNING, "leasecron_sync"):
        scheduler.start()
        try:
            assert eventually(lambda: clock.waits)
            soon = datetime.fromtimestamp(clock.now_ms() / 1000, timezone.utc)
            scheduler.add_job(handler, at(soon + timedelta(seconds=1.5)), name="soon")
            assert eventually(ran.is_set)
            assert "leasecron-timer" in own_threads()
        finally:
            scheduler.stop(timeout=10**12)
    assert waited.is_set()
    assert caplog.records == []
    assert max(clock.waits) <= MAX_WAIT_MS


def test_a_timer_that_wakes_early_starts_each_run_once_and_none_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = WrongClock(early_ms=2)
    scheduler, _backend = scheduler_under(clock, monkeypatch)
    starts = Starts(clock)
    scheduler.add_job(starts, SECONDLY, name="job", overlap="allow")
    scheduler.start()
    try:
        assert eventually(lambda: len(starts.seen) >= 3)
    finally:
        scheduler.stop()
    scheduled = sorted(starts.scheduled)
    assert scheduled == list(range(scheduled[0], scheduled[-1] + 1, 1_000))
    assert all(now_ms >= scheduled_ms for scheduled_ms, now_ms in starts.seen)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_ten_years_ahead_and_back_cost_few_calls_and_end_no_thread(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = WrongClock()
    path = tmp_path / "jobs.db" if kind == "sqlite" else None
    scheduler, backend = scheduler_under(clock, monkeypatch, path)
    starts = Starts(clock)
    scheduler.add_job(starts, SECONDLY, name="job", catch_up_ms=3_000, overlap="allow")
    scheduler.add_job(lambda: None, "* * * * *", name="minutely", catch_up_ms=86_400_000)
    scheduler.start()
    try:
        assert eventually(lambda: len(starts.seen) >= 2)
        clock.offset_ms = TEN_YEARS
        true_ms = SystemClock().now_ms()
        false_ms = true_ms + TEN_YEARS // 2
        assert eventually(lambda: [ms for ms in starts.scheduled if ms > false_ms])
        calls = sum(backend.faults.calls(name) for name in CALLS)
        clock.offset_ms = 0
        back_ms = SystemClock().now_ms()
        assert eventually(
            lambda: len([ms for ms in starts.scheduled if back_ms < ms < false_ms]) > 1
        )
        assert calls < 600  # of which a hundred runs are made up for, with three calls each
        assert "leasecron-timer" in own_threads()
    finally:
        scheduler.stop()
    assert len(starts.scheduled) == len(set(starts.scheduled))
