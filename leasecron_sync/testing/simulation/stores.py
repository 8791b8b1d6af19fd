"""Stores that a history is played on: in memory, in an SQLite file, or of another backend."""
# It reaches into the backends of this package, to share a store and to set its clock.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import contextlib
import importlib
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any, Callable, Final, Optional, Protocol

from leasecron_sync.backends._sqlite_past import BRIDGED_STEP_MS
from leasecron_sync.backends.base import Backend, ClaimBackend, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease, MemoryStore
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.testing.memory import MemoryClaim

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it


PROBE_MS: Final = 1_700_000_000_000
"""Reading of the clock of a store that is made to see what it can do."""


class StoreError(ValueError):
    """A store that cannot be simulated; the text says why."""


class Store(Protocol):
    """One store of one history.

    Attributes:
        family: ``"lease"`` or ``"claim"``.
        empties: Whether it can lose its data.
    """

    family: str
    empties: bool

    def connect(self) -> Backend:
        """Return a backend for one start of an instance."""
        ...

    def now_ms(self) -> int:
        """Return its clock, as it decides by it."""
        ...

    def stepped(self) -> None:
        """Note that its clock was set."""
        ...

    def empty(self) -> None:
        """Lose all data."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


Clock = Callable[[], int]
MakeStore = Callable[[str, Clock], Store]
"""Makes the store of one history from a name that no other has and from its clock."""


class InMemory:
    """A lease store in this process."""

    family = "lease"
    empties = True

    def __init__(self, name: str, clock: Clock) -> None:
        self._clock = clock
        self._store = MemoryStore()
        self._number = 1
        self._store.store_id = f"{name} 1"

    def connect(self) -> Backend:
        """Return a backend on this store."""
        backend = MemoryLease()
        backend._store = self._store
        backend._now_ms = self._clock
        return backend

    def now_ms(self) -> int:
        """Return its clock."""
        return self._clock()

    def stepped(self) -> None:
        """Its clock is nothing but the one it was given."""

    def empty(self) -> None:
        """Lose all data."""
        self._number += 1
        self._store.namespaces.clear()
        self._store.store_id = f"{self._store.store_id.split()[0]} {self._number}"

    def close(self) -> None:
        """There is nothing to leave behind."""


class ClaimsInMemory:
    """A claim store in this process."""

    family = "claim"
    empties = True

    def __init__(self, name: str, clock: Clock) -> None:
        del name
        self._clock = clock
        self._store = MemoryClaim()._store

    def connect(self) -> Backend:
        """Return a backend on this store."""
        backend = MemoryClaim()
        backend._store = self._store
        backend._now_ms = self._clock
        return backend

    def now_ms(self) -> int:
        """Return its clock."""
        return self._clock()

    def stepped(self) -> None:
        """Its clock is nothing but the one it was given."""

    def empty(self) -> None:
        """Forget all claims."""
        self._store.claims.clear()

    def close(self) -> None:
        """There is nothing to leave behind."""


class InSQLite:
    """A lease store in an SQLite file, in a temporary folder."""

    family = "lease"
    empties = True

    def __init__(self, name: str, clock: Clock) -> None:
        del name
        self._clock = clock
        parent = str(MEMORY_FOLDER) if MEMORY_FOLDER.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="leasecron-simulated-", dir=parent))
        self._path = self._folder / "store.db"
        self._bridged_ms = 0

    def connect(self) -> Backend:
        """Return a backend on this file."""
        backend = SQLiteLease(self._path)
        backend._now_ms = self._clock
        return backend

    def now_ms(self) -> int:
        """Return the host's clock, or the newest time in the file if that is a bit ahead of it."""
        now_ms = self._clock()
        if now_ms < self._bridged_ms:
            self.stepped()  # a newest time too far ahead is given up by whoever writes next
        if now_ms < self._bridged_ms <= now_ms + BRIDGED_STEP_MS:
            return self._bridged_ms
        return now_ms

    def stepped(self) -> None:
        """Look up the time in the file: behind it the store's clock stands still."""
        self._bridged_ms = 0
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(
                sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True)
            ) as connection,
        ):
            rows = connection.execute("SELECT value FROM leasecron_meta WHERE name = 'clock_ms'")
            self._bridged_ms = int(rows.fetchone()[0])

    def empty(self) -> None:
        """Delete the file."""
        self._bridged_ms = 0
        for path in self._folder.iterdir():
            path.unlink()

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Foreign:
    """A store of another backend, made by a function of its author.

    Args:
        factory: See ``load``.
        name: Name of the store.
        clock: Its clock.
    """

    def __init__(self, factory: Any, name: str, clock: Clock) -> None:  # noqa: ANN401 - see load()
        self._factory, self._name, self._clock = factory, name, clock
        self.empties = hasattr(factory, "empty")
        self.family = self.connect().family

    def connect(self) -> Backend:
        """Return a backend on this store."""
        backend = self._factory(self._name, self._clock)
        if not isinstance(backend, (LeaseBackend, ClaimBackend)):
            message = f"the factory returned {backend!r}, not a LeaseBackend or ClaimBackend"
            raise StoreError(message)
        return backend

    def now_ms(self) -> int:
        """Return its clock."""
        now_ms: Optional[Callable[[str], int]] = getattr(self._factory, "now_ms", None)
        return self._clock() if now_ms is None else now_ms(self._name)

    def stepped(self) -> None:
        """It reads the clock by itself."""

    def empty(self) -> None:
        """Lose all data."""
        self._factory.empty(self._name)

    def close(self) -> None:
        """Leave nothing behind, where the author has a way to."""
        close: Optional[Callable[[str], object]] = getattr(self._factory, "close", None)
        if close is not None:
            close(self._name)


BUILT_IN: dict[str, dict[str, MakeStore]] = {
    "memory": {"lease": InMemory, "claim": ClaimsInMemory},
    "sqlite": {"lease": InSQLite},
}
"""Stores of this package by name and family."""


def load(backend: str) -> dict[str, MakeStore]:
    """Return how a store is made, by family.

    Args:
        backend: ``memory``, ``sqlite``, or ``MODULE:FACTORY``. The factory is called as
            ``factory(name, clock)`` for each start of an instance and returns a backend: on the
            same store for the same name, on an empty one for a name that it does not know. The
            backend decides by ``clock()``, milliseconds since the epoch, and by no other clock.
            The factory may have attributes: ``empty(name)`` loses the data of a store, as if it
            had been set up anew; ``now_ms(name)`` returns the clock where the store does not
            decide by ``clock()`` as it is; ``close(name)`` removes a store.

    Raises:
        StoreError: There is no such backend, or the factory cannot be used.
    """
    if backend in BUILT_IN:
        return BUILT_IN[backend]
    module, colon, attribute = backend.partition(":")
    if not colon or not module or not attribute:
        message = (
            f"unknown backend {backend!r}: name one of {', '.join(BUILT_IN)}, or MODULE:FACTORY"
        )
        raise StoreError(message)
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        message = f"backend {backend!r} cannot be loaded: {type(error).__name__}: {error}"
        raise StoreError(message) from error
    if not callable(factory):
        message = f"backend {backend!r} is {factory!r}: name a function of (name, clock)"
        raise StoreError(message)

    def make(name: str, clock: Clock) -> Store:
        return Foreign(factory, name, clock)

    try:
        probe = Foreign(factory, "probe", lambda: PROBE_MS)
        family = probe.family
        probe.close()
    except Exception as error:
        message = (
            f"backend {backend!r} cannot be used: {type(error).__name__}: {error}; it is called as "
            "factory(name, clock) and returns a LeaseBackend or ClaimBackend"
        )
        raise StoreError(message) from error
    return {family: make}


def left_out(makers: dict[str, MakeStore]) -> list[str]:
    """Return what stores of these makers cannot do, so that no history has it."""
    lacking: list[str] = []
    for make in makers.values():
        store = make("probe", lambda: PROBE_MS)
        if not store.empties:
            lacking.append("stores that lose their data are left out: it has no empty(name)")
        store.close()
    return lacking
