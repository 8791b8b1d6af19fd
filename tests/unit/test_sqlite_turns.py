"""Who writes to an SQLite file when, and what several threads' settlements have in common."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from leasecron_sync import SQLiteLease
from leasecron_sync.backends._sqlite_lanes import Lane
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreRejected, StoreUnavailable
from leasecron_sync.model import (
    LeaseClaim,
    LeaseRef,
    OnOverlap,
    Outcome,
    RunKey,
    RunState,
    Settlement,
    SettleReply,
)

NOW_MS = 1_700_000_000_000
FINISHED = Settlement(Outcome.FINISHED)
LIMIT_S = 4.0


class Watched:
    """A connection that tells what it is about to execute."""

    def __init__(self, inner: sqlite3.Connection, told: Callable[[str], None]) -> None:
        self._inner = inner
        self._told = told

    def execute(self, sql: str, *values: Any) -> Any:  # noqa: ANN401 - what sqlite3 returns
        self._told(sql)
        return self._inner.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest of it
        return getattr(self._inner, name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def backend(path: Path) -> Iterator[SQLiteLease]:
    made = SQLiteLease(path)
    made._now_ms = lambda: NOW_MS
    made.open(BackendSettings("default", "me", 2_000))
    made.probe()
    yield made
    made.close()


@pytest.fixture
def other(path: Path, backend: SQLiteLease) -> Iterator[sqlite3.Connection]:
    """Another process's connection; the backend has made the file."""
    del backend
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


def watch(lane: Lane, told: Callable[[str], None]) -> None:
    assert lane.connection is not None
    lane.connection = Watched(lane.connection, told)  # type: ignore[assignment]


def claims(count: int) -> list[LeaseClaim]:
    return [
        LeaseClaim(
            RunKey(f"job {number}", NOW_MS),
            NOW_MS,
            "me",
            f"decision {number}",
            15_000,
            3,
            OnOverlap.SKIP,
            60_000,
            150_000,
        )
        for number in range(count)
    ]


def won(backend: SQLiteLease, count: int) -> list[LeaseRef]:
    leases = [reply.lease for reply in backend.claim(claims(count))]
    return [lease.ref for lease in leases if lease is not None]


# -- turns -----------------------------------------------------------------------------------------


def test_a_write_that_meets_a_lock_tries_again_soon(
    backend: SQLiteLease, other: sqlite3.Connection
) -> None:
    other.execute("BEGIN IMMEDIATE")
    tries = 0

    def told(sql: str) -> None:
        nonlocal tries
        tries += sql == "BEGIN IMMEDIATE"
        # By SQLite's own way of waiting there would be no second try, and no end of it.
        if tries == 10 and other.in_transaction:
            other.execute("COMMIT")

    watch(backend._timer_lane, told)
    assert len(won(backend, 3)) == 3
    assert tries == 10


def test_a_write_that_meets_a_lock_to_the_end_had_no_effect(
    path: Path, other: sqlite3.Connection
) -> None:
    other.execute("BEGIN IMMEDIATE")
    impatient = SQLiteLease(path)
    impatient._now_ms = lambda: NOW_MS
    impatient.open(BackendSettings("default", "you", 100))
    with pytest.raises(StoreUnavailable, match="another process did not end its transaction"):
        impatient.claim(claims(1))
    other.execute("COMMIT")
    assert impatient.claim(claims(1))[0].lease is not None
    impatient.close()


def test_a_read_that_meets_a_lock_is_begun_anew(
    backend: SQLiteLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    won(backend, 1)
    transaction, tries = backend._transaction, []

    def locked(*arguments: Any, **options: Any) -> object:  # noqa: ANN401 - passed on
        tries.append(options["begin"])
        if len(tries) < 4:
            message = "database is locked"
            raise sqlite3.OperationalError(message)
        return transaction(*arguments, **options)

    monkeypatch.setattr(backend, "_transaction", locked)
    assert len(backend.history("job 0", 10)) == 1
    assert tries == ["BEGIN"] * 4


def test_a_first_write_does_not_wait_in_sqlites_way_either(
    backend: SQLiteLease, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lease,) = won(backend, 1)
    other.execute("BEGIN IMMEDIATE")
    tries = 0
    begin = Lane.begin

    def told(sql: str) -> None:
        nonlocal tries
        tries += sql == "BEGIN IMMEDIATE"
        if tries == 10 and other.in_transaction:
            other.execute("COMMIT")

    def watched(lane: Lane, *arguments: Any) -> None:  # noqa: ANN401 - passed on
        if lane is backend._settle_lane and not isinstance(lane.connection, Watched):
            watch(lane, told)
        begin(lane, *arguments)

    monkeypatch.setattr(Lane, "begin", watched)
    assert backend.settle(lease, FINISHED).accepted
    assert tries > 10


# -- settlements of several threads ----------------------------------------------------------------


class Settling:
    """Settlements that gather while another connection has the file locked."""

    def __init__(self, backend: SQLiteLease, other: sqlite3.Connection) -> None:
        self.backend = backend
        self.other = other
        self.pool = ThreadPoolExecutor(16)
        self.commits = 0

    def begin(
        self, leases: list[LeaseRef], settlement: Settlement = FINISHED
    ) -> list[Future[SettleReply]]:
        """Lock the file, settle each lease in a thread of its own, and wait until all wait."""
        group = self.backend._settlements
        self.other.execute("BEGIN IMMEDIATE")
        asked = [self.pool.submit(self.backend.settle, leases[0], settlement)]
        eventually(lambda: group._led and not group._waiting)
        asked += [self.pool.submit(self.backend.settle, ref, settlement) for ref in leases[1:]]
        eventually(lambda: len(group._waiting) == len(leases) - 1)
        return asked

    def count_commits(self) -> None:
        """Count commits of the lane for settlements from now on."""

        def traced(sql: str) -> None:
            self.commits += sql == "COMMIT"

        assert self.backend._settle_lane.connection is not None
        self.backend._settle_lane.connection.set_trace_callback(traced)


def eventually(condition: Callable[[], bool]) -> None:
    end_ms = SystemClock().steady_ms() + LIMIT_S * 1000
    while not condition():
        assert SystemClock().steady_ms() < end_ms
        threading.Event().wait(0.001)


@pytest.fixture
def settling(backend: SQLiteLease, other: sqlite3.Connection) -> Iterator[Settling]:
    made = Settling(backend, other)
    yield made
    if other.in_transaction:
        other.execute("ROLLBACK")
    made.pool.shutdown()


def test_runs_that_end_together_share_a_commit(settling: Settling) -> None:
    backend = settling.backend
    leases = won(backend, 12)
    assert backend.settle(leases.pop(), FINISHED).accepted
    settling.count_commits()
    asked = settling.begin(leases)
    settling.other.execute("COMMIT")
    assert all(future.result(LIMIT_S).accepted for future in asked)
    assert settling.commits == 2
    states = {record.state for record in backend.history(None, 100)}
    assert states == {RunState.FINISHED}


def test_each_of_them_gets_its_own_answer(settling: Settling, path: Path) -> None:
    backend = settling.backend
    leases = won(backend, 4)
    with sqlite3.connect(path) as connection:  # as a newer version would have written it
        connection.execute(
            "UPDATE leasecron_run SET format = 99 WHERE job_id = "
            "(SELECT id FROM leasecron_job WHERE name = 'job 2')"
        )
    connection.close()
    fenced = leases[1]._replace(token=leases[1].token - 1)
    asked = settling.begin([leases[0], fenced, leases[2], leases[3]])
    settling.other.execute("COMMIT")
    assert asked[0].result(LIMIT_S).accepted
    assert not asked[1].result(LIMIT_S).accepted
    with pytest.raises(StoreRejected, match="format"):
        asked[2].result(LIMIT_S)
    assert asked[3].result(LIMIT_S).accepted


@pytest.mark.parametrize("kind", [OutcomeUnknown, StoreUnavailable])
def test_after_an_error_each_may_ask_again(
    kind: type[StoreError], settling: Settling, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, calls = settling.backend, 0
    commit = backend._commit

    def broken(connection: sqlite3.Connection) -> None:
        nonlocal calls
        calls += 1
        if calls != 2:
            commit(connection)
        elif kind is OutcomeUnknown:  # it took effect, and nobody was told
            commit(connection)
            raise OutcomeUnknown
        else:
            connection.execute("ROLLBACK")
            raise StoreUnavailable

    leases = won(backend, 6)
    monkeypatch.setattr(backend, "_commit", broken)
    asked = settling.begin(leases)
    settling.other.execute("COMMIT")
    errors = [future.exception(LIMIT_S) for future in asked]
    failed = [number for number, error in enumerate(errors) if isinstance(error, kind)]
    assert len(failed) == 5
    for number in failed:
        assert backend.settle(leases[number], FINISHED).accepted


def test_a_closed_store_settles_nothing(settling: Settling) -> None:
    backend = settling.backend
    leases = won(backend, 3)
    asked = settling.begin(leases)
    backend.close()
    settling.other.execute("COMMIT")
    results: list[Optional[BaseException]] = [future.exception(LIMIT_S) for future in asked]
    # The call that was under way went on; what had not begun had no effect.
    assert [type(error) for error in results if error is not None] == [StoreUnavailable] * 2
    with pytest.raises(StoreUnavailable, match="is closed"):
        backend.settle(leases[0], FINISHED)


def test_a_forked_child_does_not_wait_for_the_parents_settlements(backend: SQLiteLease) -> None:
    before = backend._settlements
    backend.discard()
    assert backend._settlements is not before
