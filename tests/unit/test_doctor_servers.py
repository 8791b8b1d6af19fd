"""``leasecron-sync doctor`` on real servers, healthy and not."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

import pytest

from leasecron_sync.backends import _postgres_link, _redis_link
from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.urls import connect
from leasecron_sync.cli import main, store
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.finding import Examination, Findings, Level
from leasecron_sync.doctor.redis import examine_server
from leasecron_sync.doctor.visit import SLOW_MS
from leasecron_sync.model import JobStamp
from tests.services import postgres, redis
from tests.services.fixtures import Own
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.server import Server
from tests.services.services import Services

LIMIT_S = 10.0
SHORT_MS = 400
GENEROUS_MS = 4_000

Output = pytest.CaptureFixture[str]


class Told(NamedTuple):
    """What the command wrote as JSON, and its status."""

    status: int
    findings: list[dict[str, Any]]

    def of(self, check: str) -> dict[str, Any]:
        """Return the only finding of a check."""
        [finding] = [one for one in self.findings if one["check"] == check]
        return finding

    def level(self, check: str) -> str:
        return str(self.of(check)["level"])

    def problems(self) -> set[str]:
        return {one["check"] for one in self.findings if one["level"] == "problem"}

    def warnings(self) -> set[str]:
        return {one["check"] for one in self.findings if one["level"] == "warning"}


Doctor = Callable[..., Told]


@pytest.fixture
def doctor(
    capsys: Output, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Calls the command in the namespace of the test."""
    monkeypatch.chdir(tmp_path)

    def call(url: str) -> Told:
        status = main(["doctor", url, "--namespace", namespace, "--json"])
        out, err = capsys.readouterr()
        assert not err
        told = Told(status, json.loads(out))
        assert status == bool(told.problems())
        for secret in (postgres.PASSWORD, "s3cr3t", "lowly"):
            assert secret not in out
        return told

    return call


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that end soon, where nothing answers."""
    monkeypatch.setattr(store, "CALL_TIMEOUT_MS", SHORT_MS)


def started(url: str, namespace: str) -> None:
    """Make the store as a scheduler's start does."""
    backend = connect(url)
    assert isinstance(backend, (PostgresLease, RedisLease))
    backend.open(BackendSettings(namespace, "me", 5_000))
    backend.probe()
    backend.register([JobStamp("job", "print")])
    backend.close()


# -- PostgreSQL ------------------------------------------------------------------------------------


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """The database of this test as a role that may only connect."""
    name = f"lowly_{uuid.uuid4().hex}"
    postgres.execute(postgres_url, f"CREATE ROLE {name} LOGIN PASSWORD 's3cr3t'")
    postgres.execute(postgres_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        yield postgres.as_role(postgres_url, name, "s3cr3t")
    finally:
        postgres.execute(postgres_url, f"DROP OWNED BY {name}")
        postgres.execute(postgres_url, f"DROP ROLE {name}")


def role_of(url: str) -> str:
    return url.partition("//")[2].partition(":")[0]


def tables_in(url: str) -> list[tuple[Any, ...]]:
    return postgres.execute(
        url,
        "SELECT relname, reltuples, relfilenode FROM pg_class "
        "WHERE relname ~ '^leasecron' ORDER BY 1",
    )


def rows_in(url: str) -> list[tuple[Any, ...]]:
    return [
        row
        for table in ("meta", "space", "job", "run")
        for row in postgres.execute(url, f"SELECT xmin::text, ctid::text, * FROM leasecron_{table}")
    ]


def test_a_new_database_gets_a_note_and_no_tables(doctor: Doctor, postgres_url: str) -> None:
    told = doctor(postgres_url)
    assert told.level("tables") == "note"
    assert told.level("version") == "ok"
    assert told.of("version")["found"].startswith("PostgreSQL ")
    assert told.level("client") == "ok"
    assert told.level("clock") == "ok"
    assert abs(told.of("clock")["measured"]["skew_ms"]) < 500
    measured = told.of("reachable")["measured"]
    assert 0 <= measured["p50_ms"] <= measured["max_ms"]
    assert measured["round_trips"] == 7
    assert told.level("pooler") == "ok"
    assert tables_in(postgres_url) == []


def test_a_store_is_found_in_order_and_left_as_it_is(
    doctor: Doctor, own: Own, namespace: str
) -> None:
    server = own.postgres()
    started(server.url, namespace)
    before = tables_in(server.url), rows_in(server.url)
    told = doctor(server.url)
    assert {one["level"] for one in told.findings} == {"ok"}
    assert told.status == 0
    assert {"tables", "format", "rights"} - {one["check"] for one in told.findings} == {"tables"}
    assert (tables_in(server.url), rows_in(server.url)) == before

    server.configure(fsync=False, full_page_writes=False, autovacuum=False)
    told = doctor(server.url)
    assert told.problems() == {"durability"}
    assert told.warnings() == {"autovacuum"}


def test_a_role_without_tables_that_may_not_make_them_is_sent_to_an_administrator(
    doctor: Doctor, role: str, postgres_url: str
) -> None:
    told = doctor(role)
    assert told.level("tables") == "problem"
    assert "leasecron-sync schema" in told.of("tables")["advice"]
    assert tables_in(postgres_url) == []


def test_each_right_that_is_missing_is_named(
    doctor: Doctor, role: str, postgres_url: str, namespace: str
) -> None:
    started(postgres_url, namespace)
    name = role_of(role)
    refused = doctor(role).of("rights")["found"]
    for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        assert f"{right} on leasecron_run" in refused
    tables = "leasecron_meta, leasecron_space, leasecron_job, leasecron_run"
    postgres.execute(postgres_url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {name}")
    told = doctor(role)
    assert told.level("rights") == "ok"
    assert told.level("format") == "ok"
    postgres.execute(postgres_url, f"REVOKE DELETE ON leasecron_run FROM {name}")
    postgres.execute(
        postgres_url,
        "DO $$ DECLARE f regprocedure; BEGIN FOR f IN SELECT oid FROM pg_proc "
        "WHERE proname = 'leasecron_claim_v1' LOOP "
        "EXECUTE 'REVOKE EXECUTE ON FUNCTION ' || f || ' FROM PUBLIC'; END LOOP; END $$",
    )
    found = doctor(role).of("rights")["found"]
    assert found == "this user lacks: DELETE on leasecron_run, EXECUTE on leasecron_claim_v1"
    postgres.execute(postgres_url, "REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    assert "USAGE on schema public" in doctor(role).of("rights")["found"]


def test_settings_of_a_role_are_found_with_where_they_are_set(
    doctor: Doctor, role: str, postgres_url: str
) -> None:
    name = role_of(role)
    postgres.execute(postgres_url, f"ALTER ROLE {name} SET synchronous_commit = off")
    told = doctor(role)
    assert told.level("commit") == "problem"
    assert "it comes from ALTER ROLE" in told.of("commit")["advice"]
    assert told.level("read-only") == "ok"
    postgres.execute(postgres_url, f"ALTER ROLE {name} SET default_transaction_read_only = on")
    told = doctor(role)
    assert {"commit", "read-only"} <= told.problems()
    assert "it comes from ALTER ROLE" in told.of("read-only")["advice"]


def test_tables_that_are_gone_or_emptied_by_a_crash_or_of_a_newer_version_are_told(
    doctor: Doctor, postgres_url: str, namespace: str
) -> None:
    started(postgres_url, namespace)
    postgres.execute(postgres_url, "ALTER TABLE leasecron_run SET UNLOGGED")
    assert doctor(postgres_url).level("tables") == "problem"
    postgres.execute(postgres_url, "DROP TABLE leasecron_run")
    told = doctor(postgres_url)
    assert told.level("tables") == "warning"
    assert told.of("tables")["found"] == "missing: leasecron_run"
    postgres.execute(postgres_url, "UPDATE leasecron_meta SET value = 2 WHERE name = 'format'")
    told = doctor(postgres_url)
    assert told.level("format") == "problem"


def test_another_schema_is_looked_into_where_the_url_names_one(
    doctor: Doctor, postgres_url: str, namespace: str
) -> None:
    url = f"{postgres_url}?schema=cron&table_prefix=my_"
    told = doctor(url)
    assert told.level("tables") == "note"
    assert "schema 'cron'" in told.of("tables")["found"]
    started(url, namespace)
    assert doctor(url).level("rights") == "ok"
    assert doctor(postgres_url).level("tables") == "note"


def test_a_standby_is_no_store_and_a_primary_with_one_may_forget(doctor: Doctor, own: Own) -> None:
    primary = own.postgres()
    standby = own.replica(primary)
    told = doctor(standby.url)
    assert told.problems() == {"role"}
    assert told.level("commit") == "ok"  # the other checks are done all the same
    told = doctor(primary.url)
    assert told.status == 0
    assert told.warnings() == {"replicas"}
    primary.configure(synchronous_standby_names="*")
    assert doctor(primary.url).level("replicas") == "ok"


MODES = {
    "session": ("note", "for each client"),
    "transaction": ("ok", "transaction mode"),
    "statement": ("warning", "statement mode"),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_of_a_pooler_is_found(
    doctor: Doctor, own: Own, services: Services, mode: str
) -> None:
    level, words = MODES[mode]
    told = doctor(own.pgbouncer(services.postgres(), pool_mode=mode).url)
    assert told.level("pooler") == level
    assert words in told.of("pooler")["found"]
    assert told.level("version") == "ok"


def test_a_pooler_without_sessions_enough_is_a_problem(
    doctor: Doctor, own: Own, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CALL_TIMEOUT_MS", SHORT_MS)
    pooler = own.pgbouncer(services.postgres(), pool_mode="session", default_pool_size=1)
    told = doctor(pooler.url)
    assert told.level("pooler") == "problem"
    assert "outage" in told.of("pooler")["effect"]


def test_a_wrong_password_and_a_missing_database_are_told_apart(
    doctor: Doctor, postgres_url: str
) -> None:
    told = doctor(postgres_url.replace(f":{postgres.PASSWORD}@", ":s3cr3t@"))
    assert told.of("reachable")["advice"].startswith("User and password")
    told = doctor(f"{postgres_url}_not")
    assert told.of("reachable")["advice"].startswith("Create the database")


# -- Redis and Valkey ------------------------------------------------------------------------------


def user_url(server: Server, *rules: str) -> tuple[str, str]:
    """Make a user; return its name, and the server's URL with it."""
    name = f"lowly{uuid.uuid4().hex}"
    redis.execute(server.url, "ACL", "SETUSER", name, "on", ">s3cr3t", "resetchannels", *rules)
    return name, server.url.replace("://", f"://{name}:s3cr3t@")


def keys_of(server: Server, namespace: str) -> list[bytes]:
    found: list[bytes] = redis.execute(server.url, "KEYS", f"leasecron:{{{namespace}}}*")
    return sorted(found)


def test_a_new_server_gets_a_note_and_no_key(
    doctor: Doctor, redis_server: Server, namespace: str
) -> None:
    told = doctor(redis_server.url)
    assert told.level("format") == "note"
    assert told.level("rights") == "ok"
    assert told.level("reachable") == "ok"
    assert told.level("clock") == "ok"
    name = redis_server.name.partition("-")[0].capitalize()
    assert told.of("version")["found"].startswith(f"{name} ")
    # The shared servers of the tests keep nothing.
    assert told.problems() == {"persistence"}
    assert keys_of(redis_server, namespace) == []


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_durable_server_is_in_order_until_it_evicts(
    doctor: Doctor, own: Own, namespace: str, kind: str
) -> None:
    server = own.redis() if kind == "redis" else own.valkey()
    started(server.url, namespace)
    before = {key: redis.execute(server.url, "DUMP", key) for key in keys_of(server, namespace)}
    assert before
    told = doctor(server.url)
    assert (told.status, told.warnings()) == (0, set())
    assert {one["level"] for one in told.findings} == {"ok"}
    after = {key: redis.execute(server.url, "DUMP", key) for key in keys_of(server, namespace)}
    assert after == before

    server.configure(maxmemory="100mb", maxmemory_policy="allkeys-lru", appendfsync="everysec")
    told = doctor(server.url)
    assert told.problems() == {"eviction"}
    assert told.level("persistence") == "note"
    redis.execute(server.url, "CONFIG", "SET", "appendonly", "no")
    redis.execute(server.url, "CONFIG", "SET", "save", "3600 1")
    told = doctor(server.url)
    assert told.problems() == {"eviction", "persistence"}
    assert "snapshots by save 3600 1" in told.of("persistence")["found"]


def test_a_replica_is_no_store_and_a_primary_with_one_may_forget(doctor: Doctor, own: Own) -> None:
    primary = own.redis()
    replica = own.redis(replicaof=f"{primary.host} {primary.port}")
    assert eventually(lambda: follows(primary), LIMIT_S)
    told = doctor(replica.url)
    assert told.problems() == {"role"}
    told = doctor(primary.url)
    assert (told.status, told.warnings()) == (0, {"replicas"})
    redis.execute(primary.url, "CONFIG", "SET", "min-replicas-to-write", "1")
    assert doctor(primary.url).level("replicas") == "ok"
    redis.execute(primary.url, "CONFIG", "SET", "min-replicas-to-write", "2")
    assert doctor(primary.url).problems() == {"replicas"}


def follows(primary: Server) -> bool:
    told = redis.execute(primary.url, "INFO")
    return bool(told.get("slave0", {}).get("state") == "online")


def test_the_rights_of_the_documents_are_enough(doctor: Doctor, redis_server: Server) -> None:
    rules = ("~leasecron:*", "-@all", "+@read", "+@write", "+eval", "+evalsha", "+info", "+time")
    told = doctor(user_url(redis_server, *rules)[1])
    assert told.level("rights") == "ok"
    assert told.level("settings") == "note"
    assert told.problems() == {"persistence"}


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        (("~*", "+@all", "-eval"), "EVAL"),
        (("~*", "+@all", "-evalsha"), "evalsha"),
        (("~*", "+@all", "-hset", "-zadd"), "HSET on leasecron:"),
        (("~*", "+@all", "-time"), "can't run this command|'time' command"),
        (("%R~*", "+@all"), "keys"),
        (("~other:*", "+@all"), "keys"),
    ],
)
def test_a_user_with_too_few_rights_is_told_which(
    doctor: Doctor, redis_server: Server, rules: tuple[str, ...], word: str
) -> None:
    doctor(redis_server.url)  # the script is known: a user who may not load it could begin
    told = doctor(user_url(redis_server, *rules)[1])
    assert told.level("rights") == "problem"
    assert re.search(word, told.of("rights")["found"], re.IGNORECASE)
    assert told.level("version") == "ok"  # the other checks are done all the same


def test_a_user_without_info_hides_the_settings_and_nothing_else(
    doctor: Doctor, redis_server: Server
) -> None:
    told = doctor(user_url(redis_server, "~*", "+@all", "-info")[1])
    assert told.level("version") == "warning"
    assert told.level("rights") == "ok"


def test_a_server_for_claims_is_looked_at_without_the_keys_of_leases(own: Own) -> None:
    server = own.valkey(maxmemory="100mb", maxmemory_policy="volatile-lru")
    backend = RedisLease(server.url)
    settings = BackendSettings("space", "me", 5_000)
    backend.open(settings)
    exam = Examination(settings, Findings(), Deadline(10_000))
    examine_server(backend, exam)
    found = {finding.check: finding.level for finding in exam.findings.all()}
    assert found["eviction"] is Level.PROBLEM
    assert found["version"] is Level.OK
    assert "rights" not in found


def test_a_key_of_somebody_else_is_a_problem(
    doctor: Doctor, redis_server: Server, namespace: str
) -> None:
    redis.execute(redis_server.url, "SET", f"leasecron:{{{namespace}}}:runs", "mine")
    assert doctor(redis_server.url).level("format") == "problem"


def test_a_newer_store_format_is_a_problem(
    doctor: Doctor, redis_server: Server, namespace: str
) -> None:
    redis.execute(redis_server.url, "HSET", f"leasecron:{{{namespace}}}:meta", "format", "2")
    told = doctor(redis_server.url)
    assert told.level("format") == "problem"
    assert "2" in told.of("format")["found"]


def test_a_password_that_is_missing_or_wrong_is_told(doctor: Doctor, own: Own) -> None:
    server = own.redis(requirepass="swordfish")
    place = f"{server.host}:{server.port}"
    assert doctor(server.url).level("reachable") == "ok"
    for url in (f"redis://{place}", f"redis://:s3cr3t@{place}"):
        told = doctor(url)
        assert told.problems() == {"reachable"}
        assert told.of("reachable")["advice"].startswith("User and password")


@pytest.mark.timeout(60)
def test_sentinels_lead_to_the_primary(doctor: Doctor, own: Own) -> None:
    group = own.sentinels()
    hosts = ",".join(f"{host}:{port}" for host, port in group.addresses)
    told = doctor(f"redis+sentinel://{hosts}/{group.service}/0")
    assert (told.status, told.level("sentinel")) == (0, "ok")
    assert str(group.servers[0].port) in told.of("sentinel")["found"]
    assert told.warnings() == {"replicas"}
    first = hosts.partition(",")[0]
    assert doctor(f"redis+sentinel://{first}/{group.service}/0").level("sentinel") == "note"
    told = doctor(f"redis+sentinel://{first}/other/0")
    assert told.of("reachable")["advice"].startswith("The name after the sentinels")


@pytest.mark.timeout(60)
def test_a_cluster_is_looked_at_where_the_keys_are(
    doctor: Doctor, own: Own, namespace: str
) -> None:
    cluster = own.cluster()
    keeper = cluster.node_of(f"leasecron:{{{namespace}}}:meta")
    others = [node for node in cluster.nodes if node is not keeper]
    place = f"{others[0].host}:{others[0].port}"
    # Settings of the node that has the keys are what counts.
    keeper.configure(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    told = doctor(f"redis+cluster://{place}")
    assert told.level("cluster") == "ok"
    assert told.problems() == {"eviction"}
    for node in (others[0], keeper):
        told = doctor(f"redis://{node.host}:{node.port}")
        assert "cluster" in told.problems()
        assert "redis+cluster://" in str(told.findings)


# -- what does not answer --------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "redis"])
def server(request: pytest.FixtureRequest, services: Services) -> Server:
    return services.postgres() if request.param == "postgres" else services.redis()


@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("how", ["stall", "swallow"])
def test_a_silent_peer_is_unreachable_within_the_time_of_a_call(
    doctor: Doctor, server: Server, proxy: Callable[[Server], Proxy], how: str
) -> None:
    between = proxy(server)
    getattr(between, how)()
    clock = SystemClock()
    begun_ms = clock.steady_ms()
    told = doctor(between.url_of(server.url))
    assert clock.steady_ms() - begun_ms < SHORT_MS + GENEROUS_MS
    assert told.problems() == {"reachable"}
    assert told.of("reachable")["advice"].startswith("Something takes what is sent")


@pytest.mark.usefixtures("short_calls")
def test_a_peer_that_falls_silent_under_way_is_a_problem_and_ends(
    doctor: Doctor, server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(server)
    marks = (b"pg_settings", b"INFO")
    rule = between.lose_reply(lambda request: any(mark in request for mark in marks), how="silence")
    told = doctor(between.url_of(server.url))
    assert rule.fired.is_set()
    assert told.status == 1
    [finding] = [one for one in told.findings if one["found"].startswith("no answer")]
    assert finding["level"] == "problem"
    assert told.level("rights" if "redis" in server.name else "pooler") in ("ok", "note")


def test_a_server_that_is_cut_off_says_so(
    doctor: Doctor, server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(server)
    between.refuse()
    told = doctor(between.url_of(server.url))
    assert told.problems() == {"reachable"}


def test_a_slow_way_is_measured(
    doctor: Doctor, services: Services, proxy: Callable[[Server], Proxy]
) -> None:
    server = services.redis()
    between = proxy(server)
    between.delay(to_client_ms=SLOW_MS)
    told = doctor(between.url_of(server.url))
    assert told.level("reachable") == "warning"
    assert told.of("reachable")["measured"]["p50_ms"] >= SLOW_MS
    assert told.level("clock") == "ok"


def test_a_clock_that_is_off_is_a_problem(
    doctor: Doctor,
    redis_server: Server,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = SystemClock.now_ms
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: real(self) + 3_600_000)
    for url in (redis_server.url, postgres_url):
        told = doctor(url)
        assert told.level("clock") == "problem"
        assert "behind this host's" in told.of("clock")["found"]
        assert -3_601_000 < told.of("clock")["measured"]["skew_ms"] < -3_599_000


def test_every_connection_is_closed(
    doctor: Doctor, redis_server: Server, pgbouncer_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    closed: list[object] = []

    def close(link: Any) -> None:  # noqa: ANN401
        closed.append(link)
        real[type(link)][1](link)

    def make(link: Any, *arguments: Any) -> None:  # noqa: ANN401
        made.append(link)
        real[type(link)][0](link, *arguments)

    links: tuple[Any, ...] = (_postgres_link.Link, _redis_link.Link)
    real = {link: (link.__init__, link.close) for link in links}
    for link in links:
        monkeypatch.setattr(link, "__init__", make)
        monkeypatch.setattr(link, "close", close)
    doctor(redis_server.url)
    assert len(made) == 1
    doctor(pgbouncer_url)
    assert len(made) == 3  # a pooler's mode takes two
    assert set(map(id, made)) == set(map(id, closed))
