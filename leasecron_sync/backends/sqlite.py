"""A lease backend in a file on one host: the embedded default."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Callable, ClassVar, Optional, TypeVar, Union

from leasecron_sync.backends import _local
from leasecron_sync.backends._group import Group
from leasecron_sync.backends._sqlite_errors import Unusable, is_locked, translated
from leasecron_sync.backends._sqlite_files import Names, check_log, identity
from leasecron_sync.backends._sqlite_forks import giving_way
from leasecron_sync.backends._sqlite_lanes import (
    READ,
    WRITE,
    Lane,
    close_before_forks,
    in_turn,
    leave_files,
    outdated_beside,
    was_inherited,
)
from leasecron_sync.backends._sqlite_past import Past
from leasecron_sync.backends._sqlite_place import check_file, check_place, check_visible, given_path
from leasecron_sync.backends._sqlite_schema import (
    check_format,
    has_log,
    is_whole,
    make_store,
    read_meta,
    use_log,
)
from leasecron_sync.backends._sqlite_tables import SQLiteTables
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import (
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

_clock = SystemClock()

CLOSE_S = 0.1
"""How long closing waits for a call that is under way."""

REHEARSAL_MS = 25
"""How long a rehearsal waits for a locked file at most: soon the runs are due that it is for."""

NOTE = "UPDATE leasecron_meta SET value = ? WHERE name = ?"


class SQLiteLease(LeaseBackend):
    """Keeps leases in an SQLite file that all instances on one host open.

    The file must lie on a local disk: on a network file system SQLite's locks do not hold, and
    two instances could win one run; where that can be seen, the start is refused. There is no clock
    but the host's: a step of the host's clock ahead by more than the rest of a lease makes a live
    lease look lapsed. A file that is deleted or replaced under way forgets its runs; this is
    noticed before the next claim and logged, and what was claimed within ``catch_up_ms`` may run
    again. What is copied over the file in place, past SQLite, damages it.

    Args:
        path: The file; made when missing, in a folder that exists. It may hold other tables, all
            names used here start with ``leasecron_``. A relative path counts from the working
            directory at this moment.

    Raises:
        ValueError: The path is empty or ``:memory:``, which no other process could open, or is
            relative to a working directory that does not exist any more.
    """

    name: ClassVar[str] = "sqlite-lease"

    # Tests put a reading of their own here; everything else uses the host's clock.
    _now_ms: Callable[[], int] = _clock.now_ms

    def __init__(self, path: Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]) -> None:
        # Now, and not at each connection: a daemon changes its working directory.
        self._given, self._path = given_path(path)
        self.path = self._path  # for who only looks
        self._settings: Optional[BackendSettings] = None
        self._make_lanes()
        self._past = Past(self._path)
        close_before_forks(self)

    def lanes(self) -> tuple[Lane, ...]:
        """Return the connections: for the timer, the heartbeat, settlements, and who looks on."""
        return self._timer_lane, self._renew_lane, self._settle_lane, self._people_lane

    def _make_lanes(self) -> None:
        self._timer_lane = Lane()
        self._renew_lane = Lane()
        self._settle_lane = Lane()
        self._people_lane = Lane()
        what = f"settling in the SQLite file {self._path!r}"
        self._settlements: Group[tuple[LeaseRef, Settlement], SettleReply] = Group(
            self._settle_all, _clock, what
        )

    def __repr__(self) -> str:
        """Show the path as it was given."""
        return f"SQLiteLease({self._given!r})"

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
        self._past.forget_threads()
        self._settings = None

    def probe(self) -> StoreInfo:
        warnings = check_place(self._path)
        lane = self._timer_lane

        def work(tables: SQLiteTables, now_ms: int) -> StoreInfo:
            notes = warnings if lane.logged else (*warnings, self._no_log())
            return StoreInfo(f"SQLite {sqlite3.sqlite_version}", now_ms, tables.store_id, notes)

        try:
            return self._write(lane, work)
        except Unusable as error:
            raise StoreUnsupported(str(error)) from error

    def _no_log(self) -> str:
        return (
            f"the SQLite file {self._path!r} cannot have a write-ahead log where it lies: claims "
            "are slower, and whoever reads the file holds them up; put it on another disk"
        )

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        return self._write(
            self._timer_lane,
            lambda tables, now_ms: _local.register_jobs(tables, jobs, now_ms, tables.store_id),
        )

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        return self._write(
            self._timer_lane, lambda tables, now_ms: _local.claim(tables, claims, now_ms)
        )

    def rehearse(self, claims: Sequence[LeaseClaim]) -> None:
        lane, due_ms = self._timer_lane, max(claim.due_ms for claim in claims)
        if not lane.prepared or lane.is_outdated():
            return  # a file is made, or its loss told, by what has an effect

        def work(tables: SQLiteTables, now_ms: int) -> None:
            _local.claim(tables, claims, max(now_ms, due_ms))
            tables.write()
            raise _RehearsalOver

        with suppress(_RehearsalOver):  # whatever it wrote is rolled back
            self._step(lane, work, _clock.steady_ms() + REHEARSAL_MS, begin=WRITE)

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        return self._write(
            self._renew_lane, lambda tables, now_ms: _local.renew(tables, leases, lease_ms, now_ms)
        )

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        # Runs that end at about the same time share a commit.
        return self._settlements.ask((lease, settlement), self._opened().call_timeout_ms)

    def _settle_all(
        self, asked: Sequence[tuple[LeaseRef, Settlement]], deadline_ms: int
    ) -> Sequence[Union[SettleReply, StoreRejected]]:
        return self._step(
            self._settle_lane,
            lambda tables, now_ms: _local.settle_all(tables, asked, now_ms),
            deadline_ms,
            begin=WRITE,
        )

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        asker = self._opened().instance_id
        return self._read(lambda tables, now_ms: _local.pending(tables, jobs, asker, limit, now_ms))

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        return self._read(lambda tables, _now_ms: tables.states_in(spans))

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        return self._read(lambda tables, _now_ms: tables.history(job, limit), self._people_lane)

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        return self._read(lambda tables, _now_ms: tables.summaries(limit), self._people_lane)

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        return self._write(
            self._timer_lane, lambda tables, now: _local.prune(tables, older_than_ms, limit, now)
        )

    # -- one step of the store -----------------------------------------------------------------

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = f"the SQLite store {self._path!r} is closed"
            raise StoreUnavailable(message)
        return self._settings

    def _write(self, lane: Lane, work: Callable[[SQLiteTables, int], T]) -> T:
        return self._step(lane, work, self._deadline_ms(), begin=WRITE)

    def _read(self, work: Callable[[SQLiteTables, int], T], lane: Optional[Lane] = None) -> T:
        return self._step(lane or self._timer_lane, work, self._deadline_ms(), begin=READ)

    def _deadline_ms(self) -> int:
        return _clock.steady_ms() + self._opened().call_timeout_ms

    @giving_way
    def _step(
        self, lane: Lane, work: Callable[[SQLiteTables, int], T], deadline_ms: int, *, begin: str
    ) -> T:
        settings = self._opened()
        self._enter(lane, deadline_ms)
        try:
            if lane.connection is None:
                self._connect(lane, settings, deadline_ms, begin=begin)
            if not lane.prepared and begin == WRITE:
                self._prepare(lane, deadline_ms)
            elif not lane.prepared:
                lane.logged = has_log(lane.opened()[0])
            if begin == WRITE:
                return self._transaction(lane, work, deadline_ms, begin=begin)
            # A read meets a lock where somebody mends the log after a crash.
            return in_turn(
                lambda: self._transaction(lane, work, deadline_ms, begin=begin),
                _busy_ms(deadline_ms),
                _clock,
            )
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not is_locked(error):  # then the connection is as good as before
                lane.drop()
            raise translated(self._path, error) from error
        except (OutcomeUnknown, StoreUnavailable, StoreUnsupported, Unusable):
            lane.drop()
            raise
        finally:
            if self._settings is None:  # closed meanwhile
                lane.drop()
            lane.lock.release()

    def _enter(self, lane: Lane, deadline_ms: int) -> None:
        """Lock a lane; what it has open then are the files that are at their place."""
        while True:
            left_ms = max(0, deadline_ms - _clock.steady_ms())
            if not lane.lock.acquire(timeout=left_ms / 1000):
                message = f"another call on the SQLite file {self._path!r} did not end in time"
                raise StoreUnavailable(message)
            names, former = lane.names, lane.files
            if names is None:
                names, former = outdated_beside(Names(self._path)) or (None, former)
            elif names.lead_to(former):
                names = None
            if names is None:
                return
            lane.lock.release()
            check_visible(self._path)  # what it opened may still be there, and is kept
            gone = identity(names.database) != former.database
            if leave_files(names, former, _clock, deadline_ms):
                if gone:
                    self._past.note_gone(former.database)
                else:
                    self._past.note_log_gone()
            elif _clock.steady_ms() >= deadline_ms:
                message = f"the former SQLite file {self._path!r} is still in use by another call"
                raise StoreUnavailable(message)

    def _transaction(
        self, lane: Lane, work: Callable[[SQLiteTables, int], T], deadline_ms: int, *, begin: str
    ) -> T:
        connection, tables = lane.opened()
        lane.begin(begin, _busy_ms(deadline_ms), _clock)
        try:
            changes = connection.total_changes
            meta = read_meta(connection)
            check_format(self._path, meta)
            now_ms, writes = self._past.look(meta, lane.seen, self._now_ms())
            lane.note_log()
            tables.begin(meta.get("store_id", ""))
            result = work(tables, now_ms)
            tables.write()
            if connection.total_changes != changes:
                writes += 1
                connection.executemany(NOTE, ((str(now_ms), "clock_ms"), (str(writes), "writes")))
            if not lane.logged:  # then a commit waits for those who read
                lane.wait_at_most(_busy_ms(deadline_ms))
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._commit(connection)
        lane.seen = self._past.seen(writes)
        return result

    def _commit(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if is_locked(error) and connection.in_transaction:
                connection.execute("ROLLBACK")
                raise
            message = f"nobody knows whether a commit took effect: {translated(self._path, error)}"
            raise OutcomeUnknown(message) from error

    # -- connections ---------------------------------------------------------------------------

    def _connect(
        self, lane: Lane, settings: BackendSettings, deadline_ms: int, *, begin: str
    ) -> None:
        names, found = Names(self._path), check_file(self._path)
        if found is None and begin == READ:
            check_visible(self._path)
            message = f"the SQLite file {self._path!r} does not exist"
            raise StoreUnavailable(message)
        before = identity(names.database)
        if was_inherited(before):
            message = (
                f"this process was forked while a call on the SQLite file {self._path!r} hung, "
                "and cannot use the file: start a new process"
            )
            raise StoreUnsupported(message)
        if before != self._past.identity:
            check_log(names, _clock, deadline_ms)
        busy_ms = _busy_ms(deadline_ms)
        connection = sqlite3.connect(
            self._path, timeout=busy_ms / 1000, isolation_level=None, check_same_thread=False
        )
        lane.open(connection, SQLiteTables(connection, settings.namespace), names, busy_ms)
        opened = lane.files.database
        if before not in (None, opened) or outdated_beside(names):
            lane.drop()
            message = f"the SQLite file {self._path!r} was replaced while it was opened"
            raise StoreUnavailable(message)
        self._past.note_opened(opened)

    def _prepare(self, lane: Lane, deadline_ms: int) -> None:
        """Make the file a store, unless it is one; reads alone leave a file as it is."""
        connection, _tables = lane.opened()
        # NORMAL may forget the last commits when the power fails: a claim could be won twice.
        connection.execute("PRAGMA synchronous = FULL")
        lane.logged = use_log(connection, _clock, deadline_ms)
        lane.begin(WRITE, _busy_ms(deadline_ms), _clock)
        try:
            if not is_whole(connection):
                make_store(connection, self._path)
            # Deletes nothing. SQLite opens what it may not write without a word, and begins there.
            connection.execute("DELETE FROM leasecron_meta WHERE name = ''")
            if not lane.logged:
                lane.wait_at_most(_busy_ms(deadline_ms))
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        lane.prepared = True


class _RehearsalOver(Exception):
    """Ends a transaction that is to have no effect."""


def _busy_ms(deadline_ms: int) -> int:
    """Return how long to wait for the file; a quarter of the time is left for the work itself."""
    return max(1, (deadline_ms - _clock.steady_ms()) * 3 // 4)
