"""Redis and Valkey servers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Optional
from urllib.parse import quote

from tests.services.process import KeeperClient, Launcher, Program
from tests.services.resp import Connection, Reply, ReplyError
from tests.services.server import PrivateServer, Setting
from tests.services.tls import Certificate, certificate_in, make_certificate


def execute(url: str, *words: object) -> Any:  # noqa: ANN401 - of any command
    """Execute one command on a connection of its own; return what redis-py makes of the reply."""
    import redis

    client: Any = redis.Redis.from_url(url)
    with closing(client):
        return client.execute_command(*words)


DURABLE: dict[str, Setting] = {"appendonly": True, "appendfsync": "always"}
"""What was answered is on disk: for servers that are killed, and the default of a test's own."""

FAST: dict[str, Setting] = {"appendonly": False}
"""A restart forgets everything: for the shared server, which is never stopped."""


SECRETS = ("requirepass", "masterauth")
"""Settings of one word, which may hold spaces; others may have several words."""

EMPTY = '""'


class RedisServer(PrivateServer):
    """A Redis or Valkey server.

    Settings are those of its configuration file, with ``_`` for ``-``. ``requirepass`` becomes part
    of the URL.
    """

    title = "Redis"
    ready_words = "Ready to accept connections"
    executable = "redis-server"

    def __init__(
        self,
        keeper: KeeperClient,
        launcher: Launcher,
        program: Program,
        *,
        tls: bool = False,
    ) -> None:
        super().__init__(keeper, launcher, program)
        self._tls = tls

    @property
    def password(self) -> str:
        """What a client must give, or nothing."""
        return str(self.settings.get("requirepass", ""))

    @property
    def tls(self) -> Optional[Certificate]:
        """Its certificate, if it speaks TLS."""
        return certificate_in(self.home.folder) if self._tls else None

    @property
    def url(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        user = f":{quote(self.password, safe='')}@" if self.password else ""
        ca = "" if self.tls is None else f"?ssl_ca_certs={quote(str(self.tls.ca), safe='')}"
        return f"{scheme}://{user}{self.host}:{self.port}/0{ca}"

    @property
    def socket(self) -> Path:
        """Its socket in the file system."""
        return self.home.folder / "socket"

    @property
    def unix_url(self) -> str:
        """How a client reaches its socket in the file system."""
        user = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"unix://{user}{quote(str(self.socket))}?db=0"

    def connect(self) -> Connection:
        """Return a connection of the tests' own; a client's may be what a test is about."""
        ca = None if self.tls is None else self.tls.ca
        connection = Connection((self.host, self.port), ca=ca)
        if self.password:
            connection.do("AUTH", self.password)
        return connection

    def do(self, *words: str) -> Reply:
        """Send one command, as the server's operator."""
        with self.connect() as connection:
            return connection.do(*words)

    def configure(self, **settings: Setting) -> None:
        """Change settings, at once if it runs, and for every later start.

        Raises:
            ReplyError: The server cannot change that while it runs.
        """
        if self.running:
            with self.connect() as connection:
                for name, value in settings.items():
                    connection.do("CONFIG", "SET", name.replace("_", "-"), _text(value))
        self.settings.update(settings)

    def answers(self) -> bool:
        try:
            return self.do("PING") == "PONG"
        except ReplyError as error:
            # It reads its data. Every other refusal is an answer.
            return not str(error).startswith("LOADING")
        except OSError:
            return False

    def _prepare(self) -> None:
        if self._tls:
            make_certificate(self.home)

    def _write_settings(self) -> None:
        settings: dict[str, Setting] = {
            "bind": self.host,
            "unixsocket": str(self.socket),
            "dir": str(self.home.folder),
            "save": "",
            # A replica waits for others to come otherwise, 5 s.
            "repl_diskless_sync_delay": 0,
            **self.settings,
        }
        lines = self._port_lines()
        for name, value in settings.items():
            text = _quoted(value) if name in SECRETS else _text(value) or EMPTY
            lines.append(f"{name.replace('_', '-')} {text}")
        self.home.write("server.conf", "\n".join([*lines, ""]))

    def _port_lines(self) -> list[str]:
        if self.tls is None:
            return [f"port {self.port}"]
        return [
            "port 0",
            f"tls-port {self.port}",
            f"tls-cert-file {self.tls.certificate}",
            f"tls-key-file {self.tls.key}",
            f"tls-ca-cert-file {self.tls.ca}",
            "tls-auth-clients no",
        ]

    def _command(self) -> Sequence[str]:
        return [self.executable, str(self.home.folder / "server.conf")]


class ValkeyServer(RedisServer):
    """A Valkey server, for which every client of Redis will do."""

    title = "Valkey"
    executable = "valkey-server"


def _quoted(value: Setting) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _text(value: Setting) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
