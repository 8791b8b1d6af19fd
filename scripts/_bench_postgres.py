"""PostgreSQL as bench.py drives it raw."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Callable, Optional

from leasecron_sync import connect_lease
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.backends.postgres import PostgresLease
from scripts._bench_store import Floor, Store, Winners

SETTINGS = ("fsync", "synchronous_commit", "shared_buffers")


class PostgresFloor(Floor):
    """One table, one connection of psycopg2 in autocommit."""

    insert_text = "INSERT ... ON CONFLICT DO NOTHING in one round trip, committed"
    batch_text = "as many of these in one round trip, which is one transaction"
    update_text = "as many UPDATE by key in one round trip"
    set_text = "one INSERT of as many rows from arrays"

    def __init__(self, lease: PostgresLease) -> None:
        self._table = f"bench_floor_{secrets.token_hex(4)}"
        self._connection = connected(lease)
        self._cursor = self._connection.cursor()
        self._cursor.execute(f"CREATE TABLE {self._table} (key bigint PRIMARY KEY, value text)")
        self._next = self._updates = 0
        self._value = "x" * 100

    def insert(self, count: int) -> None:
        rows = [(number, self._value) for number in self._new(count)]
        self._batch(f"INSERT INTO {self._table} VALUES (%s, %s) ON CONFLICT DO NOTHING", rows)  # noqa: S608 - its own table

    def insert_set(self, count: int) -> None:
        self._cursor.execute(
            f"INSERT INTO {self._table} SELECT * FROM unnest(%s::bigint[], %s::text[]) "  # noqa: S608 - its own table
            "ON CONFLICT DO NOTHING",
            (list(self._new(count)), [self._value] * count),
        )

    def update(self, count: int) -> None:
        self._updates += 1
        value = f"{self._updates:0{len(self._value)}}"
        rows = [(value, number) for number in range(count)]
        self._batch(f"UPDATE {self._table} SET value = %s WHERE key = %s", rows)  # noqa: S608 - its own table

    def _new(self, count: int) -> range:
        first, self._next = self._next, self._next + count
        return range(first, self._next)

    def _batch(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        from psycopg2.extras import execute_batch

        execute_batch(self._cursor, statement, rows, page_size=len(rows))

    def close(self) -> None:
        self._cursor.execute(f"DROP TABLE {self._table}")
        self._connection.close()


class PostgresWinners(Winners):
    """One table, one connection in autocommit."""

    def __init__(self, lease: PostgresLease) -> None:
        self._connection = connected(lease)
        self._cursor = self._connection.cursor()
        self._cursor.execute("CREATE TABLE IF NOT EXISTS bench_winners (key text PRIMARY KEY)")

    def win(self, keys: Sequence[str]) -> list[str]:
        # In one order in all processes: else two of them would wait for each other.
        self._cursor.execute(
            "INSERT INTO bench_winners SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING "
            "RETURNING key",
            (sorted(keys),),
        )
        return [key for (key,) in self._cursor.fetchall()]

    def remove(self) -> None:
        self._cursor.execute("DROP TABLE bench_winners")

    def close(self) -> None:
        self._connection.close()


class PostgresStore(Store):
    """A PostgreSQL database."""

    def facts(self) -> dict[str, str]:
        with closing(connected(self._lease())) as connection, connection.cursor() as cursor:
            found: dict[str, str] = {}
            for name in SETTINGS:
                cursor.execute(f"SHOW {name}")
                found[name] = cursor.fetchone()[0]
        return {**super().facts(), **found}

    def make_floor(self) -> Floor:
        return PostgresFloor(self._lease())

    def make_winners(self) -> Optional[Winners]:
        return PostgresWinners(self._lease())

    def fill(self, namespace: str, job: str, count: int) -> bool:
        lease = self._lease()
        with closing(connected(lease)) as connection, connection.cursor() as cursor:
            cursor.execute(_filled(lease, "SELECT * FROM {run} LIMIT 0"))
            names = [column.name for column in cursor.description]
            copied = ", ".join("n" if name == "scheduled_ms" else f"r.{name}" for name in names)
            statement = (
                f"INSERT INTO {{run}} ({', '.join(names)}) SELECT {copied} "  # noqa: S608 - names of columns
                "FROM generate_series(1, %(count)s) AS n CROSS JOIN (SELECT r.* FROM {run} r "
                "JOIN {job} j ON j.id = r.job_id JOIN {space} s ON s.id = j.space_id "
                "WHERE s.name = %(space)s AND j.name = %(job)s AND r.settled_ms IS NOT NULL "
                "LIMIT 1) r"
            )
            values: Mapping[str, object] = {"count": count, "space": namespace, "job": job}
            cursor.execute(_filled(lease, statement), values)
            # What the server would do in the background, and in the middle of the measurement.
            cursor.execute(_filled(lease, "VACUUM (ANALYZE) {run}"))
            _checkpoint(cursor)
        return True

    def empty_twin(self) -> Store:
        return PostgresTwin(self.url)

    def count_transactions(self, backend: LeaseBackend) -> Callable[[], int]:
        assert isinstance(backend, PostgresLease)
        made: Counter[None] = Counter()
        step = backend._call  # noqa: SLF001 - the one place where a transaction is made

        def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - see above
            made[None] += 1
            return step(*arguments, **options)

        backend._call = counted  # type: ignore[method-assign]  # noqa: SLF001
        return lambda: made[None]

    def _lease(self) -> PostgresLease:
        lease = connect_lease(self.url)
        assert isinstance(lease, PostgresLease)
        return lease


class PostgresTwin(PostgresStore):
    """Another schema of the same database, which goes away with its tables."""

    def __init__(self, url: str) -> None:
        self._schema = f"bench_{secrets.token_hex(4)}"
        place, _, query = url.partition("?")
        kept = [part for part in query.split("&") if part and not part.startswith("schema=")]
        super().__init__(f"{place}?{'&'.join([*kept, f'schema={self._schema}'])}")

    def close(self) -> None:
        with closing(connected(self._lease())) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP SCHEMA IF EXISTS {self._schema} CASCADE")


def connected(lease: PostgresLease) -> Any:  # noqa: ANN401 - of a package imported late
    """Return a connection to the same database, each statement a transaction."""
    import psycopg2

    connection = psycopg2.connect(lease._dsn)  # noqa: SLF001 - as the URL says, without what is ours
    connection.autocommit = True
    return connection


def _filled(lease: PostgresLease, statement: str) -> str:
    names = lease._names  # noqa: SLF001 - the raw tables
    for table in ("run", "job", "space"):
        statement = statement.replace(f"{{{table}}}", f"{{schema}}.{{prefix}}{table}")
    return names.filled(statement)


def _checkpoint(cursor: Any) -> None:  # noqa: ANN401 - see above
    from psycopg2.errors import InsufficientPrivilege

    try:
        cursor.execute("CHECKPOINT")
    except InsufficientPrivilege:  # then the server makes it when it likes
        return
