"""Servers of its own for bench.py, one after the other, with the defaults of their makers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Callable, Optional

from scripts._bench_crew import BenchError
from scripts._bench_sqlite import TemporarySQLite
from scripts._bench_store import Store
from scripts._bench_stores import store_of
from tests.services.process import ServiceError, ServiceMissing
from tests.services.server import PrivateServer
from tests.services.services import Services, Sources

SHARED_BUFFERS = "128MB"
SNAPSHOTS = "3600 1 300 100 60 10000"
"""The defaults of the servers, where those of the tests have others."""

Place = Callable[[], AbstractContextManager[Store]]


def places() -> dict[str, Place]:
    """Return a new store of each kind by its name; a server runs as long as its store is open."""
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


@contextmanager
def _private(make: Callable[[Services], PrivateServer]) -> Iterator[Store]:
    # Nothing that the environment names: they are new, and nobody else uses them.
    with closing(Services(Sources(environment={}))) as services:
        try:
            server = make(services)
            server.start()
        except (ServiceMissing, ServiceError) as error:
            raise BenchError(str(error)) from error
        with closing(server), closing(store_of(server.url)) as store:
            yield store
