"""What only the SQLite backend does: its file, its clock, its connections."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable
from unittest import mock

import pytest

from leasecron_sync.backends._sqlite_past import BRIDGED_STEP_MS
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseReply,
    OnOverlap,
    Outcome,
    RenewReply,
    RunKey,
    Settlement,
    Verdict,
)
from leasecron_sync.testing.clock import ManualClock

LEASE_MS = 10_000
HOUR_MS = 3_600_000
FINISHED = Settlement(Outcome.FINISHED)
WRITING = ("_timer_lane", "_renew_lane", "_settle_lane")
LANES = (*WRITING, "_people_lane")


class Bench:
    """A file, a clock, and backends on them that are closed in the end."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.path = path
        self.clock = clock
        self.opened: list[SQLiteLease] = []
        self.used = 0
        self._decisions = 0

        class OnManualClock(SQLiteLease):
            _now_ms = staticmethod(clock.now_ms)

        self._class = OnManualClock

    def open(self, namespace: str = "space", call_timeout_ms: int = 5_000) -> SQLiteLease:
        backend = self._class(self.path)
        backend.open(BackendSettings(namespace, f"instance {len(self.opened)}", call_timeout_ms))
        self.opened.append(backend)
        return backend

    def close(self) -> None:
        for backend in self.opened:
            backend.close()

    def intend(self, job: str = "job", ago_ms: int = 0) -> LeaseClaim:
        self._decisions += 1
        scheduled_ms = self.clock.now_ms() - ago_ms
        return LeaseClaim(
            key=RunKey(job, scheduled_ms),
            due_ms=scheduled_ms,
            holder="somebody",
            decision_id=f"decision {self._decisions}",
            lease_ms=LEASE_MS,
            max_attempts=3,
            on_overlap=OnOverlap.ALLOW,
            max_age_ms=HOUR_MS,
            takeover_ms=HOUR_MS,
        )

    def sql(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(statement, values).fetchall()


@pytest.fixture
def bench(tmp_path: Path, clock: ManualClock) -> Iterator[Bench]:
    bench = Bench(tmp_path / "jobs.db", clock)
    yield bench
    bench.close()


def ask(backend: SQLiteLease, claim: LeaseClaim) -> LeaseReply:
    [reply] = backend.claim([claim])
    return reply


def win(backend: SQLiteLease, claim: LeaseClaim) -> Lease:
    reply = ask(backend, claim)
    assert reply.lease is not None
    return reply.lease


def connection_of(backend: SQLiteLease, lane: str = "_timer_lane") -> sqlite3.Connection:
    connection = getattr(backend, lane).connection
    assert isinstance(connection, sqlite3.Connection)
    return connection


def use_every_lane(bench: Bench, backend: SQLiteLease) -> None:
    lease = win(backend, bench.intend("every lane", ago_ms=len(bench.opened) + bench.used))
    bench.used += 1
    assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
    assert backend.settle(lease.ref, FINISHED).accepted
    assert backend.history(None, 1)


# -- the path -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", ":memory:", "jobs\0.db"])
def test_a_path_that_no_other_process_could_open_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="use MemoryLease"):
        SQLiteLease(path)


def test_the_path_is_shown(tmp_path: Path) -> None:
    assert repr(SQLiteLease(tmp_path / "jobs.db")) == f"SQLiteLease({str(tmp_path / 'jobs.db')!r})"


def test_nothing_is_opened_before_the_first_call(bench: Bench) -> None:
    bench.open()
    assert not bench.path.exists()


def test_a_missing_folder_is_named_by_the_probe(bench: Bench) -> None:
    bench.path = bench.path.parent / "missing" / "jobs.db"
    backend = bench.open()
    with pytest.raises(StoreUnsupported, match=re.escape(str(bench.path.parent))):
        backend.probe()
    with pytest.raises(StoreUnavailable):
        ask(backend, bench.intend())
    assert not bench.path.parent.exists()


def test_the_file_may_hold_tables_of_others(bench: Bench) -> None:
    bench.sql("CREATE TABLE invoice (number INTEGER)")
    bench.sql("INSERT INTO invoice VALUES (17)")
    use_every_lane(bench, bench.open())
    assert bench.sql("SELECT number FROM invoice") == [(17,)]
    names = {name for (name,) in bench.sql("SELECT name FROM sqlite_master WHERE sql NOT NULL")}
    assert {name for name in names if not str(name).startswith("leasecron_")} == {"invoice"}


def test_the_probe_tells_version_clock_and_id(bench: Bench) -> None:
    first, second = bench.open().probe(), bench.open("another space").probe()
    assert first == second
    assert first.version == f"SQLite {sqlite3.sqlite_version}"
    assert first.store_ms == bench.clock.now_ms()
    assert len(first.store_id) == 32


# -- what is on the disk stays there --------------------------------------------------------------


def test_every_connection_writes_ahead_and_waits_for_the_disk(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    for lane in LANES:
        connection = connection_of(backend, lane)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
        assert connection.isolation_level is None
        assert not connection.in_transaction
    assert len({id(connection_of(backend, lane)) for lane in LANES}) == len(LANES)


def test_a_new_backend_finds_what_the_last_one_wrote(bench: Bench) -> None:
    first = bench.open()
    claim = bench.intend()
    lease = win(first, claim)
    store_id = first.probe().store_id
    first.close()
    second = bench.open()
    assert second.probe().store_id == store_id
    assert win(second, claim) == lease


def test_closing_is_repeatable_and_gives_up_all_connections(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    connections = [connection_of(backend, lane) for lane in LANES]
    backend.close()
    backend.close()
    for connection in connections:
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")
    with pytest.raises(StoreUnavailable):
        ask(backend, bench.intend())
    assert {path.name for path in bench.path.parent.iterdir()} == {"jobs.db"}


def test_namespaces_of_one_file_are_apart(bench: Bench) -> None:
    one, other = bench.open("one"), bench.open("other")
    claim = bench.intend()
    win(one, claim)
    assert win(other, claim).attempt == 1
    assert len(one.history(None, 10)) == len(other.history(None, 10)) == 1
    assert bench.sql("SELECT count(*) FROM leasecron_run") == [(2,)]


# -- files that are none of ours, and records that cannot be read ---------------------------------


def test_a_file_that_is_no_database_is_unsupported(bench: Bench) -> None:
    bench.path.write_text("This is a letter, not a database. " * 100, encoding="utf-8")
    before = bench.path.read_bytes()
    backend = bench.open()
    for _ in range(2):
        with pytest.raises(StoreUnsupported, match=r"not a database.*choose another path"):
            ask(backend, bench.intend())
    assert bench.path.read_bytes() == before


def test_a_newer_store_format_is_unsupported_and_left_as_it_is(bench: Bench) -> None:
    claim = bench.intend()
    win(bench.open(), claim)
    bench.close()
    bench.sql("UPDATE leasecron_meta SET value = '2' WHERE name = 'format'")
    before = bench.sql("SELECT * FROM leasecron_run")
    backend = bench.open("new space")
    for call in (backend.probe, lambda: ask(backend, claim), lambda: backend.jobs(1)):
        with pytest.raises(StoreUnsupported, match=r"store format 2.*reads 1"):
            call()
    assert bench.sql("SELECT * FROM leasecron_run") == before
    assert bench.sql("SELECT name FROM leasecron_space") == [("space",)]


@pytest.mark.parametrize(
    "damage",
    [
        "format = 2",
        "state = 'paused'",
        "state = ''",
        "format = 'x'",
        "until_ms = 'x'",
        "failures = 'x'",
        "token = x'00'",
    ],
)
def test_call_5_an_unreadable_record_is_refused_by_itself(bench: Bench, damage: str) -> None:
    backend = bench.open()
    good, bad = bench.intend("good"), bench.intend("bad")
    leases = [win(backend, claim) for claim in (good, bad)]
    bench.sql(
        f"UPDATE leasecron_run SET {damage} "
        "WHERE job_id = (SELECT id FROM leasecron_job WHERE name = 'bad')"
    )
    replies = backend.claim([bad, good])
    assert [reply.verdict for reply in replies] == [Verdict.REJECTED, Verdict.GRANTED]
    assert "'bad'" in replies[0].reason
    renewed = backend.renew([lease.ref for lease in leases[::-1]], LEASE_MS)
    assert list(renewed) == [RenewReply.LOST, RenewReply.RENEWED]
    with pytest.raises(StoreRejected, match="'bad'"):
        backend.settle(leases[1].ref, FINISHED)
    bench.clock.advance(2 * LEASE_MS)
    assert backend.pending(["good", "bad"], 10).keys == (good.key,)
    assert [record.key for record in backend.history(None, 10)] == [good.key]
    spans = [JobSpan("bad", 0, bench.clock.now_ms())]
    assert list(backend.states(spans)[0]) == [bad.key.scheduled_ms], "it is not owed"
    assert backend.settle(leases[0].ref, FINISHED).accepted


def test_call_5_text_that_cannot_be_decoded_spoils_its_own_record_at_most(bench: Bench) -> None:
    backend = bench.open()
    for job in ("good", "bad", "worse"):
        win(backend, bench.intend(job))
    for job, change in (("bad", "reason"), ("worse", "state")):
        bench.sql(
            f"UPDATE leasecron_run SET {change} = CAST(x'66ff' AS TEXT) "
            "WHERE job_id = (SELECT id FROM leasecron_job WHERE name = ?)",
            job,
        )
    records = backend.history(None, 10)
    assert {(record.key.job, record.reason) for record in records} == {
        ("good", ""),
        ("bad", "f\ufffd"),
    }
    claims = [bench.intend(job) for job in ("bad", "worse", "good")]
    verdicts = [reply.verdict for reply in backend.claim(claims)]
    assert verdicts == [Verdict.HELD, Verdict.REJECTED, Verdict.HELD]
    assert backend.pending(["good", "bad", "worse"], 10).unsettled


def test_call_5_a_job_with_values_of_other_kinds_does_not_stop_the_others(bench: Bench) -> None:
    backend = bench.open()
    backend.register([JobStamp("good", "x"), JobStamp("bad", "x")])
    bench.sql("UPDATE leasecron_job SET last_token = 'x' WHERE name = 'bad'")
    replies = backend.claim([bench.intend("bad"), bench.intend("good")])
    assert [reply.verdict for reply in replies] == [Verdict.REJECTED, Verdict.GRANTED]
    assert replies[0].reason == "the record of job 'bad' is damaged"


def test_call_5_other_runs_of_the_job_are_not_started_beside_an_unreadable_one(
    bench: Bench,
) -> None:
    backend = bench.open()
    win(backend, bench.intend(ago_ms=5))
    bench.sql("UPDATE leasecron_run SET format = 2")
    assert ask(backend, bench.intend()).verdict is Verdict.REJECTED


def test_call_5_an_unreadable_job_does_not_stop_the_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    backend = bench.open()
    stamps = [JobStamp("good", "x"), JobStamp("bad", "x")]
    first = backend.register(stamps)
    bench.sql("UPDATE leasecron_job SET former = '{' WHERE name = 'bad'")
    bench.clock.advance(HOUR_MS)
    with caplog.at_level(logging.ERROR):
        second = backend.register(stamps)
    assert second[0].owed_from_ms == first[0].owed_from_ms
    assert second[1].owed_from_ms == bench.clock.now_ms(), "nothing is owed"
    assert "'bad'" in caplog.text
    claims = [bench.intend("bad"), bench.intend("good")]
    verdicts = [reply.verdict for reply in backend.claim(claims)]
    assert verdicts == [Verdict.REJECTED, Verdict.GRANTED]


@pytest.mark.parametrize("damage", ["former = '{'", "last_token = 'x'"])
def test_call_5_an_unreadable_job_does_not_keep_the_runs_of_others_from_being_pruned(
    bench: Bench, damage: str
) -> None:
    backend = bench.open()
    claims = [bench.intend(job) for job in ("bad", "good")]
    for claim in claims:
        assert backend.settle(win(backend, claim).ref, FINISHED).accepted
    bench.sql(f"UPDATE leasecron_job SET {damage} WHERE name = 'bad'")
    bench.clock.advance(2 * HOUR_MS)
    young = bench.intend("good")
    assert backend.settle(win(backend, young).ref, FINISHED).accepted
    assert backend.prune(HOUR_MS, 100).deleted == 2
    assert [record.key for record in backend.history(None, 10)] == [young.key]
    # What was deleted is executed by nobody, of either job.
    again = [replace(claim, decision_id="again", max_age_ms=3 * HOUR_MS) for claim in claims]
    replies = backend.claim(again)
    assert [reply.lease for reply in replies] == [None, None]
    assert replies[0].verdict is Verdict.REJECTED


def test_call_5_a_damaged_note_of_what_was_pruned_lets_no_deleted_run_come_again(
    bench: Bench,
) -> None:
    backend = bench.open()
    for number in range(2):
        claim = bench.intend("bad")
        assert backend.settle(win(backend, claim).ref, FINISHED).accepted
        bench.clock.advance(2 * HOUR_MS)
        if number == 1:
            damage = "UPDATE leasecron_pruned SET last_ms = 'x'"
            bench.sql(damage)
            assert bench.sql("SELECT last_ms FROM leasecron_pruned") == [("x",)]
        assert backend.prune(HOUR_MS, 100).deleted == 1
    again = replace(claim, decision_id="again", max_age_ms=9 * HOUR_MS)
    assert ask(backend, again).lease is None


# -- calls that cannot be answered ----------------------------------------------------------------


@pytest.mark.parametrize("lane", WRITING)
def test_a_busy_file_is_unavailable_within_the_call_time_out(bench: Bench, lane: str) -> None:
    backend = bench.open(call_timeout_ms=40)
    claim = bench.intend()
    lease = win(backend, bench.intend("held"))
    calls: dict[str, Callable[[], object]] = {
        "_timer_lane": lambda: ask(backend, claim),
        "_renew_lane": lambda: backend.renew([lease.ref], LEASE_MS),
        "_settle_lane": lambda: backend.settle(lease.ref, FINISHED),
    }
    with closing(sqlite3.connect(bench.path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        for _ in range(2):  # with a new connection, and with the one that is there
            with pytest.raises(StoreUnavailable, match="locked"):
                calls[lane]()
    assert ask(backend, claim).verdict is Verdict.GRANTED
    calls[lane]()


def test_a_rehearsal_gives_up_before_a_call_would_and_leaves_nothing_locked(bench: Bench) -> None:
    backend = bench.open(call_timeout_ms=60_000)
    win(backend, bench.intend("before"))
    claim = bench.intend()
    with closing(sqlite3.connect(bench.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            backend.rehearse([claim])
        other.execute("ROLLBACK")
        backend.rehearse([claim])
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    assert ask(backend, claim).verdict is Verdict.GRANTED


def test_a_rehearsal_makes_no_file_where_one_is_gone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    backend = bench.open()
    win(backend, bench.intend("before"))
    bench.path.unlink()
    backend.rehearse([bench.intend()])
    assert not bench.path.exists()
    assert not caplog.records
    win(backend, bench.intend())
    assert [record.key.job for record in backend.history(None, 10)] == ["job"]
    assert caplog.records, "the loss is told by the claim"


def test_reading_does_not_wait_for_a_writer(bench: Bench) -> None:
    backend = bench.open(call_timeout_ms=40)
    claim = bench.intend()
    win(backend, claim)
    with closing(sqlite3.connect(bench.path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert backend.pending(["job"], 10).unsettled
        assert backend.history(None, 10)[0].key == claim.key
        assert len(backend.states([JobSpan("job", 0, bench.clock.now_ms())])[0]) == 1


def test_a_renewal_waits_for_no_other_call_of_its_instance(bench: Bench) -> None:
    backend = bench.open(call_timeout_ms=40)
    lease = win(backend, bench.intend())
    with backend._timer_lane.lock, backend._settle_lane.lock:
        assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
        with pytest.raises(StoreUnavailable, match="another call"):
            ask(backend, bench.intend("other"))
        with pytest.raises(StoreUnavailable, match="another call"):
            backend.settle(lease.ref, FINISHED)


def test_a_page_that_shows_the_history_keeps_no_run_waiting(bench: Bench) -> None:
    """Who looks on has a connection of his own, and waits for none of the scheduler's calls."""
    backend = bench.open(call_timeout_ms=40)
    first = bench.intend("first")
    with backend._people_lane.lock:  # as while thousands of records are read
        lease = win(backend, first)
        assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
        assert backend.pending(["first"], 10).unsettled
        assert backend.settle(lease.ref, FINISHED).accepted
        with pytest.raises(StoreUnavailable, match="another call"):
            backend.history(None, 10)
        with pytest.raises(StoreUnavailable, match="another call"):
            backend.jobs(10)
    with backend._timer_lane.lock, backend._renew_lane.lock, backend._settle_lane.lock:
        assert [record.key for record in backend.history(None, 10)] == [first.key]
        assert [summary.job for summary in backend.jobs(10)] == ["first"]


def test_call_1_a_new_connection_waits_no_longer_than_what_is_left_of_the_time_out(
    bench: Bench,
) -> None:
    backend, steady = bench.open(call_timeout_ms=1_000), ManualClock()
    prepare = SQLiteLease._prepare

    def slowly(*arguments: Any) -> None:  # noqa: ANN401 - passed on
        steady.advance(900)  # as behind another process that had the file locked for so long
        prepare(*arguments)

    slow_clock = mock.patch("leasecron_sync.backends.sqlite._clock", steady)
    with slow_clock, mock.patch.object(SQLiteLease, "_prepare", slowly):
        backend.probe()
    [waits_ms] = connection_of(backend).execute("PRAGMA busy_timeout").fetchone()
    assert waits_ms <= 100


def test_a_store_that_cannot_be_written_is_rejected(bench: Bench) -> None:
    backend = bench.open()
    lease = win(backend, bench.intend())
    connection_of(backend).execute("PRAGMA query_only = ON")
    with pytest.raises(StoreRejected, match="readonly"):
        ask(backend, bench.intend("other"))
    assert backend.settle(lease.ref, FINISHED).accepted, "another lane"


def test_a_full_disk_is_rejected_and_nothing_is_half_written(bench: Bench) -> None:
    backend = bench.open()
    win(backend, bench.intend())
    connection = connection_of(backend)
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    claims = [bench.intend(f"{'long name ' * 19} {number}") for number in range(200)]
    with pytest.raises(StoreRejected, match="full"):
        backend.claim(claims)
    assert bench.sql("SELECT count(*) FROM leasecron_run") == [(1,)]
    verdicts = {reply.verdict for reply in backend.claim(claims)}  # a new connection, no limit
    assert verdicts == {Verdict.GRANTED}


def test_a_call_that_breaks_off_is_undone_and_the_next_one_works(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend("new job")
    broken = mock.patch(
        "leasecron_sync.backends._sqlite_tables.SQLiteTables.put_job", side_effect=KeyboardInterrupt
    )
    with broken, pytest.raises(KeyboardInterrupt):
        ask(backend, claim)
    assert not connection_of(backend).in_transaction
    assert bench.sql("SELECT count(*) FROM leasecron_run") == [(0,)]
    assert ask(backend, claim).verdict is Verdict.GRANTED


def test_a_commit_that_fails_has_an_unknown_outcome(bench: Bench) -> None:
    failing = {"next": False}

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            if sql == "COMMIT" and failing["next"]:
                failing["next"] = False
                message = "disk I/O error"
                raise sqlite3.OperationalError(message)
            return super().execute(sql, *values)  # type: ignore[arg-type]

    connect = sqlite3.connect

    def with_faults(*args: object, **options: object) -> sqlite3.Connection:
        return connect(*args, factory=Connection, **options)  # type: ignore[call-overload,no-any-return]

    backend, claim = bench.open(), bench.intend()
    with mock.patch("sqlite3.connect", with_faults):
        backend.probe()
        failing["next"] = True
        with pytest.raises(OutcomeUnknown, match="disk I/O error"):
            ask(backend, claim)
        assert backend._timer_lane.connection is None, "a suspect connection is thrown away"
        assert ask(backend, claim).verdict is Verdict.GRANTED


def test_a_reader_in_the_way_of_a_commit_makes_the_call_unavailable_and_undone(
    bench: Bench,
) -> None:
    """Without a write-ahead log; SQLite then says for certain that nothing was committed."""
    backend, claim = bench.open(call_timeout_ms=80), bench.intend()
    with mock.patch("leasecron_sync.backends.sqlite.use_log", return_value=False):
        backend.probe()
        with closing(sqlite3.connect(bench.path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM leasecron_meta").fetchall()
            with pytest.raises(StoreUnavailable, match="locked"):
                ask(backend, claim)
            assert not connection_of(backend).in_transaction
        assert ask(backend, claim).verdict is Verdict.GRANTED


# -- the host's clock is the store's --------------------------------------------------------------


def test_a_small_step_back_of_the_clock_is_bridged(bench: Bench) -> None:
    backend, claim = bench.open(), bench.intend()
    lease = win(backend, claim)
    stopped_ms = bench.clock.now_ms()
    bench.clock.step(-BRIDGED_STEP_MS)
    for step_ms in (0, BRIDGED_STEP_MS // 2, BRIDGED_STEP_MS - BRIDGED_STEP_MS // 2):
        bench.clock.step(step_ms)
        assert backend.probe().store_ms == stopped_ms, "it stands still"
        assert bench.open().probe().store_ms == stopped_ms, "for all instances"
        assert win(backend, claim).left_ms == LEASE_MS
        assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
    bench.clock.step(1)
    assert backend.probe().store_ms == stopped_ms + 1
    assert win(backend, claim).left_ms == LEASE_MS - 1


def test_a_larger_step_back_is_accepted_with_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    backend = bench.open()
    win(backend, bench.intend())
    bench.clock.step(-BRIDGED_STEP_MS - 1)
    with caplog.at_level(logging.WARNING):
        reply = ask(backend, bench.intend("other"))
    assert reply.verdict is Verdict.GRANTED
    assert backend.probe().store_ms == bench.clock.now_ms()
    [record] = caplog.records
    assert (record.levelname, record.args) == ("WARNING", (str(bench.path), BRIDGED_STEP_MS + 1))


def test_the_newest_time_is_kept_by_what_writes(bench: Bench) -> None:
    def stored() -> object:
        return bench.sql("SELECT value FROM leasecron_meta WHERE name = 'clock_ms'")[0][0]

    backend, claim = bench.open(), bench.intend()
    win(backend, claim)
    written = stored()
    assert written == str(bench.clock.now_ms())
    bench.clock.advance(1_000)
    ask(backend, bench.intend("job", ago_ms=1_000))  # held, writes nothing
    backend.pending(["job"], 10)
    assert stored() == written
    backend.register([JobStamp("job", "x")])
    assert stored() == str(bench.clock.now_ms())


# -- a file that goes away ------------------------------------------------------------------------


def gone(path: Path, how: str) -> None:
    """Let the file go away, as an administrator might."""
    if how == "replaced":
        other = path.with_name("other.db")
        with closing(sqlite3.connect(other)) as connection:
            connection.execute("CREATE TABLE invoice (number INTEGER)")
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink()
        other.replace(path)
        return
    path.unlink()
    if how == "deleted with its log":
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink()


@pytest.mark.parametrize("how", ["deleted", "deleted with its log", "replaced"])
def test_a_file_that_is_gone_is_noticed_before_the_next_claim(
    bench: Bench, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend, other = bench.open(), bench.open()
    claim = bench.intend()
    use_every_lane(bench, backend)
    use_every_lane(bench, other)
    old = win(backend, claim)
    assert old.ref == win(other, claim).ref
    store_id = backend.probe().store_id
    gone(bench.path, how)
    bench.clock.advance(1)
    with caplog.at_level(logging.ERROR):
        again = win(other, replace(claim, decision_id="made anew"))
    assert "deleted or replaced" in caplog.text
    assert (again.attempt, again.ref.key) == (1, claim.key)
    assert list(backend.renew([old.ref], LEASE_MS)) == [RenewReply.LOST]
    assert ask(backend, claim).verdict is Verdict.HELD
    assert not backend.settle(old.ref, FINISHED).accepted
    assert backend.probe().store_id == other.probe().store_id != store_id
    for instance in (backend, other):
        instance.close()
    rows = bench.sql("SELECT token FROM leasecron_run")
    assert rows == [(again.ref.token,)], "closing the old connections did no harm"
    assert bench.sql("PRAGMA integrity_check") == [("ok",)]


# -- no command reads more than it has to ---------------------------------------------------------


def test_call_7_a_long_history_makes_no_command_slower(bench: Bench) -> None:
    """Every statement on the runs is answered by an index, so settled runs are not walked."""
    backend = bench.open()
    claims = [bench.intend(f"job {number % 3}", ago_ms=number) for number in range(60)]
    leases = [reply.lease for reply in backend.claim(claims) if reply.lease is not None]
    for lease in leases[:50]:
        backend.settle(lease.ref, FINISHED)
    backend.renew([leases[55].ref], LEASE_MS)
    backend.history(None, 1)
    statements: set[str] = set()
    for lane in LANES:
        connection_of(backend, lane).set_trace_callback(statements.add)
    job = "job 1"
    ask(backend, bench.intend(job))
    backend.renew([leases[55].ref], LEASE_MS)
    backend.settle(leases[56].ref, FINISHED)
    backend.register([JobStamp(job, "x")])
    backend.pending([job], 10)
    backend.states([JobSpan(job, 0, bench.clock.now_ms())])
    backend.history(job, 5)
    backend.history(None, 5)
    backend.jobs(2)
    bench.clock.advance(HOUR_MS)
    backend.prune(HOUR_MS, 2)
    for lane in LANES:
        connection_of(backend, lane).set_trace_callback(None)
    explained = [text for text in statements if "leasecron_run" in text and "INSERT" not in text]
    assert len(explained) > 8
    for text in explained:
        steps = [str(row[-1]) for row in bench.sql(f"EXPLAIN QUERY PLAN {text}")]
        assert not [step for step in steps if step.startswith("SCAN r")], (text, steps)
        assert not [step for step in steps if "TEMP B-TREE" in step and "LIMIT" not in text], text


# -- after a fork ---------------------------------------------------------------------------------


def test_a_child_uses_none_of_the_connections_it_inherited(bench: Bench) -> None:
    """What ``discard`` does, without a fork; with one: tests/faults/test_sqlite_processes.py."""
    backend = bench.open()
    use_every_lane(bench, backend)
    inherited = [connection_of(backend, lane) for lane in LANES]
    backend._timer_lane.lock.acquire()  # by a thread that does not exist in the child
    backend.discard()
    with pytest.raises(StoreUnavailable):
        ask(backend, bench.intend())
    backend.open(BackendSettings("space", "child", 5_000))
    use_every_lane(bench, backend)
    assert not {id(item) for item in inherited} & {
        id(connection_of(backend, lane)) for lane in LANES
    }
