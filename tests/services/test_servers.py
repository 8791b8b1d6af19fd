"""Servers of the tests do what they are told, and keep what they promise to keep."""

from __future__ import annotations

import socket
import threading
from typing import Any, Callable, Union

import pytest

from tests.services.fixtures import Own
from tests.services.keeper import below
from tests.services.ports import HOST
from tests.services.postgres import PASSWORD, USER, PostgresServer, as_role, execute
from tests.services.process import START_S, LocalProcess, ServiceError, eventually
from tests.services.redis import RedisServer
from tests.services.resp import ReplyError
from tests.services.server import PrivateServer, Server
from tests.services.services import Services
from tests.services.test_keeper import is_alive

LIMIT_S = 15.0

Kept = Union[PostgresServer, RedisServer]
KINDS = ["postgres", "redis", "valkey"]


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, own: Own) -> Kept:
    """A server of this test, with a value in it."""
    start: dict[str, Callable[[], Kept]] = {
        "postgres": own.postgres,
        "redis": own.redis,
        "valkey": own.valkey,
    }
    server = start[request.param]()
    if isinstance(server, PostgresServer):
        execute(server.url, "CREATE TABLE kept (value text)")
    put(server, "first")
    return server


def put(server: Kept, value: str) -> None:
    if isinstance(server, PostgresServer):
        execute(server.url, "INSERT INTO kept VALUES (%s)", value)
    else:
        server.do("RPUSH", "kept", value)


def kept_in(server: Kept) -> list[str]:
    if isinstance(server, PostgresServer):
        return [str(value) for (value,) in execute(server.url, "SELECT value FROM kept")]
    reply = server.do("LRANGE", "kept", "0", "-1")
    assert isinstance(reply, list)
    return [str(value) for value in reply]


# -- start, stop, kill ---------------------------------------------------------------------------


def test_a_stopped_server_keeps_its_port_and_its_data(kept: Kept) -> None:
    url = kept.url
    kept.stop()
    assert not kept.running
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((kept.host, kept.port))
    kept.start()
    assert kept.url == url
    assert kept_in(kept) == ["first"]


def test_a_killed_server_has_what_it_answered(kept: Kept) -> None:
    for number in range(3):
        put(kept, f"after {number} restarts")
        kept.kill()
        assert not kept.running
        kept.start()
    assert kept_in(kept) == ["first", *(f"after {number} restarts" for number in range(3))]


def test_a_server_restarts_while_clients_are_connected(kept: Kept) -> None:
    with socket.create_connection((kept.host, kept.port), LIMIT_S) as idle:
        kept.restart()
        assert idle.recv(1) == b""
    assert kept_in(kept) == ["first"]


def test_a_killed_server_leaves_no_process(own: Own) -> None:
    server = own.postgres()
    process = server._at_work()
    if not isinstance(process, LocalProcess):
        pytest.skip("a container has its processes for itself")
    pid = process.pid
    sessions = below(pid)
    assert len(sessions) > 1
    server.kill()
    assert not [one for one in [pid, *sessions] if is_alive(one)]


def test_a_server_without_persistence_forgets_everything(own: Own) -> None:
    server = own.redis(durable=False)
    server.do("SET", "key", "value")
    server.restart()
    assert server.do("GET", "key") is None


def test_a_closed_server_starts_again_empty(kept: Kept) -> None:
    folder = kept.home.folder
    kept.close()
    assert not folder.exists()
    kept.start()
    if isinstance(kept, PostgresServer):
        execute(kept.url, "CREATE TABLE kept (value text)")
    assert kept_in(kept) == []


def test_what_does_not_fit_the_state_is_an_error(kept: Kept) -> None:
    with pytest.raises(ServiceError, match="is running already"):
        kept.start()
    kept.stop()
    kept.stop()  # again: it is what was asked for
    kept.kill()
    with pytest.raises(ServiceError, match="is not running"):
        kept.pause()


# -- pause ---------------------------------------------------------------------------------------


def test_a_paused_server_is_silent_and_answers_afterwards(kept: Kept) -> None:
    values: list[list[str]] = []
    kept.pause()
    asker = threading.Thread(target=lambda: values.append(kept_in(kept)))
    asker.start()
    asker.join(0.3)
    assert asker.is_alive()
    assert kept.running
    kept.resume()
    asker.join(LIMIT_S)
    assert values == [["first"]]


def test_the_sessions_of_a_paused_server_stand_still_too(own: Own) -> None:
    import psycopg2

    server = own.postgres()
    connection = psycopg2.connect(server.url)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            server.pause()
            asker = threading.Thread(target=lambda: cursor.execute("SELECT 2"))
            asker.start()
            asker.join(0.3)
            assert asker.is_alive()
            server.resume()
            asker.join(LIMIT_S)
            assert cursor.fetchall() == [(2,)]
    finally:
        connection.close()


@pytest.mark.parametrize("how", ["stop", "kill", "close"])
def test_a_paused_server_can_be_ended(kept: Kept, how: str) -> None:
    kept.pause()
    getattr(kept, how)()
    assert not kept.running


# -- settings ------------------------------------------------------------------------------------


def test_settings_are_those_of_the_server_and_can_change_while_it_runs(own: Own) -> None:
    server = own.postgres(work_mem="3MB", log_connections=True)
    show = "SELECT current_setting('work_mem'), current_setting('log_connections')"
    assert execute(server.url, show) == [("3MB", "on")]
    server.configure(work_mem="5MB")
    assert execute(server.url, show) == [("5MB", "on")]
    server.restart()
    assert execute(server.url, show) == [("5MB", "on")]


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_settings_of_redis_can_change_while_it_runs(own: Own, kind: str) -> None:
    server: RedisServer = getattr(own, kind)(maxmemory="50mb", maxmemory_policy="allkeys-lru")
    assert server.do("CONFIG", "GET", "maxmemory") == ["maxmemory", str(50 * 1024**2)]
    server.configure(maxmemory_policy="noeviction")
    server.restart()
    assert server.do("CONFIG", "GET", "maxmemory-policy") == ["maxmemory-policy", "noeviction"]
    with pytest.raises(ReplyError):
        server.configure(cluster_enabled=True)
    server.configure(requirepass="a/b c")
    assert "a%2Fb%20c" in server.url
    server.restart()
    assert server.do("PING") == "PONG"


def test_servers_keep_their_data_on_disk_unless_told_otherwise(own: Own) -> None:
    fsync = "SELECT current_setting('fsync'), current_setting('synchronous_commit')"
    assert execute(own.postgres().url, fsync) == [("on", "on")]
    assert execute(own.postgres(durable=False).url, fsync) == [("off", "on")]
    assert own.redis().do("CONFIG", "GET", "appendfsync") == ["appendfsync", "always"]
    assert own.redis(durable=False).do("CONFIG", "GET", "appendonly") == ["appendonly", "no"]


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("postgres", {"wal_level": "nonsense"}, 'invalid value for parameter "wal_level"'),
        ("redis", {"appendonly": "nonsense"}, "argument must be 'yes' or 'no'"),
        ("valkey", {"nonsense": "yes"}, "Bad directive"),
    ],
)
def test_a_server_that_does_not_start_says_why(
    own: Own, kind: str, settings: dict[str, str], says: str
) -> None:
    with pytest.raises(ServiceError, match="ended with status 1") as raised:
        getattr(own, kind)(**settings)
    assert says in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_that_somebody_took_is_changed_before_the_first_start(
    services: Services, kind: str
) -> None:
    server: PrivateServer = getattr(services, f"new_{kind}")()
    with socket.create_server((HOST, server.port)) as taken:
        try:
            server.start()
            assert server.port != taken.getsockname()[1]
            assert server.answers()
        finally:
            server.close()


def test_a_port_that_somebody_took_later_is_an_error(own: Own) -> None:
    server = own.redis()
    server.stop()
    with (
        socket.create_server((HOST, server.port)),
        pytest.raises(ServiceError, match="found its port taken"),
    ):
        server.start()
    server.start()


# -- clients -------------------------------------------------------------------------------------


def test_redis_is_reached_by_every_form_of_url(own: Own) -> None:
    import redis

    server = own.redis(tls=True, requirepass="p@ss/word")
    for url in (server.url, server.unix_url):
        client = redis.Redis.from_url(url)
        assert client.ping()
        client.close()
    assert server.url.startswith("rediss://")
    plain = redis.Redis.from_url(f"redis://:p%40ss%2Fword@{server.host}:{server.port}")
    with pytest.raises(redis.ConnectionError):
        plain.ping()
    plain.close()


def test_every_role_logs_in_through_pgbouncer_with_its_own_password(own: Own) -> None:
    import psycopg2

    server = own.postgres()
    bouncer = own.pgbouncer(server)
    execute(server.url, "CREATE ROLE reader LOGIN PASSWORD 'readme'")
    for url in (server.url, bouncer.url):
        assert execute(as_role(url, "reader", "readme"), "SELECT current_user") == [("reader",)]
        assert execute(url, "SELECT current_user") == [(USER,)]
        with pytest.raises(psycopg2.OperationalError, match="authentication failed"):
            execute(as_role(url, "reader", PASSWORD), "SELECT 1")


def test_pgbouncer_gives_a_server_connection_per_transaction(own: Own) -> None:
    import psycopg2

    bouncer = own.pgbouncer(own.postgres(), default_pool_size=1)
    one, other = psycopg2.connect(bouncer.url), psycopg2.connect(bouncer.url)
    backends = set()
    try:
        for _ in range(2):
            for connection in (one, other):
                with connection, connection.cursor() as cursor:
                    cursor.execute("SELECT pg_backend_pid()")
                    backends.add(cursor.fetchone())
    finally:
        one.close()
        other.close()
    assert len(backends) == 1


def test_pgbouncer_outlives_the_server_behind_it(own: Own) -> None:
    import psycopg2

    server = own.postgres()
    bouncer = own.pgbouncer(server, server_login_retry=1, query_timeout=5)
    assert execute(bouncer.url, "SELECT 1") == [(1,)]
    server.kill()
    bouncer.restart()
    server.start()

    def works() -> bool:
        try:
            return execute(bouncer.url, "SELECT 1") == [(1,)]
        except psycopg2.OperationalError:
            return False

    assert eventually(works, LIMIT_S)


def test_a_replica_follows_and_can_be_promoted(own: Own) -> None:
    import psycopg2

    primary = own.postgres()
    execute(primary.url, "CREATE TABLE kept (value text)")
    replica = own.replica(primary)
    assert replica.port != primary.port
    execute(primary.url, "INSERT INTO kept VALUES ('first')")
    assert eventually(lambda: kept_in(replica) == ["first"], LIMIT_S)
    with pytest.raises(psycopg2.errors.ReadOnlySqlTransaction):
        put(replica, "second")
    replica.restart()
    primary.kill()
    replica.promote()
    put(replica, "second")
    assert kept_in(replica) == ["first", "second"]


# -- shared servers ------------------------------------------------------------------------------


def test_shared_servers_are_started_once(services: Services) -> None:
    assert services.redis() is services.redis()
    assert services.valkey() is not services.redis()
    assert services.postgres() is services.postgres()
    newest = services.sources.majors()[0]
    assert services.postgres(newest) is services.postgres()
    assert services.pgbouncer() is services.pgbouncer(services.postgres())


def test_each_test_has_a_database_of_its_own(
    postgres_server: Server, postgres_url: str, pgbouncer_url: str
) -> None:
    execute(postgres_url, "CREATE TABLE mine (value text)")
    execute(pgbouncer_url, "INSERT INTO mine VALUES ('x')")
    assert execute(postgres_url, "SELECT value FROM mine") == [("x",)]
    assert execute(postgres_server.url, "SELECT to_regclass('mine')") == [(None,)]


def test_shared_redis_and_valkey_are_what_they_are_called(
    redis_server: Server, redis_url: str, request: pytest.FixtureRequest
) -> None:
    import redis

    client = redis.Redis.from_url(redis_url, decode_responses=True)
    name = "valkey" if "valkey" in request.node.callspec.id else "redis"
    told: Any = client.info("server")
    assert told.get("server_name", "redis") == name
    client.close()
    if isinstance(redis_server, PrivateServer):
        assert redis_server.program.name == name


def test_the_limits_leave_room_for_a_test_to_tell_what_was_wrong() -> None:
    assert START_S < 30
