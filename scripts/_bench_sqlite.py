"""SQLite as bench.py drives it raw."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Optional
from urllib.parse import quote, unquote, urlsplit

from leasecron_sync import SQLiteLease
from leasecron_sync.backends.base import LeaseBackend
from scripts._bench_store import CALL_TIMEOUT_MS, Floor, Store, Winners


class SQLiteFloor(Floor):
    """One table, one connection with the settings of ``SQLiteLease``."""

    insert_text = "INSERT ... ON CONFLICT DO NOTHING in BEGIN IMMEDIATE, committed"
    batch_text = "as many of these in one transaction"
    update_text = "as many UPDATE by key in one transaction"

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("DROP TABLE IF EXISTS bench_floor")
        self._connection.execute("CREATE TABLE bench_floor (key INTEGER PRIMARY KEY, value TEXT)")
        self._next = self._updates = 0
        self._value = "x" * 100

    def insert(self, count: int) -> None:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        for number in range(self._next, self._next + count):
            execute(
                "INSERT INTO bench_floor VALUES (?, ?) ON CONFLICT DO NOTHING",
                (number, self._value),
            )
        execute("COMMIT")
        self._next += count

    def update(self, count: int) -> None:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        self._updates += 1  # SQLite does not write what is the same as before
        value = f"{self._updates:0{len(self._value)}}"
        for number in range(count):
            execute("UPDATE bench_floor SET value = ? WHERE key = ?", (value, number))
        execute("COMMIT")

    def close(self) -> None:
        self._connection.execute("DROP TABLE bench_floor")
        self._connection.close()


class SQLiteWinners(Winners):
    """One table, one connection with the settings of ``SQLiteLease``."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(
            path, isolation_level=None, timeout=CALL_TIMEOUT_MS / 1000, check_same_thread=False
        )
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS bench_winners (key TEXT PRIMARY KEY)")

    def win(self, keys: Sequence[str]) -> list[str]:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        won = [
            key
            for key in keys
            if execute(
                "INSERT INTO bench_winners VALUES (?) ON CONFLICT DO NOTHING", (key,)
            ).rowcount
        ]
        execute("COMMIT")
        return won

    def remove(self) -> None:
        self._connection.execute("DROP TABLE bench_winners")

    def close(self) -> None:
        self._connection.close()


class SQLiteStore(Store):
    """An SQLite file."""

    @property
    def path(self) -> str:
        """Path of the file."""
        return unquote(urlsplit(self.url).path[1:])

    def facts(self) -> dict[str, str]:
        return {**super().facts(), "file system": file_system(self.path)}

    def make_floor(self) -> Floor:
        return SQLiteFloor(self.path)

    def make_winners(self) -> Optional[Winners]:
        return SQLiteWinners(self.path)

    def fill(self, namespace: str, job: str, count: int) -> bool:
        with closing(sqlite3.connect(self.path)) as connection:
            found = connection.execute(
                "SELECT j.id FROM leasecron_job j JOIN leasecron_space s ON s.id = j.space_id "
                "WHERE s.name = ? AND j.name = ?",
                (namespace, job),
            ).fetchone()
            columns = [
                row[1] for row in connection.execute("PRAGMA table_info(leasecron_run)").fetchall()
            ]
            copied = ", ".join("n" if name == "scheduled_ms" else name for name in columns)
            with connection:
                connection.execute(
                    "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers "  # noqa: S608 - names of columns
                    "LIMIT ?), model AS (SELECT * FROM leasecron_run WHERE job_id = ? "
                    "AND settled_ms IS NOT NULL LIMIT 1) INSERT INTO leasecron_run "
                    f"({', '.join(columns)}) SELECT {copied} FROM numbers CROSS JOIN model",
                    (count, found[0]),
                )
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return True

    def empty_twin(self) -> Store:
        return TemporarySQLite(str(Path(self.path).absolute().parent))

    def count_transactions(self, backend: LeaseBackend) -> Callable[[], int]:
        assert isinstance(backend, SQLiteLease)
        made: Counter[None] = Counter()
        step = backend._transaction  # noqa: SLF001 - the one place where a transaction is made

        def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - see above
            made[None] += 1
            return step(*arguments, **options)

        backend._transaction = counted  # type: ignore[method-assign]  # noqa: SLF001
        return lambda: made[None]


class TemporarySQLite(SQLiteStore):
    """An SQLite file that goes away with its folder.

    Args:
        below: Where to make the folder; the usual place when left out.
    """

    def __init__(self, below: Optional[str] = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leasecron-bench-", dir=below)
        super().__init__(f"sqlite:///{quote(str(Path(self._folder.name) / 'jobs.db'))}")

    def __str__(self) -> str:
        """Say that it is a temporary one."""
        return f"a temporary SQLite file in {Path(self._folder.name).parent}"

    def close(self) -> None:
        self._folder.cleanup()


def file_system(path: str) -> str:
    """Return the kind of file system that a path lies on, where the platform tells."""
    place = os.path.realpath(path)
    best = ("", "unknown")
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return best[1]
    for line in mounts.splitlines():
        _device, mounted, kind, *_rest = line.split(" ")
        inside = mounted in ("/", place) or place.startswith(f"{mounted}/")
        if inside and len(mounted) >= len(best[0]):
            best = (mounted, kind)
    return best[1]
