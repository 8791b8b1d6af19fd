"""Records of one namespace in the tables of an SQLite file."""

from __future__ import annotations

import itertools
import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from leasecron_sync.errors import StoreRejected
from leasecron_sync.model import (
    STORE_FORMAT,
    FormerSchedule,
    JobRecord,
    JobSpan,
    JobSummary,
    RunKey,
    RunRecord,
    RunState,
)
from leasecron_sync.protocol.transition import Span

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

_RUN_FIELDS = (
    "state, token, attempt, failures, hand_overs, holder, decision_id, until_ms, lease_ms, "
    "max_attempts, overlap, takeover_ms, claimed_ms, settled_ms, reason"
)
_RUN_NAMES = ("scheduled_ms", *_RUN_FIELDS.split(", "))
# SQLite keeps a value of any type in a column of any type.
_KINDS: tuple[tuple[type, ...], ...] = (
    (int,), (str,), (int,), (int,), (int,), (int,), (str,), (str,), (int,), (int,), (int,), (int,),
    (int,), (int, type(None)), (int, type(None)), (str,),
)  # fmt: skip
_KINDS_OF_RUNS = frozenset(itertools.product(*_KINDS))
_STATES = {state.value: state for state in RunState}
_RUN_SELECT = ", ".join(f"r.{name}" for name in ("format", *_RUN_NAMES))
_ONE_RUN = f"SELECT {_RUN_SELECT} FROM leasecron_run r WHERE r.job_id = ? AND r.scheduled_ms = ?"
_ADD_RUN = (
    f"INSERT INTO leasecron_run (format, {_RUN_FIELDS}, space_id, job_id, scheduled_ms) "
    f"VALUES ({', '.join('?' * 19)})"
)
_CHANGE_RUN = (
    f"UPDATE leasecron_run SET format = ?, {_RUN_FIELDS.replace(',', ' = ?,')} = ?, space_id = ? "
    "WHERE job_id = ? AND scheduled_ms = ?"
)
_JOB_FIELDS = "last_token, pruned_to_ms, owed_from_ms, fingerprint, former"
_KINDS_OF_JOBS = frozenset(
    itertools.product((int,), (int,), (int, type(None)), (int, type(None)), (str,), (str,))
)
_ONE_JOB = f"SELECT id, {_JOB_FIELDS} FROM leasecron_job WHERE space_id = ? AND name = ?"
_ADD_JOB = f"INSERT INTO leasecron_job (space_id, name, {_JOB_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
_CHANGE_JOB = f"UPDATE leasecron_job SET {_JOB_FIELDS.replace(',', ' = ?,')} = ? WHERE id = ?"
_GRANT_JOB = "UPDATE leasecron_job SET last_token = ? WHERE id = ?"
# Named, since SQLite would rather walk all runs of a job, or all of them, settled or not.
_UNSETTLED = "INDEXED BY leasecron_run_unsettled"
# CROSS JOIN keeps SQLite from walking all jobs instead of the few runs that match.
_WITH_JOB = "CROSS JOIN leasecron_job j ON j.id = r.job_id WHERE r.space_id = ? "
_RUNS_WITH_JOB = f"SELECT j.name, {_RUN_SELECT} FROM leasecron_run r {_WITH_JOB}"
_UNSETTLED_WITH_JOB = (
    f"SELECT j.name, {_RUN_SELECT} FROM leasecron_run r {_UNSETTLED} {_WITH_JOB}"
    "AND r.settled_ms IS NULL "
)
_UNSETTLED_OF_JOB = (
    f"SELECT {_RUN_SELECT} FROM leasecron_run r {_UNSETTLED} "
    "WHERE r.space_id = ? AND r.job_id = ? AND r.settled_ms IS NULL"
)

_NONE = "[]"
"""The former schedules of most jobs, as JSON."""

_JobRow = tuple[int, int, Optional[int], Optional[int], str, str]
"""Id and fields of a job, as they stand in the file."""


class SQLiteTables:
    """Reads and writes records inside the transaction that its caller has begun.

    What it has read it remembers until the transaction ends, and no longer: ids are those of
    other jobs when somebody has put the contents of another file in place.
    """

    def __init__(self, connection: sqlite3.Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self.store_id = ""
        self.begin("")

    def begin(self, store_id: str) -> None:
        """Note the beginning of a transaction, and the id of the store that it reads."""
        self.store_id = store_id
        self._known_space_id: Optional[int] = None
        self._jobs: dict[str, _JobRow] = {}
        self._runs: dict[RunKey, bool] = {}

    @property
    def _space_id(self) -> int:
        """Id of the namespace; 0, which none has, while nothing was written to it."""
        known = self._known_space_id
        if known is None:
            rows = self._rows("SELECT id FROM leasecron_space WHERE name = ?", (self._namespace,))
            known = self._known_space_id = int(rows[0][0]) if rows else 0
        return known

    def _made_space_id(self) -> int:
        if not self._space_id:
            made = self._connection.execute(
                "INSERT INTO leasecron_space (name) VALUES (?)", (self._namespace,)
            )
            self._known_space_id = made.lastrowid
        return self._space_id

    def run(self, key: RunKey) -> Optional[RunRecord]:
        job = self._job_row(key.job)
        if job is None:
            return None
        rows = self._rows(_ONE_RUN, (job[0], key.scheduled_ms))
        self._runs[key] = bool(rows)
        return _record(key.job, rows[0]) if rows else None

    def job(self, name: str) -> Optional[JobRecord]:
        row = self._job_row(name)
        if row is None:
            return None
        _id, last_token, pruned_to_ms, owed_from_ms, fingerprint, former = row
        if tuple(map(type, row)) not in _KINDS_OF_JOBS:
            message = f"the record of job {name!r} is damaged"
            raise StoreRejected(message)
        try:
            displaced = () if former == _NONE else _former(former)
        except (TypeError, ValueError) as error:
            message = f"the record of job {name!r} cannot be read: {error}"
            raise StoreRejected(message) from error
        return JobRecord(name, last_token, pruned_to_ms, owed_from_ms, fingerprint, displaced)

    def unsettled(self, job: Optional[str]) -> tuple[RunRecord, ...]:
        if job is None:
            rows = self._rows(_UNSETTLED_WITH_JOB, (self._space_id,))
            return tuple(_readable(rows))
        row = self._job_row(job)
        if row is None:
            return ()
        rows = self._rows(_UNSETTLED_OF_JOB, (self._space_id, row[0]))
        return tuple(_record(job, row) for row in rows)

    def lapsed_before(self, until_ms: int, limit: int) -> Sequence[RunRecord]:
        rows = self._rows(
            _UNSETTLED_WITH_JOB + "AND r.until_ms < ? LIMIT ?",
            (self._space_id, until_ms, limit),
        )
        return _readable(rows)

    def settled_before(self, scheduled_ms: int, limit: int) -> Sequence[RunKey]:
        rows = self._rows(
            "SELECT j.name, r.scheduled_ms FROM leasecron_run r "
            "CROSS JOIN leasecron_job j ON j.id = r.job_id WHERE r.space_id = ? "
            "AND r.scheduled_ms < ? AND r.settled_ms IS NOT NULL "
            "ORDER BY r.scheduled_ms, j.name LIMIT ?",
            (self._space_id, scheduled_ms, limit),
        )
        return [RunKey(*row) for row in rows]

    def states(self, span: JobSpan) -> Mapping[int, RunState]:
        job_id = self._job_id(span.job)
        if job_id is None:
            return {}
        rows = self._rows(
            "SELECT scheduled_ms, state FROM leasecron_run "
            "WHERE job_id = ? AND scheduled_ms BETWEEN ? AND ? ORDER BY scheduled_ms",
            (job_id, span.from_ms, span.to_ms),
        )
        # A state of a newer version says at least that the run is known, so it is not owed.
        return {scheduled_ms: _STATES.get(state, RunState.RUNNING) for scheduled_ms, state in rows}

    def newest(self, job: str, until_ms: int) -> Optional[int]:
        job_id = self._job_id(job)
        if job_id is None:
            return None
        rows = self._rows(
            "SELECT scheduled_ms FROM leasecron_run WHERE job_id = ? AND scheduled_ms <= ? "
            "ORDER BY scheduled_ms DESC LIMIT 1",
            (job_id, until_ms),
        )
        return rows[0][0] if rows else None

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        if job is None:
            rows = self._rows(
                _RUNS_WITH_JOB + "ORDER BY r.scheduled_ms DESC, j.name LIMIT ?",
                (self._space_id, limit),
            )
            return _readable(rows)
        rows = self._rows(
            f"SELECT ?, {_RUN_SELECT} FROM leasecron_run r WHERE r.job_id = ? "
            "ORDER BY r.scheduled_ms DESC LIMIT ?",
            (job, self._job_id(job), limit),
        )
        return _readable(rows)

    def summaries(self, limit: int) -> Sequence[JobSummary]:
        rows = self._rows(
            "SELECT name, owed_from_ms FROM leasecron_job WHERE space_id = ? ORDER BY name LIMIT ?",
            (self._space_id, limit),
        )
        found: list[JobSummary] = []
        for name, owed_from_ms in rows:
            newest = self.history(name, 1)
            rows = self._rows(
                f"SELECT count(*) FROM leasecron_run r {_UNSETTLED} "
                "WHERE r.space_id = ? AND r.job_id = ? AND r.settled_ms IS NULL",
                (self._space_id, self._job_id(name)),
            )
            unsettled = rows[0][0]
            found.append(JobSummary(name, owed_from_ms, newest[0] if newest else None, unsettled))
        return found

    def put_run(self, record: RunRecord) -> None:
        key = record.key
        job_id = self._job_id(key.job)
        if job_id is None:  # claimed before it was registered
            self.put_job(JobRecord(key.job))
            job_id = self._job_id(key.job)
        known = self._runs.get(key)
        if known is None:  # it was read together with others
            known = bool(self._rows(_ONE_RUN, (job_id, key.scheduled_ms)))
        self._runs[key] = True
        self._connection.execute(
            _CHANGE_RUN if known else _ADD_RUN,
            (
                STORE_FORMAT,
                record.state.value, record.token, record.attempt, record.failures,
                record.hand_overs, record.holder, record.decision_id, record.until_ms,
                record.lease_ms, record.max_attempts, int(record.overlap), record.takeover_ms,
                record.claimed_ms, record.settled_ms, record.reason,
                self._space_id, job_id, key.scheduled_ms,
            ),
        )  # fmt: skip

    def put_job(self, record: JobRecord) -> None:
        name, before = record.job, self._job_row(record.job)
        former = [
            [item.fingerprint, item.owed_from_ms, item.displaced_ms] for item in record.former
        ]
        values = (
            record.last_token,
            record.pruned_to_ms,
            record.owed_from_ms,
            record.fingerprint,
            json.dumps(former) if former else _NONE,
        )
        if before is None:
            made = self._connection.execute(_ADD_JOB, (self._made_space_id(), name, *values))
            assert made.lastrowid is not None
            self._jobs[name] = (made.lastrowid, *values)
            return
        self._jobs[name] = (before[0], *values)
        if before[2:] == values[1:]:  # a grant
            self._connection.execute(_GRANT_JOB, (record.last_token, before[0]))
        else:
            self._connection.execute(_CHANGE_JOB, (*values, before[0]))

    def pruned(self, job: str) -> tuple[Span, ...]:
        rows = self._rows(
            "SELECT first_ms, last_ms FROM leasecron_pruned WHERE job_id = ? ORDER BY first_ms",
            (self._job_id(job),),
        )
        if not all(isinstance(value, int) for row in rows for value in row):
            message = f"what was pruned of job {job!r} is damaged"
            raise StoreRejected(message)
        return tuple(rows)

    def put_pruned(self, job: str, spans: tuple[Span, ...]) -> None:
        job_id = self._job_id(job)
        self._connection.execute("DELETE FROM leasecron_pruned WHERE job_id = ?", (job_id,))
        self._connection.executemany(
            "INSERT INTO leasecron_pruned (job_id, first_ms, last_ms) VALUES (?, ?, ?)",
            [(job_id, *span) for span in spans],
        )

    def delete_runs(self, keys: Sequence[RunKey]) -> None:
        self._connection.executemany(
            "DELETE FROM leasecron_run WHERE job_id = ? AND scheduled_ms = ?",
            [(self._job_id(key.job), key.scheduled_ms) for key in keys],
        )

    def _job_id(self, name: str) -> Optional[int]:
        row = self._job_row(name)
        return None if row is None else row[0]

    def _job_row(self, name: str) -> Optional[_JobRow]:
        found = self._jobs.get(name)
        if found is None:
            rows = self._rows(_ONE_JOB, (self._space_id, name))
            if rows:
                found = self._jobs[name] = rows[0]
        return found

    def _rows(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if "decode" not in str(error):
                raise
        # Damaged text spoils its own record only.
        self._connection.text_factory = _lenient
        try:
            return self._connection.execute(sql, values).fetchall()
        finally:
            self._connection.text_factory = str


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _former(text: str) -> tuple[FormerSchedule, ...]:
    return tuple(FormerSchedule(*item) for item in json.loads(text))


def _readable(rows: Sequence[Any]) -> list[RunRecord]:
    """Read rows of many jobs; one that a newer version wrote does not spoil the others."""
    records: list[RunRecord] = []
    for name, *row in rows:
        try:
            records.append(_record(name, row))
        except StoreRejected as error:
            _logger.debug("left a record out error=%r", str(error))
    return records


def _record(job: Optional[str], row: Sequence[Any]) -> RunRecord:
    assert job is not None
    number, *values = row
    if not isinstance(number, int) or number > STORE_FORMAT:
        message = (
            f"the record of job {job!r} at {values[0]} has format {number!r}, this version of "
            f"leasecron_sync reads up to {STORE_FORMAT}: upgrade it"
        )
        raise StoreRejected(message)
    state = _STATES.get(values[1])
    if state is None or tuple(map(type, values)) not in _KINDS_OF_RUNS:
        raise StoreRejected(_damage(job, values))
    scheduled_ms, _state, *fields = values
    fields[9] = bool(fields[9])  # overlap; SQLite has no boolean
    return RunRecord(RunKey(job, scheduled_ms), state, *fields)


def _damage(job: str, values: Sequence[Any]) -> str:
    wrong = [
        name
        for name, kinds, value in zip(_RUN_NAMES, _KINDS, values)
        if type(value) not in kinds or (name == "state" and value not in _STATES)
    ]
    return f"the record of job {job!r} at {values[0]!r} is damaged: {', '.join(wrong)}"
