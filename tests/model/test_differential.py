"""Real backends and ``transition`` get the same generated histories and give the same answers.

After each command the replies are compared, and all records. This is what keeps rules that a
backend states in a language of its own honest. A new backend gets a row in ``BACKENDS``.

Some histories are what instances could really do. Wild ones are not: batches of claims for the same
few runs with options that contradict each other, at instants that are often the very millisecond of
a limit.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Callable, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.protocol.transition import PRUNED_SPANS
from leasecron_sync.testing.clock import ManualClock
from tests.model.both import Both, Spans, Store, spans_in_postgres, spans_in_redis, spans_of
from tests.model.histories import (
    HISTORIES,
    Operation,
    Player,
    random_operation,
)
from tests.model.wild import JOBS as WILD_JOBS
from tests.model.wild import Pruner, Wild
from tests.services.fixtures import had
from tests.services.services import Services


def _memory(request: pytest.FixtureRequest) -> Iterator[Store]:
    del request

    def connect(clock: ManualClock, store: str) -> LeaseBackend:
        class OnManualClock(MemoryLease):
            _now_ms = staticmethod(clock.now_ms)

        return OnManualClock(store)

    def pruned(backend: LeaseBackend, namespace: str) -> Spans:
        assert isinstance(backend, MemoryLease)
        return backend._store.namespaces[namespace]._pruned

    yield Store(connect, pruned)


def _sqlite(request: pytest.FixtureRequest) -> Iterator[Store]:
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    path = factory.mktemp("store") / "store.db"

    def connect(clock: ManualClock, _store: str) -> LeaseBackend:
        class OnManualClock(SQLiteLease):
            _now_ms = staticmethod(clock.now_ms)

        return OnManualClock(path)

    def pruned(_backend: LeaseBackend, namespace: str) -> Spans:
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute(
                "SELECT j.name, p.first_ms, p.last_ms FROM leasecron_pruned p "
                "JOIN leasecron_job j ON j.id = p.job_id "
                "JOIN leasecron_space s ON s.id = j.space_id WHERE s.name = ? ORDER BY p.first_ms",
                (namespace,),
            )
            return spans_of(rows.fetchall())

    # Small steps back of the clock are bridged by this backend alone, see tests/unit/test_sqlite.
    bridges_nothing = mock.patch("leasecron_sync.backends._sqlite_past.BRIDGED_STEP_MS", 0)
    with bridges_nothing, _without_waiting_for_the_disk():
        yield Store(connect, pruned)


def _postgres(request: pytest.FixtureRequest) -> Iterator[Store]:
    services: Services = request.getfixturevalue("services")
    url = had(services.postgres).url
    made: list[PostgresLease] = []
    idle: list[PostgresLease] = []

    class KeepsItsConnections(PostgresLease):
        def close(self) -> None:
            idle.append(self)

    def connect(clock: ManualClock, _store: str) -> LeaseBackend:
        if not idle:
            idle.append(KeepsItsConnections(url, schema="differential"))
            made.append(idle[0])
        backend = idle.pop()
        backend._now_ms = clock.now_ms
        return backend

    def pruned(_backend: LeaseBackend, namespace: str) -> Spans:
        return spans_in_postgres(url, "differential", namespace)

    yield Store(connect, pruned)
    for backend in made:
        PostgresLease.close(backend)


def _redis(request: pytest.FixtureRequest) -> Iterator[Store]:
    services: Services = request.getfixturevalue("services")
    yield from _of_redis(had(services.redis).url)


def _valkey(request: pytest.FixtureRequest) -> Iterator[Store]:
    services: Services = request.getfixturevalue("services")
    yield from _of_redis(had(services.valkey).url)


def _of_redis(url: str) -> Iterator[Store]:
    def connect(clock: ManualClock, _store: str) -> LeaseBackend:
        backend = RedisLease(url)
        backend._now_ms = clock.now_ms
        return backend

    yield Store(connect, lambda _backend, namespace: spans_in_redis(url, namespace))


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


class Row(NamedTuple):
    """How to connect to a backend, and how often to read all that it has."""

    make: Callable[[pytest.FixtureRequest], Iterator[Store]]
    look_every: int


BACKENDS = {
    "memory": Row(_memory, look_every=1),
    "sqlite": Row(_sqlite, look_every=1),
    "postgres": Row(_postgres, look_every=4),
    "redis": Row(_redis, look_every=4),
    "valkey": Row(_valkey, look_every=4),
}


class Playground(NamedTuple):
    """A backend under test."""

    store: Store
    look_every: int

    @contextmanager
    def both(self, clock: ManualClock) -> Iterator[Both]:
        """Give out a fresh namespace of it beside the reference."""
        both = Both(clock, self.store, self.look_every)
        try:
            yield both
        finally:
            both.close()

    def play(self, history: Sequence[Operation]) -> None:
        """Play a history on both."""
        clock = ManualClock()
        with self.both(clock) as both:
            Player(both, clock).play(history)
            both.look(clock.now_ms())


@pytest.fixture(params=BACKENDS)
def playground(request: pytest.FixtureRequest) -> Iterator[Playground]:
    row = BACKENDS[request.param]
    for store in row.make(request):
        yield Playground(store, row.look_every)


@pytest.mark.timeout(90)  # thousands of commands, each a round trip where the store is a server
@settings(
    derandomize=True,
    database=None,
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # the store is shared, each history has a namespace
)
@given(history=HISTORIES)
def test_same_history_same_replies_and_records(
    playground: Playground, history: Sequence[Operation]
) -> None:
    playground.play(history)


@pytest.mark.parametrize("seed", range(2))
def test_same_long_history_same_replies_and_records(playground: Playground, seed: int) -> None:
    dice = random.Random(seed)
    playground.play([random_operation(dice) for _ in range(1_000)])


@pytest.mark.parametrize("seed", range(4))
def test_same_wild_commands_same_replies_and_records(playground: Playground, seed: int) -> None:
    clock = ManualClock()
    with playground.both(clock) as both:
        wild = Wild(random.Random(seed), clock, both)
        for _ in range(500):
            wild.step()
        both.compare_records()
        both.compare_pruned(WILD_JOBS)


@pytest.mark.parametrize("seed", range(4))
def test_same_spans_of_what_was_pruned_and_same_claims_after_it(
    playground: Playground, seed: int
) -> None:
    clock = ManualClock()
    with playground.both(clock) as both:
        pruner = Pruner(random.Random(seed), clock, both)
        for _ in range(150):
            pruner.step()
        assert both.most_spans == PRUNED_SPANS
        assert both.ahead > 10
