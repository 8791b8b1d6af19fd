"""The servers of a fault campaign, and what is done to them and to the network before them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Optional

from leasecron_sync import PostgresLease, RedisLease
from leasecron_sync.backends.base import LeaseBackend
from scripts._faults_crew import CampaignError
from scripts._faults_place import Place
from scripts._faults_plan import BY_NAME, CLOCKED, MOST, Injection
from scripts._faults_sqlite import SQLitePlace
from tests.services.ports import free_port
from tests.services.postgres import PASSWORD, as_role, execute
from tests.services.process import ServiceError, ServiceMissing
from tests.services.proxy import Proxy, postgres_answered
from tests.services.rabbitmq import RabbitMQServer
from tests.services.redis import RedisServer
from tests.services.relay import anything
from tests.services.server import PrivateServer
from tests.services.services import Services, Sources

ROLE: Final = "campaign"
END_SESSIONS: Final = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"


class ServerPlace(Place):
    """A server of its own, with a proxy in front of it for each instance."""

    @staticmethod
    def answered(reply: bytes) -> bool:
        """Tell whether what a server sent answers a call."""
        return anything(reply)

    def __init__(self, folder: Path, store: str) -> None:
        super().__init__(folder)
        self._store = store
        strategy = store.partition("-")[2]
        self._query = f"?strategy={strategy}" if strategy else ""
        # Nothing that the environment names: this one is going to be killed.
        self._services = Services(Sources(environment={}))
        self._server: Optional[PrivateServer] = None
        self._proxies: list[Proxy] = []

    @property
    def server(self) -> PrivateServer:
        """The server."""
        assert self._server is not None
        return self._server

    def start(self) -> None:
        if self._store in CLOCKED:
            self.store_clock = self._new_clock("store")
        for slot in range(MOST):
            clock = self._new_clock(str(slot))
            if clock is not None:
                self.clocks[slot] = clock
        try:
            self._server = MAKERS[self._store](self._services)
            if self.store_clock is not None:
                self._server.environment.update(self.store_clock.environment())
            self._server.start()
            self._prepare()
        except (ServiceMissing, ServiceError) as error:
            raise CampaignError(str(error)) from error
        for _ in range(MOST):
            self._proxies.append(Proxy((self.server.host, self.server.port)))

    def _prepare(self) -> None:
        """Make what the instances need, once the server answers."""

    def _client_url(self) -> str:
        return self.server.url

    def url_of(self, slot: int) -> str:
        return self._proxies[slot].url_of(self._client_url()) + self._query

    def environment_of(self, slot: int) -> Mapping[str, str]:
        return self.clocks[slot].environment() if slot in self.clocks else {}

    def connect(self) -> LeaseBackend:
        message = f"{self.server} keeps no records"
        raise CampaignError(message)

    # -- faults ----------------------------------------------------------------------------------

    def begin(self, one: Injection) -> None:
        if BY_NAME[one.kind].group == "network":
            for proxy in self._meant(one):
                self._disturb(proxy, one)
        elif one.kind == "store clock step":
            self.set_store_clock(one)
        else:
            self._at_server(one)

    def _meant(self, one: Injection) -> list[Proxy]:
        return self._proxies if one.slot is None else [self._proxies[one.slot]]

    def _disturb(self, proxy: Proxy, one: Injection) -> None:
        if one.kind == "cut":
            proxy.cut()
        elif one.kind == "reset":
            proxy.reset()
        elif one.kind == "silence":
            proxy.swallow()
        elif one.kind == "delay":
            proxy.delay(to_server_ms=one.amount, to_client_ms=one.amount)
        elif one.kind == "half-open":
            proxy.stall()
            proxy.cut()
        else:
            assert one.kind == "reply lost"
            proxy.lose_reply(nth=one.amount, complete=type(self).answered)

    def _at_server(self, one: Injection) -> None:
        if one.kind == "server kill":
            self._kill()
        elif one.kind == "server restart":
            self.server.stop()
        elif one.kind.startswith("server pause"):
            self.server.pause()
        else:
            message = f"{one.kind} is nothing for {self.server}"
            raise CampaignError(message)

    def _kill(self) -> None:
        self.server.kill()

    def end(self, one: Injection) -> None:
        if BY_NAME[one.kind].group == "network":
            if one.lasts_ms:
                for proxy in self._meant(one):
                    proxy.forward()
        elif one.kind in ("server kill", "server restart"):
            self.server.start()
        elif one.kind.startswith("server pause"):
            self.server.resume()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.forward()
        if not self.server.running:
            self.server.start()
        else:
            self.server.resume()

    def close(self) -> None:
        with contextlib.ExitStack() as closed:
            closed.callback(self._services.close)
            if self._server is not None:
                closed.callback(self._server.close)
            for proxy in self._proxies:
                closed.callback(proxy.close)


class PostgresPlace(ServerPlace):
    """A PostgreSQL server; the instances have a role of their own."""

    answered = staticmethod(postgres_answered)

    def _prepare(self) -> None:
        self._sql(f"CREATE ROLE {ROLE} SUPERUSER LOGIN PASSWORD '{PASSWORD}'")

    def _sql(self, statement: str) -> None:
        execute(self.server.url, statement)

    def _client_url(self) -> str:
        return as_role(self.server.url, ROLE, PASSWORD)

    def connect(self) -> LeaseBackend:
        return PostgresLease(self.server.url)

    def _at_server(self, one: Injection) -> None:
        if one.kind == "connections ended":
            self._end_sessions()
        elif one.kind == "read-only":
            self._read_only("on")
        else:
            super()._at_server(one)

    def _end_sessions(self) -> None:
        execute(self.server.url, END_SESSIONS, ROLE)

    def _read_only(self, value: str) -> None:
        self._sql(f"ALTER ROLE {ROLE} SET default_transaction_read_only = {value}")
        self._end_sessions()

    def end(self, one: Injection) -> None:
        if one.kind == "read-only":
            self._read_only("off")
        super().end(one)

    def heal(self) -> None:
        super().heal()
        self._read_only("off")


class RedisPlace(ServerPlace):
    """A Redis or Valkey server."""

    def connect(self) -> LeaseBackend:
        return super().connect() if self._query else RedisLease(self.server.url)

    def _do(self, *words: str) -> None:
        assert isinstance(self.server, RedisServer)
        self.server.do(*words)

    def _at_server(self, one: Injection) -> None:
        if one.kind == "connections ended":
            self._do("CLIENT", "KILL", "TYPE", "normal")
        elif one.kind == "script flush":
            self._do("SCRIPT", "FLUSH")
        elif one.kind == "read-only":
            # Of a primary that is not there, so that it keeps what it has.
            self._do("REPLICAOF", self.server.host, str(free_port()))
        elif one.kind == "memory full":
            self._do("CONFIG", "SET", "maxmemory", "1")
        else:
            super()._at_server(one)

    def end(self, one: Injection) -> None:
        if one.kind == "read-only":
            self._do("REPLICAOF", "NO", "ONE")
        elif one.kind == "memory full":
            self._do("CONFIG", "SET", "maxmemory", "0")
        super().end(one)

    def heal(self) -> None:
        super().heal()
        self._do("REPLICAOF", "NO", "ONE")
        self._do("CONFIG", "SET", "maxmemory", "0")


class RabbitMQPlace(ServerPlace):
    """A RabbitMQ server."""

    def _kill(self) -> None:
        """Kill it when all that it has confirmed is on disk: it forgets new queues otherwise."""
        assert isinstance(self.server, RabbitMQServer)
        for proxy in self._proxies:
            proxy.hold()
            proxy.cut()
        self.server.call("mnesia", "sync_log")
        self.server.kill()
        for proxy in self._proxies:
            proxy.forward()


MAKERS: Final[dict[str, Callable[[Services], PrivateServer]]] = {
    "postgres": lambda services: services.new_postgres(),
    "redis": lambda services: services.new_redis(),
    "valkey": lambda services: services.new_valkey(),
    "rabbitmq": lambda services: services.new_rabbitmq(),
    "nats": lambda services: services.new_nats(),
    "redis-script": lambda services: services.new_redis(),
    "redis-stream-id": lambda services: services.new_redis(),
    "redis-idmp": lambda services: services.new_redis8(),
}
"""Servers whose answers are on disk."""

PLACES: Final[dict[str, type[ServerPlace]]] = {
    "postgres": PostgresPlace,
    "rabbitmq": RabbitMQPlace,
    "nats": ServerPlace,
}


def place_of(store: str, folder: Path) -> Place:
    """Return a store of a kind; nothing is started yet."""
    if store == "sqlite":
        return SQLitePlace(folder)
    return PLACES.get(store, RedisPlace)(folder, store)


def world_readable(folder: Path) -> Path:
    """Let a server's user look into a folder."""
    os.chmod(folder, 0o755)  # noqa: PTH101, S103 - nothing in it is secret
    return folder
