"""Connections of an SQLite store, one for each role, and what a fork does to them.

SQLite keeps account of a process's locks by file. A child that inherits the account with a
connection believes in locks that it does not have, whatever connections it opens itself; another
process that thinks it is the last one may then take the log away from under it. So there is
nothing to inherit: every connection is closed before a fork, and made anew when it is needed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Sequence
from typing import Optional, Protocol

from leasecron_sync.backends._sqlite_tables import SQLiteTables

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

FORK_S = 5.0
"""How long a fork waits for a call that is under way; a call has its own time-out."""

Identity = tuple[int, int]
"""Device and inode of a file."""


class Lane:
    """One connection and the lock around it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Optional[sqlite3.Connection] = None
        self.tables: Optional[SQLiteTables] = None
        self.prepared = False
        self.identity: Optional[Identity] = None

    def drop(self) -> None:
        """Close the connection."""
        connection, self.connection, self.tables = self.connection, None, None
        self.prepared = False
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error as error:
                _logger.debug("closing a connection failed error=%r", str(error))

    def abandon(self) -> None:
        """Forget the connection without closing it, in a child that inherited it."""
        if self.connection is not None:
            _abandoned.append(self.connection)
        self.connection = self.tables = None


class Store(Protocol):
    """What has lanes, and can forget them."""

    def lanes(self) -> Sequence[Lane]:
        """Return its lanes."""
        ...

    def discard(self) -> None:
        """Forget them."""
        ...


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_held: dict[int, list[Lane]] = {}  # by the thread that forks
_hooked = threading.Lock()

# Where a call did not end in time for the fork, its connection stays referenced in the child, and
# unused, for ever: closing it could harm the parent's file. The child leaves such a file alone.
_abandoned: list[sqlite3.Connection] = []
_inherited: set[Identity] = set()


def close_before_forks(store: Store) -> None:
    """Have a store's connections closed before every fork of this process."""
    _stores.add(store)
    if _hooked.acquire(blocking=False):  # once in a process, and its children
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child
        )


def was_inherited(identity: Optional[Identity]) -> bool:
    """Tell whether this process inherited a connection to a file, and must not use it."""
    return identity in _inherited


def _before_fork() -> None:
    held = _held[threading.get_ident()] = []
    for store in list(_stores):
        for lane in store.lanes():
            if lane.lock.acquire(timeout=FORK_S):
                held.append(lane)
                lane.drop()


def _after_fork() -> None:
    for lane in _held.pop(threading.get_ident(), []):
        lane.lock.release()


def _in_child() -> None:
    _held.clear()
    for store in list(_stores):
        for lane in store.lanes():
            if lane.connection is not None and lane.identity is not None:
                _inherited.add(lane.identity)
        store.discard()
