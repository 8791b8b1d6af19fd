"""What only the PostgreSQL backend does: its address, its schema, its connections, its errors."""

from __future__ import annotations

import builtins
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Callable, Optional
from unittest import mock

import pytest

from leasecron_sync import Scheduler, every
from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._postgres_errors import unreachable
from leasecron_sync.backends._postgres_link import targets
from leasecron_sync.backends._postgres_rows import number_array, text_array
from leasecron_sync.backends._postgres_schema import FUNCTIONS, Names, schema_sql
from leasecron_sync.backends._secrets import shown_dsn
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    MissingDependency,
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Outcome,
    RenewReply,
    RunKey,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.testing import ManualClock, ManualScheduler
from leasecron_sync.testing.conformance._names import ODD_NAMES
from leasecron_sync.testing.conformance._race import race
from tests.services.postgres import execute
from tests.services.process import eventually
from tests.services.proxy import Proxy, postgres_answered
from tests.services.relay import How
from tests.services.server import Server

LEASE_MS = 10_000
HOUR_MS = 3_600_000
LIMIT_S = 10.0
FINISHED = Settlement(Outcome.FINISHED)
SECRETS = ("alice", "s3cret")


# -- the address ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dsn", ["", "  ", "host=localhost\0"])
def test_an_address_that_names_nothing_is_refused(dsn: str) -> None:
    with pytest.raises(ValueError, match="postgresql://localhost/jobs"):
        PostgresLease(dsn)


@pytest.mark.parametrize("option", ["dsn", "schema", "table_prefix"])
def test_what_is_no_text_is_refused(option: str) -> None:
    arguments: dict[str, Any] = {"dsn": "host=localhost", option: b"x"}
    with pytest.raises(TypeError, match=f"{option} must be text, not bytes"):
        PostgresLease(**arguments)


@pytest.mark.parametrize("name", ["", "1up", "a.b", 'a"b', "a b", "a%b", "a{b", "\u00e4", "x" * 64])
def test_a_schema_that_would_need_care_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"schema .* must be"):
        PostgresLease("host=localhost", schema=name)


@pytest.mark.parametrize("name", ["1up", "Up_", "a-b", "a%b", "a b", "x" * 31])
def test_a_prefix_that_would_need_care_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"table_prefix .* must be"):
        PostgresLease("host=localhost", table_prefix=name)


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("host=db port=5433 dbname=jobs", "host=db port=5433 dbname=jobs"),
        ("dbname=jobs user=alice password=s3cret host=db", "host=db dbname=jobs"),
        ("host = 'db'  password = 's3 cret\\' x' dbname = jobs", "host='db' dbname=jobs"),
        ("service=jobs", "service=jobs"),
        ("password=s3cret", "***"),
        ("user=alice", "***"),
        ("s3cret", "***"),
        ("host=db s3cret", "***"),
        ("host=db password='s3cret", "***"),
        ("dbname='postgresql://alice:s3cret@db/jobs'", "***"),
        ("host=db dbname='user=alice password=s3cret'", "host=db"),
        ("postgresql://alice:s3cret@db/jobs?sslmode=require", "postgresql://db/jobs"),
        ("postgres://alice:s3cret@one,two:5433/jobs", "postgres://one,two:5433/jobs"),
        ("postgresql://alice:s3@cret@db/jobs", "postgresql://db/jobs"),
        ("postgresql://db/jobs?password=s3@cret", "postgresql://***"),
        (" postgresql://alice:s3cret@db/jobs", "postgresql://db/jobs"),
    ],
)
def test_an_address_is_shown_without_user_and_password(dsn: str, shown: str) -> None:
    assert shown_dsn(dsn) == shown
    assert repr(PostgresLease(dsn)) == f"PostgresLease({shown!r})"


def test_where_the_tables_are_is_shown() -> None:
    backend = PostgresLease("host=db", schema="cron", table_prefix="")
    assert repr(backend) == "PostgresLease('host=db', schema='cron', table_prefix='')"


def test_nothing_is_connected_before_the_first_call() -> None:
    PostgresLease("host=127.0.0.1 port=1").open(BackendSettings("space", "me", 1_000))


@pytest.mark.parametrize(
    "dsn", ["postgresql://alice:s3cret@[::1/jobs", "alice s3cret", "pasword=s3cret user=alice"]
)
def test_an_address_that_libpq_cannot_read_is_not_shown(dsn: str) -> None:
    backend = PostgresLease(dsn)
    with pytest.raises(ValueError, match="libpq cannot read") as caught:
        backend.open(BackendSettings("space", "me", 1_000))
    assert not any(secret in str(caught.value) for secret in SECRETS)
    assert caught.value.__cause__ is None


def test_a_missing_client_is_named_with_its_extra() -> None:
    real = builtins.__import__

    def without_client(name: str, *rest: Any) -> object:  # noqa: ANN401 - passed on
        if name.startswith("psycopg2"):
            raise ImportError(name)
        return real(name, *rest)

    backend = PostgresLease("host=localhost")
    missing = mock.patch("builtins.__import__", without_client)
    with missing, pytest.raises(MissingDependency, match=r"leasecron_sync\[postgres\]"):
        backend.open(BackendSettings("space", "me", 1_000))
    with pytest.raises(StoreUnavailable, match="closed"):
        backend.probe()


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ({}, [{}]),
        ({"host": "a", "port": "1"}, [{"host": "a", "port": "1"}]),
        ({"host": "a,b"}, [{"host": "a"}, {"host": "b"}]),
        ({"host": "a,b", "port": "1"}, [{"host": "a", "port": "1"}, {"host": "b", "port": "1"}]),
        ({"host": "a,b", "port": "1,2"}, [{"host": "a", "port": "1"}, {"host": "b", "port": "2"}]),
        ({"hostaddr": "::1,::2"}, [{"hostaddr": "::1"}, {"hostaddr": "::2"}]),
        ({"host": "a,b", "port": "1,2,3"}, [{"host": "a,b", "port": "1,2,3"}]),
    ],
)
def test_servers_that_an_address_lists_are_tried_one_by_one(
    given: dict[str, str], places: list[dict[str, str]]
) -> None:
    assert list(targets({**given, "dbname": "jobs"})) == [{**it, "dbname": "jobs"} for it in places]


def test_arrays_keep_every_character() -> None:
    assert text_array([]) == number_array([]) == "{}"
    assert number_array([1, -2]) == "{1,-2}"
    assert text_array([""]) == '{""}'
    assert text_array(["a", "", "null", "{,}"]) == '{"a","","null","{,}"}'
    assert text_array(['a"b', "c\\d"]) == '{"a\\"b","c\\\\d"}'
    assert text_array(['"']) == '{"\\""}'


@pytest.mark.parametrize(
    "text",
    [
        'FATAL:  password authentication failed for user "alice"',
        "FATAL:  Passwort-Authentifizierung f\u00fcr Benutzer \u00bbalice\u00ab fehlgeschlagen",
        'FATAL:  role "somebody else" does not exist',
        "could not use alice or s3cret",
    ],
)
def test_no_error_of_a_connection_shows_credentials(text: str) -> None:
    error = unreachable(OSError(f"connection to db failed\n{text}\n"), "host=db", SECRETS)
    assert str(error).startswith("host=db cannot be reached: ")
    assert "***" in str(error)
    assert not any(secret in str(error) for secret in (*SECRETS, "somebody"))


# -- with a server --------------------------------------------------------------------------------


class Bench:
    """A schema of a server, and backends on it that are closed in the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.schema = f"unit_{uuid.uuid4().hex}"
        self._opened: list[PostgresLease] = []
        self._decisions = 0

    def open(self, url: str = "", call_timeout_ms: int = 5_000, **where: str) -> PostgresLease:
        backend = PostgresLease(url or self.url, **{"schema": self.schema, **where})
        backend.open(BackendSettings("space", f"instance {len(self._opened)}", call_timeout_ms))
        self._opened.append(backend)
        return backend

    def close(self) -> None:
        for backend in self._opened:
            backend.close()
        self.sql(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")

    def script(self, text: str) -> None:
        """Run many statements, as an administrator would."""
        execute(self.url, text.replace("%", "%%"))

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return execute(self.url, statement.format(s=self.schema), *values)

    def intend(self, job: str = "job", *, ago_ms: int = 0, lease_ms: int = LEASE_MS) -> LeaseClaim:
        self._decisions += 1
        scheduled_ms = SystemClock().now_ms() - ago_ms
        return LeaseClaim(
            key=RunKey(job, scheduled_ms),
            due_ms=scheduled_ms - HOUR_MS // 2,
            holder="somebody",
            decision_id=f"decision {self._decisions}",
            lease_ms=lease_ms,
            max_attempts=3,
            on_overlap=OnOverlap.ALLOW,
            max_age_ms=HOUR_MS,
            takeover_ms=HOUR_MS,
        )


@pytest.fixture
def bench(postgres_server: Server) -> Iterator[Bench]:
    bench = Bench(postgres_server.url)
    yield bench
    bench.close()


@pytest.fixture
def database(postgres_server: Server) -> Iterator[Callable[[str], str]]:
    """Makes databases with the options that it is given."""
    names: list[str] = []

    def make(options: str) -> str:
        name = f"unit_{uuid.uuid4().hex}"
        execute(postgres_server.url, f"CREATE DATABASE {name} {options}")
        names.append(name)
        return postgres_server.url.replace("/postgres", f"/{name}")

    yield make
    for name in names:
        execute(postgres_server.url, f"DROP DATABASE {name} WITH (FORCE)")


def ask(backend: PostgresLease, claim: LeaseClaim) -> LeaseReply:
    [reply] = backend.claim([claim])
    return reply


def win(backend: PostgresLease, claim: LeaseClaim) -> Lease:
    reply = ask(backend, claim)
    assert reply.lease is not None
    return reply.lease


def hurry(backend: PostgresLease, call_timeout_ms: int) -> None:
    """Give calls less time from now on, after those that make the connections."""
    backend.open(BackendSettings("space", "me", call_timeout_ms))


def use_every_lane(bench: Bench, backend: PostgresLease) -> None:
    lease = win(backend, bench.intend(f"every lane {uuid.uuid4().hex}"))
    assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
    assert backend.settle(lease.ref, FINISHED).accepted


def server_pids(backend: PostgresLease) -> list[int]:
    """Return the processes that serve a backend's connections."""
    return [
        lane.connection._connection.info.backend_pid
        for lane in backend._lanes.all()
        if lane.connection is not None
    ]


def every_call(
    backend: PostgresLease, claim: LeaseClaim, lease: Lease
) -> list[Callable[[], object]]:
    return [
        backend.probe,
        partial(backend.register, [JobStamp("job", "x")]),
        partial(backend.claim, [claim]),
        partial(backend.renew, [lease.ref], LEASE_MS),
        partial(backend.settle, lease.ref, FINISHED),
        partial(backend.pending, ["job"], 10),
        partial(backend.states, [JobSpan("job", 0, claim.due_ms)]),
        partial(backend.history, None, 10),
        partial(backend.history, "job", 10),
        partial(backend.jobs, 10),
        partial(backend.prune, HOUR_MS, 10),
    ]


# -- its schema -----------------------------------------------------------------------------------


def test_the_probe_tells_version_clock_and_id(bench: Bench) -> None:
    before_ms = SystemClock().now_ms()
    first, second = bench.open().probe(), bench.open().probe()
    assert first.version == second.version
    assert first.version.startswith("PostgreSQL ")
    assert first.store_id == second.store_id
    assert len(first.store_id) == 32
    assert first.store_ms is not None
    assert before_ms - 1 <= first.store_ms <= SystemClock().now_ms() + 1
    assert first.warnings == ("fsync is off: after a crash of the host the store may be damaged",)


def test_what_may_be_forgotten_is_a_warning_of_the_probe(
    bench: Bench, database: Callable[[str], str]
) -> None:
    url = database("")
    execute(url, f"ALTER DATABASE {url.rpartition('/')[2]} SET synchronous_commit = off")
    warnings = bench.open(url).probe().warnings
    assert [warning for warning in warnings if "synchronous_commit is off" in warning]


def test_any_number_of_instances_make_the_schema_at_once(bench: Bench) -> None:
    backends = [bench.open() for _ in range(12)]
    infos = race([backend.probe for backend in backends])
    assert len({info.store_id for info in infos}) == 1
    assert win(backends[0], bench.intend()).attempt == 1
    [(tables,)] = bench.sql("SELECT count(*) FROM pg_tables WHERE schemaname = '{s}'")
    assert tables == 4


def test_schemas_and_prefixes_keep_stores_apart(bench: Bench) -> None:
    one, two = bench.open(), bench.open(table_prefix="other_")
    claim = bench.intend()
    assert win(one, claim).attempt == win(two, claim).attempt == 1
    assert one.probe().store_id != two.probe().store_id
    assert one.settle(win(one, claim).ref, FINISHED).accepted
    assert ask(two, claim).verdict is Verdict.GRANTED
    assert len(one.history(None, 10)) == len(two.history(None, 10)) == 1


def test_names_that_a_reader_of_sql_could_mistake_are_quoted(bench: Bench) -> None:
    bench.sql('CREATE SCHEMA "user"')
    try:
        use_every_lane(bench, bench.open(schema="user", table_prefix=""))
        [(tables,)] = bench.sql("SELECT count(*) FROM pg_tables WHERE schemaname = 'user'")
        assert tables == 4
    finally:
        bench.sql('DROP SCHEMA "user" CASCADE')


@contextmanager
def role(bench: Bench, *grants: str) -> Iterator[str]:
    """Make a role that may connect, and what else is granted; give out its URL."""
    name = f"role_{uuid.uuid4().hex}"
    bench.sql(f"CREATE ROLE {name} LOGIN PASSWORD 's3cret'")
    try:
        for grant in grants:
            bench.sql(f"GRANT {grant} TO {name}")
        yield bench.url.replace("leasecron:secret@", f"{name}:s3cret@")
    finally:
        bench.sql(f"DROP OWNED BY {name}")
        bench.sql(f"DROP ROLE {name}")


@pytest.mark.parametrize("prefix", ["leasecron_", "own_", ""])
def test_a_role_that_may_not_create_uses_what_an_administrator_made(
    bench: Bench, prefix: str
) -> None:
    text = PostgresLease(bench.url, schema=bench.schema, table_prefix=prefix).schema_sql()
    bench.script(text)
    grants = re.findall("^--   GRANT (.*) TO role;$", text, re.MULTILINE)  # as it says itself
    assert len(grants) == 2
    with role(bench, *grants) as url:
        backend = bench.open(url, table_prefix=prefix)
        assert len(backend.probe().store_id) == 32
        lease = win(backend, bench.intend())
        for call in every_call(backend, bench.intend(), lease):
            call()
        backend.close()


def test_the_printed_schema_may_be_run_again_and_by_psql(bench: Bench) -> None:
    text = schema_sql(Names(bench.schema, "leasecron_"))
    assert text.count("CREATE OR REPLACE FUNCTION") == len(FUNCTIONS)
    assert "{schema}" not in text
    assert "{prefix}" not in text
    for _ in range(2):
        bench.script(text)
    first = bench.open().probe().store_id
    bench.script(text)
    assert bench.open().probe().store_id == first


def test_a_role_that_may_not_create_is_told_what_to_do(bench: Bench) -> None:
    with role(bench) as url:
        backend = bench.open(url)
        with pytest.raises(StoreUnsupported, match="leasecron-sync schema") as caught:
            backend.probe()
        assert "permission denied" in str(caught.value)
        assert not any(name in str(caught.value) for name in ("role_", "s3cret"))
        backend.close()


def test_a_role_that_may_not_write_is_rejected(bench: Bench) -> None:
    bench.open().probe()
    grants = ("USAGE ON SCHEMA {s}", "SELECT ON ALL TABLES IN SCHEMA {s}")
    with role(bench, *grants) as url:
        backend = bench.open(url)
        backend.probe()
        with pytest.raises(StoreRejected, match=r"the user needs USAGE.*SELECT, INSERT"):
            ask(backend, bench.intend())
        backend.close()


def test_a_newer_store_format_is_unsupported_and_left_as_it_is(bench: Bench) -> None:
    win(bench.open(), bench.intend())
    bench.sql("UPDATE {s}.leasecron_meta SET value = '2' WHERE name = 'format'")
    bench.sql("DROP FUNCTION {s}.leasecron_renew_v1")  # as one that knows another would
    backend = bench.open()
    claim = bench.intend()
    for call in (backend.probe, partial(ask, backend, claim), partial(backend.jobs, 1)):
        with pytest.raises(StoreUnsupported, match=r"store format 2.*reads 1"):
            call()
    assert bench.sql("SELECT count(*) FROM {s}.leasecron_run") == [(1,)]


def test_who_only_reads_makes_no_tables(bench: Bench) -> None:
    backend = bench.open()
    calls: list[Callable[[], object]] = [
        partial(backend.jobs, 1),
        partial(backend.history, None, 1),
        partial(backend.pending, ["job"], 1),
        partial(backend.states, [JobSpan("job", 0, 1)]),
    ]
    for call in calls:
        with pytest.raises(StoreRejected, match=r"no tables for this version .*\?schema="):
            call()
    assert bench.sql("SELECT to_regnamespace('{s}')") == [(None,)]


@pytest.mark.parametrize(
    "loss",
    [
        "DROP SCHEMA {s} CASCADE",
        "DROP TABLE {s}.leasecron_run",
        "DROP TABLE {s}.leasecron_job",
        "TRUNCATE {s}.leasecron_meta, {s}.leasecron_job, {s}.leasecron_run, {s}.leasecron_space",
    ],
)
def test_register_5_a_store_that_lost_its_data_has_another_id(bench: Bench, loss: str) -> None:
    backend = bench.open()
    stamps = [JobStamp("job", "x")]
    [before] = backend.register(stamps)
    token = win(backend, bench.intend()).ref.token
    bench.sql(loss)
    with pytest.raises(StoreError):  # the engine asks for a probe then
        backend.register(stamps)
    assert backend.probe().store_id != before.store_id
    [after] = backend.register(stamps)
    assert after.store_id == backend.probe().store_id != before.store_id
    assert after.owed_from_ms >= before.owed_from_ms
    assert win(backend, bench.intend("job", ago_ms=3)).ref.token > token


def test_functions_of_another_version_are_left_beside_ones_own(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    lease = win(backend, bench.intend())
    bench.sql(
        "CREATE FUNCTION {s}.leasecron_renew_v99() RETURNS integer LANGUAGE sql AS 'SELECT 1'"
    )
    bench.sql("DROP FUNCTION {s}.leasecron_renew_v1")
    with pytest.raises(StoreUnavailable):
        backend.renew([lease.ref], LEASE_MS)
    assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
    assert bench.sql("SELECT {s}.leasecron_renew_v99()") == [(1,)]


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_an_encoding_that_lacks_letters_is_unsupported(
    bench: Bench, database: Callable[[str], str], encoding: str
) -> None:
    url = database(f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    backend = bench.open(url)
    with pytest.raises(StoreUnsupported, match=rf"encoded as {encoding}.*ENCODING 'UTF8'"):
        backend.probe()
    assert execute(url, "SELECT to_regnamespace(%s)", bench.schema) == [(None,)]


def test_call_6_a_database_without_an_encoding_keeps_names_as_they_are(
    bench: Bench, database: Callable[[str], str]
) -> None:
    backend = bench.open(database("ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"))
    claims = [bench.intend(name) for name in ODD_NAMES]
    assert {reply.verdict for reply in backend.claim(claims)} == {Verdict.GRANTED}
    assert [job.job for job in backend.jobs(1_000)] == sorted(ODD_NAMES)
    keys = {record.key for record in backend.history(None, 1_000)}
    assert keys == {claim.key for claim in claims}
    long = Settlement(Outcome.FAILED, "\u5b9a" * 1_000)
    lease = win(backend, claims[0])
    backend.settle(lease.ref, long)
    assert backend.history(ODD_NAMES[0], 1)[0].reason == long.reason


def test_a_server_that_is_too_old_is_unsupported(bench: Bench) -> None:
    newer = mock.patch("leasecron_sync.backends._postgres_schema.OLDEST_SERVER", 990_000)
    with newer, pytest.raises(StoreUnsupported, match="version 99 or a newer one"):
        bench.open().probe()


# -- records that cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["format = 2", "state = 'paused'"])
def test_call_5_an_unreadable_record_is_refused_by_itself(bench: Bench, damage: str) -> None:
    backend = bench.open()
    good, bad = bench.intend("good", lease_ms=1), bench.intend("bad", lease_ms=1)
    leases = [win(backend, claim) for claim in (good, bad)]
    bench.sql(
        f"UPDATE {{s}}.leasecron_run SET {damage} "
        "WHERE job_id = (SELECT id FROM {s}.leasecron_job WHERE name = 'bad')"
    )
    claims = [bench.intend("bad", ago_ms=1), good, bad, bench.intend("bad", ago_ms=2)]
    replies = backend.claim(claims)
    refused = [Verdict.REJECTED, Verdict.GRANTED, Verdict.REJECTED, Verdict.REJECTED]
    assert [reply.verdict for reply in replies] == refused
    assert "'bad'" in replies[0].reason
    assert "upgrade" in replies[2].reason
    assert replies[1].lease is not None
    renewed = backend.renew([leases[1].ref, replies[1].lease.ref], 1)
    assert list(renewed) == [RenewReply.LOST, RenewReply.RENEWED]
    with pytest.raises(StoreRejected, match="'bad'"):
        backend.settle(leases[1].ref, FINISHED)
    assert eventually(lambda: backend.pending(["good", "bad"], 10).keys == (good.key,), LIMIT_S)
    assert [record.key for record in backend.history(None, 10)] == [good.key]
    assert [job.newest is None for job in backend.jobs(10)] == [True, False]
    spans = [JobSpan("bad", 0, SystemClock().now_ms())]
    assert list(backend.states(spans)[0]) == [bad.key.scheduled_ms], "it is not owed"
    assert backend.prune(0, 10).abandoned == (good.key,)


def test_call_5_an_unreadable_job_does_not_stop_the_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    backend = bench.open()
    stamps = [JobStamp("good", "x"), JobStamp("bad", "x")]
    first = backend.register(stamps)
    bench.sql("UPDATE {s}.leasecron_job SET format = 2, owed_from_ms = 1 WHERE name = 'bad'")
    with caplog.at_level(logging.ERROR):
        second = backend.register([JobStamp("bad", "y"), JobStamp("good", "x")])
    assert second[1].owed_from_ms == first[0].owed_from_ms
    assert second[0].owed_from_ms == second[0].store_ms, "nothing is owed"
    assert "'bad'" in caplog.text
    assert bench.sql("SELECT owed_from_ms FROM {s}.leasecron_job WHERE name = 'bad'") == [(1,)]
    verdicts = [
        reply.verdict for reply in backend.claim([bench.intend("bad"), bench.intend("good")])
    ]
    assert verdicts == [Verdict.REJECTED, Verdict.GRANTED]


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_text_that_cannot_be_stored_is_rejected_and_the_connection_stays(
    bench: Bench, name: str
) -> None:
    backend = bench.open()
    backend.probe()
    before = server_pids(backend)
    with pytest.raises(StoreRejected, match="cannot be stored"):
        ask(backend, bench.intend(name))
    assert ask(backend, bench.intend()).verdict is Verdict.GRANTED
    assert server_pids(backend) == before


# -- the server's clock ---------------------------------------------------------------------------


def test_clock_1_the_server_decides_by_its_own_clock(bench: Bench) -> None:
    """All that depends on time, with a host clock that is an hour off."""
    backend = bench.open()
    store_ms = backend.probe().store_ms
    assert store_ms is not None
    keep_ms = 60
    with mock.patch("time.time_ns", return_value=(store_ms + HOUR_MS) * 1_000_000):
        early = bench.intend("early")
        early = LeaseClaim(**{**vars(early), "due_ms": store_ms + HOUR_MS})
        reply = ask(backend, early)
        assert reply.verdict is Verdict.EARLY
        assert HOUR_MS - 5_000 < reply.wait_ms <= HOUR_MS
        claim = LeaseClaim(**{**vars(bench.intend(lease_ms=keep_ms)), "due_ms": store_ms})
        lease = win(backend, claim)
        assert store_ms <= lease.ref.token <= store_ms + 5_000, "a token is the store's time"
        other = LeaseClaim(**{**vars(claim), "decision_id": "another"})
        assert eventually(lambda: ask(backend, other).lease is not None, LIMIT_S)
        assert backend.pending(["job"], 10).next_in_ms is not None
        [standing] = backend.register([JobStamp("job", "x")])
        assert store_ms <= standing.owed_from_ms <= store_ms + 5_000
        record = backend.history("job", 1)[0]
        assert record.attempt == 2
        assert record.claimed_ms is not None
        assert lease.ref.token + keep_ms <= record.claimed_ms < store_ms + HOUR_MS


def test_clock_1_a_claim_that_waited_for_a_lock_reads_the_clock_afterwards(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend(lease_ms=LEASE_MS)
    win(backend, claim)
    with closing(_connected(bench.url)) as other:
        other.cursor().execute(f"SELECT FROM {bench.schema}.leasecron_job FOR UPDATE")
        later = bench.intend("job", ago_ms=1)

        def free_then() -> int:
            assert eventually(lambda: _waiting(bench) == 1, LIMIT_S)
            [(now_ms,)] = bench.sql(
                "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            )
            other.rollback()
            return int(now_ms)

        contenders: list[Callable[[], Any]] = [free_then, partial(win, backend, later)]
        freed_ms, lease = race(contenders)
    assert lease.ref.token >= freed_ms


def test_a_scheduler_that_is_moved_by_hand_moves_the_clock_of_its_store(bench: Bench) -> None:
    clock = ManualClock()
    scheduler = Scheduler(PostgresLease(bench.url, schema=bench.schema))
    seen: list[str] = []
    scheduler.add_job(lambda: seen.append("ran"), every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, clock)
    manual.start()
    manual.advance(180_000)
    records = manual.history()
    manual.stop()
    manual.end_stop()
    assert seen == ["ran"] * 3
    assert [record.state for record in records] == [RunState.FINISHED] * 3
    assert all(record.settled_ms == record.key.scheduled_ms for record in records)


def _waiting(bench: Bench) -> int:
    [(count,)] = bench.sql(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND query LIKE '%%{s}%%'"
    )
    return int(count)


def _connected(url: str) -> Any:  # noqa: ANN401
    import psycopg2

    return psycopg2.connect(url)


# -- connections ----------------------------------------------------------------------------------


def test_one_round_trip_per_command_and_per_batch(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(postgres_server)
    backend = bench.open(between.url_of(bench.url))
    use_every_lane(bench, backend)
    backend.register([JobStamp(f"job {number}", "x") for number in range(100)])
    before = between.requests
    claims = [bench.intend(f"job {number}") for number in range(100)]
    claims += [bench.intend(f"job {number}", ago_ms=LEASE_MS) for number in range(10)]
    leases = [reply.lease for reply in backend.claim(claims) if reply.lease is not None]
    assert len(leases) == 110
    assert between.requests == before + 1
    backend.renew([lease.ref for lease in leases], LEASE_MS)
    assert between.requests == before + 2
    for call in every_call(backend, bench.intend(), leases[0]):
        before = between.requests
        call()
        assert between.requests == before + 1, call
    assert between.accepted == 3


def test_a_job_that_nobody_registered_is_made_by_its_first_claim(bench: Bench) -> None:
    backend = bench.open()
    early, old, due = bench.intend("early"), bench.intend("old"), bench.intend("due")
    early = LeaseClaim(**{**vars(early), "due_ms": early.due_ms + 2 * HOUR_MS})
    old = LeaseClaim(**{**vars(old), "max_age_ms": 1})
    verdicts = [reply.verdict for reply in backend.claim([early, old])]
    assert verdicts == [Verdict.EARLY, Verdict.TOO_OLD]
    assert backend.jobs(10) == [], "they write nothing"
    verdicts = [reply.verdict for reply in backend.claim([early, due, old])]
    assert verdicts == [Verdict.EARLY, Verdict.GRANTED, Verdict.TOO_OLD]
    assert [job.job for job in backend.jobs(10)] == ["due"]


def test_no_transaction_stays_open_and_nothing_is_left_in_the_session(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    bench.sql("DROP FUNCTION {s}.leasecron_prune_v1")
    with pytest.raises(StoreUnavailable):
        backend.prune(0, 1)
    use_every_lane(bench, backend)
    for pid in server_pids(backend):
        activity = "SELECT state, xact_start, backend_xid FROM pg_stat_activity WHERE pid = %s"
        assert bench.sql(activity, pid)[0][0] == "idle"
    link = backend._lanes.timer.connection
    assert link is not None
    cursor = link._connection.cursor()
    for setting in ("statement_timeout", "lock_timeout", "jit", "enable_seqscan"):
        cursor.execute(f"SELECT setting = reset_val FROM pg_settings WHERE name = '{setting}'")
        link._wait(link._connection, Deadline(5_000))
        assert cursor.fetchall() == [(True,)], setting


def test_a_default_isolation_of_the_database_changes_nothing(
    bench: Bench, database: Callable[[str], str]
) -> None:
    url = database("")
    name = url.rpartition("/")[2]
    execute(url, f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    backends = [bench.open(url) for _ in range(4)]
    for backend in backends:
        backend.register([JobStamp("job", "x")])
    for number in range(10):
        claim = LeaseClaim(**{**vars(bench.intend(ago_ms=number)), "on_overlap": OnOverlap.DEFER})
        again = [LeaseClaim(**{**vars(claim), "decision_id": f"{number} {it}"}) for it in range(4)]
        replies = race([partial(ask, backend, one) for backend, one in zip(backends, again)])
        [lease] = [reply.lease for reply in replies if reply.lease is not None]
        assert backends[0].settle(lease.ref, FINISHED).accepted


def test_a_connection_that_died_is_replaced_before_anything_is_sent(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    before = server_pids(backend)
    assert len(set(before)) == 3
    for _ in range(3):
        for pid in server_pids(backend):
            bench.sql("SELECT pg_terminate_backend(%s, 5000)", pid)
        use_every_lane(bench, backend)
        assert len(set(server_pids(backend))) == 3
    assert not set(before) & set(server_pids(backend))
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leasecron_sync'"
    assert bench.sql(f"{count} AND query LIKE '%%{{s}}%%'") == [(3,)]


def test_a_session_that_ends_during_a_call_has_an_unknown_outcome(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend()
    win(backend, bench.intend("other"))
    [pid] = server_pids(backend)
    with closing(_connected(bench.url)) as other:
        other.cursor().execute(f"LOCK TABLE {bench.schema}.leasecron_job")

        def terminate() -> None:
            assert eventually(lambda: _waiting(bench) == 1, LIMIT_S)
            bench.sql("SELECT pg_terminate_backend(%s, 5000)", pid)

        contenders: list[Callable[[], Any]] = [
            terminate,
            partial(_error_of, partial(ask, backend, claim)),
        ]
        error = race(contenders)[1]
    assert isinstance(error, OutcomeUnknown)
    assert win(backend, claim).attempt == 1


def _error_of(call: Callable[[], object]) -> Optional[Exception]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return error
    return None


def test_a_lost_reply_is_unknown_and_the_repeat_is_the_same_grant(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(postgres_server)
    backend = bench.open(between.url_of(bench.url))
    use_every_lane(bench, backend)
    claim = bench.intend()
    hows: tuple[How, ...] = ("reset", "cut")
    for how in hows:
        rule = between.lose_reply(
            lambda request: b"claim_v1(" in request, complete=postgres_answered, how=how
        )
        with pytest.raises(OutcomeUnknown):
            ask(backend, claim)
        assert rule.fired.wait(LIMIT_S)
    lease = win(backend, claim)
    assert (lease.attempt, lease.left_ms <= LEASE_MS) == (1, True)
    assert len(backend.history("job", 10)) == 1


def test_call_1_a_silent_server_ends_a_call_at_its_deadline(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(postgres_server)
    lease = win(bench.open(), bench.intend())
    backend = bench.open(between.url_of(bench.url))
    use_every_lane(bench, backend)
    hurry(backend, 300)
    between.swallow()
    for call in every_call(backend, bench.intend(), lease):
        began_ms = SystemClock().steady_ms()
        error = _error_of(call)
        assert isinstance(error, (OutcomeUnknown, StoreUnavailable)), call
        assert SystemClock().steady_ms() - began_ms < 4_000
    assert server_pids(backend) == [], "no suspect connection is kept"
    between.forward()
    hurry(backend, 5_000)
    use_every_lane(bench, backend)


def test_call_1_connecting_to_a_server_that_accepts_nobody_ends_at_the_deadline(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(postgres_server)
    backend = bench.open(between.url_of(bench.url), call_timeout_ms=300)
    between.stall()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            ask(backend, bench.intend())
    between.forward()
    hurry(backend, 5_000)
    assert ask(backend, bench.intend()).verdict is Verdict.GRANTED


def test_a_silent_server_in_a_list_leaves_time_for_the_next(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    silent = proxy(postgres_server)
    silent.stall()
    bench.open().probe()
    place = f"{postgres_server.host}:{postgres_server.port}"
    url = bench.url.replace(place, f"{silent.host}:{silent.port},{place}")
    assert bench.open(url, call_timeout_ms=4_000).probe().store_id


def test_locks_of_others_end_a_call_in_time_and_surely_without_effect(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend()
    lease = win(backend, bench.intend("held"))
    use_every_lane(bench, backend)
    before = server_pids(backend)
    hurry(backend, 300)
    with closing(_connected(bench.url)) as other:
        other.cursor().execute(f"LOCK TABLE {bench.schema}.leasecron_run")
        for call in (
            partial(ask, backend, claim),
            partial(backend.renew, [lease.ref], LEASE_MS),
            partial(backend.settle, lease.ref, FINISHED),
        ):
            with pytest.raises(StoreUnavailable, match="lock"):
                call()
    assert server_pids(backend) == before, "the connections are sound"
    hurry(backend, 5_000)
    assert ask(backend, claim).verdict is Verdict.GRANTED
    assert backend.settle(lease.ref, FINISHED).accepted


def test_pruning_does_not_wait_for_who_settles_an_old_run_once_more(bench: Bench) -> None:
    """Who does may have locked a younger run before, for which pruning makes it wait."""
    backend = bench.open()
    claims = [bench.intend(ago_ms=age) for age in (LEASE_MS, 2 * LEASE_MS)]
    for claim in claims:
        assert backend.settle(win(backend, claim).ref, FINISHED).accepted
    with closing(_connected(bench.url)) as other:
        other.cursor().execute(
            f"SELECT FROM {bench.schema}.leasecron_run WHERE scheduled_ms = %s FOR UPDATE",
            (claims[0].key.scheduled_ms,),
        )
        assert backend.prune(0, 10).deleted == 1
        assert [record.key for record in backend.history(None, 10)] == [claims[0].key]
        other.rollback()  # closing alone does not wait until the lock is gone
    assert backend.prune(0, 10).deleted == 1


def test_a_renewal_waits_for_no_other_call_of_its_instance(bench: Bench) -> None:
    backend = bench.open()
    lease = win(backend, bench.intend())
    with backend._lanes.timer.held(Deadline(100)), backend._lanes.settle.held(Deadline(100)):
        assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
        hurry(backend, 100)
        with pytest.raises(StoreUnavailable, match="another call"):
            ask(backend, bench.intend("other"))
        with pytest.raises(StoreUnavailable, match="another call"):
            backend.settle(lease.ref, FINISHED)
    hurry(backend, 5_000)
    assert backend.settle(lease.ref, FINISHED).accepted


def test_a_read_only_server_is_rejected_and_taken_back(
    bench: Bench, database: Callable[[str], str]
) -> None:
    url = database("")
    name = url.rpartition("/")[2]
    backend = bench.open(url)
    lease = win(backend, bench.intend())
    execute(url, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    backend.close()
    backend.open(BackendSettings("space", "me", 5_000))
    backend.probe()
    for call in (partial(ask, backend, bench.intend()), partial(backend.renew, [lease.ref], 1)):
        with pytest.raises(StoreRejected, match="takes no writes"):
            call()
    assert len(backend.history(None, 10)) == 1
    execute(
        url.replace(f"/{name}", "/postgres"),
        f"ALTER DATABASE {name} RESET default_transaction_read_only",
    )
    backend.close()
    backend.open(BackendSettings("space", "me", 5_000))
    assert backend.settle(lease.ref, FINISHED).accepted


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("leasecron:secret@ leasecron:wr0ng@", "password authentication failed"),
        ("leasecron:secret@ alice:s3cret@", "password authentication failed"),
        ("/postgres /n0where", "does not exist"),
    ],
)
def test_a_connection_that_is_refused_is_unavailable_and_shows_no_secrets(
    bench: Bench, change: str, told: str
) -> None:
    before, after = change.split()
    backend = bench.open(bench.url.replace(before, after))
    with pytest.raises(StoreUnavailable, match=told) as caught:
        backend.probe()
    text = str(caught.value)
    assert not any(secret in text for secret in (*SECRETS, "leasecron:", "secret", "wr0ng"))
    assert '"leasecron"' not in text
    assert caught.value.__context__ is None, "a traceback would show it"


def test_a_port_where_nobody_listens_is_unavailable(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(postgres_server)
    between.refuse()
    with pytest.raises(StoreUnavailable, match=r"cannot be reached.*refused$"):
        bench.open(between.url_of(bench.url)).probe()


def test_closing_is_repeatable_and_gives_up_all_connections(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    pids = server_pids(backend)
    backend.close()
    backend.close()
    gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"
    assert eventually(lambda: bench.sql(gone, pids) == [(0,)], LIMIT_S)
    with pytest.raises(StoreUnavailable, match="closed"):
        ask(backend, bench.intend())


def test_a_call_that_is_closed_under_way_gives_its_connection_up(bench: Bench) -> None:
    backend = bench.open()
    backend.probe()
    [pid] = server_pids(backend)
    with closing(_connected(bench.url)) as other:
        other.cursor().execute(f"LOCK TABLE {bench.schema}.leasecron_job")

        def close() -> None:
            assert eventually(lambda: _waiting(bench) == 1, LIMIT_S)
            backend.close()
            other.rollback()

        call = partial(_error_of, partial(ask, backend, bench.intend()))
        contenders: list[Callable[[], Any]] = [close, call]
        race(contenders)
    assert server_pids(backend) == []
    gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    assert eventually(lambda: bench.sql(gone, pid) == [(0,)], LIMIT_S)


def test_a_call_that_is_interrupted_gives_its_connection_up(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend()
    backend.probe()
    interrupted = mock.patch(
        "leasecron_sync.backends._postgres_link.Link._wait", side_effect=KeyboardInterrupt
    )
    with interrupted, pytest.raises(KeyboardInterrupt):
        ask(backend, claim)
    assert server_pids(backend) == []
    assert win(backend, claim).attempt == 1


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    before = server_pids(backend)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        try:
            backend.discard()
            backend.open(BackendSettings("space", "child", 5_000))
            told = {"won": ask(backend, bench.intend("child")).verdict.value}
            told["pids"] = server_pids(backend)  # type: ignore[assignment]
            backend.close()
            os.write(writer, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert told["won"] == "granted"
    assert not set(told["pids"]) & set(before)
    use_every_lane(bench, backend)
    assert server_pids(backend) == before


def test_calls_from_many_threads_take_turns(bench: Bench) -> None:
    backend = bench.open()
    leases = [win(backend, bench.intend(f"job {number}")) for number in range(12)]
    accepted: list[bool] = []

    def settle(lease: Lease) -> None:
        accepted.append(backend.settle(lease.ref, FINISHED).accepted)

    threads = [threading.Thread(target=settle, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert accepted == [True] * 12
    assert len(server_pids(backend)) == 2


def test_settlements_that_come_together_share_a_round_trip(
    bench: Bench, postgres_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(postgres_server)
    backend = bench.open(between.url_of(bench.url))
    use_every_lane(bench, backend)
    leases = [win(backend, bench.intend(f"job {number}")) for number in range(40)]
    fenced = LeaseRef(leases[0].ref.key, 1)
    before = between.requests
    with backend._lanes.settle.held(Deadline(100)):  # the first one waits for the lane
        calls = [partial(backend.settle, lease.ref, FINISHED) for lease in leases]
        threads = _started([*calls, partial(backend.settle, fenced, FINISHED)])
        assert eventually(lambda: len(backend._settlements._waiting) == 40, LIMIT_S)
    accepted = [thread() for thread in threads]
    assert [reply.accepted for reply in accepted] == [True] * 40 + [False]
    assert between.requests == before + 2


def test_a_settlement_that_cannot_be_read_is_an_error_of_that_one_alone(bench: Bench) -> None:
    backend = bench.open()
    leases = [win(backend, bench.intend(job)) for job in ("newer", "job")]
    bench.sql(
        "UPDATE {s}.leasecron_run SET format = 99 WHERE scheduled_ms = %s",
        leases[0].ref.key.scheduled_ms,
    )
    asked = [(lease.ref, FINISHED) for lease in leases]
    first, second = backend._settle_all(asked, SystemClock().steady_ms() + 5_000)
    assert isinstance(first, StoreRejected)
    assert isinstance(second, SettleReply)
    assert second.accepted
    with pytest.raises(StoreRejected, match="format 99"):
        backend.settle(leases[0].ref, FINISHED)


def _started(calls: Sequence[Callable[[], SettleReply]]) -> list[Callable[[], SettleReply]]:
    """Start a thread for each call; return what waits for their results."""
    results: dict[int, SettleReply] = {}

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()

    def result(number: int) -> SettleReply:
        threads[number].join(LIMIT_S)
        return results[number]

    return [partial(result, number) for number in range(len(calls))]


def test_a_process_that_gets_no_connection_any_more_settles_by_the_one_it_has(
    postgres_server: Server, postgres_url: str
) -> None:
    """As at the end under uWSGI, where the library that encrypts is gone before Python."""
    bench = Bench(postgres_url)
    backend, name = bench.open(), postgres_url.rpartition("/")[2]
    [reply] = backend.claim([bench.intend()])
    assert reply.lease is not None
    execute(postgres_server.url, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
    with pytest.raises(StoreUnavailable):
        backend.renew([reply.lease.ref], LEASE_MS)
    assert backend.settle(reply.lease.ref, FINISHED).accepted
    backend.close()
    other = bench.open()
    with pytest.raises(StoreUnavailable):
        other.settle(reply.lease.ref, FINISHED)
    other.close()
