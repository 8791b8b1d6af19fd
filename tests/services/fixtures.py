"""Options and fixtures for tests that need servers.

============================ =======================================================================
``services``                 the session's servers; ``services.redis()`` and its like are shared,
                             started on first use, never stopped and never emptied
``postgres_server``          a shared PostgreSQL server; a test runs once per major version found
``postgres_url``             a new database there, of this test alone
``pgbouncer_url``            the same database through pgbouncer in transaction mode
``redis_server``             a shared server; a test runs once with Redis and once with Valkey
``redis_url``                how to reach it; use the fixture ``namespace`` for keys
``redis8_server``            a shared Redis server of 8.6 or newer, which has idempotent producers
``redis8_url``               how to reach it
``rabbitmq_version``         ``"3.10"`` and ``"4.0"``: a test runs once with each, for
                             ``own.rabbitmq(rabbitmq_version)``
``rabbitmq_server``          a shared RabbitMQ server of that version
``rabbitmq_url``             how to reach it: ``amqp://leasecron:secret@127.0.0.1:PORT/%2F``; that
                             user may do everything; use the fixture ``namespace`` for queues
``nats_version``             ``"2.9"`` and ``"2.15"``, likewise
``nats_server``              a shared NATS server of that version, with JetStream
``nats_url``                 how to reach it: ``nats://127.0.0.1:PORT``; use ``namespace`` for names
``own``                      starts servers of this test alone, which it may stop, kill and pause
``proxy``                    starts proxies in front of servers, which disturb connections
============================ =======================================================================

A server that cannot be had fails the test and says what to install; ``--without-services`` skips
it. The end of the logs of a test's own servers, and what the shared ones wrote meanwhile, is shown
with a test that fails.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator, Iterator, Sequence
from typing import Callable, NoReturn, Optional, Protocol, TypeVar, Union

import pytest

from tests.services.nats import NatsCluster, NatsServer
from tests.services.postgres import PgBouncer, PostgresServer, new_database, through
from tests.services.process import ServiceMissing
from tests.services.programs import VERSIONS
from tests.services.proxy import Proxy
from tests.services.rabbitmq import RabbitMQServer
from tests.services.rabbitmq_cluster import RabbitMQCluster
from tests.services.redis import RedisServer, ValkeyServer
from tests.services.redis_groups import Cluster, Sentinels, SentinelServer
from tests.services.server import Server, Setting
from tests.services.services import Services, Sources

T = TypeVar("T")
V = TypeVar("V")


Group = Union[Sentinels, Cluster, RabbitMQCluster, NatsCluster]
"""Servers that belong together."""


class _Startable(Protocol):
    def start(self) -> None: ...

    def close(self) -> None: ...


Startable = TypeVar("Startable", bound=_Startable)

_OWN = pytest.StashKey["Own"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this file."""
    group = parser.getgroup("services", "servers that tests need")
    group.addoption(
        "--without-services",
        action="store_true",
        help="skip the tests that need a server",
    )
    group.addoption(
        "--docker",
        action="store_true",
        help="have docker run the servers that this machine has not",
    )
    group.addoption(
        "--newest-servers",
        action="store_true",
        help="leave out the older versions of a server",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of a PostgreSQL server on each version that is found, of others on each wanted."""
    for name in VERSIONS:
        if f"{name}_version" in metafunc.fixturenames:
            versions = _wanted(metafunc, _sources(metafunc.config).versions(name))
            ids = [name if version is None else f"{name}-{version}" for version in versions]
            metafunc.parametrize(f"{name}_version", versions, ids=ids)
    if "postgres_server" in metafunc.fixturenames:
        majors = _wanted(metafunc, _sources(metafunc.config).majors())
        ids = ["postgresql" if major is None else f"postgresql-{major}" for major in majors]
        metafunc.parametrize("postgres_server", majors, ids=ids, indirect=True)


def _wanted(metafunc: pytest.Metafunc, versions: Sequence[V]) -> Sequence[V]:
    return versions[:1] if metafunc.config.getoption("--newest-servers") else versions


def _sources(config: pytest.Config) -> Sources:
    return Sources(docker=config.getoption("--docker"))


@pytest.fixture(scope="session")
def services(request: pytest.FixtureRequest) -> Iterator[Services]:
    """The servers of this session."""
    if request.config.getoption("--without-services"):
        pytest.skip("left out with --without-services")
    services = Services(_sources(request.config))
    services.open()
    try:
        yield services
    finally:
        services.close()


def had(get: Callable[[], T]) -> T:
    """Return a server; fail the test and say what to install if it cannot be had."""
    try:
        return get()
    except ServiceMissing as missing:
        return _fail(str(missing))


def _fail(message: str) -> NoReturn:
    # Alone: where it was raised says nothing, and hides what is to do.
    pytest.fail(message, pytrace=False)


@pytest.fixture
def postgres_server(request: pytest.FixtureRequest, services: Services) -> Server:
    """A shared PostgreSQL server."""
    return had(lambda: services.postgres(request.param))


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """A database of this test alone."""
    with new_database(postgres_server, f"test_{uuid.uuid4().hex}") as url:
        yield url


@pytest.fixture
def pgbouncer_url(services: Services, postgres_server: Server, postgres_url: str) -> str:
    """The database of this test through pgbouncer."""
    return through(postgres_url, had(lambda: services.pgbouncer(postgres_server)))


@pytest.fixture(params=["redis", "valkey"])
def redis_server(request: pytest.FixtureRequest, services: Services) -> Server:
    """A shared Redis or Valkey server."""
    return had(services.valkey if request.param == "valkey" else services.redis)


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """How to reach the shared Redis or Valkey server."""
    return redis_server.url


@pytest.fixture
def redis8_server(services: Services) -> Server:
    """A shared Redis server that has idempotent producers."""
    return had(services.redis8)


@pytest.fixture
def redis8_url(redis8_server: Server) -> str:
    """How to reach the shared Redis server that has idempotent producers."""
    return redis8_server.url


@pytest.fixture
def rabbitmq_server(services: Services, rabbitmq_version: Optional[str]) -> Server:
    """A shared RabbitMQ server."""
    return had(lambda: services.rabbitmq(rabbitmq_version))


@pytest.fixture
def rabbitmq_url(rabbitmq_server: Server) -> str:
    """How to reach the shared RabbitMQ server."""
    return rabbitmq_server.url


@pytest.fixture
def nats_server(services: Services, nats_version: Optional[str]) -> Server:
    """A shared NATS server."""
    return had(lambda: services.nats(nats_version))


@pytest.fixture
def nats_url(nats_server: Server) -> str:
    """How to reach the shared NATS server."""
    return nats_server.url


class Own:
    """Starts servers of one test, which end with it.

    Each method returns a server that answers. What was answered is on disk for those that can keep
    it, unless it is told ``durable=False``. Settings are those of the server's configuration file.
    """

    def __init__(self, services: Services, closed: contextlib.ExitStack) -> None:
        self.started: list[Union[Server, Group]] = []
        self._services = services
        self._closed = closed

    def postgres(
        self, major: Optional[int] = None, *, durable: bool = True, **settings: Setting
    ) -> PostgresServer:
        """Start a PostgreSQL server."""
        return self._start(
            had(lambda: self._services.new_postgres(major, durable=durable, **settings))
        )

    def replica(self, primary: PostgresServer, **settings: Setting) -> PostgresServer:
        """Start a streaming replica of a PostgreSQL server."""
        return self._start(had(lambda: self._services.new_replica(primary, **settings)))

    def pgbouncer(self, target: Server, **settings: Setting) -> PgBouncer:
        """Start a pgbouncer in transaction mode in front of a PostgreSQL server."""
        return self._start(had(lambda: self._services.new_pgbouncer(target, **settings)))

    def redis(self, *, durable: bool = True, tls: bool = False, **settings: Setting) -> RedisServer:
        """Start a Redis server."""
        return self._start(
            had(lambda: self._services.new_redis(durable=durable, tls=tls, **settings))
        )

    def valkey(self, *, durable: bool = True, **settings: Setting) -> ValkeyServer:
        """Start a Valkey server."""
        return self._start(had(lambda: self._services.new_valkey(durable=durable, **settings)))

    def redis8(
        self, *, durable: bool = True, tls: bool = False, **settings: Setting
    ) -> RedisServer:
        """Start a Redis server that has idempotent producers."""
        return self._start(
            had(lambda: self._services.new_redis8(durable=durable, tls=tls, **settings))
        )

    def rabbitmq(self, version: Optional[str] = None, **settings: Setting) -> RabbitMQServer:
        """Start a RabbitMQ server."""
        return self._start(had(lambda: self._services.new_rabbitmq(version, **settings)))

    def rabbitmq_cluster(
        self, version: Optional[str] = None, *, size: int = 2, **settings: Setting
    ) -> RabbitMQCluster:
        """Start RabbitMQ servers that are one broker."""
        return self._start(
            had(lambda: self._services.new_rabbitmq_cluster(version, size=size, **settings))
        )

    def nats(
        self, version: Optional[str] = None, *, jetstream: bool = True, **settings: Setting
    ) -> NatsServer:
        """Start a NATS server."""
        return self._start(
            had(lambda: self._services.new_nats(version, jetstream=jetstream, **settings))
        )

    def nats_cluster(self, version: Optional[str] = None, **settings: Setting) -> NatsCluster:
        """Start three NATS servers that keep streams together."""
        return self._start(had(lambda: self._services.new_nats_cluster(version, **settings)))

    def sentinels(self, kind: str = "redis", **settings: Setting) -> Sentinels:
        """Start a primary with a replica and three sentinels, of Redis or Valkey."""
        return self._start(had(lambda: self._services.new_sentinels(kind, **settings)))

    def sentinel_of(self, watched: RedisServer, service: str) -> SentinelServer:
        """Start one sentinel by itself, which knows a server and fails nothing over."""
        return self._start(self._services.new_sentinel(watched, service))

    def cluster(self, kind: str = "redis", **settings: Setting) -> Cluster:
        """Start a cluster of three primaries, of Redis or Valkey."""
        return self._start(had(lambda: self._services.new_cluster(kind, **settings)))

    def _start(self, server: Startable) -> Startable:
        assert isinstance(server, (Server, Sentinels, Cluster, RabbitMQCluster, NatsCluster))
        self.started.append(server)
        # Also one that does not start: its log is shown before that.
        self._closed.callback(server.close)
        had(server.start)
        return server


@pytest.fixture
def own(request: pytest.FixtureRequest, services: Services) -> Iterator[Own]:
    """Servers of this test alone."""
    with contextlib.ExitStack() as closed:
        own = Own(services, closed)
        request.node.stash[_OWN] = own
        yield own


@pytest.fixture
def proxy() -> Iterator[Callable[[Server], Proxy]]:
    """Proxies of this test: a function from a server to a proxy in front of it."""
    with contextlib.ExitStack() as closed:
        yield lambda server: closed.enter_context(Proxy((server.host, server.port)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the servers of a test wrote last if it fails."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for server in _servers_of(item):
            report.sections.append((f"end of the log of {server}", server.log_tail()))
    return report


def _servers_of(item: pytest.Function) -> list[Server]:
    found: list[Server] = []
    if _OWN in item.stash:
        for one in item.stash[_OWN].started:
            found += [one] if isinstance(one, Server) else one.members()
    services = item.funcargs.get("services")
    if isinstance(services, Services):
        found += services.shared()
    return found
