"""The kinds of stores that bench.py knows.

A store whose kind has no class of its own is measured without a floor. To add one, derive from
``Store``, fill in what the kind can do, and enter its URL scheme in ``KINDS``.
"""

from __future__ import annotations

from leasecron_sync import connect_lease
from scripts._bench_postgres import PostgresStore
from scripts._bench_redis import RedisStore
from scripts._bench_sqlite import SQLiteStore
from scripts._bench_store import Store


class MemoryStore(Store):
    """The memory of this process: no other process sees it."""

    between_processes = False


KINDS: dict[str, type[Store]] = {
    "sqlite": SQLiteStore,
    "postgresql": PostgresStore,
    "postgres": PostgresStore,
    "redis": RedisStore,
    "valkey": RedisStore,
    "unix": RedisStore,
    "memory": MemoryStore,
}


def store_of(url: str) -> Store:
    """Return the store that a URL names.

    Raises:
        ValueError: It names none.
    """
    connect_lease(url)
    return KINDS.get(url.partition(":")[0].lower(), Store)(url)
