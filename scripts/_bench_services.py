"""Servers of its own for bench.py, one after the other, with the defaults of their makers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Callable, Optional

from scripts._bench_broker import Broker
from scripts._bench_claim_stores import ClaimStore
from scripts._bench_crew import BenchError
from scripts._bench_sqlite import TemporarySQLite, file_system
from scripts._bench_store import AnyStore
from scripts._bench_stores import any_store_of
from tests.services.process import ServiceError, ServiceMissing
from tests.services.rabbitmq import RabbitMQServer
from tests.services.server import PrivateServer
from tests.services.services import Services, Sources

SHARED_BUFFERS = "128MB"
SNAPSHOTS = "3600 1 300 100 60 10000"
"""The defaults of the servers, where those of the tests have others."""

Place = Callable[[], AbstractContextManager[AnyStore]]


def places() -> dict[str, Place]:
    """Return a new store of leases of each kind by its name.

    A server runs as long as its store is open.
    """
    found: dict[str, Place] = {"a temporary SQLite file": lambda: closing(TemporarySQLite())}
    for major in Sources(environment={}).majors():
        found[f"PostgreSQL {major or ''}".rstrip()] = _postgres(major)
    found["Redis"] = lambda: _private(lambda services: _snapshots(services.new_redis))
    found["Valkey"] = lambda: _private(lambda services: _snapshots(services.new_valkey))
    return found


def _postgres(major: Optional[int]) -> Place:
    return lambda: _private(
        lambda services: services.new_postgres(major, shared_buffers=SHARED_BUFFERS)
    )


def _snapshots(make: Callable[..., PrivateServer]) -> PrivateServer:
    return make(durable=False, save=SNAPSHOTS)


def claim_places() -> dict[str, Place]:
    """Return a new store for each way to claim, by its name."""
    return {
        "Redis, claims by script": lambda: _private(
            lambda services: _snapshots(services.new_redis), "?strategy=script"
        ),
        "Redis, claims by stream-id": lambda: _private(
            lambda services: _snapshots(services.new_redis), "?strategy=stream-id"
        ),
        "Redis, claims by idmp": lambda: _private(
            lambda services: _snapshots(services.new_redis8), "?strategy=idmp"
        ),
        "NATS, claims": lambda: _private(lambda services: services.new_nats()),
        "RabbitMQ, claims": lambda: _private(lambda services: services.new_rabbitmq()),
    }


@contextmanager
def _private(make: Callable[[Services], PrivateServer], parameters: str = "") -> Iterator[AnyStore]:
    # Nothing that the environment names: they are new, and nobody else uses them.
    with _on_disk(), closing(Services(Sources(environment={}))) as services:
        try:
            server = make(services)
            server.start()
        except (ServiceMissing, ServiceError) as error:
            raise BenchError(str(error)) from error
        with closing(server), closing(any_store_of(f"{server.url}{parameters}")) as store:
            store.known = {"file system": file_system(str(server.home.folder))}
            if isinstance(server, RabbitMQServer) and isinstance(store, ClaimStore):
                store.broker = Broker(server)
            yield store


@contextmanager
def _on_disk() -> Iterator[None]:
    """Have servers keep their data where programs do, which may be in memory for tests."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
