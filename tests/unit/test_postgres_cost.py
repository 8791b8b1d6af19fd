"""What a command reads does not grow with the history, whenever its plan was made."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Callable
from unittest import mock

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
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
from tests.services.postgres import execute
from tests.services.server import Server

NOW_MS = 1_700_000_000_000
HISTORY = 3_000
JOBS = 50
FINISHED = Settlement(Outcome.FINISHED)


class Session:
    """One session of a server, whose reads are counted, and a backend that uses no other."""

    def __init__(self, url: str) -> None:
        import psycopg2

        self.url = url
        self.schema = f"cost_{uuid.uuid4().hex}"
        self.read = 0
        self._connection: Any = psycopg2.connect(url)
        self.backend = PostgresLease(url, schema=self.schema)
        self.backend._now_ms = lambda: NOW_MS
        self.backend.open(BackendSettings("space", "me", 5_000))
        self.backend.probe()
        for lane in self.backend._lanes.all():
            lane.drop()
            lane.connection = mock.Mock(is_sound=True, ask=self._ask)
        self._decisions = 0

    def _ask(self, statement: str, values: object, _deadline: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.cursor()
        before = self._counted(cursor)
        cursor.execute(statement, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        self.read = self._counted(cursor) - before
        self._connection.commit()
        return rows

    def _counted(self, cursor: Any) -> int:  # noqa: ANN401
        """Return how many rows were read, also in transactions whose counts were not sent yet."""
        cursor.execute(
            "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) "
            "FROM pg_stat_xact_all_tables WHERE schemaname = %s",
            (self.schema,),
        )
        return int(cursor.fetchone()[0])

    def close(self) -> None:
        self._connection.close()
        execute(self.url, f"DROP SCHEMA {self.schema} CASCADE")

    def sql(self, statement: str) -> None:
        execute(self.url, statement.format(s=self.schema))

    def won(self, number: int) -> LeaseRef:
        self._decisions += 1
        key = RunKey("job 7", NOW_MS - number)
        [reply] = self.backend.claim(
            [
                LeaseClaim(
                    key,
                    key.scheduled_ms,
                    "me",
                    f"decision {self._decisions}",
                    15_000,
                    3,
                    OnOverlap.SKIP,
                    60_000,
                    150_000,
                )
            ]
        )
        assert reply.lease is not None
        return reply.lease.ref

    def reads(self, command: str, number: int) -> int:
        """Return how many rows a command reads."""
        backend = self.backend
        ref = self.won(number)
        claimed = self.read
        calls: dict[str, Callable[[], object]] = {
            "claim": lambda: None,
            "renew": lambda: backend.renew([ref], 15_000),
            "settle": lambda: backend.settle(ref, FINISHED),
            "pending": lambda: backend.pending(["job 7"], 10),
            "register": lambda: backend.register([JobStamp("job 7", "x")]),
            "states": lambda: backend.states([JobSpan("job 7", NOW_MS - 5, NOW_MS)]),
            "history": lambda: backend.history("job 7", 3),
            "history of all": lambda: backend.history(None, 3),
            "prune": lambda: backend.prune(10 * NOW_MS, 100),
        }
        calls[command]()
        read = claimed if command == "claim" else self.read
        assert backend.settle(ref, FINISHED).accepted
        return read


@pytest.fixture
def session(postgres_server: Server) -> Iterator[Session]:
    with closing(Session(postgres_server.url)) as session:
        yield session


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "as made"])
@pytest.mark.parametrize(
    "command",
    [
        *("claim", "renew", "settle", "pending", "register", "states"),
        *("history", "history of all", "prune"),
    ],
)
def test_call_7_a_command_does_not_read_the_history(
    session: Session, command: str, *, analyzed: bool
) -> None:
    session.backend.register([JobStamp(f"job {number}", "x") for number in range(JOBS)])
    tables = ("job", "run", "space")
    if analyzed:  # while there is nothing in them: any index looks as good as any other then
        for table in tables:
            session.sql(f"VACUUM ANALYZE {{s}}.leasecron_{table}")
    for number in range(3):
        session.reads(command, number)
    before = session.reads(command, 3)
    session.sql(
        "INSERT INTO {s}.leasecron_run SELECT job_id, n, space_id, format, state, token, attempt, "
        "failures, hand_overs, holder, decision_id, until_ms, lease_ms, max_attempts, overlap, "
        "takeover_ms, claimed_ms, settled_ms, reason, unsettled_job_id "
        f"FROM {{s}}.leasecron_run, generate_series(1, {HISTORY}) n WHERE scheduled_ms = {NOW_MS}"
    )
    after = session.reads(command, 4)
    session.sql("VACUUM ANALYZE {s}.leasecron_run")
    replanned = session.reads(command, 5)
    all_jobs = command in ("history of all", "prune")
    slack = JOBS + 4 if all_jobs else 4  # a new plan may read all jobs once more
    assert 0 < before < 40 + 2 * slack
    assert after <= before + slack, "with the plans from before"
    assert replanned <= before + slack, "with new ones"
