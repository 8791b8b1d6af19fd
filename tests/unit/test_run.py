"""What a handler is given, and when it is told to end."""

from __future__ import annotations

import threading
from datetime import datetime, timezone
from typing import Optional

import pytest

from leasecron_sync.errors import RunLost, RunStopping, RunTimeLimit
from leasecron_sync.model import LeaseRef, RunKey
from leasecron_sync.run import LeaseRun, Run, RunControl
from leasecron_sync.testing import ManualClock

KEY = RunKey("job", 1_700_049_600_123)


class Held:
    """A run that is held, and how often its loss was told."""

    def __init__(self, trust_ms: Optional[int] = 10_000, limit_ms: Optional[int] = None) -> None:
        self.clock = ManualClock()
        self.losses = 0
        until_ms = None if trust_ms is None else self.clock.steady_ms() + trust_ms
        self.control = RunControl(
            self.clock, trusted_until_ms=until_ms, time_limit_ms=limit_ms, on_lost=self._lose
        )
        self.run = LeaseRun(KEY, self.control, LeaseRef(KEY, 77), 2)

    def _lose(self) -> None:
        self.losses += 1


def test_a_run_tells_its_job_its_time_and_its_lease() -> None:
    run = Held().run
    assert (run.job, run.attempt, run.token) == ("job", 2, 77)
    assert run.scheduled_time == datetime(2023, 11, 15, 12, 0, 0, 123_000, timezone.utc)
    assert repr(run) == "<LeaseRun 'job' 2023-11-15T12:00:00.123000+00:00>"
    assert not run.stopping
    assert not run.lost
    run.check()


def test_trust_ends_at_its_end() -> None:
    held = Held(1_000)
    held.clock.advance(999)
    held.run.check()
    held.clock.advance(1)
    assert not held.control.trusted
    with pytest.raises(RunLost):
        held.run.check()


def test_a_renewal_restores_trust_that_nobody_saw_end() -> None:
    held = Held(1_000)
    held.clock.advance(5_000)
    assert not held.control.trusted
    assert not held.control.known_lost
    held.control.trust_until(held.clock.steady_ms() + 1_000)
    held.run.check()
    assert held.losses == 0


@pytest.mark.parametrize("how", ["lost", "check", "wait", "refuse"])
def test_a_loss_that_was_seen_is_final_and_told_once(how: str) -> None:
    held = Held(1_000)
    if how == "refuse":
        held.control.refuse()
    else:
        held.clock.advance(5_000)
    if how == "lost":
        assert held.run.lost
    elif how == "check":
        with pytest.raises(RunLost):
            held.run.check()
    elif how == "wait":
        with pytest.raises(RunLost):
            held.run.wait(1)
    held.control.trust_until(held.clock.steady_ms() + 9_000)
    assert held.run.lost
    assert not held.control.trusted
    held.control.refuse()
    with pytest.raises(RunLost):
        held.run.check()
    assert held.losses == 1


def test_threads_that_find_a_loss_together_tell_it_once() -> None:
    held = Held(0)
    barrier = threading.Barrier(8)

    def look() -> None:
        barrier.wait()
        assert held.run.lost

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.losses == 1


def test_what_comes_first_is_lost_then_limit_then_stopping() -> None:
    held = Held(1_000, 500)
    held.control.started()
    held.control.stop()
    with pytest.raises(RunStopping):
        held.run.check()
    held.clock.advance(500)
    with pytest.raises(RunTimeLimit):
        held.run.check()
    held.clock.advance(500)
    with pytest.raises(RunLost):
        held.run.check()


def test_the_time_limit_counts_from_the_start_of_the_handler() -> None:
    held = Held(limit_ms=1_000)
    held.clock.advance(5_000)
    assert not held.control.timed_out
    held.control.started()
    held.clock.advance(999)
    assert not held.control.timed_out
    held.clock.advance(1)
    assert held.control.timed_out


def test_a_wait_takes_as_long_as_it_says() -> None:
    held = Held(60_000)
    before_ms = held.clock.steady_ms()
    held.run.wait(12.5)
    assert held.clock.steady_ms() - before_ms == 12_500
    held.run.wait(0)
    held.run.wait(-1)
    assert held.clock.steady_ms() - before_ms == 12_500


@pytest.mark.parametrize(
    ("trust_ms", "limit_ms", "error"), [(3_000, None, RunLost), (60_000, 3_000, RunTimeLimit)]
)
def test_a_wait_ends_when_the_run_should(
    trust_ms: int, limit_ms: Optional[int], error: type[Exception]
) -> None:
    held = Held(trust_ms, limit_ms)
    held.control.started()
    before_ms = held.clock.steady_ms()
    with pytest.raises(error):
        held.run.wait(100)
    assert held.clock.steady_ms() - before_ms == 3_000


def test_a_wait_ends_when_the_scheduler_stops() -> None:
    held = Held(60_000)
    held.control.stop()
    before_ms = held.clock.steady_ms()
    with pytest.raises(RunStopping):
        held.run.wait(100)
    assert held.clock.steady_ms() == before_ms


def test_a_run_without_a_lease_is_never_lost() -> None:
    held = Held(None)
    run = Run(KEY, held.control)
    held.clock.advance(10**9)
    run.check()
    run.wait(7)
    assert held.losses == 0
    assert not hasattr(run, "lost")
