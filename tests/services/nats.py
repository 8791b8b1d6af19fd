"""NATS servers with JetStream, alone and as a cluster."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from tests.services.ports import free_port
from tests.services.process import KeeperClient, Launcher, Program, ServiceError, eventually
from tests.services.server import PrivateServer

TIMEOUT_S = 5.0
"""How long a reply may take."""

CLUSTER_S = 20.0
"""How long servers may take to find each other and a leader."""

GROUP = "leasecron"

LOGIN = ("user", "password")
"""Settings that stand in a block of their own."""


class NatsServer(PrivateServer):
    """A NATS server.

    Settings are those of its configuration file; ``user`` and ``password`` become part of the URL.
    JetStream keeps its data in the server's folder.
    """

    title = "NATS"
    ready_words = "Server is ready"
    # SIGTERM would do as well, but ends with a status of failure in some versions.
    stop_signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(
        self,
        keeper: KeeperClient,
        launcher: Launcher,
        program: Program,
        *,
        jetstream: bool = True,
    ) -> None:
        super().__init__(keeper, launcher, program)
        self.name = f"nats-{'.'.join(map(str, program.version[:2]))}"
        self.jetstream = jetstream
        self.routes: list[int] = []
        self.route_port = 0
        self._monitor_port = free_port()

    @property
    def url(self) -> str:
        user, password = (quote(str(self.settings.get(name, "")), safe="") for name in LOGIN)
        login = f"{user}:{password}@" if user else ""
        return f"nats://{login}{self.host}:{self.port}"

    def _prepare(self) -> None:
        """Nothing: it makes its folders itself."""

    def _write_settings(self) -> None:
        settings: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "http": f"{self.host}:{self._monitor_port}",
            "server_name": f"{GROUP}-{self.port}",
            **{name: value for name, value in self.settings.items() if name not in LOGIN},
        }
        login = {name: self.settings[name] for name in LOGIN if name in self.settings}
        if login:
            settings["authorization"] = login
        if self.jetstream:
            settings["jetstream"] = {"store_dir": str(self.home.folder / "data")}
        if self.routes:
            settings["cluster"] = {
                "name": GROUP,
                "host": self.host,
                "port": self.route_port,
                "routes": [f"nats://{self.host}:{port}" for port in self.routes],
            }
        # Its configuration may be JSON.
        self.home.write("server.conf", json.dumps(settings, indent=1))

    def _command(self) -> Sequence[str]:
        return ["nats-server", "--config", str(self.home.folder / "server.conf")]

    def answers(self) -> bool:
        """Tell whether it takes clients, and has JetStream if it should."""
        try:
            with Talk(self) as talk:
                return bool(talk.info.get("jetstream")) is self.jetstream
        except OSError:
            return False

    def request(self, subject: str, content: object = None) -> dict[str, Any]:
        """Ask the server something, such as ``$JS.API.STREAM.INFO.name``, and return its answer.

        Raises:
            OSError: It did not answer in time.
        """
        with Talk(self) as talk:
            return talk.request(subject, content)

    def streams(self) -> dict[str, int]:
        """Return the names of its streams and how many messages they hold.

        Raises:
            OSError: One of them did not answer: it may have no leader just now.
        """
        # Each by itself: the list of a cluster leaves those out that did not answer.
        names = self.request("$JS.API.STREAM.NAMES")["streams"] or []
        answers = {name: self.request(f"$JS.API.STREAM.INFO.{name}") for name in names}
        return {name: answer["state"]["messages"] for name, answer in answers.items()}

    def connections(self) -> list[dict[str, Any]]:
        """Return the clients' connections, as its monitoring tells them: cid, name, port, ..."""
        place = f"http://{self.host}:{self._monitor_port}/connz"
        with urllib.request.urlopen(place, timeout=TIMEOUT_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["connections"]
        return found

    def close(self) -> None:
        super().close()
        # Somebody may have taken one of these instead of its port.
        self._monitor_port = free_port()


class Talk:
    """A connection to a server, without a client's habits."""

    def __init__(self, server: NatsServer) -> None:
        self._socket = socket.create_connection((server.host, server.port), TIMEOUT_S)
        try:
            self._lines = self._socket.makefile("rb")
            self.info: dict[str, Any] = json.loads(self._line().partition(b" ")[2])
            login = {"user": server.settings.get("user"), "pass": server.settings.get("password")}
            options = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
            hello = {**options, **{name: value for name, value in login.items() if value}}
            self._socket.sendall(b"CONNECT " + json.dumps(hello).encode() + b"\r\nPING\r\n")
            self._until(b"PONG")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *details: object) -> None:
        self._lines.close()
        self._socket.close()

    def request(self, subject: str, content: object) -> dict[str, Any]:
        """Ask for something and return the answer."""
        body = b"" if content is None else json.dumps(content).encode()
        head = f"SUB answer 1\r\nPUB {subject} answer {len(body)}\r\n".encode()
        self._socket.sendall(head + body + b"\r\n")
        words = self._until(b"MSG", b"HMSG").split()
        text = self._lines.read(int(words[-1]))
        if words[0] == b"HMSG":
            message = f"nobody answers {subject}"
            raise ConnectionError(message)
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _until(self, *kinds: bytes) -> bytes:
        while True:
            line = self._line()
            kind = line.split(b" ")[0]
            if kind in kinds:
                return line
            if kind == b"-ERR":
                raise ConnectionError(line.decode())

    def _line(self) -> bytes:
        line: bytes = self._lines.readline()
        if not line.endswith(b"\r\n"):
            message = "the server has closed the connection"
            raise ConnectionError(message)
        return line[:-2]


class NatsCluster:
    """Three servers that keep streams together.

    Attributes:
        nodes: The servers.
    """

    def __init__(self, nodes: Sequence[NatsServer]) -> None:
        self.nodes = list(nodes)

    @property
    def url(self) -> str:
        """How a client reaches all of them."""
        return ",".join(node.url for node in self.nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the nodes listen."""
        return [(node.host, node.port) for node in self.nodes]

    def start(self) -> None:
        """Start all, and return when streams can be made.

        Raises:
            ServiceError: A server did not start, or they found no leader.
        """
        for node in self.nodes:
            node.route_port = free_port()
        for node in self.nodes:
            node.routes = [one.route_port for one in self.nodes]
        for node in self.nodes:
            node.start()
        self.wait_complete()

    def wait_complete(self) -> None:
        """Wait until all servers that run know a leader.

        Raises:
            ServiceError: That took too long.
        """
        if not eventually(self._complete, CLUSTER_S, 0.1):
            message = f"the servers found no leader within {CLUSTER_S:.0f} s"
            raise ServiceError(message)

    def _complete(self) -> bool:
        def usable(node: NatsServer) -> bool:
            try:
                return "error" not in node.request("$JS.API.INFO")
            except OSError:
                return False

        return all(usable(node) for node in self.nodes if node.running)

    def leader_of(self, stream: str) -> NatsServer:
        """Return the server that leads a stream."""
        running = next(node for node in self.nodes if node.running)
        answer = running.request(f"$JS.API.STREAM.INFO.{stream}")
        leader = answer["cluster"]["leader"]
        return next(node for node in self.nodes if f"{GROUP}-{node.port}" == leader)

    def members(self) -> list[NatsServer]:
        """Return all servers."""
        return self.nodes

    def close(self) -> None:
        """End all."""
        errors = []
        for node in self.nodes:
            try:
                node.close()
            except ServiceError as error:
                errors.append(error)
        if errors:
            raise errors[0]
