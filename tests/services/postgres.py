"""PostgreSQL servers, their replicas, and pgbouncer in front of them."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional, Union
from urllib.parse import quote, unquote, urlsplit

from tests.services.process import (
    START_S,
    KeeperClient,
    Launcher,
    Program,
    ServiceError,
    eventually,
    new_home,
    run,
)
from tests.services.server import PrivateServer, Server, Setting

USER = "leasecron"
"""The superuser of private servers."""

PASSWORD = "secret"
DATABASE = "postgres"

DURABLE: dict[str, Setting] = {}
"""What was answered is on disk, as PostgreSQL is unless told otherwise: for servers that are
killed, and the default of a test's own."""

FAST: dict[str, Setting] = {"fsync": False, "full_page_writes": False}
"""Nothing is forced to the disk: for the shared server, which is never killed. What is answered
when, and what a restart finds, is the same; a crash of the machine would lose data."""

LIMIT_S = 10.0
"""How long an operator's command may take."""


class Template:
    """The data of a new server of one version, made once per session: a copy is quicker."""

    def __init__(self, keeper: KeeperClient, launcher: Launcher) -> None:
        self._keeper = keeper
        self._launcher = launcher
        self._data: Optional[Path] = None

    def copy_to(self, data: Path) -> None:
        """Make a copy for another server, with the same owner."""
        if self._data is None:
            home = new_home(self._keeper, "template", unprivileged=True)
            password = home.write("password", PASSWORD)
            made = home.folder / "data"
            argv = [
                *("initdb", "--pgdata", str(made), "--username", USER, "--pwfile", str(password)),
                *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
            ]
            run(self._launcher, argv, home)
            self._data = made
        subprocess.run(["cp", "-a", str(self._data), str(data)], timeout=START_S, check=True)


class PostgresServer(PrivateServer):
    """A PostgreSQL server with a password, new or the streaming replica of another.

    Settings are those of ``postgresql.conf``.
    """

    title = "PostgreSQL"
    ready_words = "database system is ready to accept"
    unprivileged = True
    # SIGTERM would wait for the clients, for ever when a test has failed.
    stop_signals = (signal.SIGINT, signal.SIGQUIT)
    ending = signal.SIGQUIT  # it gives its shared memory back, and does not write what is removed

    def __init__(
        self,
        keeper: KeeperClient,
        launcher: Launcher,
        program: Program,
        *,
        source: Union[Template, PostgresServer],
    ) -> None:
        super().__init__(keeper, launcher, program)
        self._source = source

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{PASSWORD}@{self.host}:{self.port}/{DATABASE}"

    def answers(self) -> bool:
        return takes_clients(self.host, self.port)

    def configure(self, **settings: Setting) -> None:
        """Change settings, for every later start and, where the server can do that, at once.

        Raises:
            ServiceError: A running server did not read them.
        """
        self.settings.update(settings)
        if self._home is None:
            return
        self._write_settings()
        if self.running:
            read = "SELECT pg_conf_load_time()"
            before = execute(self.url, read)
            self._at_work().signal(signal.SIGHUP)
            # New connections have what its first process has read.
            if not eventually(lambda: execute(self.url, read) != before, LIMIT_S):
                message = f"{self} did not read its settings: {self.log_tail()}"
                raise ServiceError(message)

    def promote(self) -> None:
        """Make a replica a server of its own, and return when it takes writes."""
        execute(self.url, "SELECT pg_promote()")

    @property
    def _data(self) -> str:
        return str(self.home.folder / "data")

    def _prepare(self) -> None:
        if isinstance(self._source, Template):
            self._source.copy_to(Path(self._data))
            return
        place = f"host={self._source.host} port={self._source.port}"
        who = f"user={USER} password={PASSWORD} application_name={USER}"
        argv = [
            *("pg_basebackup", "--pgdata", self._data, "--dbname", f"{place} {who}"),
            *("--checkpoint", "fast", "--write-recovery-conf", "--no-sync"),
        ]
        run(self._launcher, argv, self.home)

    def _write_settings(self) -> None:
        settings: dict[str, Setting] = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": "",
            # Files in its folder, which are removed with it even if it is killed.
            "dynamic_shared_memory_type": "mmap",
            "shared_buffers": "16MB",
            "timezone": "UTC",
            "log_line_prefix": "%m [%p] %q%u@%d ",
            **self.settings,
        }
        lines = [f"{name} = {_quoted(value)}" for name, value in settings.items()]
        self.home.write("settings.conf", "\n".join([*lines, ""]))

    def _command(self) -> Sequence[str]:
        # ALTER SYSTEM goes on top of this file: postgresql.auto.conf is read last.
        return [
            *("postgres", "-D", self._data),
            f"--config-file={self.home.folder / 'settings.conf'}",
            f"--hba-file={self._data}/pg_hba.conf",
            f"--ident-file={self._data}/pg_ident.conf",
        ]


class PgBouncer(PrivateServer):
    """A pgbouncer in transaction mode in front of a PostgreSQL server, for all its databases.

    Settings are those of its section ``[pgbouncer]``. Every role logs in with its own password.
    """

    title = "pgbouncer"
    ready_words = "process up"
    unprivileged = True
    ending = signal.SIGKILL

    def __init__(
        self, keeper: KeeperClient, launcher: Launcher, program: Program, *, target: Server
    ) -> None:
        super().__init__(keeper, launcher, program)
        self.target = target
        # The meaning of the signals moved: SIGTERM has waited for the clients since 1.23.
        self.stop_signals = (
            signal.SIGTERM if program.version < (1, 23) else signal.SIGQUIT,
            signal.SIGKILL,
        )

    @property
    def url(self) -> str:
        return through(self.target.url, self)

    def answers(self) -> bool:
        # Whether it encrypts: it can tell that without its PostgreSQL server, which may be down.
        return _ask(self.host, self.port, struct.pack("!II", 8, 80_877_103))[:1] in (b"N", b"S")

    def configure(self, **settings: Setting) -> None:
        """Change settings for the next start."""
        self.settings.update(settings)

    def _prepare(self) -> None:
        """Nothing: it has no data."""

    def _write_settings(self) -> None:
        parts = urlsplit(self.target.url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        users = self.home.write("users.txt", f'"{user}" "{password}"\n')
        settings: dict[str, Setting] = {
            "listen_addr": self.host,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "pool_mode": "transaction",
            "auth_type": "scram-sha-256",
            "auth_file": str(users),
            # Other roles are looked up in the server by the one that the file has.
            "auth_user": user,
            "admin_users": user,
            **self.settings,
        }
        lines = [f"{name} = {int(x) if isinstance(x, bool) else x}" for name, x in settings.items()]
        self.home.write(
            "pgbouncer.ini",
            f"[databases]\n* = host={self.target.host} port={self.target.port}\n"
            "[pgbouncer]\n" + "\n".join([*lines, ""]),
        )

    def _command(self) -> Sequence[str]:
        return ["pgbouncer", str(self.home.folder / "pgbouncer.ini")]


def through(url: str, server: Server) -> str:
    """Return a URL that leads to the same database by another address."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{credentials}{at}{server.host}:{server.port}").geturl()


def as_role(url: str, role: str, password: str) -> str:
    """Return a URL that leads to the same database as another role."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    credentials = f"{quote(role, safe='')}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{credentials}@{place}").geturl()


CANNOT_CONNECT_NOW = b"C57P03\0"


def takes_clients(host: str, port: int) -> bool:
    """Tell whether a server asks a client for its password, or lets it in, or knows it not."""
    body = struct.pack("!I", 196_608) + b"user\0nobody\0database\0postgres\0\0"
    reply = _ask(host, port, struct.pack("!I", len(body) + 4) + body)
    return reply[:1] == b"R" or (reply[:1] == b"E" and CANNOT_CONNECT_NOW not in reply)


def _ask(host: str, port: int, request: bytes) -> bytes:
    """Return how a server begins its reply, or nothing."""
    try:
        with socket.create_connection((host, port), LIMIT_S) as client:
            client.sendall(request)
            return client.recv(4096)
    except OSError:
        return b""


def execute(url: str, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
    """Execute one statement as an operator would, in a connection of its own.

    Returns:
        The rows of its result, if it has one.
    """
    import psycopg2

    with contextlib.closing(psycopg2.connect(url, connect_timeout=int(LIMIT_S))) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement, arguments)
            return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def new_database(server: Server, name: str) -> Iterator[str]:
    """Make a database of this name, and drop it in the end whoever is still connected.

    Yields:
        Its URL.
    """
    execute(server.url, f'CREATE DATABASE "{name}"')
    try:
        yield urlsplit(server.url)._replace(path=f"/{name}").geturl()
    finally:
        execute(server.url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _quoted(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"
