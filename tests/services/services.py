"""All servers of one test session.

Tests get at them by the fixtures of ``tests/services/fixtures.py``; this module knows nothing of
pytest.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, TypeVar

from tests.services import postgres, redis
from tests.services.docker import IMAGES, Docker
from tests.services.nats import NatsCluster, NatsServer
from tests.services.postgres import PgBouncer, PostgresServer, Template
from tests.services.process import (
    KeeperClient,
    Launcher,
    LocalLauncher,
    Program,
    ServiceMissing,
)
from tests.services.programs import VARIABLES, VERSIONS, Programs, Version, missing
from tests.services.rabbitmq import Names, RabbitMQServer
from tests.services.rabbitmq_cluster import RabbitMQCluster
from tests.services.redis import RedisServer, ValkeyServer
from tests.services.redis_groups import Cluster, Sentinels, SentinelServer
from tests.services.server import PrivateServer, Server, Setting

S = TypeVar("S", bound=PrivateServer)

SHARED_CONNECTIONS = 300
"""How many clients the shared PostgreSQL server has room for."""


@dataclass(frozen=True)
class Sources:
    """Where servers may come from.

    Attributes:
        docker: From docker too, if this machine has none.
        environment: Variables that name servers that are there already.
        programs: What this machine has.
    """

    docker: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    programs: Programs = field(default_factory=Programs)

    def url(self, name: str) -> Optional[str]:
        """Return the URL of a server that is there already."""
        return self.environment.get(VARIABLES[name]) or None

    def majors(self) -> list[Optional[int]]:
        """Return the major versions of PostgreSQL that can be had, the newest first.

        None stands for the one that the environment names, and for one that cannot be had.
        """
        if self.url("postgresql"):
            return [None]
        found = list(self.programs.postgres())
        if not found and self.docker:
            found = [int(major) for major in IMAGES["postgresql"]]
        return [*found] or [None]

    def versions(self, name: str) -> list[Optional[str]]:
        """Return the versions of RabbitMQ or NATS that tests want, the newest first.

        None stands for the one that the environment names.
        """
        return [None] if self.url(name) else [*VERSIONS[name]]

    def local(self, name: str) -> dict[Version, Program]:
        """Return this machine's programs of one kind, by their version."""
        several: dict[str, Callable[[], Mapping[Any, Program]]] = {
            "postgresql": self.programs.postgres,
            "rabbitmq": self.programs.rabbitmq,
            "nats": self.programs.nats,
        }
        if name in several:
            return dict(several[name]())
        found = {
            "pgbouncer": self.programs.pgbouncer,
            "redis": self.programs.redis,
            "redis8": self.programs.redis8,
            "valkey": self.programs.valkey,
        }[name]()
        return {} if found is None else {found.version[0]: found}


class Services:
    """Shared servers, started on first use, and new ones.

    A shared server comes from the environment, else from this machine, else from docker if that was
    asked for; a new one from this machine or from docker. Whatever cannot be had is
    ``ServiceMissing``.
    """

    def __init__(self, sources: Optional[Sources] = None) -> None:
        self.sources = sources or Sources()
        self._keeper = KeeperClient()
        self._docker = Docker(self._keeper)
        self._shared: dict[tuple[str, object], Server] = {}
        self._templates: dict[Program, Template] = {}

    def open(self) -> None:
        """Open now what stays open, so that no test seems to have left it open."""
        self._keeper.open()
        if self.sources.docker:
            with contextlib.suppress(ServiceMissing):  # it may not be needed
                self._docker.open()

    # -- shared servers --------------------------------------------------------------------------

    def postgres(self, major: Optional[int] = None) -> Server:
        """Return the shared PostgreSQL server of a major version, or the newest."""
        major = major or self.sources.majors()[0]

        def make() -> PostgresServer:
            return self.new_postgres(major, durable=False, max_connections=SHARED_CONNECTIONS)

        return self._share("postgresql", make, of=major)

    def pgbouncer(self, target: Optional[Server] = None) -> Server:
        """Return the shared pgbouncer in front of a shared PostgreSQL server, or the newest."""
        behind = target or self.postgres()
        return self._share("pgbouncer", lambda: self.new_pgbouncer(behind), of=behind)

    def redis(self) -> Server:
        """Return the shared Redis server."""
        return self._share("redis", lambda: self.new_redis(durable=False))

    def valkey(self) -> Server:
        """Return the shared Valkey server."""
        return self._share("valkey", lambda: self.new_valkey(durable=False))

    def redis8(self) -> Server:
        """Return the shared Redis server that has idempotent producers."""
        return self._share("redis8", lambda: self.new_redis8(durable=False))

    def rabbitmq(self, version: Optional[str] = None) -> Server:
        """Return the shared RabbitMQ server of a version, or the newest."""
        version = version or self.sources.versions("rabbitmq")[0]
        return self._share("rabbitmq", lambda: self.new_rabbitmq(version), of=version)

    def nats(self, version: Optional[str] = None) -> Server:
        """Return the shared NATS server of a version, or the newest."""
        version = version or self.sources.versions("nats")[0]
        return self._share("nats", lambda: self.new_nats(version), of=version)

    def shared(self) -> list[Server]:
        """Return the shared servers that are in use."""
        return list(self._shared.values())

    def _share(self, name: str, make: Callable[[], PrivateServer], of: object = None) -> Server:
        key = name, of
        if key not in self._shared:
            url = self.sources.url(name)
            if url is None:
                self._shared[key] = started(make())
            else:
                # Clients of Redis do not know the schemes of Valkey.
                self._shared[key] = Server(name, re.sub("^valkey", "redis", url))
        return self._shared[key]

    # -- new servers, not started ----------------------------------------------------------------

    def new_postgres(
        self, major: Optional[int] = None, *, durable: bool = True, **settings: Setting
    ) -> PostgresServer:
        """Return a new PostgreSQL server."""
        program = self._program("postgresql", major)
        launcher = self._launcher(program)
        template = self._templates.setdefault(program, Template(self._keeper, launcher))
        server = PostgresServer(self._keeper, launcher, program, source=template)
        return _with(server, postgres.DURABLE if durable else postgres.FAST, settings)

    def new_replica(self, primary: PostgresServer, **settings: Setting) -> PostgresServer:
        """Return a new streaming replica of a PostgreSQL server that runs."""
        program = primary.program
        server = PostgresServer(self._keeper, self._launcher(program), program, source=primary)
        return _with(server, primary.settings, settings)

    def new_pgbouncer(self, target: Server, **settings: Setting) -> PgBouncer:
        """Return a new pgbouncer in front of a PostgreSQL server."""
        program = self._program("pgbouncer")
        server = PgBouncer(self._keeper, self._launcher(program), program, target=target)
        return _with(server, {}, settings)

    def new_redis(
        self, *, durable: bool = True, tls: bool = False, **settings: Setting
    ) -> RedisServer:
        """Return a new Redis server."""
        program = self._program("redis")
        server = RedisServer(self._keeper, self._launcher(program), program, tls=tls)
        return _with(server, redis.DURABLE if durable else redis.FAST, settings)

    def new_valkey(self, *, durable: bool = True, **settings: Setting) -> ValkeyServer:
        """Return a new Valkey server."""
        program = self._program("valkey")
        server = ValkeyServer(self._keeper, self._launcher(program), program)
        return _with(server, redis.DURABLE if durable else redis.FAST, settings)

    def new_sentinels(self, kind: str = "redis", **settings: Setting) -> Sentinels:
        """Return a new primary with a replica and three sentinels, of Redis or Valkey."""
        return Sentinels(*self._several(2, kind, settings))

    def new_sentinel(self, watched: RedisServer, service: str) -> SentinelServer:
        """Return a new sentinel by itself, which knows a server and fails nothing over."""
        return SentinelServer(watched, service)

    def new_cluster(self, kind: str = "redis", **settings: Setting) -> Cluster:
        """Return a new cluster of three primaries, of Redis or Valkey."""
        return Cluster(self._several(3, kind, settings))

    def _several(self, count: int, kind: str, settings: Mapping[str, Setting]) -> list[RedisServer]:
        makers: dict[str, Callable[..., RedisServer]] = {
            "redis": self.new_redis,
            "valkey": self.new_valkey,
        }
        return [makers[kind](**settings) for _ in range(count)]

    def new_redis8(
        self, *, durable: bool = True, tls: bool = False, **settings: Setting
    ) -> RedisServer:
        """Return a new Redis server that has idempotent producers."""
        program = self._program("redis8")
        server = RedisServer(self._keeper, self._launcher(program), program, tls=tls)
        return _with(server, redis.DURABLE if durable else redis.FAST, settings)

    def new_rabbitmq(self, version: Optional[str] = None, **settings: Setting) -> RabbitMQServer:
        """Return a new RabbitMQ server."""
        program = self._program("rabbitmq", version)
        return _with(RabbitMQServer(self._keeper, self._launcher(program), program), {}, settings)

    def new_rabbitmq_cluster(
        self, version: Optional[str] = None, *, size: int = 2, **settings: Setting
    ) -> RabbitMQCluster:
        """Return new RabbitMQ servers that will be one broker."""
        program = self._program("rabbitmq", version)
        launcher = self._launcher(program)
        names = Names(self._keeper, launcher)
        nodes = [
            _with(RabbitMQServer(self._keeper, launcher, program, names=names), {}, settings)
            for _ in range(size)
        ]
        return RabbitMQCluster(nodes, names)

    def new_nats(
        self, version: Optional[str] = None, *, jetstream: bool = True, **settings: Setting
    ) -> NatsServer:
        """Return a new NATS server."""
        program = self._program("nats", version)
        server = NatsServer(self._keeper, self._launcher(program), program, jetstream=jetstream)
        return _with(server, {}, settings)

    def new_nats_cluster(self, version: Optional[str] = None, **settings: Setting) -> NatsCluster:
        """Return three new NATS servers that will keep streams together."""
        nodes = [self.new_nats(version) for _ in range(3)]
        return NatsCluster([_with(node, {}, settings) for node in nodes])

    def _program(self, name: str, major: Optional[Version] = None) -> Program:
        found = self.sources.local(name)
        if major is None and found:
            return next(iter(found.values()))
        if major in found:
            return found[major]
        if not self.sources.docker:
            raise ServiceMissing(missing(name, major))
        return self._docker.program(name, major)

    def _launcher(self, program: Program) -> Launcher:
        if program.image:
            return self._docker.launcher(program)
        return LocalLauncher(self._keeper, program)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all servers that are left."""
        try:
            # pgbouncer before the server behind it.
            for server in reversed(self.shared()):
                server.close()
        finally:
            self._shared.clear()
            self._keeper.close()
            self._docker.close()


def started(server: S) -> S:
    """Start a server, and leave nothing of it if it does not start."""
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server


def _with(server: S, first: Mapping[str, Setting], then: Mapping[str, Setting]) -> S:
    server.settings.update({**first, **then})
    return server
