"""The three files of an SQLite store, and whether they are still those that a connection opened.

SQLite finds the two files beside the database, the log and its index, by name, and never checks
that they belong to it. Where somebody put another database in place, the former one's log would be
written into it. Where somebody removed the log or its index, processes that have them open and
processes that do not would not see each other's leases.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Optional
from urllib.parse import quote

from leasecron_sync.clock import Clock
from leasecron_sync.errors import StoreUnsupported

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

TURN_MS = 10
"""Pause before the next try to be the one that removes a former log."""

LATER_NS = 2_000_000_000
"""How much later than its log a database may be touched without a doubt: what the log holds is
written to the database right after."""

CHECK_STEPS = 10_000
"""Instructions of SQLite between two looks at the clock."""

Identity = tuple[int, int]
"""Device and inode of a file."""


class Files(NamedTuple):
    """The files that a connection has open; the log and its index are None before it has them."""

    database: Optional[Identity]
    log: Optional[Identity] = None
    log_index: Optional[Identity] = None


class Names:
    """Where the files are.

    Args:
        path: The database, absolute.

    Attributes:
        database: The same.
        real: What it leads to by symbolic links at this moment, where SQLite looks for the others.
        log: The log.
        log_index: Its index.
    """

    def __init__(self, path: str) -> None:
        real = os.path.realpath(path)
        self.database = Path(path)
        self.real = Path(real)
        self.log = Path(real + "-wal")
        self.log_index = Path(real + "-shm")

    def found(self) -> Files:
        """Return the files that are there now."""
        return Files(identity(self.database), identity(self.log), identity(self.log_index))

    def lead_to(self, files: Files) -> bool:
        """Tell whether the files that a connection has open are still there."""
        if identity(self.database) != files.database:
            return False
        if files.log is None:  # it writes no log, and follows by itself when another begins one
            return True
        return identity(self.log) == files.log and identity(self.log_index) == files.log_index


def identity(path: Path) -> Optional[Identity]:
    """Return device and inode of a file; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def complete(connection: sqlite3.Connection) -> None:
    """Write the log of a database that was moved away into it: there it has no log any more."""
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.Error as error:
        _logger.debug("a database that is gone could not be completed error=%r", str(error))


def remove_former_log(names: Names, former: Files, clock: Clock, deadline_ms: int) -> None:
    """Remove a log and its index that are left from a database which is gone.

    The caller has the former files open: as long as somebody has, no other file gets their inodes.
    Instances that remove the same log do it one by one, or the second would take away the new one
    that the first has begun. They lock the folder for that, since it is there for all of them.
    """
    try:
        folder = os.open(names.log.parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _logger.debug("a former log is left where it is error=%r", str(error))
        return
    try:
        while not _locked(folder):
            if clock.steady_ms() + TURN_MS > deadline_ms:
                return
            clock.wait(threading.Event(), TURN_MS)
        for name, file in ((names.log, former.log), (names.log_index, former.log_index)):
            if file is not None and identity(name) == file:
                name.unlink()
    except OSError as error:
        _logger.debug("a former log is left where it is error=%r", str(error))
    finally:
        os.close(folder)


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_log(names: Names, clock: Clock, deadline_ms: int) -> None:
    """Refuse a database beside a log that is not its own, before SQLite joins them for good.

    SQLite writes to the database only what it has written to the log before. A database that was
    touched after its log may have been put in place of another, after a crash that left the log.
    Whether they fit is then asked on a connection that cannot write.

    Raises:
        StoreUnsupported: They do not fit.
    """
    try:
        log, database = names.log.stat(), names.database.stat()
    except OSError:
        return
    later_ns = database.st_ctime_ns - log.st_mtime_ns
    if not log.st_size or not database.st_size or later_ns <= LATER_NS:
        return
    path = str(names.database)
    wait_s = max(0, deadline_ms - clock.steady_ms()) / 4_000
    url = f"file:{quote(os.fsencode(path))}?mode=ro"
    with closing(sqlite3.connect(url, uri=True, timeout=wait_s)) as connection:
        connection.set_progress_handler(
            lambda: int(clock.steady_ms() > deadline_ms - wait_s * 1_000), CHECK_STEPS
        )
        try:
            [(verdict,)] = connection.execute("PRAGMA integrity_check(1)").fetchall()
        except sqlite3.OperationalError as error:  # no time for all of it, locked, not readable
            _logger.info("a log was not held against its database error=%r", str(error))
            return
        except sqlite3.DatabaseError as error:
            verdict = str(error)
    if "not a database" in verdict or verdict == "ok":
        return  # the former is told when the file is opened
    message = (
        f"the SQLite file {path!r} and the log {names.log.name!r} beside it do not fit: the file "
        "was put in place of another, or is damaged; stop all instances, remove "
        f"{names.log.name!r} and {names.log_index.name!r}, which belong to the former file, and "
        "start again"
    )
    raise StoreUnsupported(message)
