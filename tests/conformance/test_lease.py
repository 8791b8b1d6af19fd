"""The shipped suite over every lease backend."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Callable

import pytest

from leasecron_sync.backends._redis_scripts import keys_of
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.model import RunKey
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import LeaseConformance
from leasecron_sync.testing.faults import FaultyLease
from tests.conformance.clocks import RunningClock
from tests.services import redis
from tests.services.fixtures import had
from tests.services.postgres import execute, through
from tests.services.server import Server
from tests.services.services import Services


class _OnManualClock(LeaseConformance):
    clock: ManualClock

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)


class TestMemoryLease(_OnManualClock):
    @pytest.fixture
    def backend_factory(self) -> Callable[[], LeaseBackend]:
        clock = self.clock = ManualClock()

        class OnManualClock(MemoryLease):
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        return lambda: OnManualClock(name)


class TestFaultyLeaseWithoutFaults(_OnManualClock):
    @pytest.fixture
    def backend_factory(self) -> Callable[[], LeaseBackend]:
        clock = self.clock = ManualClock()

        class OnManualClock(MemoryLease):
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        return lambda: FaultyLease(OnManualClock(name))


class TestMemoryLeaseOnARunningClock(_OnManualClock):
    """What the cases ask for can be had from a store whose clock goes on by itself, too."""

    slack_ms = 500

    @pytest.fixture
    def backend_factory(self) -> Callable[[], LeaseBackend]:
        clock = self.clock = RunningClock()

        class OnRunningClock(MemoryLease):
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        return lambda: OnRunningClock(name)

    def set_back(self, ms: int) -> None:
        del ms
        pytest.skip("a running clock is not set back")


class TestSQLiteLease(_OnManualClock):
    path: Path

    @pytest.fixture
    def backend_factory(self, tmp_path: Path) -> Callable[[], LeaseBackend]:
        clock = self.clock = ManualClock()

        class OnManualClock(SQLiteLease):
            _now_ms = staticmethod(clock.now_ms)

        self.path = tmp_path / "store.db"
        return lambda: OnManualClock(self.path)

    def plant_unreadable(self, namespace: str, run: RunKey) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            changed = connection.execute(
                "UPDATE leasecron_run SET format = 99 WHERE scheduled_ms = ? AND job_id = ("
                "SELECT j.id FROM leasecron_job j JOIN leasecron_space s ON s.id = j.space_id "
                "WHERE s.name = ? AND j.name = ?)",
                (run.scheduled_ms, namespace, run.job),
            )
            assert changed.rowcount == 1

    @contextmanager
    def locked(self) -> Iterator[None]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield


class TestPostgresLease(_OnManualClock):
    url: str

    @pytest.fixture
    def backend_factory(self, postgres_server: Server) -> Callable[[], LeaseBackend]:
        clock = self.clock = ManualClock()
        self.url = postgres_server.url

        class OnManualClock(PostgresLease):
            _now_ms = staticmethod(clock.now_ms)

        return lambda: OnManualClock(self.url, schema="conformance")

    def plant_unreadable(self, namespace: str, run: RunKey) -> None:
        changed = execute(
            self.url,
            "UPDATE conformance.leasecron_run SET format = 99 WHERE scheduled_ms = %s "
            "AND job_id = (SELECT j.id FROM conformance.leasecron_job j "
            "JOIN conformance.leasecron_space s ON s.id = j.space_id "
            "WHERE s.name = %s AND j.name = %s) RETURNING 1",
            run.scheduled_ms,
            namespace,
            run.job,
        )
        assert len(changed) == 1

    @contextmanager
    def locked(self) -> Iterator[None]:
        import psycopg2

        with closing(psycopg2.connect(self.url)) as connection, connection:
            connection.cursor().execute("LOCK TABLE conformance.leasecron_space")
            yield


class TestPostgresLeaseThroughPgbouncer(TestPostgresLease):
    """Behind a pooler in transaction mode."""

    @pytest.fixture
    def backend_factory(
        self, services: Services, postgres_server: Server
    ) -> Callable[[], LeaseBackend]:
        clock = self.clock = ManualClock()
        self.url = postgres_server.url
        url = through(self.url, had(lambda: services.pgbouncer(postgres_server)))

        class OnManualClock(PostgresLease):
            _now_ms = staticmethod(clock.now_ms)

        return lambda: OnManualClock(url, schema="conformance")


class TestRedisLease(_OnManualClock):
    url: str

    @pytest.fixture
    def backend_factory(self, redis_url: str) -> Callable[[], LeaseBackend]:
        clock = self.clock = ManualClock()
        self.url = redis_url

        class OnManualClock(RedisLease):
            _now_ms = staticmethod(clock.now_ms)

        return lambda: OnManualClock(redis_url)

    def plant_unreadable(self, namespace: str, run: RunKey) -> None:
        runs = keys_of(namespace)[3]
        ending = f":{run.job}:{run.scheduled_ms + 10**15:016d}"
        names = redis.execute(self.url, "HKEYS", runs)
        [member] = [name for name in names if name.decode().endswith(ending)]
        redis.execute(self.url, "HSET", runs, member, '["99"]')

    @contextmanager
    def locked(self) -> Iterator[None]:
        redis.execute(self.url, "CLIENT", "PAUSE", 30_000, "WRITE")
        try:
            yield
        finally:
            redis.execute(self.url, "CLIENT", "UNPAUSE")
