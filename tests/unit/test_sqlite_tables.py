"""What is read and written together within one transaction of an SQLite store."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from enum import IntEnum

import pytest

from leasecron_sync.backends._sqlite_schema import schema_sql
from leasecron_sync.backends._sqlite_tables import AHEAD, SQLiteTables
from leasecron_sync.backends.memory import MemoryTables
from leasecron_sync.errors import StoreRejected
from leasecron_sync.model import JobRecord, JobSpan, RunKey, RunRecord, RunState

JOBS = [f"job {number}" for number in range(AHEAD + 3)]
KEYS = [RunKey(job, ms) for job in JOBS for ms in (1_000, 2_000, 3_000)]


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(":memory:", isolation_level=None)
    opened.executescript(schema_sql())
    yield opened
    opened.close()


def record_of(key: RunKey, dice: random.Random) -> RunRecord:
    settled = dice.random() < 0.5
    return RunRecord(
        key,
        RunState.FINISHED if settled else RunState.RUNNING,
        token=dice.randrange(1_000_000),
        until_ms=dice.randrange(1_000),
        settled_ms=5_000 if settled else None,
    )


class Both:
    """The tables of a file and those in memory, to which the same is done."""

    def __init__(self, tables: SQLiteTables, dice: random.Random) -> None:
        self._tables = tables
        self._expected = MemoryTables()
        self._dice = dice

    def step(self) -> None:
        """Do something that is drawn."""
        keys = self._dice.sample(KEYS, self._dice.randrange(1, 2 * AHEAD))
        step = self._dice.choice(
            [self.read_ahead, self.put_runs, self.put_runs, self.put_jobs, self.delete, self.look]
        )
        step(keys)

    def read_ahead(self, keys: list[RunKey]) -> None:
        self._tables.read_ahead(keys, others=self._dice.random() < 0.5)

    def put_runs(self, keys: list[RunKey]) -> None:
        for key in keys:
            record = record_of(key, self._dice)
            for tables in (self._tables, self._expected):
                if tables.job(key.job) is None:
                    tables.put_job(JobRecord(key.job))
                tables.put_run(record)

    def put_jobs(self, keys: list[RunKey]) -> None:
        for key in keys:
            owed_ms = self._dice.choice([None, 7_000])
            job = JobRecord(key.job, self._dice.randrange(1_000_000), owed_from_ms=owed_ms)
            for tables in (self._tables, self._expected):
                tables.put_job(job)

    def delete(self, keys: list[RunKey]) -> None:
        found = [self._expected.run(key) for key in keys]
        settled = [run.key for run in found if run is not None and run.state.settled]
        for tables in (self._tables, self._expected):
            tables.delete_runs(settled)

    def look(self, keys: list[RunKey]) -> None:
        """Compare what both answer, in one of the ways in which it can be asked for."""
        tables, expected = self._tables, self._expected
        way = self._dice.choice(["runs", "jobs", "unsettled"])
        for key in keys:
            if way == "runs":
                assert tables.run(key) == expected.run(key)
            elif way == "jobs":
                assert tables.job(key.job) == expected.job(key.job)
            else:
                assert set(tables.unsettled(key.job)) == set(expected.unsettled(key.job))

    def compare(self) -> None:
        """Compare everything."""
        for _way in range(6):
            self.look(KEYS)
        spans = [JobSpan(job, 2_000, 3_000) for job in JOBS]
        assert self._tables.states_in(spans) == [self._expected.states(span) for span in spans]


@pytest.mark.parametrize("seed", range(40))
def test_a_transaction_reads_what_it_has_written(seed: int, connection: sqlite3.Connection) -> None:
    """However reads, writes and deletions follow each other, and whatever was read ahead."""
    tables = SQLiteTables(connection, "default")
    both = Both(tables, random.Random(seed))
    for _transaction in range(3):
        connection.execute("BEGIN IMMEDIATE")
        tables.begin("store")
        for _step in range(12):
            both.step()
        tables.write()
        connection.execute("COMMIT")
        tables.begin("store")
        both.compare()


@pytest.mark.parametrize("others", [False, True])
def test_a_run_without_a_format_is_damaged_and_not_missing(*, others: bool) -> None:
    """A zero in the wrong place of the file is enough for that, whatever the table forbids."""
    schema = schema_sql()
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(schema.replace("format       INTEGER NOT NULL", "format INTEGER"))
    tables = SQLiteTables(connection, "default")
    for key in KEYS:
        tables.put_run(RunRecord(key, RunState.FINISHED, settled_ms=5_000))
    tables.write()
    connection.execute("UPDATE leasecron_run SET format = NULL WHERE scheduled_ms = 2000")
    tables.begin("store")
    tables.read_ahead(KEYS, others=others)
    for key in KEYS:
        if key.scheduled_ms == 2_000:
            with pytest.raises(StoreRejected, match="format None"):
                tables.run(key)
        else:
            assert tables.run(key) is not None
    assert tables.run(RunKey(JOBS[0], 4_000)) is None
    connection.close()


class Attempts(IntEnum):
    """What an application may give where a number is asked for."""

    FEW = 2


def test_what_was_put_is_no_damage_whatever_kind_of_number_it_has(
    connection: sqlite3.Connection,
) -> None:
    tables = SQLiteTables(connection, "default")
    key = RunKey("job", 1_000)
    record = RunRecord(key, RunState.RUNNING, max_attempts=Attempts.FEW)
    tables.put_job(JobRecord("job"))
    tables.put_run(record)
    assert tables.run(key) == record
    assert tables.unsettled("job") == (record,)
    tables.write()
    tables.begin("store")
    assert tables.run(key) == record


def test_what_is_put_is_written_when_it_is_said_at_the_latest(
    connection: sqlite3.Connection,
) -> None:
    tables = SQLiteTables(connection, "default")
    tables.put_job(JobRecord("job"))
    tables.put_run(RunRecord(RunKey("job", 1_000), RunState.RUNNING))
    tables.write()
    tables.write()
    assert connection.execute("SELECT count(*) FROM leasecron_run").fetchone() == (1,)
