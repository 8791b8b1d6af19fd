"""Faults of the lease backends that were found by trying to break them."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Callable, Union
from unittest import mock

import pytest

from leasecron_sync.backends import _redis_link
from leasecron_sync.backends._redis_scripts import Script, keys_of, script_of
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import OutcomeUnknown, StoreUnavailable
from leasecron_sync.model import JobStamp, LeaseClaim, OnOverlap, RunKey, Verdict
from tests.services import redis
from tests.services.fixtures import Own
from tests.services.postgres import as_role, execute
from tests.services.proxy import Proxy
from tests.services.server import Server

HOUR_MS = 3_600_000
NAME = "two-addresses.invalid"

Backend = Union[PostgresLease, RedisLease]


def intend(job: str, decision_id: str = "") -> LeaseClaim:
    scheduled_ms = SystemClock().now_ms()
    return LeaseClaim(
        key=RunKey(job, scheduled_ms),
        due_ms=scheduled_ms - HOUR_MS // 2,
        holder="somebody",
        decision_id=decision_id or uuid.uuid4().hex,
        lease_ms=10_000,
        max_attempts=3,
        on_overlap=OnOverlap.ALLOW,
        max_age_ms=HOUR_MS,
        takeover_ms=HOUR_MS,
    )


def verdict(backend: Backend, job: str) -> Verdict:
    [reply] = backend.claim([intend(job)])
    return reply.verdict


def opened(backend: Backend, space: str = "space", call_timeout_ms: int = 3_000) -> Backend:
    backend.open(BackendSettings(space, "me", call_timeout_ms))
    return backend


# -- PostgreSQL -----------------------------------------------------------------------------------


@pytest.fixture
def schema(postgres_server: Server) -> Iterator[str]:
    name = f"attack_{uuid.uuid4().hex}"
    yield name
    execute(postgres_server.url, f"DROP SCHEMA IF EXISTS {name} CASCADE")


@pytest.fixture
def role(postgres_server: Server) -> Iterator[str]:
    name = f"attack_{uuid.uuid4().hex}"
    execute(postgres_server.url, f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
    yield name
    execute(postgres_server.url, f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


@pytest.mark.parametrize(
    "loss",
    [
        "TRUNCATE {s}.leasecron_meta, {s}.leasecron_job, {s}.leasecron_run, {s}.leasecron_space",
        "TRUNCATE {s}.leasecron_job, {s}.leasecron_run",
        "DELETE FROM {s}.leasecron_job",
        "DELETE FROM {s}.leasecron_space",
    ],
)
def test_register_5_tables_that_were_emptied_are_noticed_by_a_claim_and_told_once(
    postgres_server: Server, schema: str, loss: str
) -> None:
    """Else nobody registers the jobs again, and after the next downtime nothing is made up for."""
    stamps = [JobStamp("job", "x"), JobStamp("other", "x")]
    with closing(opened(PostgresLease(postgres_server.url, schema=schema))) as backend:
        backend.register(stamps)
        assert verdict(backend, "job") is Verdict.GRANTED
        execute(postgres_server.url, loss.format(s=schema))
        with pytest.raises(StoreUnavailable, match="has lost its data"):
            verdict(backend, "job")
        assert verdict(backend, "other") is Verdict.GRANTED
        backend.probe()
        backend.register(stamps)
        assert verdict(backend, "job") is Verdict.GRANTED


def test_jobs_that_a_policy_hides_are_an_error_of_the_store(
    postgres_server: Server, schema: str, role: str
) -> None:
    url = postgres_server.url
    with closing(opened(PostgresLease(url, schema=schema))) as backend:
        backend.register([JobStamp("job", "x")])
    table = f"{schema}.leasecron_job"
    execute(
        url,
        f"GRANT USAGE ON SCHEMA {schema} TO {role}; "
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}; "
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; "
        f"CREATE POLICY makes ON {table} FOR INSERT TO {role} WITH CHECK (true); "
        # So that only the lock on the row is refused, not its making.
        f"CREATE POLICY sees ON {table} FOR SELECT TO {role} USING (true)",
    )
    theirs = opened(PostgresLease(as_role(url, role, role), schema=schema))
    with closing(theirs), pytest.raises(StoreUnavailable, match="row-level security"):
        verdict(theirs, "another job")


def test_an_address_of_a_name_that_is_silent_leaves_time_for_the_next(
    postgres_server: Server, schema: str, proxy: Callable[[Server], Proxy]
) -> None:
    """A host whose IPv6 address leads nowhere, for example."""
    between = proxy(postgres_server)
    known = socket.getaddrinfo

    def both(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:  # noqa: ANN401 - passed on
        if host != NAME:
            return known(host, port, *rest, **more)
        return [
            *known("127.0.0.2", port, *rest, **more),
            *known("127.0.0.1", port, *rest, **more),
        ]

    url = between.url_of(postgres_server.url)
    with socket.socket() as silent, mock.patch("socket.getaddrinfo", both):
        silent.bind(("127.0.0.2", int(url.rpartition(":")[2].partition("/")[0])))
        silent.listen()
        with closing(
            opened(
                PostgresLease(url.replace("127.0.0.1", NAME), schema=schema), call_timeout_ms=2_000
            )
        ) as it:
            assert it.probe().version.startswith("PostgreSQL ")


def test_a_silent_server_that_the_environment_lists_leaves_time_for_the_next(
    postgres_server: Server,
    schema: str,
    proxy: Callable[[Server], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    between = proxy(postgres_server)
    url = between.url_of(postgres_server.url)
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", int(url.rpartition(":")[2].partition("/")[0])))
        silent.listen()
        monkeypatch.setenv("PGHOST", "127.0.0.2,127.0.0.1")
        with closing(
            opened(
                PostgresLease(url.replace("127.0.0.1", ""), schema=schema), call_timeout_ms=2_000
            )
        ) as it:
            assert it.probe().version.startswith("PostgreSQL ")


def test_ids_that_are_taken_do_not_keep_new_jobs_out(postgres_server: Server, schema: str) -> None:
    """Logical replication copies rows and not how far ids have come."""
    old = [JobStamp(f"old {number}", "x") for number in range(50)]
    with closing(opened(PostgresLease(postgres_server.url, schema=schema))) as backend:
        backend.register(old)
        for table in ("job", "space"):
            execute(
                postgres_server.url,
                f"ALTER TABLE {schema}.leasecron_{table} ALTER COLUMN id RESTART WITH 1",
            )
        assert len(backend.register([*old, JobStamp("new", "x")])) == 51
        assert verdict(backend, "new") is Verdict.GRANTED
        assert {it.job for it in backend.jobs(100)} == {"new", *(it.job for it in old)}
    other = opened(PostgresLease(postgres_server.url, schema=schema), "another space")
    with closing(other):
        assert len(other.register(old)) == 50


def test_a_search_path_that_leads_to_other_functions_changes_nothing(
    postgres_server: Server, schema: str, role: str
) -> None:
    url = postgres_server.url
    execute(
        url,
        f"CREATE SCHEMA {schema} AUTHORIZATION {role}; "
        f"CREATE FUNCTION {schema}.pg_is_in_recovery() RETURNS boolean LANGUAGE sql "
        "AS 'SELECT true'; "
        f"CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE sql "
        "AS 'SELECT to_timestamp(0)'; "
        f"ALTER ROLE {role} SET search_path = {schema}, pg_catalog",
    )
    with closing(opened(PostgresLease(as_role(url, role, role), schema=schema))) as backend:
        info = backend.probe()
    assert info.store_ms is not None
    assert abs(info.store_ms - SystemClock().now_ms()) < HOUR_MS
    assert not any("replica" in warning for warning in info.warnings)


# -- Redis and Valkey -----------------------------------------------------------------------------


def test_a_sentinel_that_names_a_replica_is_passed_over_for_the_next(own: Own) -> None:
    """One that is cut off from the others still knows the primary of before."""
    primary, replica = own.redis(durable=False), own.redis(durable=False)
    stale, right = own.sentinel_of(replica, "cron"), own.sentinel_of(primary, "cron")
    replica.do("REPLICAOF", primary.host, str(primary.port))
    hosts = f"{stale.host}:{stale.port},{right.host}:{right.port}"
    with closing(opened(RedisLease(f"redis+sentinel://{hosts}/cron/0"))) as backend:
        assert verdict(backend, "job") is Verdict.GRANTED


@pytest.mark.parametrize(
    "record",
    [
        ["1", "0", "", "5", "f", ["former", "5", "x"], []],
        ["1", "0", "", "5", "f", ["former", "x", "5"], []],
        ["1", "0", "99999999999999", "5", "f", [], ["x", "5"]],
        ["1", "nan", "", "5", "f", [], []],
        ["1", "inf", "", "5", "f", [], []],
    ],
    ids=["displaced", "owed", "span", "no number", "no end"],
)
def test_call_5_a_job_whose_numbers_are_none_does_not_stop_the_others(
    redis_server: Server, namespace: str, record: list[object]
) -> None:
    jobs = keys_of(namespace)[2]
    with closing(opened(RedisLease(redis_server.url), namespace)) as backend:
        backend.register([JobStamp("bad", "f"), JobStamp("good", "f")])
        redis.execute(redis_server.url, "HSET", jobs, "bad", json.dumps(record))
        assert len(backend.register([JobStamp("bad", "g"), JobStamp("good", "g")])) == 2
        replies = backend.claim([intend("bad"), intend("good")])
    assert [it.verdict for it in replies] == [Verdict.REJECTED, Verdict.GRANTED]


def test_call_1_a_server_that_takes_a_few_bytes_now_and_then_ends_a_call_at_its_deadline(
    tmp_path: Path,
) -> None:
    """A long command is sent in pieces, and each of them may take its time."""
    over = threading.Event()

    def sip(listener: socket.socket) -> None:
        asked, _address = listener.accept()
        with asked, suppress(OSError):
            while not over.wait(0.02) and asked.recv(4096):
                pass

    stamps = [JobStamp(f"{number:04} {'x' * 190}", "f") for number in range(5_000)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        thread = threading.Thread(target=sip, args=(listener,))
        thread.start()
        backend = opened(RedisLease(f"unix://{tmp_path / 'socket'}"), call_timeout_ms=200)
        try:
            with closing(backend):
                began_ms = SystemClock().steady_ms()
                with pytest.raises(OutcomeUnknown):
                    backend.register(stamps)
                assert SystemClock().steady_ms() - began_ms < 1_500
        finally:
            over.set()
            thread.join(10.0)


def test_a_script_that_breaks_off_half_way_has_an_unknown_outcome(
    redis_server: Server, namespace: str
) -> None:
    """What it wrote by then stays written: a claim may have been granted."""
    whole = script_of("claim")
    text = whole.text.replace(b"return cjson.encode(rows)", b"error('broken')")
    assert text != whole.text

    def broken(name: str) -> Script:
        return Script(text, b"0" * 40) if name == "claim" else script_of(name)

    claim = intend("job")
    with closing(opened(RedisLease(redis_server.url), namespace)) as backend:
        backend.register([JobStamp("job", "f")])
        with mock.patch.object(_redis_link, "script_of", broken), pytest.raises(OutcomeUnknown):
            backend.claim([claim])
        [reply] = backend.claim([claim])
        assert reply.lease is not None
        assert reply.lease.attempt == 1
