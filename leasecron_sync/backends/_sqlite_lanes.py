"""Connections of an SQLite store, one for each role, and when all of them have to be closed.

SQLite keeps account of a process's locks by file. A child that inherits the account with a
connection believes in locks that it does not have, whatever connections it opens itself; another
process that thinks it is the last one may then take the log away from under it. So there is
nothing to inherit: every connection is closed before a fork, and made anew when it is needed.

When the files were replaced, no connection to the former ones may be at work in this process
beside one to the new ones: SQLite would take the former index, which both find by its name, for
its own.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Callable, Optional, Protocol, TypeVar

from leasecron_sync.backends._sqlite_errors import Unusable, is_locked
from leasecron_sync.backends._sqlite_files import (
    Files,
    Identity,
    Names,
    complete,
    identity,
    remove_former_log,
)
from leasecron_sync.backends._sqlite_forks import (
    GaveWay,
    Lock,
    begin_fork,
    end_fork,
    forget_forks,
    fork_waits,
    let_calls_go_first,
)
from leasecron_sync.backends._sqlite_past import Seen
from leasecron_sync.backends._sqlite_tables import SQLiteTables
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.errors import StoreUnavailable

T = TypeVar("T")

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

_clock = SystemClock()

FORK_MS = 5_000
"""How long a fork waits, in all, for calls that are under way; a call has its own time-out."""

TURN_MS = 3
"""How long SQLite itself waits for a locked file, before it is tried anew."""

# A write locks the file at once: a transaction that begins as a reader cannot wait for its turn.
WRITE = "BEGIN IMMEDIATE"
READ = "BEGIN"


class Lane:
    """One connection and the lock around it.

    Attributes:
        lock: Held by whoever uses the rest.
        connection: None until it is needed.
        tables: The records, by this connection.
        names: Where the files are that it has open.
        files: The files that it has open.
        prepared: True when it has found or made a store, and may write.
        logged: True when the file has a write-ahead log.
        busy_ms: How long it waits for the file.
        seen: What it saw of the store when it last looked.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.connection: Optional[sqlite3.Connection] = None
        self.tables: Optional[SQLiteTables] = None
        self.names: Optional[Names] = None
        self.files = Files(None)
        self.prepared = self.logged = False
        self.busy_ms = 0
        self.seen = Seen(0, 0)

    def open(
        self, connection: sqlite3.Connection, tables: SQLiteTables, names: Names, busy_ms: int
    ) -> None:
        """Take a new connection."""
        # Before the names: by both, other threads tell whether the files are those at their place.
        self.files = Files(identity(names.database))
        self.connection, self.tables, self.names = connection, tables, names
        self.busy_ms = busy_ms

    def opened(self) -> tuple[sqlite3.Connection, SQLiteTables]:
        """Return the connection, which there must be."""
        assert self.connection is not None
        assert self.tables is not None
        return self.connection, self.tables

    def note_log(self) -> None:
        """Note the log and its index, inside a transaction, when they are open for certain.

        Raises:
            StoreUnavailable: The database was replaced since it was opened; what lies beside it is
                perhaps its successor's.
            Unusable: They are not there: this connection has found them in the memory of another
                one, and other processes would not see what it writes.
        """
        if self.names is None or not self.logged or self.files.log is not None:
            return
        found = self.names.found()
        if found.database != self.files.database:
            message = (
                f"the SQLite file {str(self.names.database)!r} was replaced while it was opened"
            )
            raise StoreUnavailable(message)
        if found.log is None or found.log_index is None:
            message = (
                f"the log of the SQLite file {str(self.names.database)!r} was deleted while this "
                "application has a connection of its own to the file: close that, or start this "
                "process again"
            )
            raise Unusable(message)
        self.files = found

    def wait_at_most(self, busy_ms: int) -> None:
        """Have it wait for the file so long, or a little less; changing that takes a statement."""
        if not self.busy_ms * 9 <= busy_ms * 10 <= self.busy_ms * 10:
            assert self.connection is not None
            self.connection.execute(f"PRAGMA busy_timeout = {busy_ms}")
            self.busy_ms = busy_ms

    def begin(self, how: str, busy_ms: int, clock: Clock) -> None:
        """Begin a transaction; one that writes waits for its turn.

        SQLite tries after waits that grow up to a tenth of a second. Where several write all the
        time, who waits in that way finds the file locked each time, while those who have just
        written go on: its instance would have free slots, and leave the runs to the others.

        Args:
            how: The statement.
            busy_ms: How long to wait for the file at most.
            clock: What the wait is measured by.
        """
        connection, _tables = self.opened()
        if not self.logged:  # then not only the begin waits, but also the end, for those who read
            self.wait_at_most(busy_ms)
            connection.execute(how)
            return
        if self.busy_ms != TURN_MS:
            connection.execute(f"PRAGMA busy_timeout = {TURN_MS}")
            self.busy_ms = TURN_MS
        in_turn(lambda: connection.execute(how), busy_ms, clock)

    def is_outdated(self) -> bool:
        """Tell whether its files are not those at their place any more."""
        names = self.names  # once: who forks in another thread may drop it meanwhile
        return names is not None and not names.lead_to(self.files)

    def drop(self) -> None:
        """Close the connection."""
        outdated, connection = self.is_outdated(), self.connection
        self.tables = self.names = None
        self.prepared = False
        if connection is not None:
            if outdated:
                # Whoever closes last writes the log into the file, unless that is interrupted. This
                # log is not the file's any more, and others may have written to the file since.
                connection.interrupt()
            try:
                connection.close()
            except sqlite3.Error as error:
                _logger.debug("closing a connection failed error=%r", str(error))
        # Afterwards: a signal handler that forks in between must see that there was one.
        self.connection = None

    def abandon(self) -> None:
        """Forget the connection without closing it, in a child that inherited it."""
        if self.connection is not None:
            _abandoned.append(self.connection)
        self.connection = self.tables = self.names = None


def in_turn(call: Callable[[], T], busy_ms: int, clock: Clock) -> T:
    """Make a call again and again while the file is locked, for a while.

    Args:
        call: What to do; where the file is locked it has no effect.
        busy_ms: How long to wait for the file at most.
        clock: What the wait is measured by.

    Raises:
        GaveWay: A fork waits for this process's connections.
    """
    until_ms = clock.steady_ms() + busy_ms
    while True:
        try:
            return call()
        except sqlite3.Error as error:
            if not is_locked(error) or clock.steady_ms() >= until_ms:
                raise
            if fork_waits():
                raise GaveWay from error


class Store(Protocol):
    """What has lanes, and can forget them."""

    def lanes(self) -> Sequence[Lane]:
        """Return its lanes."""
        ...

    def discard(self) -> None:
        """Forget them."""
        ...


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_hooked = threading.Lock()


# Held by whoever closes several lanes.
_closing = Lock()

# Where a call did not end in time for the fork, its connection stays referenced in the child, and
# unused, for ever: closing it could harm the parent's file. The child leaves such a file alone.
_abandoned: list[sqlite3.Connection] = []
_inherited: set[Identity] = set()


def outdated_beside(names: Names) -> Optional[tuple[Names, Files]]:
    """Return files that a connection of this process to the same place still has open.

    Such a connection has to be closed before another is used (``leave_files``).
    """
    for store in _all_stores():
        for lane in store.lanes():
            found, files = lane.names, lane.files
            here = found is not None and names.real in (found.real, found.database)
            if found is not None and here and not found.lead_to(files):
                return found, files
    return None


def leave_files(names: Names, former: Files, clock: Clock, deadline_ms: int) -> bool:
    """Close this process's connections to files that are not those at their place any more.

    Must not be called with a lane's lock held. A new connection to the same database would share
    the former index with one that is left, so either all are closed or none; one that is in a call
    on a database that is gone may end it.

    Returns:
        True when the caller is the one who closed them.
    """
    with _within(_closing, clock, deadline_ms) as mine:
        if not mine:
            return False
        held: list[Lane] = []
        try:
            lanes = [lane for store in _all_stores() for lane in store.lanes()]
            lanes = [lane for lane in lanes if lane.files.database == former.database]
            held.extend(
                lane for lane in lanes if lane.lock.acquire(timeout=_left_s(clock, deadline_ms))
            )
            outdated = [lane for lane in held if lane.is_outdated()]
            gone = identity(names.database) != former.database
            if len(held) < len(lanes) and not gone:
                return False
            logs = [lane.files for lane in outdated if lane.files.log is not None]
            # Not where only a symbolic link leads elsewhere: others are at work on the former.
            if logs and identity(names.real) != former.database:
                assert outdated[0].connection is not None
                complete(outdated[0].connection)
                remove_former_log(names, logs[0], clock, deadline_ms)
            elif logs and identity(names.log) != logs[0].log:
                # By an index that is left, all who open the file would look for a log that is gone.
                index = Files(former.database, None, logs[0].log_index)
                remove_former_log(names, index, clock, deadline_ms)
            for lane in outdated:
                lane.drop()
        finally:
            for lane in held:
                lane.lock.release()
        return bool(outdated)


@contextmanager
def _within(lock: Lock, clock: Clock, deadline_ms: int) -> Generator[bool, None, None]:
    mine = lock.acquire(timeout=_left_s(clock, deadline_ms))
    try:
        yield mine
    finally:
        if mine:
            lock.release()


def _left_s(clock: Clock, deadline_ms: int) -> float:
    return max(0, deadline_ms - clock.steady_ms()) / 1000


def close_before_forks(store: Store) -> None:
    """Have a store's connections closed before every fork of this process."""
    _stores.add(store)
    if _hooked.acquire(blocking=False):  # once in a process, and its children
        os.register_at_fork(before=_before_fork, after_in_parent=end_fork, after_in_child=_in_child)


def was_inherited(file: Optional[Identity]) -> bool:
    """Tell whether this process inherited a connection to a file, and must not use it."""
    return file in _inherited


def _before_fork() -> None:
    fork, thread, end_ms = begin_fork(), threading.get_ident(), _clock.steady_ms() + FORK_MS
    lanes = [(store, lane) for store in _all_stores() for lane in store.lanes()]
    # First the lock around all lanes: whoever has it may be waiting for one that is taken below, or
    # for one that this very thread has, where a signal handler forks in the middle of a call.
    in_call = any(lane.lock.holder == thread and lane.connection is not None for _, lane in lanes)
    if _closing.acquire(timeout=0 if in_call else _left_s(_clock, end_ms)):
        fork.locks.append(_closing)
    let_calls_go_first([lane.lock for _, lane in lanes])
    for store, lane in lanes:
        if lane.lock.holder == thread:
            continue  # in such a call; or for a fork that this one came into, and closed
        if lane.lock.acquire(timeout=_left_s(_clock, end_ms)):
            fork.locks.append(lane.lock)
            lane.drop()
        else:
            _logger.warning(
                "a call did not end in time for a fork, a child that is forked now cannot use the "
                "file store=%r",
                store,
            )


def _all_stores() -> list[Store]:
    while True:
        try:
            return list(_stores)
        except RuntimeError:  # another thread has made a store meanwhile
            continue


def _in_child() -> None:
    global _closing  # noqa: PLW0603 - a thread that is not here may have had it
    _closing = Lock()
    forget_forks()
    for store in list(_stores):
        for lane in store.lanes():
            if lane.connection is not None and lane.files.database is not None:
                _inherited.add(lane.files.database)
        store.discard()
