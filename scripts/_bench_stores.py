"""The kinds of stores that bench.py knows.

A store whose kind has no class of its own is measured without a floor. To add one, derive from
``Store``, fill in what the kind can do, and enter its URL scheme in ``KINDS``. Those of claims are
in ``_bench_claim_stores.py``.
"""

from __future__ import annotations

from leasecron_sync import connect, connect_lease
from leasecron_sync.backends.base import ClaimBackend
from scripts._bench_claim_stores import claim_store_of
from scripts._bench_postgres import PostgresStore
from scripts._bench_redis import RedisStore
from scripts._bench_sqlite import SQLiteStore
from scripts._bench_store import AnyStore, Store


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
    """Return the store of leases that a URL names.

    Raises:
        ValueError: It names none.
    """
    connect_lease(url)
    return KINDS.get(url.partition(":")[0].lower(), Store)(url)


def any_store_of(url: str) -> AnyStore:
    """Return the store that a URL names, of leases or of claims.

    Raises:
        ValueError: It names none.
    """
    backend = connect(url)
    return claim_store_of(url, backend) if isinstance(backend, ClaimBackend) else store_of(url)
