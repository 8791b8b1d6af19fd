"""What ``status()`` says is true: also of threads that hang, and of a store that is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

import pytest

from leasecron_sync import MemoryLease, Scheduler, StoreUnavailable, every
from leasecron_sync import scheduler as scheduler_module
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import LeaseClaim, LeaseReply
from leasecron_sync.testing import FaultyLease
from tests.faults.processes import eventually

LIMIT_S = 20.0


def now() -> datetime:
    return datetime.fromtimestamp(SystemClock().now_ms() / 1000, timezone.utc)


@pytest.fixture
def store() -> FaultyLease:
    return FaultyLease(MemoryLease())


@pytest.fixture
def scheduler(store: FaultyLease) -> Iterator[Scheduler[FaultyLease]]:
    made = Scheduler(store)
    made.add_job(lambda: None, every(seconds=1), name="job")
    yield made
    made.stop(timeout=5)


def test_a_scheduler_that_is_well_has_no_problems(scheduler: Scheduler[FaultyLease]) -> None:
    began = now()
    scheduler.start()
    assert eventually(lambda: scheduler.status().last_claim, LIMIT_S)
    status = scheduler.status()
    assert list(status.problems) == []
    assert status.store_answered is not None
    assert status.last_claim is not None
    assert began.replace(microsecond=0) <= status.last_claim <= now()
    assert began.replace(microsecond=0) <= status.store_answered <= now()
    assert set(status.stuck_ms) == set(status.threads) == {"leasecron-timer", "leasecron-heartbeat"}


def test_a_scheduler_that_does_not_run_says_so(scheduler: Scheduler[FaultyLease]) -> None:
    assert list(scheduler.status().problems) == ["the scheduler is stopped"]
    scheduler.start()
    scheduler.stop()
    assert list(scheduler.status().problems) == ["the scheduler is stopped"]


def test_a_store_that_does_not_answer_shows_until_it_does(
    scheduler: Scheduler[FaultyLease], store: FaultyLease
) -> None:
    store.faults.down = True
    scheduler.start()
    assert eventually(lambda: scheduler.status().problems, LIMIT_S)
    (problem,) = scheduler.status().problems
    assert problem.startswith("the store does not answer, or refuses a command, since 20")
    assert scheduler.status().store_answered is None
    store.faults.down = False
    assert eventually(lambda: not scheduler.status().problems, LIMIT_S)


def test_a_thread_that_has_ended_shows(scheduler: Scheduler[FaultyLease]) -> None:
    scheduler.start()
    started = scheduler._lifecycle.started
    assert started is not None
    alive, started.timer_thread.thread = (
        started.timer_thread.thread,
        threading.Thread(name="leasecron-timer"),  # as one that has ended
    )
    assert list(scheduler.status().problems) == ["the thread leasecron-timer has ended"]
    started.timer_thread.thread = alive


def test_a_call_that_never_returns_shows(
    scheduler: Scheduler[FaultyLease], store: FaultyLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "STUCK_MS", 300)
    hanging, go_on = threading.Event(), threading.Event()

    def claim(_claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        hanging.set()
        assert go_on.wait(LIMIT_S)
        message = "gone"
        raise StoreUnavailable(message)

    monkeypatch.setattr(store, "claim", claim)
    scheduler.start()
    try:
        assert hanging.wait(LIMIT_S)
        assert eventually(lambda: scheduler.status().problems, LIMIT_S)
        (problem,) = scheduler.status().problems
        assert problem.startswith("the thread leasecron-timer has been in one step for ")
    finally:
        go_on.set()


def test_a_long_wait_is_no_problem(store: FaultyLease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "STUCK_MS", 1)
    scheduler = Scheduler(store)
    scheduler.add_job(lambda: None, "0 0 1 1 *", name="yearly")
    with scheduler:
        assert eventually(lambda: not scheduler.status().problems, LIMIT_S)
        waiting = threading.Event()
        assert not waiting.wait(0.3)
        assert list(scheduler.status().problems) == []
