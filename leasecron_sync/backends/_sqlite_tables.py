"""Records of one namespace in the tables of an SQLite file."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

_RUN_FIELDS = (
    "state, token, attempt, failures, hand_overs, holder, decision_id, until_ms, lease_ms, "
    "max_attempts, overlap, takeover_ms, claimed_ms, settled_ms, reason"
)
# SQLite keeps a value of any type in a column of any type.
_MAYBE = (int, type(None))
_KINDS: tuple[Any, ...] = (
    int,
    int,
    int,
    int,
    str,
    str,
    int,
    int,
    int,
    int,
    int,
    _MAYBE,
    _MAYBE,
    str,
)
_RUN_SELECT = ", ".join(
    f"r.{name}" for name in ("format", "scheduled_ms", *_RUN_FIELDS.split(", "))
)
_PUT_RUN = (
    f"INSERT OR REPLACE INTO leasecron_run (job_id, scheduled_ms, space_id, format, {_RUN_FIELDS}) "
    f"VALUES ({', '.join('?' * 19)})"
)
_PUT_JOB = """
    INSERT INTO leasecron_job
      (space_id, name, last_token, pruned_to_ms, owed_from_ms, fingerprint, former)
    VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (space_id, name) DO UPDATE SET
      last_token = excluded.last_token, pruned_to_ms = excluded.pruned_to_ms,
      owed_from_ms = excluded.owed_from_ms, fingerprint = excluded.fingerprint,
      former = excluded.former
"""
# Named, since SQLite would rather walk all runs of a job, or all of them, settled or not.
_UNSETTLED = "INDEXED BY leasecron_run_unsettled"
# CROSS JOIN keeps SQLite from walking all jobs instead of the few runs that match.
_WITH_JOB = "CROSS JOIN leasecron_job j ON j.id = r.job_id WHERE r.space_id = ? "
_RUNS_WITH_JOB = f"SELECT j.name, {_RUN_SELECT} FROM leasecron_run r {_WITH_JOB}"
_UNSETTLED_WITH_JOB = (
    f"SELECT j.name, {_RUN_SELECT} FROM leasecron_run r {_UNSETTLED} {_WITH_JOB}"
    "AND r.settled_ms IS NULL "
)


class SQLiteTables:
    """Reads and writes records inside the transaction that its caller has begun."""

    def __init__(self, connection: sqlite3.Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._known_space_id: Optional[int] = None
        self._job_ids: dict[str, int] = {}

    def forget(self) -> None:
        """Forget ids, after a transaction that may have made some was rolled back."""
        self._known_space_id = None
        self._job_ids.clear()

    @property
    def _space_id(self) -> int:
        """Id of the namespace; 0, which none has, while nothing was written to it."""
        known = self._known_space_id
        if known is None:
            rows = self._rows("SELECT id FROM leasecron_space WHERE name = ?", (self._namespace,))
            known = int(rows[0][0]) if rows else 0
            self._known_space_id = known or None
        return known

    def _made_space_id(self) -> int:
        if not self._space_id:
            self._connection.execute(
                "INSERT INTO leasecron_space (name) VALUES (?)", (self._namespace,)
            )
        return self._space_id

    def run(self, key: RunKey) -> Optional[RunRecord]:
        job_id = self._job_id(key.job)
        if job_id is None:
            return None
        rows = self._rows(
            f"SELECT {_RUN_SELECT} FROM leasecron_run r WHERE r.job_id = ? AND r.scheduled_ms = ?",
            (job_id, key.scheduled_ms),
        )
        return _record(key.job, rows[0]) if rows else None

    def job(self, name: str) -> Optional[JobRecord]:
        rows = self._rows(
            "SELECT last_token, pruned_to_ms, owed_from_ms, fingerprint, former "
            "FROM leasecron_job WHERE space_id = ? AND name = ?",
            (self._space_id, name),
        )
        if not rows:
            return None
        last_token, pruned_to_ms, owed_from_ms, fingerprint, former = rows[0]
        try:
            displaced = tuple(FormerSchedule(*item) for item in json.loads(former))
        except (TypeError, ValueError) as error:
            message = f"the record of job {name!r} cannot be read: {error}"
            raise StoreRejected(message) from error
        return JobRecord(name, last_token, pruned_to_ms, owed_from_ms, fingerprint, displaced)

    def unsettled(self, job: Optional[str]) -> tuple[RunRecord, ...]:
        if job is None:
            rows = self._rows(_UNSETTLED_WITH_JOB, (self._space_id,))
            return tuple(_readable(rows))
        job_id = self._job_id(job)
        if job_id is None:
            return ()
        rows = self._rows(
            f"SELECT {_RUN_SELECT} FROM leasecron_run r {_UNSETTLED} "
            "WHERE r.space_id = ? AND r.job_id = ? AND r.settled_ms IS NULL",
            (self._space_id, job_id),
        )
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
        known = {state.value: state for state in RunState}
        return {scheduled_ms: known.get(state, RunState.RUNNING) for scheduled_ms, state in rows}

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
        job_id = self._job_id(record.key.job)
        if job_id is None:  # claimed before it was registered
            self.put_job(JobRecord(record.key.job))
            job_id = self._job_id(record.key.job)
        self._connection.execute(
            _PUT_RUN,
            (
                job_id, record.key.scheduled_ms, self._space_id, STORE_FORMAT,
                record.state.value, record.token, record.attempt, record.failures,
                record.hand_overs, record.holder, record.decision_id, record.until_ms,
                record.lease_ms, record.max_attempts, int(record.overlap), record.takeover_ms,
                record.claimed_ms, record.settled_ms, record.reason,
            ),
        )  # fmt: skip

    def put_job(self, record: JobRecord) -> None:
        former = [
            [item.fingerprint, item.owed_from_ms, item.displaced_ms] for item in record.former
        ]
        self._connection.execute(
            _PUT_JOB,
            (
                self._made_space_id(), record.job, record.last_token, record.pruned_to_ms,
                record.owed_from_ms, record.fingerprint, json.dumps(former),
            ),
        )  # fmt: skip

    def delete_runs(self, keys: Sequence[RunKey]) -> None:
        self._connection.executemany(
            "DELETE FROM leasecron_run WHERE job_id = ? AND scheduled_ms = ?",
            [(self._job_id(key.job), key.scheduled_ms) for key in keys],
        )

    def _job_id(self, name: str) -> Optional[int]:
        found = self._job_ids.get(name)
        if found is None:
            rows = self._rows(
                "SELECT id FROM leasecron_job WHERE space_id = ? AND name = ?",
                (self._space_id, name),
            )
            if rows:
                found = self._job_ids[name] = rows[0][0]
        return found

    def _rows(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()


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
    number, scheduled_ms, state, *rest = row
    if not isinstance(number, int) or number > STORE_FORMAT:
        message = (
            f"the record of job {job!r} at {scheduled_ms} has format {number!r}, this version of "
            f"leasecron_sync reads up to {STORE_FORMAT}: upgrade it"
        )
        raise StoreRejected(message)
    wrong = [
        name
        for name, kind, value in zip(_RUN_FIELDS.split(", ")[1:], _KINDS, rest)
        if not isinstance(value, kind)
    ]
    if wrong:
        message = f"the record of job {job!r} at {scheduled_ms} is damaged: {', '.join(wrong)}"
        raise StoreRejected(message)
    try:
        record = RunRecord(RunKey(job, scheduled_ms), RunState(state), *rest)
    except (TypeError, ValueError) as error:
        message = f"the record of job {job!r} at {scheduled_ms} cannot be read: {error}"
        raise StoreRejected(message) from error
    return replace(record, overlap=bool(record.overlap))  # SQLite has no boolean
