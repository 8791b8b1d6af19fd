"""Stores that forget under a run: a record that somebody deletes, keys that the server evicts.

The holder learns of it at its next renewal and tells it; it makes nothing anew and spoils nothing
of who runs it next. Tokens rise through all of it, so fenced writes stay safe.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable

import pytest

from leasecron_sync import Event, LeaseRun, Scheduler, at, every
from leasecron_sync.backends._redis_scripts import keys_for, keys_of
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.backends.urls import connect, connect_lease
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import LeaseClaim, LeaseReply, RunRecord, RunState
from tests.faults.processes import LONG
from tests.services.fixtures import Own, had
from tests.services.postgres import execute as execute_sql
from tests.services.postgres import new_database
from tests.services.process import eventually
from tests.services.redis import execute
from tests.services.services import Services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

LEASE_MS = 1_500
LIMIT_S = 20.0
START_S = 2.5
"""What falls due so long after now finds instances that have registered: else it is not owed."""
EVICTIONS = 10 if LONG else 1
EVENTS = ("run_lost", "run_missed", "run_taken_over", "store_down", "store_back")


class Instance:
    """A scheduler, the runs that its handler was called with, and what it told."""

    def __init__(self, url: str, namespace: str, lease_ms: int = LEASE_MS) -> None:
        backend = connect_lease(url)
        self.asked = threading.Event()  # a claim of it was answered
        claim = backend.claim

        def asking(claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
            replies = claim(claims)
            self.asked.set()
            return replies

        backend.claim = asking  # type: ignore[method-assign]
        self.scheduler: Scheduler[LeaseBackend] = Scheduler(
            backend, namespace=namespace, lease_ms=lease_ms
        )
        self.runs: list[LeaseRun] = []
        self.told: list[Event] = []
        self.may_end = threading.Event()
        for name in EVENTS:
            self.scheduler.on(name, self.told.append)  # type: ignore[arg-type]

    def handler(self, run: LeaseRun) -> None:
        self.runs.append(run)
        assert self.may_end.wait(LIMIT_S)

    def names(self) -> list[str]:
        return [event.name for event in self.told]


@contextmanager
def stopped(*instances: Instance) -> Iterator[None]:
    try:
        yield
    finally:
        for item in instances:
            item.may_end.set()
        for item in instances:
            item.scheduler.stop(timeout=5.0)


def records(url: str, namespace: str) -> list[RunRecord]:
    backend = connect_lease(url)
    backend.open(BackendSettings(namespace, "reader", 5_000))
    try:
        return list(backend.history(None, 1_000))
    finally:
        backend.close()


# -- a record that somebody deletes ----------------------------------------------------------------


Place = tuple[str, Callable[[str], object]]


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store, and what deletes the records of a namespace's runs past the library."""
    if request.param == "sqlite":
        path = tmp_path / "jobs.db"

        def delete_rows(_namespace: str) -> None:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("DELETE FROM leasecron_run")

        yield f"sqlite:///{path}", delete_rows
        return
    services: Services = request.getfixturevalue("services")
    if request.param == "redis":
        url = had(services.redis).url
        yield url, lambda space: execute(url, "DEL", keys_of(space)[3])
        return
    with new_database(had(services.postgres), f"lost_{uuid.uuid4().hex}") as dsn:
        yield dsn, lambda _namespace: execute_sql(dsn, "DELETE FROM leasecron_run")


def test_a_holder_whose_record_was_deleted_makes_none_anew_and_spoils_nobodys(
    place: Place, namespace: str
) -> None:
    url, delete = place
    holder, other = Instance(url, namespace), Instance(url, namespace)
    due = datetime.fromtimestamp(SystemClock().now_ms() / 1000 + START_S, timezone.utc)
    with stopped(holder, other):
        for item in (holder, other):
            item.scheduler.add_job(item.handler, at(due), name="job")
            item.scheduler.start()
        assert eventually(lambda: holder.runs or other.runs, LIMIT_S)
        if other.runs:
            holder, other = other, holder
        [run] = holder.runs
        # Else its first claim would come after the deletion, and be granted.
        assert other.asked.wait(LIMIT_S)
        delete(namespace)
        assert eventually(lambda: run.lost, LEASE_MS / 1000)  # at a renewal, not at the very end
        assert eventually(lambda: "run_lost" in holder.names(), LIMIT_S)
        assert records(url, namespace) == []
        assert not other.runs
        # Whoever looks back finds it owed: to the store it has never been claimed.
        other.scheduler.stop(timeout=5.0)
        other.scheduler.start()
        assert eventually(lambda: other.runs, LIMIT_S)
        [again] = other.runs
        assert again.attempt == 1
        assert again.token > run.token
        # The end of the former one changes nothing of it.
        holder.may_end.set()
        assert eventually(lambda: not holder.scheduler.status().runs, LIMIT_S)
        [record] = records(url, namespace)
        assert (record.state, record.token) == (RunState.RUNNING, again.token)
        other.may_end.set()
        assert eventually(
            lambda: [x.state for x in records(url, namespace)] == [RunState.FINISHED], LIMIT_S
        )
        assert not again.lost
    assert holder.names().count("run_lost") == 1
    assert "run_lost" not in other.names()


# -- keys that are evicted -------------------------------------------------------------------------


class Worker(Instance):
    """One whose handlers take a while, and note what they were called with."""

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(url, namespace)
        for name, seconds in (("quick", 0.02), ("long", 1.3)):
            self.scheduler.add_job(
                lambda run, seconds=seconds: self._work(run, seconds),
                every(seconds=1),
                name=name,
                max_attempts=50,
                retry_delay_ms=100,
            )

    def _work(self, run: LeaseRun, seconds: float) -> None:
        self.runs.append(run)
        run.wait(seconds)


def judge(workers: list[Worker], now_ms: int, *, again: int) -> None:
    """No thread has ended, every job goes on, and what ran again is told and fenced."""

    def goes_on() -> bool:
        newest: dict[str, float] = {}
        for worker in workers:
            for run in list(worker.runs):
                newest[run.job] = max(newest.get(run.job, 0), run.scheduled_time.timestamp())
        return all(newest.get(job, 0) * 1000 > now_ms for job in ("quick", "long"))

    assert eventually(goes_on, LIMIT_S)
    assert all(all(worker.scheduler.status().threads.values()) for worker in workers)
    runs = [run for worker in workers for run in list(worker.runs)]
    tokens = Counter((run.job, run.token) for run in runs)
    assert max(tokens.values()) == 1, "one token was given to two"
    starts = Counter((run.job, run.scheduled_time) for run in runs)
    assert max(starts.values()) <= 1 + again, starts.most_common(3)


@pytest.mark.parametrize("kind", ["redis", *(["valkey"] if LONG else [])])
def test_whichever_key_is_evicted_under_a_run_no_job_falls_silent(
    own: Own, namespace: str, kind: str
) -> None:
    """One key at a time, in a namespace of its own, as a server does that is short of memory."""
    server = (own.redis if kind == "redis" else own.valkey)(durable=False)
    count = len(keys_for(namespace, "server"))
    spaces = {number: f"{namespace} {number}" for number in range(count)}
    workers = {
        number: [Worker(server.url, space) for _ in range(2)] for number, space in spaces.items()
    }
    everyone = [worker for pair in workers.values() for worker in pair]
    with stopped(*everyone):
        for worker in everyone:
            worker.scheduler.start()

        def busy(pair: list[Worker]) -> bool:
            return any(run.job == "long" for one in pair for run in one.scheduler.status().runs)

        for number, pair in workers.items():
            assert eventually(lambda pair=pair: busy(pair), LIMIT_S)  # type: ignore[misc]
            server.do("DEL", keys_for(spaces[number], "server")[number])
        now_ms = SystemClock().now_ms()
        for pair in workers.values():
            judge(pair, now_ms, again=2)


def test_a_server_that_evicts_says_so_at_the_start_and_leaves_no_loss_untold(
    own: Own, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is filled with junk until the leases of the runs under way are gone.

    Such a server keeps no promise: what was claimed lately may run again. It is told at the start.
    """
    server = own.redis(durable=False, maxmemory="4mb", maxmemory_policy="allkeys-lru")
    pair = [Worker(server.url, namespace) for _ in range(2)]
    runs = keys_of(namespace)[3]
    junk = "x" * 100_000
    with caplog.at_level(logging.WARNING), stopped(*pair):
        for worker in pair:
            worker.scheduler.start()
        for _ in range(EVICTIONS):
            [run] = _long_under_way(pair)
            for number in range(10_000):
                if server.do("EXISTS", runs) == 0:
                    break
                server.do("SET", f"junk {number}", junk)
            else:
                pytest.fail("nothing was evicted")
            assert eventually(lambda run=run: run.lost, LEASE_MS / 1000 + 1)  # type: ignore[misc]
        server.do("CONFIG", "SET", "maxmemory", "0")
        judge(pair, SystemClock().now_ms(), again=EVICTIONS)
    told = [name for worker in pair for name in worker.names()]
    assert told.count("run_lost") >= EVICTIONS
    warned = [line for line in caplog.messages if "maxmemory-policy is allkeys-lru" in line]
    assert len(warned) == 2


def _long_under_way(pair: list[Worker]) -> list[LeaseRun]:
    """Wait for a run that has just begun and takes a while."""
    found: list[LeaseRun] = []

    def look() -> bool:
        status = [run for one in pair for run in one.scheduler.status().runs]
        young = {run.scheduled_time for run in status if run.job == "long" and run.age_ms < 300}
        found[:] = [
            run
            for one in pair
            for run in list(one.runs)
            if run.job == "long" and run.scheduled_time in young
        ][-1:]
        return bool(found)

    assert eventually(look, LIMIT_S)
    return found


# -- a stop that takes longer than a lease ---------------------------------------------------------


def test_a_stop_that_waits_for_a_handler_keeps_its_lease(tmp_path: Path, namespace: str) -> None:
    """The standby may not take over what is only coming to its end."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    due = datetime.fromtimestamp(SystemClock().now_ms() / 1000 + START_S, timezone.utc)
    pair = [Instance(url, namespace, lease_ms=2_000) for _ in range(2)]
    with stopped(*pair):
        for item in pair:
            item.scheduler.add_job(item.handler, at(due), name="job")
            item.scheduler.start()
        assert eventually(lambda: any(item.runs for item in pair), LIMIT_S)
        holder, standby = pair if pair[0].runs else reversed(pair)
        stop = threading.Thread(target=holder.scheduler.stop, kwargs={"timeout": LIMIT_S})
        stop.start()
        assert eventually(lambda: holder.runs[0].stopping, LIMIT_S)
        assert not threading.Event().wait(4.4)  # two leases, and some
        assert stop.is_alive()
        holder.may_end.set()
        stop.join(LIMIT_S)
        [record] = records(url, namespace)
    assert (record.state, record.attempt) == (RunState.FINISHED, 1)
    assert not standby.runs


# -- a server that tells nothing of itself ---------------------------------------------------------


def test_a_server_whose_settings_nobody_may_ask_for_is_used_all_the_same(
    own: Own, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may evict or not; that it is not known is told at the start."""
    server = own.redis(durable=False, user="alice on >s3cret ~* +@all -info -config")
    url = server.url.replace("://", "://alice:s3cret@")
    ran: list[str] = []
    lease = Scheduler(connect(url), namespace=namespace)
    claim = Scheduler(connect(f"{url}?strategy=script"), namespace=namespace)
    schedulers: dict[str, Scheduler[Any]] = {"lease": lease, "claim": claim}
    with caplog.at_level(logging.WARNING):
        try:
            for name, scheduler in schedulers.items():
                due = datetime.fromtimestamp(SystemClock().now_ms() / 1000 + START_S, timezone.utc)
                scheduler.add_job(lambda run: ran.append(run.job), at(due), name=name)
                scheduler.start()
            assert eventually(lambda: set(ran) == set(schedulers), LIMIT_S)
        finally:
            for scheduler in schedulers.values():
                scheduler.stop(timeout=5.0)
    assert sum("its user may not ask INFO" in line for line in caplog.messages) == 2
    assert len(caplog.messages) == 2
    assert "s3cret" not in caplog.text
