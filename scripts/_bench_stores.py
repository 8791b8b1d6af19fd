"""What bench.py needs to know of a kind of store: its floor, its transactions, a long history.

A store whose kind has no class of its own is measured without a floor. To add one, derive from
``Store``, fill in what the kind can do, and enter its URL scheme in ``KINDS``.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Callable, ClassVar, Optional
from urllib.parse import quote, unquote, urlsplit

from leasecron_sync import SQLiteLease, connect_lease
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.backends.urls import hide_credentials

CALLS = ("register", "claim", "settle", "renew", "pending", "states", "prune", "probe")
CALL_TIMEOUT_MS = 5_000


class Floor:
    """The same store, driven raw: the least that a claim or a renewal could cost.

    This one does nothing, for kinds of store that have none here.
    """

    insert_text: ClassVar[str] = "none"
    update_text: ClassVar[str] = "none"

    def insert(self, count: int) -> None:
        """Write new rows unless they are there, in one transaction."""

    def update(self, count: int) -> None:
        """Change rows by their keys, in one transaction; there must be as many."""

    def close(self) -> None:
        """Leave nothing behind."""


class Winners(ABC):
    """Decides by the smallest statement who has a run; for one process, among several."""

    @abstractmethod
    def win(self, keys: Sequence[str]) -> list[str]:
        """Return which of these this process is the first to ask for, in one transaction."""

    @abstractmethod
    def close(self) -> None:
        """Leave no connection behind."""


class Store:
    """A store that instances of one or several processes share.

    Args:
        url: What ``connect_lease`` takes.
    """

    between_processes: ClassVar[bool] = True
    """Whether instances in different processes can meet in it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        """Show the URL without credentials."""
        return hide_credentials(self.url)

    def facts(self) -> dict[str, str]:
        """Return what a reader of the figures should know of it."""
        with closing(self.opened("bench-facts")) as backend:
            return {"store": backend.probe().version}

    def opened(self, namespace: str, instance_id: str = "bench") -> LeaseBackend:
        """Return a new backend, ready for calls."""
        backend = connect_lease(self.url)
        backend.open(BackendSettings(namespace, instance_id, CALL_TIMEOUT_MS))
        return backend

    @contextmanager
    def floor(self) -> Iterator[Floor]:
        """Give its floor, and leave nothing of it behind."""
        floor = self.make_floor()
        try:
            yield floor
        finally:
            floor.close()

    def make_floor(self) -> Floor:
        """Return its floor, if its kind has one here."""
        return Floor()

    def make_winners(self) -> Optional[Winners]:
        """Return what the smallest program would decide by, if this kind has that here."""
        return None

    def fill(self, namespace: str, job: str, count: int) -> bool:
        """Copy a job's only settled record to as many earlier scheduled times, if it can."""
        del namespace, job, count
        return False

    def empty_twin(self) -> Store:
        """Return a store of the same kind in which the history of this one does not weigh."""
        return self

    def count_transactions(self, backend: LeaseBackend) -> Callable[[], int]:
        """Count from now on how often a backend makes its store take a step."""
        calls = count_calls(backend)
        return lambda: sum(calls.values())

    def close(self) -> None:
        """Remove what was made for the figures alone."""


def count_calls(backend: LeaseBackend) -> Counter[str]:
    """Count the calls of a backend from now on, by method."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the method takes and returns
            calls[name] += 1  # workers settle at the same time; one lost count does not matter
            return method(*arguments)

        return call

    for name in CALLS:
        setattr(backend, name, counted(name, getattr(backend, name)))
    return calls


class SQLiteFloor(Floor):
    """One table, one connection with the settings of ``SQLiteLease``."""

    insert_text = "INSERT ... ON CONFLICT DO NOTHING in BEGIN IMMEDIATE, committed"
    update_text = "UPDATE by key in BEGIN IMMEDIATE, committed"

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


class MemoryStore(Store):
    """The memory of this process: no other process sees it."""

    between_processes = False


KINDS: dict[str, type[Store]] = {"sqlite": SQLiteStore, "memory": MemoryStore}


def store_of(url: str) -> Store:
    """Return the store that a URL names.

    Raises:
        ValueError: It names none.
    """
    connect_lease(url)
    return KINDS.get(url.partition(":")[0].lower(), Store)(url)


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
