"""Whatever a handler, a listener or a backend raises, the scheduler goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from leasecron_sync import Event, LeaseRun, MemoryLease, Run, Scheduler, at, every
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.testing.faults import FaultyClaim, FaultyLease
from leasecron_sync.testing.memory import MemoryClaim
from tests.threads.leftovers import eventually, own_threads

SECONDLY = every(seconds=1)


class OwnBaseError(BaseException):
    """Derived from BaseException by an application."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        message = "no text"
        raise RuntimeError(message)


def raises(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


def recurses() -> None:
    recurses()


HANDLERS = {
    "SystemExit": raises(SystemExit(3)),
    "KeyboardInterrupt": raises(KeyboardInterrupt()),
    "GeneratorExit": raises(GeneratorExit()),
    "OwnBaseError": raises(OwnBaseError("own")),
    "RecursionError": recurses,
    "UnprintableError": raises(UnprintableError()),
}


def test_what_a_handler_raises_ends_its_run_alone() -> None:
    scheduler = Scheduler(MemoryLease())
    failed: list[Event] = []
    others: list[float] = []
    scheduler.on("run_failed", failed.append)
    for kind, handler in HANDLERS.items():
        # A machine that stands still for a second may not skip any.
        scheduler.add_job(handler, SECONDLY, name=kind, max_attempts=1, overlap="allow")
    scheduler.add_job(
        lambda run: others.append(run.scheduled_time.timestamp()),
        SECONDLY,
        name="good",
        overlap="allow",
    )
    scheduler.start()
    try:
        assert eventually(
            lambda: all(sum(event.job == kind for event in failed) >= 3 for kind in HANDLERS)
        )
        assert all(scheduler.status().threads.values())
        assert scheduler.status().store_down_since is None
        for kind in HANDLERS:
            records = [record for record in scheduler.history(kind) if record.state.settled]
            assert {record.state.value for record in records} == {"failed"}
            assert all(kind in record.reason for record in records)
            # Each scheduled time, without a gap.
            times = sorted(
                event.scheduled_time.timestamp()
                for event in failed
                if event.job == kind and event.scheduled_time is not None
            )
            assert times == [times[0] + n for n in range(len(times))]
        assert eventually(lambda: len(others) >= 3)
        # What is left is waiting for the next second, or at work on it.
        assert eventually(lambda: not [n for n in own_threads() if n.startswith("leasecron-run")])
    finally:
        scheduler.stop()


def test_attempts_that_end_in_system_exit_are_counted() -> None:
    scheduler = Scheduler(MemoryLease())
    failed: list[Event] = []
    retried: list[Event] = []
    scheduler.on("run_failed", failed.append)
    scheduler.on("run_retried", retried.append)
    scheduler.add_job(
        raises(SystemExit(3)), every(seconds=2), name="bad", max_attempts=2, retry_delay_ms=50
    )
    scheduler.start()
    assert eventually(lambda: failed)
    scheduler.stop()
    assert failed[0].attempt == 2
    assert retried[0].attempt == 1


@pytest.mark.parametrize("where", ["call", "enter", "exit"])
def test_what_around_run_raises_ends_its_run_alone(where: str) -> None:
    @contextmanager
    def around(run: Run) -> Iterator[None]:
        if run.job == "bad" and where == "enter":
            message = "enter"
            raise OwnBaseError(message)
        yield
        if run.job == "bad" and where == "exit":
            message = "exit"
            raise OwnBaseError(message)

    def called(run: Run) -> AbstractContextManager[None]:
        if run.job == "bad" and where == "call":
            message = "call"
            raise OwnBaseError(message)
        return around(run)

    scheduler = Scheduler(MemoryLease(), around_run=called)
    failed: list[Event] = []
    good: list[int] = []
    scheduler.on("run_failed", failed.append)
    scheduler.add_job(lambda: None, SECONDLY, name="bad", max_attempts=1)
    scheduler.add_job(lambda: good.append(1), SECONDLY, name="good")
    scheduler.start()
    assert eventually(lambda: len(failed) >= 2)
    assert eventually(lambda: len(good) >= 2)
    assert all(scheduler.status().threads.values())
    scheduler.stop()


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1), OwnBaseError("bad")])
def test_a_listener_that_raises_is_called_again_and_harms_nobody(error: BaseException) -> None:
    scheduler = Scheduler(MemoryLease())
    called: list[str] = []
    heard: list[Event] = []

    def bad(event: Event) -> None:
        called.append(event.name)
        raise error

    scheduler.on("run_finished", bad)
    scheduler.on("run_finished", heard.append)
    scheduler.add_job(lambda: None, SECONDLY, name="job")
    scheduler.start()
    assert eventually(lambda: len(called) >= 2 and len(heard) >= 2)
    assert "leasecron-events" in own_threads()
    scheduler.stop()


LEASE_CALLS = ["register", "claim", "renew", "settle", "pending", "states", "prune", "tend"]


@pytest.mark.parametrize("method", LEASE_CALLS)
def test_an_error_that_no_contract_foresees_ends_no_thread(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leasecron_sync.engine import upkeep

    monkeypatch.setattr(upkeep, "UPKEEP_MS", 300)  # so that prune is called soon
    backend = FaultyLease(MemoryLease())
    scheduler = Scheduler(backend, lease_ms=900)
    finished: list[Event] = []
    scheduler.on("run_finished", finished.append)

    def handler(run: LeaseRun) -> None:
        run.wait(0.5)

    scheduler.add_job(handler, SECONDLY, name="job")
    if method == "states":  # asked only where something may be owed
        scheduler.start()
        assert eventually(lambda: finished)
        scheduler.stop()
    for nth in (1, 2, 5):
        backend.faults.raise_at(method, ValueError(f"{method} fails"), nth)
    scheduler.start()
    try:
        assert eventually(lambda: backend.faults.calls(method) >= 1)
        seen = len(finished)
        assert eventually(lambda: len(finished) >= seen + 3, 15)
        assert all(scheduler.status().threads.values())
        times = [event.scheduled_time for event in finished]
        assert len(set(times)) == len(times)
    finally:
        scheduler.stop()
    assert eventually(
        lambda: {record.state.value for record in _records(backend)} <= {"finished", "skipped"}
    )


def _records(backend: FaultyLease) -> list[Any]:
    inner = backend._backend
    store = inner._store  # type: ignore[attr-defined]
    return [record for tables in store.namespaces.values() for record in tables.all_runs()]


@pytest.mark.parametrize("method", ["claim", "tend"])
def test_an_error_that_no_contract_foresees_ends_no_thread_of_a_claim_backend(method: str) -> None:
    backend = FaultyClaim(MemoryClaim())
    scheduler = Scheduler(backend)
    finished: list[Event] = []
    scheduler.on("run_finished", finished.append)
    scheduler.add_job(lambda: None, SECONDLY, name="job")
    for nth in (1, 3):
        backend.faults.raise_at(method, ValueError(f"{method} fails"), nth)
    scheduler.start()
    assert eventually(lambda: len(finished) >= 4)
    assert all(scheduler.status().threads.values())
    scheduler.stop()
    times = [event.scheduled_time for event in finished]
    assert len(set(times)) == len(times)


def test_a_backend_that_cannot_be_closed_does_not_disturb_the_stop() -> None:
    backend = FaultyLease(MemoryLease())
    backend.faults.raise_at("close", ValueError("close fails"))
    scheduler = Scheduler(backend)
    scheduler.start()
    scheduler.stop()
    assert scheduler.status().state == "stopped"
    assert own_threads() == []


def test_stop_is_complete_although_it_was_interrupted() -> None:
    """Control-C while the main thread waits in stop(): nothing goes on behind its back."""
    backend = FaultyLease(MemoryLease())
    scheduler = Scheduler(backend, lease_ms=600)
    entered, let_go = threading.Event(), threading.Event()

    def handler() -> None:
        entered.set()
        let_go.wait(15)

    scheduler.add_job(handler, SECONDLY, name="job")
    scheduler.start()
    assert entered.wait(5)
    runtime = scheduler._lifecycle.runtime

    def interrupted(_instance_id: str, _timeout_s: float) -> list[LiveRun]:
        raise KeyboardInterrupt

    runtime.wait_until_empty = interrupted  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            scheduler.stop()
        assert scheduler.status().state == "stopped"
        assert eventually(
            lambda: [n for n in own_threads() if not n.startswith("leasecron-run")] == [], 3
        ), own_threads()
        renewals = backend.faults.calls("renew")
        time.sleep(1)
        assert backend.faults.calls("renew") <= renewals + 1
    finally:
        let_go.set()
    assert eventually(lambda: own_threads() == [])


def test_a_failure_told_while_the_store_is_being_looked_at_is_not_forgotten() -> None:
    """The answer of ``pending`` may be older than what a worker noted while it was on its way."""
    backend = FaultyLease(MemoryLease())
    scheduler = Scheduler(backend)
    entered, fail = threading.Event(), threading.Event()
    tried: list[int] = []

    def late(run: LeaseRun) -> None:
        tried.append(run.attempt)
        entered.set()
        if run.attempt == 1:
            fail.wait(20)
            message = "the first attempt fails"
            raise ValueError(message)

    hooked = threading.Event()

    def reply_on_its_way() -> None:
        if entered.is_set() and not hooked.is_set():
            hooked.set()
            settled = backend.faults.calls("settle")
            fail.set()
            eventually(lambda: backend.faults.calls("settle") > settled, 5)
            eventually(lambda: not scheduler.status().runs, 5)

    backend.faults.slow("pending", after=reply_on_its_way)
    soon = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=2)
    scheduler.add_job(late, at(soon), name="late", retry_delay_ms=100)
    scheduler.start()
    started = scheduler._lifecycle.started
    assert started is not None
    try:
        assert entered.wait(5)
        started.context.note_unsettled(1)  # somebody else's run made it look
        assert hooked.wait(5)
        assert eventually(lambda: 2 in tried, 8), "the retry was forgotten"
    finally:
        fail.set()
        scheduler.stop()
