"""The work of a command does not grow with the history of its job."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from leasecron_sync import SQLiteLease
from leasecron_sync.backends._sqlite_tables import AHEAD
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    LeaseClaim,
    LeaseRef,
    OnOverlap,
    Outcome,
    RunKey,
    Settlement,
)

NOW_MS = 1_700_000_000_000
HISTORY = 3_000


def _claim(number: int) -> LeaseClaim:
    key = RunKey("job", NOW_MS - number)
    return LeaseClaim(
        key,
        key.scheduled_ms,
        "me",
        f"decision {number}",
        15_000,
        3,
        OnOverlap.SKIP,
        60_000,
        150_000,
    )


def _won(backend: SQLiteLease, number: int) -> LeaseRef:
    (reply,) = backend.claim([_claim(number)])
    assert reply.lease is not None
    return reply.lease.ref


def _finish(backend: SQLiteLease, ref: LeaseRef) -> None:
    assert backend.settle(ref, Settlement(Outcome.FINISHED)).accepted


def _fill(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO leasecron_run SELECT job_id, ?, space_id, format, state, token, attempt, "
            "failures, hand_overs, holder, decision_id, until_ms, lease_ms, max_attempts, overlap, "
            "takeover_ms, claimed_ms, settled_ms, reason FROM leasecron_run "
            "WHERE settled_ms IS NOT NULL LIMIT 1",
            [(number,) for number in range(HISTORY)],
        )
    connection.close()


@pytest.mark.parametrize("command", ["claim", "renew", "settle", "pending", "register", "states"])
def test_a_command_does_not_read_the_history(command: str, tmp_path: Path) -> None:
    backend = SQLiteLease(tmp_path / "jobs.db")
    backend._now_ms = lambda: NOW_MS
    backend.open(BackendSettings("default", "me", 5_000))
    stamp = JobStamp("job", "x")
    backend.register([stamp])
    _finish(backend, _won(backend, 1))

    def work(number: int) -> int:
        """Return how many instructions SQLite needs for the command."""
        ref = None if command == "claim" else _won(backend, number)
        calls: dict[str, Callable[[], object]] = {
            "claim": lambda: backend.claim([_claim(number)]),
            "renew": lambda: backend.renew([LeaseRef(RunKey("job", NOW_MS - number), 1)], 15_000),
            "settle": lambda: _finish(backend, ref) if ref is not None else None,
            "pending": lambda: backend.pending(["job"], 10),
            "register": lambda: backend.register([stamp]),
            "states": lambda: backend.states([JobSpan("job", NOW_MS - 5, NOW_MS)]),
        }
        counted = [0]

        def count() -> int:
            counted[0] += 1
            return 0

        for lane in backend.lanes():
            if lane.connection is not None:
                lane.connection.set_progress_handler(count, 1)
        calls[command]()
        for lane in backend.lanes():
            if lane.connection is not None:
                lane.connection.set_progress_handler(None, 1)
        if command != "settle":
            _finish(backend, ref if ref is not None else _won(backend, number))
        return counted[0]

    work(2)  # statements are prepared, pages are read
    before = work(3)
    _fill(tmp_path / "jobs.db")
    after = work(4)
    backend.close()
    assert 0 < after <= before * 1.5


def _statements(backend: SQLiteLease, call: Callable[[], object]) -> int:
    """Return how many statements SQLite executes for a call."""
    seen: list[str] = []
    for lane in backend.lanes():
        if lane.connection is not None:
            lane.connection.set_trace_callback(seen.append)
    call()
    for lane in backend.lanes():
        if lane.connection is not None:
            lane.connection.set_trace_callback(None)
    return len(seen)


def test_a_claim_in_a_batch_needs_two_statements_and_its_part_of_two_others(
    tmp_path: Path,
) -> None:
    """What a batch needs besides does not grow with it: each statement is paid by every claim."""
    backend = SQLiteLease(tmp_path / "jobs.db")
    backend._now_ms = lambda: NOW_MS
    backend.open(BackendSettings("default", "me", 5_000))
    jobs = [f"job {number}" for number in range(150)]
    backend.register([JobStamp(job, "x") for job in jobs])

    def claims(first: int, count: int) -> list[LeaseClaim]:
        return [
            replace(_claim(number), key=RunKey(jobs[number], NOW_MS - 1))
            for number in range(first, first + count)
        ]

    backend.claim(claims(0, 1))  # the connection is made, statements are prepared
    few = _statements(backend, lambda: backend.claim(claims(10, AHEAD)))
    many = _statements(backend, lambda: backend.claim(claims(40, 9 * AHEAD)))
    assert many - few == 8 * AHEAD * 2 + 8 * 2, "the run, the token of its job; twice a reading"
    assert few - AHEAD * 2 - 2 == 6, (
        "BEGIN, what the file says of itself, its namespace, two notes, COMMIT"
    )
    backend.pending(jobs, 10)
    reads = _statements(backend, lambda: backend.pending(jobs, 10))
    assert reads == 5, "BEGIN, what the file says of itself, the namespace, the runs, COMMIT"
    backend.close()
