"""The stores of a soak, and how many connections their servers count."""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path
from typing import Final, Optional

from scripts._faults_servers import MAKERS
from tests.services.nats import NatsServer
from tests.services.postgres import PostgresServer, execute
from tests.services.process import ServiceError, ServiceMissing
from tests.services.rabbitmq import RabbitMQServer
from tests.services.redis import RedisServer
from tests.services.server import PrivateServer
from tests.services.services import Services, Sources

STORES: Final = ("sqlite", *MAKERS)
COUNT_SESSIONS: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leasecron_sync'"
)


class StoreError(Exception):
    """A store cannot be had; told in one line."""


class Store(ABC):
    """A store of a soak.

    Attributes:
        url: How the instances reach it.
        title: What it is, for people.
    """

    def __init__(self, url: str, title: str) -> None:
        self.url = url
        self.title = title

    @abstractmethod
    def connections(self, pid: int) -> int:
        """Return how many connections a process has, as the store tells.

        Args:
            pid: The process.
        """


class File(Store):
    """An SQLite file; its connections are the handles that the system counts."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}", "SQLite")
        self._path = path

    def connections(self, pid: int) -> int:
        count = 0
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                count += str(handle.readlink()) == str(self._path)
        return count


class ServerStore(Store):
    """A server; it counts everybody."""

    def __init__(self, server: PrivateServer, strategy: str) -> None:
        query = f"?strategy={strategy}" if strategy else ""
        version = ".".join(map(str, server.version))
        super().__init__(f"{server.url}{query}", f"{server.title} {version}")
        self._server = server

    def connections(self, pid: int) -> int:
        del pid
        server = self._server
        if isinstance(server, PostgresServer):
            return int(execute(server.url, COUNT_SESSIONS)[0][0])
        if isinstance(server, RedisServer):
            return len(str(server.do("CLIENT", "LIST")).splitlines()) - 1  # without this one
        assert isinstance(server, (RabbitMQServer, NatsServer))
        return len(server.connections())


@contextlib.contextmanager
def opened(name: str) -> Generator[Store, None, None]:
    """Start a store of a kind, and end it.

    Raises:
        StoreError: It cannot be had.
    """
    with contextlib.ExitStack() as closed:
        if name == "sqlite":
            folder = closed.enter_context(tempfile.TemporaryDirectory(prefix="leasecron-soak-"))
            yield File(Path(folder).resolve() / "jobs.db")
            return
        # Nothing that the environment names: others would be counted.
        services = Services(Sources(environment={}))
        closed.callback(services.close)
        server: Optional[PrivateServer] = None
        try:
            server = MAKERS[name](services)
            closed.callback(server.close)
            server.start()
        except (ServiceMissing, ServiceError) as error:
            raise StoreError(str(error)) from error
        yield ServerStore(server, name.partition("-")[2])
