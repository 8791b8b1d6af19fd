"""What a store has forgotten is noticed also where nobody met an outage, and nothing is lost."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import pytest

from leasecron_sync import LeaseRun, Scheduler, SQLiteLease, at
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.errors import OutcomeUnknown
from leasecron_sync.model import JobStamp, LeaseClaim, OnOverlap, RunKey, Verdict
from tests.services.postgres import execute
from tests.services.process import eventually

pytestmark = [pytest.mark.slow]

LIMIT_S = 10.0


def test_a_run_that_was_forgotten_under_its_handler_is_executed_again_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jobs.db"
    runs: list[LeaseRun] = []
    scheduler = Scheduler(SQLiteLease(path), lease_ms=1_500)

    def handler(run: LeaseRun) -> None:
        runs.append(run)
        if len(runs) == 1:
            run.wait(LIMIT_S)

    due = datetime.fromtimestamp(time.time() + 2.5, timezone.utc)  # it has registered by then
    scheduler.add_job(handler, at(due), name="job")
    with caplog.at_level(logging.ERROR):
        scheduler.start()
        try:
            assert eventually(lambda: runs, LIMIT_S)
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("DELETE FROM leasecron_run")
            assert eventually(lambda: len(runs) == 2, LIMIT_S)
        finally:
            scheduler.stop(timeout=5.0)
    assert [run.attempt for run in runs] == [1, 1]
    assert runs[0].token < runs[1].token
    told = [line for line in caplog.messages if "has no record of a run that was won here" in line]
    assert len(told) == 1


def test_postgresql_that_lost_its_data_is_noticed_after_others_have_registered_anew(
    postgres_url: str,
) -> None:
    first, second = PostgresLease(postgres_url), PostgresLease(postgres_url)
    now_ms = time.time_ns() // 1_000_000
    claim = LeaseClaim(
        key=RunKey("job", now_ms),
        due_ms=now_ms,
        holder="first",
        decision_id="1",
        lease_ms=1_000,
        max_attempts=3,
        on_overlap=OnOverlap.SKIP,
        max_age_ms=60_000,
        takeover_ms=60_000,
    )
    for number, backend in enumerate((first, second)):
        backend.open(BackendSettings("default", f"instance {number}", 5_000))
        backend.register([JobStamp("job", "x")])
    try:
        execute(postgres_url, "DROP SCHEMA public CASCADE")
        execute(postgres_url, "CREATE SCHEMA public")
        second.close()
        second.open(BackendSettings("default", "instance 1", 5_000))
        [standing] = second.register([JobStamp("job", "x")])
        with pytest.raises(OutcomeUnknown, match="it has lost its data"):
            first.claim([claim])
        assert [x.store_id for x in first.register([JobStamp("job", "x")])] == [standing.store_id]
        [reply] = first.claim([claim])  # the same decision: what it won, if it won
        assert reply.verdict is Verdict.GRANTED
    finally:
        first.close()
        second.close()
