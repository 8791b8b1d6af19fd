"""A lease backend in a file on one host: the embedded default."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, ClassVar, Optional, TypeVar, Union

from leasecron_sync.backends import _local
from leasecron_sync.backends._sqlite_lanes import Lane, close_before_forks, was_inherited
from leasecron_sync.backends._sqlite_schema import make_tables, read_meta, use_log
from leasecron_sync.backends._sqlite_tables import SQLiteTables
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import (
    STORE_FORMAT,
    JobSpan,
    JobStamp,
    JobStanding,
    JobSummary,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    Pending,
    Pruned,
    RenewReply,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    StoreInfo,
)

T = TypeVar("T")

_logger = logging.getLogger("leasecron_sync.backends.sqlite")
_clock = SystemClock()

BRIDGED_STEP_MS = 10_000
"""The host's clock may step back this far before the newest time in the file is given up."""

CLOSE_S = 0.1
"""How long closing waits for a call that is under way."""

# A write locks the file at once: a transaction that begins as a reader cannot wait for its turn.
WRITE = "BEGIN IMMEDIATE"
READ = "BEGIN"

_REJECTED = (
    "no such table",  # of a read: nothing was ever written to this file
    "readonly database",
    "database or disk is full",
    "malformed",
    "permission denied",
    "not authorized",
)


class SQLiteLease(LeaseBackend):
    """Keeps leases in an SQLite file that all instances on one host open.

    The file must lie on a local disk: on a network file system SQLite's locks do not hold, and
    two instances could win one run. There is no clock but the host's: a step of the host's clock
    ahead by more than the rest of a lease makes a live lease look lapsed. A file that is deleted
    or replaced under way forgets its runs; this is noticed before the next claim and logged, and
    what was claimed within ``catch_up_ms`` may run again.

    Args:
        path: The file; made when missing, in a folder that exists. It may hold other tables, all
            names used here start with ``leasecron_``.

    Raises:
        ValueError: The path is empty or ``:memory:``, which no other process could open.
    """

    name: ClassVar[str] = "sqlite-lease"

    # Tests put a reading of their own here; everything else uses the host's clock.
    _now_ms: Callable[[], int] = _clock.now_ms

    def __init__(self, path: Union[str, os.PathLike[str]]) -> None:
        self._path = os.fspath(path)
        if "://" in self._path:
            message = (
                "SQLiteLease takes a path, not a URL: write SQLiteLease('jobs.db') or "
                "Scheduler('sqlite:///jobs.db')"
            )
            raise ValueError(message)
        if not self._path or self._path == ":memory:" or "\0" in self._path:
            message = (
                f"SQLiteLease needs the path of a file, not {self._path!r}: for tests within one "
                "process use MemoryLease()"
            )
            raise ValueError(message)
        self._settings: Optional[BackendSettings] = None
        self._make_lanes()
        self._identity: Optional[tuple[int, int]] = None
        self._store_id = ""
        close_before_forks(self)

    def lanes(self) -> tuple[Lane, ...]:
        """Return the connections: one for the timer, the heartbeat and settlements each."""
        return self._timer_lane, self._renew_lane, self._settle_lane

    def _make_lanes(self) -> None:
        self._timer_lane = Lane()
        self._renew_lane = Lane()
        self._settle_lane = Lane()

    def __repr__(self) -> str:
        """Show the path."""
        return f"SQLiteLease({self._path!r})"

    def open(self, settings: BackendSettings) -> None:
        self._settings = settings

    def close(self) -> None:
        self._settings = None
        for lane in self.lanes():
            # A thread that is still in a call drops its connection when the call ends.
            if lane.lock.acquire(timeout=CLOSE_S):
                try:
                    lane.drop()
                finally:
                    lane.lock.release()

    def discard(self) -> None:
        for lane in self.lanes():
            lane.abandon()
        self._make_lanes()
        self._settings = None

    def probe(self) -> StoreInfo:
        if Path(self._path).is_dir():
            message = f"the SQLite file {self._path!r} is a folder: name a file in it"
            raise StoreUnsupported(message)
        folder = Path(self._path).absolute().parent
        if not folder.is_dir():
            message = f"the folder {str(folder)!r} for the SQLite file does not exist: make it"
            raise StoreUnsupported(message)

        def work(tables: SQLiteTables, now_ms: int) -> StoreInfo:
            del tables
            return StoreInfo(f"SQLite {sqlite3.sqlite_version}", now_ms, self._store_id)

        return self._write(self._timer_lane, work)

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        return self._write(
            self._timer_lane,
            lambda tables, now_ms: _local.register_jobs(tables, jobs, now_ms, self._store_id),
        )

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        return self._write(
            self._timer_lane, lambda tables, now_ms: _local.claim(tables, claims, now_ms)
        )

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        return self._write(
            self._renew_lane, lambda tables, now_ms: _local.renew(tables, leases, lease_ms, now_ms)
        )

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        return self._write(
            self._settle_lane,
            lambda tables, now_ms: _local.settle(tables, lease, settlement, now_ms),
        )

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        asker = self._opened().instance_id
        return self._read(lambda tables, now_ms: _local.pending(tables, jobs, asker, limit, now_ms))

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        return self._read(lambda tables, _now_ms: [tables.states(span) for span in spans])

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        return self._read(lambda tables, _now_ms: tables.history(job, limit))

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        return self._read(lambda tables, _now_ms: tables.summaries(limit))

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        return self._write(
            self._timer_lane,
            lambda tables, now_ms: _local.prune(tables, older_than_ms, limit, now_ms),
        )

    # -- one step of the store -----------------------------------------------------------------

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = f"the SQLite store {self._path!r} is closed"
            raise StoreUnavailable(message)
        return self._settings

    def _write(self, lane: Lane, work: Callable[[SQLiteTables, int], T]) -> T:
        return self._step(lane, work, begin=WRITE)

    def _read(self, work: Callable[[SQLiteTables, int], T]) -> T:
        return self._step(self._timer_lane, work, begin=READ)

    def _step(self, lane: Lane, work: Callable[[SQLiteTables, int], T], *, begin: str) -> T:
        settings = self._opened()
        deadline_ms = _clock.steady_ms() + settings.call_timeout_ms
        if not lane.lock.acquire(timeout=settings.call_timeout_ms / 1000):
            message = f"another call on the SQLite file {self._path!r} did not end in time"
            raise StoreUnavailable(message)
        try:
            if begin == READ and self._file_identity() is None:
                message = f"the SQLite file {self._path!r} does not exist"
                raise StoreUnavailable(message)
            tables, connection = self._connected(lane, settings, deadline_ms)
            if not lane.prepared and begin == WRITE:
                use_log(connection, _clock, deadline_ms)
                self._prepare(connection)
                lane.prepared = True
            elif not lane.prepared:
                self._check_format(read_meta(connection))
            connection.execute(f"PRAGMA busy_timeout = {_busy_ms(deadline_ms)}")
            return self._transaction(tables, connection, work, begin=begin)
        except sqlite3.Error as error:
            lane.drop()
            raise self._translated(error) from error
        except OutcomeUnknown:
            lane.drop()
            raise
        finally:
            if self._settings is None:  # closed meanwhile
                lane.drop()
            lane.lock.release()

    def _transaction(
        self,
        tables: SQLiteTables,
        connection: sqlite3.Connection,
        work: Callable[[SQLiteTables, int], T],
        *,
        begin: str,
    ) -> T:
        connection.execute(begin)
        try:
            changes = connection.total_changes
            now_ms, stored_ms = self._store_now(connection)
            result = work(tables, now_ms)
            if connection.total_changes != changes and now_ms != stored_ms:
                connection.execute(
                    "UPDATE leasecron_meta SET value = ? WHERE name = 'clock_ms'", (str(now_ms),)
                )
        except BaseException:
            tables.forget()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            message = f"committing to the SQLite file {self._path!r} failed: {error}"
            raise OutcomeUnknown(message) from error
        return result

    def _store_now(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return the store's clock: the host's, without its small steps back."""
        rows = connection.execute(
            "SELECT value FROM leasecron_meta WHERE name = 'clock_ms'"
        ).fetchall()
        try:
            stored_ms = int(rows[0][0])
        except (IndexError, ValueError) as error:
            message = f"the SQLite file {self._path!r} is damaged: it has no clock"
            raise StoreRejected(message) from error
        now_ms = self._now_ms()
        if now_ms >= stored_ms:
            return now_ms, stored_ms
        if stored_ms - now_ms <= BRIDGED_STEP_MS:
            return stored_ms, stored_ms
        _logger.warning(
            "the clock stepped back behind the newest time in the file path=%r step_ms=%d",
            self._path,
            stored_ms - now_ms,
        )
        return now_ms, stored_ms

    # -- connections ---------------------------------------------------------------------------

    def _connected(
        self, lane: Lane, settings: BackendSettings, deadline_ms: int
    ) -> tuple[SQLiteTables, sqlite3.Connection]:
        if lane.connection is not None and lane.identity != self._file_identity():
            lane.drop()
        if lane.connection is None or lane.tables is None:
            if was_inherited(self._file_identity()):
                message = (
                    f"this process was forked while a call on the SQLite file {self._path!r} hung, "
                    "and cannot use the file: start a new process"
                )
                raise StoreUnsupported(message)
            lane.connection = sqlite3.connect(
                self._path,
                timeout=_busy_ms(deadline_ms) / 1000,
                isolation_level=None,
                check_same_thread=False,
            )
            lane.tables = SQLiteTables(lane.connection, settings.namespace)
            lane.identity = self._file_identity()
            self._note_identity(lane.identity)
        return lane.tables, lane.connection

    def _file_identity(self) -> Optional[tuple[int, int]]:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _note_identity(self, identity: Optional[tuple[int, int]]) -> None:
        before, self._identity = self._identity, identity
        if before is not None and before != identity:
            _logger.error(
                "the SQLite file was deleted or replaced, what was claimed in it may run again "
                "path=%r",
                self._path,
            )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the file a store, unless it is one; reads alone leave a file as it is."""
        # NORMAL may forget the last commits when the power fails: a claim could be won twice.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(WRITE)
        try:
            make_tables(connection)
            meta = read_meta(connection)
            self._check_format(meta)
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        self._store_id = meta["store_id"]

    def _check_format(self, meta: Mapping[str, Any]) -> None:
        found = meta.get("format", "no")
        if found != str(STORE_FORMAT):
            message = (
                f"the SQLite file {self._path!r} has store format {found}, this version of "
                f"leasecron_sync reads {STORE_FORMAT}: use a version that knows it"
            )
            raise StoreUnsupported(message)

    def _translated(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        message = f"SQLite file {self._path!r}: {text}"
        if "readonly" in text or "unable to open" in text:
            message += (
                f": user {os.geteuid()} must be able to read and write the file and its folder, "
                "where SQLite keeps two files beside it"
            )
        if "not a database" in text:
            return StoreUnsupported(f"{message}: choose another path")
        if any(part in text for part in _REJECTED):
            return StoreRejected(message)
        # Nothing was committed: the transaction was rolled back, or never began.
        return StoreUnavailable(message)


def _busy_ms(deadline_ms: int) -> int:
    """Return how long to wait for the file; a quarter of the time is left for the work itself."""
    return max(1, (deadline_ms - _clock.steady_ms()) * 3 // 4)
