"""Real backends and ``transition`` get the same generated histories and give the same answers.

After each command the replies are compared, and all records. This is what keeps rules that a
backend states in a language of its own honest. A new backend gets a row in ``BACKENDS``.
"""

from __future__ import annotations

import random
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Callable, Protocol
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings

from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    JobStanding,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    Pending,
    Pruned,
    RenewReply,
    Settlement,
    SettleReply,
)
from leasecron_sync.testing.clock import ManualClock
from tests.model.histories import (
    HISTORIES,
    HOUR_MS,
    INSTANCES,
    JOBS,
    Operation,
    Player,
    random_operation,
)
from tests.model.plain import PlainStore

Factory = Callable[[ManualClock, str], LeaseBackend]
"""Makes an unopened backend under this clock, on the store that this text may name."""


class MakeFactory(Protocol):
    """Prepares a store, and gives out what connects to it under a clock of the test's own."""

    def __call__(self, folder: Path) -> Iterator[Factory]: ...


def _memory(folder: Path) -> Iterator[Factory]:
    del folder

    def connect(clock: ManualClock, store: str) -> LeaseBackend:
        class OnManualClock(MemoryLease):
            _now_ms = staticmethod(clock.now_ms)

        return OnManualClock(store)

    yield connect


def _sqlite(folder: Path) -> Iterator[Factory]:
    def connect(clock: ManualClock, _store: str) -> LeaseBackend:
        class OnManualClock(SQLiteLease):
            _now_ms = staticmethod(clock.now_ms)

        return OnManualClock(folder / "store.db")

    # Small steps back of the clock are bridged by this backend alone, see tests/unit/test_sqlite.
    bridges_nothing = mock.patch("leasecron_sync.backends.sqlite.BRIDGED_STEP_MS", 0)
    with bridges_nothing, _without_waiting_for_the_disk():
        yield connect


@contextmanager
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Decisions are the subject here; that they are on the disk is tested elsewhere."""
    connect = sqlite3.connect

    class Careless(sqlite3.Connection):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous = FULL", "synchronous = OFF"), *values)  # type: ignore[arg-type]

    def careless(*args: object, **kwargs: object) -> sqlite3.Connection:
        return connect(*args, factory=Careless, **kwargs)  # type: ignore[call-overload,no-any-return]

    with mock.patch("sqlite3.connect", careless):
        yield


BACKENDS: dict[str, MakeFactory] = {"memory": _memory, "sqlite": _sqlite}


class Both:
    """Sends each command to the reference and to the backend, and compares."""

    def __init__(self, clock: ManualClock, connect: Factory) -> None:
        self.plain = PlainStore(clock.now_ms)
        namespace = uuid.uuid4().hex
        self._backends = {name: connect(clock, namespace) for name in INSTANCES}
        for name, backend in self._backends.items():
            backend.open(BackendSettings(namespace, name, 5_000))
            backend.probe()  # as the scheduler does: makes the store where there is none
        self._turn = 0

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()

    @property
    def backend(self) -> LeaseBackend:
        """A connection, another one each time."""
        self._turn += 1
        return self._backends[INSTANCES[self._turn % len(INSTANCES)]]

    def _compare(self) -> None:
        expected = self.plain.history(None, 10_000)
        assert list(self.backend.history(None, 10_000)) == expected

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        replies = self.plain.claim(claims)
        assert list(self.backend.claim(claims)) == replies
        self._compare()
        return replies

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        replies = self.plain.renew(leases, lease_ms)
        assert list(self.backend.renew(leases, lease_ms)) == replies
        self._compare()
        return replies

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        reply = self.plain.settle(lease, settlement)
        assert self.backend.settle(lease, settlement) == reply
        self._compare()
        return reply

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        standings = self.plain.register(jobs)
        found = [replace(standing, store_id="plain") for standing in self.backend.register(jobs)]
        assert found == standings
        return standings

    def pending(self, jobs: Sequence[str], limit: int, asker: str) -> Pending:
        pending = self.plain.pending(jobs, limit, asker)
        assert self._backends[asker].pending(jobs, limit) == pending
        return pending

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        """Prune both; among equally old records the limit may leave out others, so it is high."""
        del limit
        pruned = self.plain.prune(older_than_ms, 10_000)
        found = self.backend.prune(older_than_ms, 10_000)
        assert found.deleted == pruned.deleted
        assert sorted(found.abandoned) == sorted(pruned.abandoned)
        self._compare()
        return pruned

    def look(self, now_ms: int) -> None:
        """Compare what is only read."""
        names = [job.name for job in JOBS]
        for limit in (1, 100):
            for asker in INSTANCES:
                self.pending(names, limit, asker)
        spans = [JobSpan(name, now_ms - 5_000, now_ms) for name in names]
        spans.append(JobSpan(names[0], 0, now_ms + HOUR_MS))
        found = [dict(states) for states in self.backend.states(spans)]
        assert found == self.plain.states(spans)
        for name in (None, *names):
            assert list(self.backend.history(name, 3)) == self.plain.history(name, 3)
        self.register([JobStamp(name, "version 0") for name in names])
        summaries = {job.job: job for job in self.backend.jobs(100)}
        for name in names:
            newest = self.plain.history(name, 1)
            assert summaries[name].newest == (newest[0] if newest else None)
            assert summaries[name].unsettled == len(self.plain.unsettled(name))
            assert summaries[name].owed_from_ms == self.plain.jobs[name].owed_from_ms


def _play(connect: Factory, history: Sequence[Operation]) -> None:
    clock = ManualClock()
    both = Both(clock, connect)
    try:
        Player(both, clock).play(history)
        both.look(clock.now_ms())
    finally:
        both.close()


@pytest.fixture(params=BACKENDS)
def connect(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Factory]:
    make = BACKENDS[request.param]
    yield from make(tmp_path_factory.mktemp("store"))


@settings(
    derandomize=True,
    database=None,
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # the store is shared, each history has a namespace
)
@given(history=HISTORIES)
def test_same_history_same_replies_and_records(
    connect: Factory, history: Sequence[Operation]
) -> None:
    _play(connect, history)


@pytest.mark.parametrize("seed", range(4))
def test_same_long_history_same_replies_and_records(connect: Factory, seed: int) -> None:
    dice = random.Random(seed)
    _play(connect, [random_operation(dice) for _ in range(1_000)])
