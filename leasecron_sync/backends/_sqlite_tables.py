"""Records of one namespace in the tables of an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from leasecron_sync.backends._sqlite_rows import (
    JOB_FIELDS,
    RUN_FIELDS,
    RUN_NAMES,
    JobRow,
    RunRow,
    job_of,
    job_row,
    readable,
    run_of,
    run_row,
    state_of,
)
from leasecron_sync.errors import StoreRejected
from leasecron_sync.model import (
    JobRecord,
    JobSpan,
    JobSummary,
    RunKey,
    RunRecord,
    RunState,
)
from leasecron_sync.options import MIN_SLICE
from leasecron_sync.protocol.transition import Span

_RUN_SELECT = ", ".join(f"r.{name}" for name in ("format", *RUN_NAMES))
_ONE_RUN = f"SELECT {_RUN_SELECT} FROM leasecron_run r WHERE r.job_id = ? AND r.scheduled_ms = ?"
_ADD_RUN = (
    f"INSERT INTO leasecron_run (format, {RUN_FIELDS}, space_id, job_id, scheduled_ms) "
    f"VALUES ({', '.join('?' * 19)})"
)
_CHANGE_RUN = (
    f"UPDATE leasecron_run SET format = ?, {RUN_FIELDS.replace(',', ' = ?,')} = ?, space_id = ? "
    "WHERE job_id = ? AND scheduled_ms = ?"
)
_ONE_JOB = f"SELECT id, {JOB_FIELDS} FROM leasecron_job WHERE space_id = ? AND name = ?"
_ADD_JOB = f"INSERT INTO leasecron_job (space_id, name, {JOB_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
_CHANGE_JOB = f"UPDATE leasecron_job SET {JOB_FIELDS.replace(',', ' = ?,')} = ? WHERE id = ?"
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

AHEAD = MIN_SLICE
"""Runs that are read in one statement: as many as an instance claims in one call as a rule."""

FEW = 4
"""So few are read one by one: that is as quick, since the other statement has its fixed length."""

# A statement is prepared once, so it always has that many rows; those too many are NULL.
_ASKED = f"WITH asked (n, name, from_ms, to_ms) AS (VALUES {', '.join(['(?, ?, ?, ?)'] * AHEAD)}) "
_JOBS_AHEAD = (
    f"{_ASKED}SELECT a.n, j.id, {', '.join(f'j.{name}' for name in JOB_FIELDS.split(', '))}, "
    f"{_RUN_SELECT} FROM asked a CROSS JOIN leasecron_job j ON j.space_id = ? AND j.name = a.name "
    "LEFT JOIN leasecron_run r ON r.job_id = j.id AND r.scheduled_ms = a.from_ms"
)
_UNSETTLED_AHEAD = (
    f"SELECT r.job_id, {_RUN_SELECT} FROM leasecron_run r {_UNSETTLED} WHERE r.space_id = ? "
    f"AND r.job_id IN ({', '.join('?' * AHEAD)}) AND r.settled_ms IS NULL"
)
_STATES_IN = (
    f"{_ASKED}SELECT a.n, r.scheduled_ms, r.state FROM asked a "
    "CROSS JOIN leasecron_job j ON j.space_id = ? AND j.name = a.name "
    "CROSS JOIN leasecron_run r ON r.job_id = j.id AND r.scheduled_ms BETWEEN a.from_ms AND a.to_ms"
)

_RUN_AT = len(JOB_FIELDS.split(", "))
"""Where a run begins in a row that has those fields of its job first."""

_Run = Union[RunRow, RunRecord]
"""A run as it was read, or as it was put."""


class SQLiteTables:
    """Reads and writes records inside the transaction that its caller has begun.

    What it has read it remembers until the transaction ends, and no longer: ids are those of
    other jobs when somebody has put the contents of another file in place. What is put is written
    before the next statement that reads, and at the latest by ``write``.
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
        self._jobs: dict[str, JobRow] = {}
        self._runs: dict[RunKey, Optional[_Run]] = {}
        self._open: dict[str, dict[RunKey, _Run]] = {}
        self._added: list[tuple[object, ...]] = []
        self._changed: list[tuple[object, ...]] = []
        self._granted: list[tuple[int, int]] = []

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

    def read_ahead(self, keys: Sequence[RunKey], *, others: bool) -> None:
        for first in range(0, len(keys), AHEAD):
            few = keys[first : first + AHEAD]
            if len(few) > FEW:
                names = self._read_runs(few)
                if others:
                    self._read_unsettled(names)

    def _read_runs(self, keys: Sequence[RunKey]) -> dict[int, str]:
        """Read these runs, and their jobs; return the names of these by id."""
        spans = [JobSpan(key.job, key.scheduled_ms, key.scheduled_ms) for key in keys]
        names: dict[int, str] = {}
        found = self._rows(_JOBS_AHEAD, (*_asked(spans), self._space_id))
        number: int
        job_id: int
        for number, job_id, *row in found:
            key = keys[number]
            names[job_id] = key.job
            self._jobs[key.job] = (job_id, *row[:_RUN_AT])
            # Of a run that is not there all is NULL; in a damaged one that may be true of others.
            there = row[_RUN_AT + 1] is not None
            self._runs[key] = row[_RUN_AT:] if there else None
        return names

    def _read_unsettled(self, names: Mapping[int, str]) -> None:
        self._open.update((name, {}) for name in names.values())
        ids = [*names, *[None] * (AHEAD - len(names))]
        for job_id, *row in self._rows(_UNSETTLED_AHEAD, (self._space_id, *ids)):
            name = names[job_id]
            self._open[name][RunKey(name, row[1])] = row

    def _read_one(self, job_id: int, key: RunKey) -> None:
        rows = self._rows(_ONE_RUN, (job_id, key.scheduled_ms))
        self._runs[key] = rows[0] if rows else None

    def run(self, key: RunKey) -> Optional[RunRecord]:
        if key not in self._runs:
            job_id = self._job_id(key.job)
            if job_id is None:
                return None
            self._read_one(job_id, key)
        found = self._runs[key]
        return None if found is None else _record(key.job, found)

    def job(self, name: str) -> Optional[JobRecord]:
        row = self._job_row(name)
        return None if row is None else job_of(name, row)

    def unsettled(self, job: Optional[str]) -> tuple[RunRecord, ...]:
        if job is None:
            rows = self._rows(_UNSETTLED_WITH_JOB, (self._space_id,))
            return tuple(readable(rows))
        known = self._open.get(job)
        if known is not None:
            return tuple(_record(job, run) for run in known.values())
        row = self._job_row(job)
        if row is None:
            return ()
        rows = self._rows(_UNSETTLED_OF_JOB, (self._space_id, row[0]))
        return tuple(run_of(job, row) for row in rows)

    def lapsed_before(self, until_ms: int, limit: int) -> Sequence[RunRecord]:
        rows = self._rows(
            _UNSETTLED_WITH_JOB + "AND r.until_ms < ? LIMIT ?",
            (self._space_id, until_ms, limit),
        )
        return readable(rows)

    def settled_before(self, scheduled_ms: int, limit: int) -> Sequence[RunKey]:
        rows = self._rows(
            "SELECT j.name, r.scheduled_ms FROM leasecron_run r "
            "CROSS JOIN leasecron_job j ON j.id = r.job_id WHERE r.space_id = ? "
            "AND r.scheduled_ms < ? AND r.settled_ms IS NOT NULL "
            "ORDER BY r.scheduled_ms, j.name LIMIT ?",
            (self._space_id, scheduled_ms, limit),
        )
        return [RunKey(*row) for row in rows]

    def states_in(self, spans: Sequence[JobSpan]) -> list[Mapping[int, RunState]]:
        """Return the states of known runs in each span, by their scheduled times."""
        found: list[dict[int, RunState]] = [{} for _span in spans]
        for first in range(0, len(spans), AHEAD):
            few = spans[first : first + AHEAD]
            for number, ms, state in self._rows(_STATES_IN, (*_asked(few), self._space_id)):
                found[first + number][ms] = state_of(state)
        return [dict(sorted(states.items())) for states in found]

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
            return readable(rows)
        rows = self._rows(
            f"SELECT ?, {_RUN_SELECT} FROM leasecron_run r WHERE r.job_id = ? "
            "ORDER BY r.scheduled_ms DESC LIMIT ?",
            (job, self._job_id(job), limit),
        )
        return readable(rows)

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
            assert job_id is not None
        if key not in self._runs:  # it was read together with others
            self._read_one(job_id, key)
        written = self._added if self._runs[key] is None else self._changed
        self._runs[key] = record
        number, scheduled_ms, *values = run_row(record)
        written.append((number, *values, self._space_id, job_id, scheduled_ms))
        open_ones = self._open.get(key.job)
        if open_ones is not None:
            if record.settled_ms is None:
                open_ones[key] = record
            else:
                open_ones.pop(key, None)

    def write(self) -> None:
        """Write what was put, statement by statement, since that is quicker than record by record.

        To be called at the end of the transaction; whatever is read in it comes after a write.
        """
        for sql, rows in (
            (_ADD_RUN, self._added),
            (_CHANGE_RUN, self._changed),  # perhaps of what was just added
            (_GRANT_JOB, self._granted),
        ):
            if rows:
                self._connection.executemany(sql, rows)
                rows.clear()

    def put_job(self, record: JobRecord) -> None:
        name, before = record.job, self._job_row(record.job)
        if before is None:
            _none, *values = job_row(0, record)
            made = self._connection.execute(_ADD_JOB, (self._made_space_id(), name, *values))
            assert made.lastrowid is not None
            self._jobs[name] = job_row(made.lastrowid, record)
            return
        self._jobs[name] = after = job_row(before[0], record)
        if before[2:] == after[2:]:  # a grant
            self._granted.append((record.last_token, before[0]))
        else:
            self.write()
            self._connection.execute(_CHANGE_JOB, (*after[1:], before[0]))

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
        self.write()
        self._connection.executemany(
            "DELETE FROM leasecron_run WHERE job_id = ? AND scheduled_ms = ?",
            [(self._job_id(key.job), key.scheduled_ms) for key in keys],
        )
        self._runs.update((key, None) for key in keys)

    def _job_id(self, name: str) -> Optional[int]:
        row = self._job_row(name)
        return None if row is None else row[0]

    def _job_row(self, name: str) -> Optional[JobRow]:
        found = self._jobs.get(name)
        if found is None:
            rows = self._rows(_ONE_JOB, (self._space_id, name))
            if rows:
                found = self._jobs[name] = rows[0]
        return found

    def _rows(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        self.write()
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


def _asked(spans: Sequence[JobSpan]) -> list[object]:
    """Return the values for ``_ASKED``."""
    rows: list[object] = [value for number, span in enumerate(spans) for value in (number, *span)]
    return rows + [None] * (4 * AHEAD - len(rows))


def _record(job: str, run: _Run) -> RunRecord:
    return run if isinstance(run, RunRecord) else run_of(job, run)


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace")
