"""From a URL to a backend; what is refused, and that nobody reads a password in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.redis_claim import RedisClaim
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.backends.urls import connect, connect_claim, connect_lease, hide_credentials

SECRETS = ("alice", "s3cret")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///jobs.db", "jobs.db"),
        ("sqlite:///data/jobs.db", "data/jobs.db"),
        ("sqlite:////var/lib/jobs.db", "/var/lib/jobs.db"),
        ("SQLite:///jobs.db", "jobs.db"),
        ("sqlite:///50%25%20of%3F%23.db", "50% of?#.db"),
        ("sqlite:///a@b:c.db", "a@b:c.db"),
        ("sqlite:///../jobs.db", "../jobs.db"),
        ("sqlite:///caf%C3%A9.db", "caf\u00e9.db"),
        ("sqlite:///plus+sign.db", "plus+sign.db"),
    ],
)
def test_a_sqlite_url_names_a_path(url: str, path: str) -> None:
    backend = connect(url)
    assert isinstance(backend, SQLiteLease)
    assert repr(backend) == f"SQLiteLease({path!r})"


@pytest.mark.parametrize(
    ("url", "dsn", "shown"),
    [
        ("postgresql://localhost/jobs", "postgresql://localhost/jobs", ""),
        ("postgres://localhost/jobs", "postgres://localhost/jobs", ""),
        ("PostgreSQL://localhost/jobs", "postgresql://localhost/jobs", ""),
        ("postgresql://", "postgresql://", ""),
        ("postgresql:///jobs?host=/tmp", "postgresql:///jobs?host=/tmp", ""),
        (
            "postgresql://alice:s3%40cret@one:5432,two/jobs?sslmode=require",
            "postgresql://alice:s3%40cret@one:5432,two/jobs?sslmode=require",
            "",
        ),
        (
            "postgresql://h/jobs?schema=cron&sslmode=disable&table_prefix=app_",
            "postgresql://h/jobs?sslmode=disable",
            ", schema='cron', table_prefix='app_'",
        ),
        ("postgresql://h/jobs?table_prefix=", "postgresql://h/jobs", ", table_prefix=''"),
        ("postgresql://h/jobs?sch%65ma=a%2Db", "postgresql://h/jobs", ", schema='a-b'"),
    ],
)
def test_a_postgresql_url_names_a_database(url: str, dsn: str, shown: str) -> None:
    backend = connect(url)
    assert isinstance(backend, PostgresLease)
    assert backend._dsn == dsn
    assert repr(backend) == f"PostgresLease({hide_credentials(dsn)!r}{shown})"


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("?sslmod=require", "it has: sslmod;"),
        ("?sslmode=require&Schema=x&b=1", "it has: Schema, b;"),
        ("?schema=1up", "schema '1up' must be"),
        ("?schema=a.b", "schema 'a.b' must be"),
        ("?schema=", "schema '' must be"),
        ("?table_prefix=App_", "table_prefix 'App_' must be"),
        (f"?table_prefix={'x' * 31}", "must be up to 30"),
        ("?options=a@b", "special character.*%40"),
        ("#part", "special character.*%23"),
    ],
)
def test_a_postgresql_url_that_cannot_be_meant_is_refused(rest: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        connect(f"postgresql://alice:s3cret@localhost/jobs{rest}")
    assert not any(secret in str(caught.value) for secret in SECRETS)


NO_CERTIFICATE = {"ssl_cert_reqs": "none", "ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "addresses", "options"),
    [
        ("redis://localhost:7000/2", (("localhost", 7000),), {"db": 2}),
        ("REDIS://h", (("h", 6379),), {}),
        ("redis://", (("localhost", 6379),), {}),
        ("valkey://[::1]:7000?db=3", (("::1", 7000),), {"db": 3}),
        (
            "redis://alice:s3%40cret@h?client_name=cron",
            (("h", 6379),),
            {"username": "alice", "password": "s3@cret", "client_name": "cron"},
        ),
        ("redis://:s3cret@h/0", (("h", 6379),), {"password": "s3cret", "db": 0}),
        (
            "rediss://h?ssl_ca_certs=%2Fca.pem&ssl_check_hostname=false",
            (("h", 6379),),
            {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False},
        ),
        ("unix:///run/a%20b.sock?db=1", (), {"path": "/run/a b.sock", "db": 1}),
        ("redis+sentinel://a,b:1/main/4", (("a", 26379), ("b", 1)), {"db": 4}),
        ("valkeys+cluster://a:1,b", (("a", 1), ("b", 6379)), {"ssl_check_hostname": True}),
        ("rediss://h?ssl_cert_reqs=none", (("h", 6379),), NO_CERTIFICATE),
    ],
)
def test_a_redis_url_names_a_server(
    url: str, addresses: tuple[tuple[str, int], ...], options: dict[str, object]
) -> None:
    backend = connect(url)
    assert isinstance(backend, RedisLease)
    assert backend.place.addresses == addresses
    assert backend.place.options == options
    assert repr(backend) == f"RedisLease({hide_credentials(url)!r})"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://alice:s3cret@h/jobs", "database is a number"),
        ("redis://alice:s3cret@h/0?tiemout=1", "it has: tiemout"),
        ("redis://alice:s3cret@h/0?socket_timeout=1", "it has: socket_timeout"),
        ("redis://alice:s3cret@h/0?ssl_ca_certs=x", "it has: ssl_ca_certs"),
        ("redis://alice:s3cret@h:port/0", "host:port"),
        ("redis://alice:s3cret@h:70000/0", "host:port"),
        ("redis://alice:s3cret@one,two/0", "several hosts"),
        ("redis://alice:s3cret@h/0#s3cret", "%23"),
        ("redis://alice:s3cret/more@h/0", "%2F"),
        ("unix://alice:s3cret@/run/a@b.sock", "%40"),
        ("redis+sentinel://alice:s3cret@h", "names no service"),
        ("redis+cluster://alice:s3cret@h/1", "database 0 only"),
        ("unix://alice:s3cret@run/redis.sock", "absolute path"),
        ("rediss://alice:s3cret@h?ssl_check_hostname=no", "true or false"),
        ("rediss://alice:s3cret@h?ssl_cert_reqs=maybe", "none, optional or required"),
        ("redis://alice:s3cret?x@localhost", r"\*\*\*"),
    ],
)
def test_a_redis_url_that_cannot_be_meant_is_refused(url: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        connect(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_nothing_is_opened(tmp_path: Path) -> None:
    connect(f"sqlite:///{tmp_path}/jobs.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("memory://tests", "tests"),
        ("MEMORY://tests", "tests"),
        ("memory://a/b", "a/b"),
        ("memory://two%20words", "two words"),
    ],
)
def test_a_memory_url_names_a_store_of_this_process(url: str, name: str) -> None:
    backend = connect(url)
    assert isinstance(backend, MemoryLease)
    assert repr(backend) == f"MemoryLease({name!r})"
    assert backend._store is MemoryLease(name)._store
    assert backend._store is not MemoryLease(f"not {name}")._store


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sqlite://jobs.db", "three slashes"),
        ("sqlite://", "three slashes"),
        ("sqlite:///", "three slashes"),
        ("sqlite://localhost/jobs.db", "three slashes"),
        ("sqlite:///:memory:", "MemoryLease"),
        ("sqlite:///jobs%00.db", "MemoryLease"),
        ("memory://", "memory://tests"),
    ],
)
def test_a_url_that_lacks_something_is_refused_with_an_example(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        connect(url)


@pytest.mark.parametrize("base", ["sqlite:///jobs.db", "memory://tests"])
@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("?timeout=5", "timeout"),
        ("?b=1&a=2", "a, b"),
        ("?mode", "mode"),
        ("#part", "a fragment"),
    ],
)
def test_an_unknown_parameter_is_refused_by_name(base: str, rest: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"has: {named};"):
        connect(base + rest)


# -- brokers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://localhost", "RabbitMQClaim('amqp://localhost')"),
        ("AMQP://alice:s3cret@h:5673/%2Fx?heartbeat=30", "RabbitMQClaim('AMQP://h:5673/%2Fx')"),
        ("amqps://alice:s3cret@h", "RabbitMQClaim('amqps://h')"),
        ("nats://localhost", "NatsClaim('nats://localhost')"),
        ("nats://alice:s3cret@a,b:4223?replicas=3", "NatsClaim('nats://a,b:4223')"),
        ("tls://s3cret@a", "NatsClaim('tls://a')"),
        (
            "redis://alice:s3cret@h/0?strategy=script",
            "RedisClaim('redis://h/0', strategy='script')",
        ),
        ("redis://h?strategy=stream-id", "RedisClaim('redis://h', strategy='stream-id')"),
        ("valkey+cluster://h?strategy=idmp", "RedisClaim('valkey+cluster://h', strategy='idmp')"),
        ("unix:///r.sock?db=1&strategy=idmp", "RedisClaim('unix:///r.sock', strategy='idmp')"),
    ],
)
def test_a_broker_url_names_a_claim_backend(url: str, shown: str) -> None:
    backend = connect_claim(url)
    assert repr(backend) == shown


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "amqp://alice:s3cret@h/x?password=s3cret",
            "takes the parameters heartbeat, it has: passw",
        ),
        ("amqp://alice:s3cret@h/x?heartbeat=no", "heartbeat is a number of seconds"),
        ("amqp://alice:s3cret@h/x?heartbeat=0", "heartbeat is a number of seconds"),
        ("amqp://alice:s3cret@h/x?cacertfile=x", "takes the parameters heartbeat, it has: cacert"),
        ("amqps://alice:s3cret@h/x?cacertfile=/no/such", "cacertfile names no file"),
        ("amqps://alice:s3cret@h/x?verify=no", "verify is verify_peer or verify_none"),
        ("amqp://alice:s3cret@h/a/b", "a vhost is one part"),
        ("amqp://alice:s3cret@a,b/x", "one host is named"),
        ("amqp://alice:s3cret@h:x/x", "the port cannot be read"),
        ("amqp://alice:s3cret@h/x#y", "is no AMQP URL"),
        ("nats://alice:s3cret@h?replicas=0", "replicas is a number from 1 to 5"),
        ("nats://alice:s3cret@h?replicas=x", "replicas is a number from 1 to 5"),
        (
            "nats://alice:s3cret@h?timeout=1",
            "takes the parameters replicas, credentials, it has: t",
        ),
        ("nats://alice:s3cret@h?tls_ca=x", "takes the parameters replicas, credentials, it has: t"),
        ("tls://alice:s3cret@h?tls_ca=/no/such", "tls_ca names no file"),
        ("nats://alice:s3cret@h/x", "nothing comes after the hosts"),
        ("nats://alice:s3cret@h:x", "a server is host, host:port"),
        ("nats://alice:s3cret@h?strategy=lease", "which is not in this version"),
        ("redis://alice:s3cret@h/0?strategy=first", "strategy is one of script, stream-id, idmp"),
        ("redis://alice:s3cret@h/0?strategy=", "strategy is one of script, stream-id, idmp"),
        ("redis://alice:s3cret@h/0?strategy=idmp&strategy=script", "strategy is one of"),
    ],
)
def test_a_broker_url_that_cannot_be_meant_is_refused(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        connect(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize("url", ["mysql://alice:s3cret@localhost/x", "http://localhost"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(ValueError, match=r"unknown scheme.*sqlite://, .*memory://") as caught:
        connect(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize("url", ["", "jobs.db", "/var/lib/jobs.db", "://x", "sqlite:jobs.db"])
def test_text_without_a_scheme_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match=r"sqlite:///jobs\.db.*SQLiteLease\(path\)"):
        connect(url)


@pytest.mark.parametrize("url", [None, 5, Path("jobs.db"), MemoryLease()])
def test_what_is_no_text_is_refused(url: object) -> None:
    with pytest.raises(TypeError, match="must be text"):
        connect(url)  # type: ignore[arg-type]


# -- the typed forms ------------------------------------------------------------------------------


def test_connect_lease_returns_lease_backends_only() -> None:
    assert isinstance(connect_lease("sqlite:///jobs.db"), SQLiteLease)
    with pytest.raises(ValueError, match=r"nats://localhost names NatsClaim, not a lease"):
        connect_lease("nats://alice:s3cret@localhost")


def test_connect_claim_returns_claim_backends_only() -> None:
    with pytest.raises(ValueError, match=r"sqlite:///jobs\.db names SQLiteLease, not a claim"):
        connect_claim("sqlite:///jobs.db")
    assert isinstance(connect_claim("redis://h?strategy=script"), RedisClaim)


# -- credentials ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://alice:s3cret@localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:s3cret@localhost", "redis://localhost"),
        ("redis://alice@localhost/0", "redis://localhost/0"),
        ("postgresql://alice:s3@cret@localhost/db", "postgresql://localhost/db"),
        ("postgresql://localhost/db?password=s3cret&user=alice", "postgresql://localhost/db"),
        ("postgresql:///db?password=s3cret", "postgresql:///db"),
        ("nats://s3cret@one:4222,two:4222", "nats://one:4222,two:4222"),
        ("amqp://alice:s3cret@localhost/%2Fvhost#s3cret", "amqp://localhost/%2Fvhost"),
        ("postgresql://localhost/db?password=s3@cret", "postgresql://***"),
        ("redis://alice:s3cret?x@localhost", "redis://***"),
        ("sqlite:////var/lib/jobs.db", "sqlite:////var/lib/jobs.db"),
        ("alice:s3cret@localhost", "***"),
    ],
)
def test_a_url_is_shown_without_user_password_and_parameters(url: str, shown: str) -> None:
    assert hide_credentials(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://alice:s3cret/more@localhost/0",
        "redis://alice:s3cret?more@localhost/0",
        "redis://alice:s3cret#more@localhost/0",
        "redis://localhost/0?password=more@s3cret",
        "redis://localhost/0#s3cret@more",
    ],
)
def test_a_password_that_is_not_encoded_is_not_shown_either(url: str) -> None:
    assert not any(secret in hide_credentials(url) for secret in SECRETS)


@pytest.mark.parametrize(
    "url", ["alice:s3cret@localhost/0?next=http://x", "redis:alice:s3cret@h://x"]
)
def test_text_that_is_no_scheme_is_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="scheme") as caught:
        connect(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_a_url_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(TypeError) as caught:
        connect(b"redis://alice:s3cret@localhost/0")  # type: ignore[arg-type]
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://alice:s3cret@localhost/jobs.db",
        "sqlite://alice:s3cret@localhost/jobs.db?x=1",
        "memory://alice:s3cret@localhost?password=s3cret",
        "sqlite:///jobs.db?password=s3cret",
        "postgresql://alice:s3cret?x@localhost/jobs",
        "postgresql://alice:s3cret@localhost/jobs?passwort=s3cret",
    ],
)
def test_no_error_shows_credentials(url: str) -> None:
    with pytest.raises(ValueError, match=r"sqlite|memory|postgresql") as caught:
        connect(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)
