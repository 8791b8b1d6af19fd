"""Start and stop from everywhere, in every order."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from leasecron_sync import (
    HandOver,
    LeaseRun,
    MemoryLease,
    Run,
    RunStopping,
    Scheduler,
    SchedulerStateError,
    SQLiteLease,
    every,
)
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.testing.faults import FaultyClaim, FaultyLease
from leasecron_sync.testing.memory import MemoryClaim
from tests.threads.leftovers import eventually, open_files, own_threads

SECONDLY = every(seconds=1)


class Stubborn:
    """A handler that ignores the stop, until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.told: Optional[bool] = None

    def __call__(self, run: LeaseRun) -> None:
        self.entered.set()
        self.let_go.wait(20)
        self.told = run.stopping


def test_a_second_start_is_an_error_and_harms_nothing() -> None:
    ran = threading.Event()
    scheduler = Scheduler(MemoryLease())
    scheduler.add_job(ran.set, SECONDLY, name="job")
    scheduler.start()
    try:
        told = r"running already: call stop\(\) first, and start it in one place only$"
        with pytest.raises(SchedulerStateError, match=told):
            scheduler.start()
        assert own_threads().count("leasecron-timer") == 1
        assert ran.wait(5)
    finally:
        scheduler.stop()


def test_stop_before_start_and_stop_twice_do_nothing() -> None:
    scheduler = Scheduler(MemoryLease())
    scheduler.stop()
    scheduler.start()
    scheduler.stop()
    scheduler.stop()
    assert scheduler.status().state == "stopped"


def test_start_after_stop_is_a_new_instance_that_works() -> None:
    runs: list[int] = []
    scheduler = Scheduler(MemoryLease())
    scheduler.add_job(lambda: runs.append(1), SECONDLY, name="job")
    seen = set()
    for number in range(1, 4):
        scheduler.start()
        seen.add(scheduler.status().instance_id)
        assert own_threads().count("leasecron-timer") == 1
        assert eventually(lambda number=number: len(runs) >= number)  # type: ignore[misc]
        scheduler.stop()
    assert len(seen) == 3


def test_no_thread_of_the_library_is_left_the_moment_stop_returns() -> None:
    """The worker's thread too, not only its handler."""
    left: list[list[str]] = []
    for _ in range(5):
        entered = threading.Event()
        scheduler = Scheduler(MemoryLease())

        def handler(run: LeaseRun, entered: threading.Event = entered) -> None:
            entered.set()
            run.wait(20)

        for number in range(4):
            scheduler.add_job(handler, SECONDLY, name=f"job {number}")
        scheduler.on("run_finished", lambda _event: None)
        scheduler.start()
        assert entered.wait(5)
        scheduler.stop()
        left.append(own_threads())
    assert left == [[]] * len(left)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_ten_threads_start_and_stop_one_scheduler_fifty_times(kind: str, tmp_path: Path) -> None:
    backend: LeaseBackend = MemoryLease() if kind == "memory" else SQLiteLease(tmp_path / "a.db")
    scheduler = Scheduler(backend)
    scheduler.add_job(lambda: None, SECONDLY, name="job")
    scheduler.on("run_finished", lambda _event: None)
    odd: list[BaseException] = []
    started = [0]

    def work() -> None:
        for _ in range(50):
            try:
                scheduler.start()
                started[0] += 1
            except SchedulerStateError:
                pass
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
                odd.append(error)
            try:
                scheduler.stop()
            except BaseException as error:  # noqa: BLE001
                odd.append(error)

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    assert not any(thread.is_alive() for thread in threads), "a start or a stop hangs"
    scheduler.stop()
    assert odd == []
    assert started[0] >= 50
    assert scheduler.status().state == "stopped"
    assert eventually(lambda: own_threads() == [], 3)
    # and it still works
    ran = threading.Event()
    scheduler.add_job(ran.set, SECONDLY, name="afterwards")
    scheduler.start()
    assert ran.wait(5)
    scheduler.stop()


@pytest.mark.parametrize("where", ["handler", "listener"])
def test_stop_from_a_thread_of_the_scheduler_returns_at_once_and_stops(where: str) -> None:
    scheduler = Scheduler(MemoryLease())
    took: list[float] = []

    def stop(_what: object = None) -> None:
        began = time.monotonic()
        scheduler.stop()
        took.append(time.monotonic() - began)

    def nothing() -> None:
        pass

    handler: Callable[..., Any] = stop if where == "handler" else nothing
    scheduler.add_job(handler, SECONDLY, name="job")
    if where == "listener":
        scheduler.on("run_finished", stop)
    scheduler.start()
    assert eventually(lambda: scheduler.status().state == "stopped")
    assert took[0] < 2
    assert eventually(lambda: own_threads() == [], 5)
    scheduler.start()
    scheduler.stop()


def test_two_threads_stop_while_a_handler_ignores_it() -> None:
    stubborn = Stubborn()
    scheduler = Scheduler(MemoryLease(), lease_ms=1_000)
    scheduler.add_job(stubborn, SECONDLY, name="stubborn")
    scheduler.start()
    assert stubborn.entered.wait(5)
    took: list[float] = []

    def stop() -> None:
        began = time.monotonic()
        scheduler.stop(timeout=1.0)
        took.append(time.monotonic() - began)

    threads = [threading.Thread(target=stop) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        assert len(took) == 2
        assert max(took) < 1.0 + 2.0
        assert scheduler.status().state == "stopped"
    finally:
        stubborn.let_go.set()
    assert eventually(lambda: stubborn.told)


def test_a_handler_that_ignored_the_stop_loses_its_lease_and_keeps_its_slot() -> None:
    store = "ignored stop"
    stubborn = Stubborn()
    old = Scheduler(MemoryLease(store), lease_ms=1_000)
    old.add_job(stubborn, every(seconds=2), name="job")
    taken_over = threading.Event()
    new = Scheduler(MemoryLease(store), lease_ms=1_000)
    old.start()
    try:
        assert stubborn.entered.wait(5)
        old.stop(timeout=0.2)
        assert [run.stale for run in old.status().runs] == [True]

        def second(run: LeaseRun) -> None:
            if run.attempt == 2:
                taken_over.set()

        new.add_job(second, every(seconds=2), name="job")
        new.start()
        assert taken_over.wait(8)
    finally:
        stubborn.let_go.set()
        new.stop()
    assert eventually(lambda: old.status().runs == [])


@pytest.mark.parametrize("timeout", [0.0, 1.0])
def test_stop_returns_in_time_while_the_store_file_is_locked(
    tmp_path: Path, timeout: float
) -> None:
    path = tmp_path / "locked.db"
    scheduler = Scheduler(SQLiteLease(path))
    entered = threading.Event()

    def handler(run: LeaseRun) -> None:
        entered.set()
        run.wait(30)

    scheduler.add_job(handler, SECONDLY, name="job")
    scheduler.add_job(lambda: None, SECONDLY, name="other")
    scheduler.start()
    assert entered.wait(5)
    locker = sqlite3.connect(path, isolation_level=None, timeout=10)
    locker.execute("BEGIN IMMEDIATE")
    try:
        time.sleep(1.2)  # the timer, and a worker, are in a call that waits for the file
        began = time.monotonic()
        scheduler.stop(timeout=timeout)
        took = time.monotonic() - began
    finally:
        locker.execute("ROLLBACK")
        locker.close()
    assert took < timeout + 2.0
    assert scheduler.status().state == "stopped"
    # What was still in a call ends soon after, and leaves no connection behind.
    assert eventually(lambda: own_threads() == [], 10)
    assert eventually(lambda: open_files(path.name) == [], 2), open_files(path.name)


@pytest.mark.parametrize("answers", [False, True])
def test_a_stop_does_not_blame_a_handler_whose_end_the_store_is_slow_to_take(
    *, answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler has ended in time; what takes long is a call of the store."""
    backend = FaultyLease(MemoryLease())
    settling, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        settling.set()
        go_on.wait(10)

    backend.faults.slow("settle", before=hold)
    scheduler = Scheduler(backend)
    scheduler.add_job(lambda: None, SECONDLY, name="job")
    scheduler.start()
    assert settling.wait(5)
    if answers:  # after the stop has given up waiting for handlers, and before it returns
        real_close = backend.close

        def close() -> None:
            go_on.set()
            real_close()

        backend.close = close  # type: ignore[method-assign]
    scheduler.stop(timeout=0.1)
    go_on.set()
    assert eventually(lambda: own_threads() == [], 5)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not any("a handler did not end in time" in line for line in told)
    assert any("a thread is still in a call" in line for line in told) is not answers


def test_stop_gives_back_a_grant_that_arrives_meanwhile() -> None:
    backend = FaultyLease(MemoryLease("late grant"))
    claimed, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> None:
        claimed.set()
        go_on.wait(10)

    backend.faults.slow("claim", after=hold)
    scheduler = Scheduler(backend)
    scheduler.add_job(lambda: ran.append(1), every(seconds=2), name="job")
    scheduler.start()
    assert claimed.wait(5)
    stopper = threading.Thread(target=scheduler.stop, args=(5.0,))
    stopper.start()
    assert eventually(lambda: scheduler.status().state == "stopping")
    go_on.set()
    stopper.join(10)
    assert not stopper.is_alive()
    assert ran == []
    # It is free for another instance at once.
    other = Scheduler(MemoryLease("late grant"))
    attempts: list[int] = []
    other.add_job(lambda run: attempts.append(run.attempt), every(seconds=2), name="job")
    other.start()
    assert eventually(lambda: 2 in attempts, 4)
    other.stop()


def test_stop_waits_for_a_run_that_is_claimed_meanwhile_where_nobody_else_can_have_it() -> None:
    backend = FaultyClaim(MemoryClaim())
    claimed, go_on = threading.Event(), threading.Event()
    stopping: list[bool] = []
    told: list[str] = []

    def hold() -> None:
        claimed.set()
        go_on.wait(10)

    def handler(run: Run) -> None:
        run.wait(0.2)
        stopping.append(run.stopping)

    backend.faults.slow("claim", after=hold)
    scheduler = Scheduler(backend)
    for name in ("run_finished", "run_failed", "run_missed"):
        scheduler.on(name, lambda event: told.append(event.name))
    scheduler.add_job(handler, every(seconds=2), name="job")
    scheduler.start()
    assert claimed.wait(5)
    stopper = threading.Thread(target=scheduler.stop, args=(5.0,))
    stopper.start()
    assert eventually(lambda: scheduler.status().state == "stopping")
    go_on.set()
    stopper.join(10)
    assert not stopper.is_alive()
    assert stopping == [False]  # it had its time before it was told to end
    assert told == ["run_finished"]


def test_a_run_that_stop_could_not_see_yet_does_not_outlive_it() -> None:
    """The timer may be between its last look at the stop and the start of the worker."""
    scheduler = Scheduler(MemoryLease())
    inside, go_on, timely = threading.Event(), threading.Event(), threading.Event()

    def handler(run: LeaseRun) -> None:
        run.wait(8)

    scheduler.add_job(handler, SECONDLY, name="job")
    scheduler.start()
    started = scheduler._lifecycle.started
    assert started is not None
    begin = started.context.runtime.begin

    def slow_begin(live: LiveRun) -> None:
        inside.set()
        go_on.wait(10)
        begin(live)

    started.context.runtime.begin = slow_begin  # type: ignore[method-assign]
    assert inside.wait(5)
    scheduler.stop(timeout=0)
    go_on.set()
    if eventually(lambda: own_threads() == [], 4):
        timely.set()
    eventually(lambda: own_threads() == [])  # so that the next test is not disturbed
    assert timely.is_set(), "a handler began after stop() had returned, and was not told to end"


def test_a_run_whose_thread_cannot_be_started_goes_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = "no threads"
    real = threading.Thread.start
    broken = threading.Event()
    broken.set()

    def start(thread: threading.Thread) -> None:
        if broken.is_set() and thread.name.startswith("leasecron-run"):
            message = "can't start new thread"
            raise RuntimeError(message)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    attempts: list[int] = []
    handed_over: list[str] = []
    scheduler = Scheduler(MemoryLease(store))
    scheduler.on("run_handed_over", lambda event: handed_over.append(event.reason))
    scheduler.add_job(lambda run: attempts.append(run.attempt), every(seconds=2), name="job")
    scheduler.start()
    try:
        assert eventually(lambda: handed_over)
        states = {record.state.value for record in scheduler.history("job")}
        assert states == {"waiting"}
        assert all(scheduler.status().threads.values())
        assert scheduler.status().runs == []
    finally:
        scheduler.stop()
    assert attempts == []
    broken.clear()
    other = Scheduler(MemoryLease(store))
    done: list[int] = []
    other.add_job(lambda run: done.append(run.attempt), every(seconds=2), name="job")
    other.start()
    assert eventually(lambda: 2 in done, 3)  # far sooner than a lease of 15 s
    other.stop()


@pytest.mark.parametrize("name", ["leasecron-timer", "leasecron-heartbeat"])
def test_a_start_without_threads_fails_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            message = "can't start new thread"
            raise RuntimeError(message)
        real(thread)

    scheduler = Scheduler(MemoryLease())
    scheduler.on("run_finished", lambda _event: None)
    ran = threading.Event()
    scheduler.add_job(ran.set, SECONDLY, name="job")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(SchedulerStateError, match="could not be started"):
        scheduler.start()
    assert scheduler.status().state == "stopped"
    assert eventually(lambda: own_threads() == [], 3)
    monkeypatch.setattr(threading.Thread, "start", real)
    scheduler.start()
    assert ran.wait(5)
    scheduler.stop()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("name", ["leasecron-timer", "leasecron-heartbeat", "leasecron-events"])
def test_a_start_that_a_signal_breaks_off_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    """Its exception comes while the start waits for a thread to begin, which is there by then."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        if thread.name == name:
            raise error

    ran: list[int] = []
    scheduler = Scheduler(MemoryLease())
    scheduler.on("run_finished", lambda _event: None)
    scheduler.add_job(lambda: ran.append(1), SECONDLY, name="job")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(error):
        scheduler.start()
    assert scheduler.status().state == "stopped"
    assert eventually(lambda: own_threads() == [], 3), own_threads()
    assert ran == []
    monkeypatch.setattr(threading.Thread, "start", real)
    scheduler.start()
    assert eventually(lambda: ran, 5)
    assert own_threads().count("leasecron-timer") == 1
    scheduler.stop()


def test_a_start_beside_a_stop_is_refused_at_once_and_holds_nothing_up() -> None:
    """The handler that is waited for may ask the scheduler something, and is not kept waiting."""
    entered, ask, asked = threading.Event(), threading.Event(), threading.Event()
    scheduler = Scheduler(MemoryLease())

    def handler(_run: LeaseRun) -> None:
        entered.set()
        ask.wait(10)
        scheduler.next_runs()
        asked.set()

    refused: list[str] = []

    def start() -> None:
        try:
            scheduler.start()
        except SchedulerStateError as error:
            refused.append(str(error))

    scheduler.add_job(handler, SECONDLY, name="job")
    scheduler.start()
    stopping = threading.Thread(target=scheduler.stop, args=(8.0,))
    starting = threading.Thread(target=start)
    try:
        assert entered.wait(5)
        stopping.start()
        assert eventually(lambda: scheduler.status().state == "stopping")
        starting.start()
        assert eventually(lambda: refused, 3), "the start waits for the stop"
        assert "stopping" in refused[0]
        assert stopping.is_alive()
        ask.set()
        assert asked.wait(3), "the handler waits for the start, which waits for the stop"
    finally:
        ask.set()
        stopping.join(15)
        starting.join(15)
    assert scheduler.status().state == "stopped"
    scheduler.start()
    scheduler.stop()


def test_stop_hands_over_and_the_standby_starts_long_before_a_lease_would_lapse() -> None:
    store, lease_ms = "hand over at stop", 20_000
    entered, taken = threading.Event(), threading.Event()
    at: dict[str, float] = {}

    def first(run: LeaseRun) -> None:
        entered.set()
        run.wait(30)

    def second(run: LeaseRun) -> None:
        if run.attempt == 2:
            at["taken"] = time.monotonic()
            taken.set()

    holder = Scheduler(MemoryLease(store), lease_ms=lease_ms)
    holder.add_job(first, every(seconds=3), name="job")
    holder.start()
    assert entered.wait(8)
    standby = Scheduler(MemoryLease(store), lease_ms=lease_ms)
    standby.add_job(second, every(seconds=3), name="job")
    standby.start()
    assert eventually(lambda: standby.status().next_due is not None)
    time.sleep(0.5)
    at["stop"] = time.monotonic()
    holder.stop()
    assert taken.wait(10)
    standby.stop()
    assert at["taken"] - at["stop"] < lease_ms / 1000 / 5


def test_stop_cuts_a_wait_short_and_is_not_an_error() -> None:
    ends: list[type[BaseException]] = []
    entered = threading.Event()

    def handler(run: LeaseRun) -> None:
        entered.set()
        try:
            run.wait(30)
        except BaseException as error:
            ends.append(type(error))
            raise

    failed: list[object] = []
    handed_over: list[str] = []
    scheduler = Scheduler(MemoryLease())
    scheduler.add_job(handler, SECONDLY, name="job")
    scheduler.on("run_failed", failed.append)
    scheduler.on("run_handed_over", lambda event: handed_over.append(event.reason))
    scheduler.start()
    assert entered.wait(5)
    began = time.monotonic()
    scheduler.stop()
    assert time.monotonic() - began < 5
    assert ends == [RunStopping]
    assert handed_over == ["stopping"]
    assert failed == []


def test_a_handler_that_always_hands_over_does_not_spin() -> None:
    store = "always hands over"
    entered: list[float] = []

    def handler() -> None:
        entered.append(time.monotonic())
        raise HandOver

    pair = [Scheduler(MemoryLease(store), lease_ms=1_000) for _ in range(2)]
    for scheduler in pair:
        scheduler.add_job(handler, every(seconds=3_600), name="job", catch_up_ms=3_700_000)
    # Owed from the last full hour on.
    for scheduler in pair:
        _owe_an_hour(scheduler)
    for scheduler in pair:
        scheduler.start()
    time.sleep(4)
    for scheduler in pair:
        scheduler.stop()
    assert 2 <= len(entered) <= 2 * 4 + 4


def _owe_an_hour(scheduler: Scheduler[MemoryLease]) -> None:
    """Have the store owe what it would owe to a job that was registered long ago."""
    from dataclasses import replace

    from leasecron_sync.backends.base import BackendSettings
    from leasecron_sync.model import JobStamp

    backend = scheduler.backend
    backend.open(BackendSettings("default", "setup", 1_000))
    job = scheduler._jobs["job"]
    backend.register([JobStamp("job", job.fingerprint())])
    tables = backend._tables()
    record = tables.job("job")
    assert record is not None
    assert record.owed_from_ms is not None
    tables.put_job(replace(record, owed_from_ms=record.owed_from_ms - 4_000_000))
    backend.close()


def test_descriptors_and_threads_stay_flat_over_thirty_starts(tmp_path: Path) -> None:
    path = tmp_path / "cycles.db"
    scheduler = Scheduler(SQLiteLease(path))
    scheduler.add_job(lambda: None, SECONDLY, name="job")
    scheduler.on("run_finished", lambda _event: None)
    counts = []
    for _ in range(30):
        scheduler.start()
        scheduler.stop()
        counts.append((len(open_files()), threading.active_count()))
    assert counts[-1] == counts[1]
    assert open_files(path.name) == []


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_memory_and_descriptors_stay_flat_over_many_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import logging

    # What pytest captures of the log is kept, with the tracebacks.
    monkeypatch.setattr(logging.getLogger("leasecron_sync"), "propagate", False)
    path = tmp_path / "many.db"
    scheduler = Scheduler(SQLiteLease(path), max_concurrent_runs=100)
    done: list[int] = []

    def handler(run: LeaseRun) -> None:
        done.append(run.token)
        if run.token % 3 == 0:
            message = "one in three fails"
            raise ValueError(message)

    for number in range(40):
        scheduler.add_job(
            handler, SECONDLY, name=f"job {number}", overlap="allow", retry_delay_ms=200
        )
    scheduler.on("run_finished", lambda _event: None)
    scheduler.start()
    assert eventually(lambda: len(done) > 80, 20)
    gc.collect()
    before = len(gc.get_objects()), len(open_files())
    assert eventually(lambda: len(done) > 400, 40)
    assert eventually(lambda: len(scheduler.status().runs) == 0, 5)
    gc.collect()
    after = len(gc.get_objects()), len(open_files())
    live = sum(isinstance(item, LiveRun) for item in gc.get_objects())
    scheduler.stop()
    # The heartbeat opens its connection at its first renewal: a file, its log and its index.
    assert after[1] <= before[1] + 3
    assert after[0] < before[0] + 3_000, (before, after)
    assert live < 60


def test_events_that_found_a_full_queue_leave_no_thread_behind() -> None:
    """A listener that does not keep up is left alone by stop(), and its thread ends later."""
    from leasecron_sync import events as module
    from leasecron_sync.options import EVENT_QUEUE

    let_go = threading.Event()
    scheduler = Scheduler(MemoryLease())
    scheduler.add_job(lambda: None, SECONDLY, name="job")
    called = threading.Event()

    def listener(_event: module.Event) -> None:
        called.set()
        let_go.wait(10)

    scheduler.on("run_finished", listener)
    scheduler.start()
    assert called.wait(5)
    for _ in range(EVENT_QUEUE + 1):
        scheduler._hub.emit(module.Event("run_finished", "flood"))
    scheduler.stop(timeout=0.5)
    let_go.set()
    assert eventually(lambda: own_threads() == [], 8), own_threads()
