"""Rows of an SQLite file as records, and records as rows."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any, Optional

from leasecron_sync.errors import StoreRejected
from leasecron_sync.model import (
    STORE_FORMAT,
    FormerSchedule,
    JobRecord,
    RunKey,
    RunRecord,
    RunState,
)

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

RUN_FIELDS = (
    "state, token, attempt, failures, hand_overs, holder, decision_id, until_ms, lease_ms, "
    "max_attempts, overlap, takeover_ms, claimed_ms, settled_ms, reason"
)
RUN_NAMES = ("scheduled_ms", *RUN_FIELDS.split(", "))
JOB_FIELDS = "last_token, pruned_to_ms, owed_from_ms, fingerprint, former"

JobRow = tuple[int, int, Optional[int], Optional[int], str, str]
"""Id and fields of a job, as they stand in the file."""

RunRow = Sequence[Any]
"""Format, scheduled time and fields of a run, as they stand in the file."""

# SQLite keeps a value of any type in a column of any type.
_KINDS: tuple[tuple[type, ...], ...] = (
    (int,), (str,), (int,), (int,), (int,), (int,), (str,), (str,), (int,), (int,), (int,), (int,),
    (int,), (int, type(None)), (int, type(None)), (str,),
)  # fmt: skip
_KINDS_OF_RUNS = frozenset(itertools.product(*_KINDS))
_KINDS_OF_JOBS = frozenset(
    itertools.product((int,), (int,), (int, type(None)), (int, type(None)), (str,), (str,))
)
_STATES = {state.value: state for state in RunState}

_NONE = "[]"
"""The former schedules of most jobs, as JSON."""


def job_of(name: str, row: JobRow) -> JobRecord:
    """Return a row as the record of a job.

    Raises:
        StoreRejected: It is damaged.
    """
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


def job_row(job_id: int, record: JobRecord) -> JobRow:
    """Return the record of a job as a row."""
    former = [[item.fingerprint, item.owed_from_ms, item.displaced_ms] for item in record.former]
    return (
        job_id,
        record.last_token,
        record.pruned_to_ms,
        record.owed_from_ms,
        record.fingerprint,
        json.dumps(former) if former else _NONE,
    )


def run_of(job: str, row: RunRow) -> RunRecord:
    """Return a row as the record of a run.

    Raises:
        StoreRejected: It is damaged, or a newer version wrote it.
    """
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


def run_row(record: RunRecord) -> RunRow:
    """Return the record of a run as a row."""
    return (
        STORE_FORMAT,
        record.key.scheduled_ms,
        record.state.value,
        record.token,
        record.attempt,
        record.failures,
        record.hand_overs,
        record.holder,
        record.decision_id,
        record.until_ms,
        record.lease_ms,
        record.max_attempts,
        int(record.overlap),
        record.takeover_ms,
        record.claimed_ms,
        record.settled_ms,
        record.reason,
    )


def readable(rows: Sequence[Any]) -> list[RunRecord]:
    """Read rows of many jobs; one that a newer version wrote does not spoil the others."""
    records: list[RunRecord] = []
    for name, *row in rows:
        try:
            records.append(run_of(name, row))
        except StoreRejected as error:
            _logger.debug("left a record out error=%r", str(error))
    return records


def state_of(value: str) -> RunState:
    """Return a state; one of a newer version says at least that the run is known, so not owed."""
    return _STATES.get(value, RunState.RUNNING)


def _former(text: str) -> tuple[FormerSchedule, ...]:
    return tuple(FormerSchedule(*item) for item in json.loads(text))


def _damage(job: str, values: Sequence[Any]) -> str:
    wrong = [
        name
        for name, kinds, value in zip(RUN_NAMES, _KINDS, values)
        if type(value) not in kinds or (name == "state" and value not in _STATES)
    ]
    return f"the record of job {job!r} at {values[0]!r} is damaged: {', '.join(wrong)}"
