"""RabbitMQ servers, and what can be done to them.

Every server is a private one: its own cookie and home, its own ports for AMQP, for other nodes and
for the name service of Erlang (epmd), all on 127.0.0.1, and no plugins. Its operator's commands
are calls of its own functions over Erlang's protocol: see ``erlang.py``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, Optional, Union
from urllib.parse import quote

from tests.services.erlang import Atom, Node, Opaque, Term
from tests.services.ports import HOST, free_port
from tests.services.process import (
    KILL_S,
    START_S,
    Home,
    KeeperClient,
    Launcher,
    Process,
    Program,
    ServiceError,
    eventually,
    new_home,
    remove_home,
)
from tests.services.server import PrivateServer, Setting

USER = "leasecron"
PASSWORD = "secret"
COOKIE = "tests"
EVERYTHING = ".*"
VHOST = "/"

FILES = 65_536
"""How many files a server may have open: every queue takes one, and a test may make thousands."""

KHEPRI = (3, 12)
"""From this version on what a cluster knows is not always kept in Mnesia."""

HEADER = b"AMQP\x00\x00\x09\x01"
TIMEOUT_S = 5.0

# As many files as it may have, at most those that it is told. dash does not know "ulimit -Sn".
SHELL = 'ulimit -n "$0" 2>/dev/null || ulimit -n "$(ulimit -Hn)"; exec "$@"'


class Names:
    """The name service (epmd) of the nodes of one server or cluster.

    A node would start one itself, which would outlive it.
    """

    def __init__(self, keeper: KeeperClient, launcher: Launcher) -> None:
        self.port = free_port()
        self._keeper = keeper
        self._launcher = launcher
        self._home: Optional[Home] = None
        self._process: Optional[Process] = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is not None and self._process.running():
            return
        if self._home is None:
            self._home = new_home(self._keeper, "epmd", unprivileged=False)
        argv = ["epmd", "-port", str(self.port), "-address", HOST]
        self._process = self._launcher.launch(argv, self._home)
        if not eventually(lambda: _listens(self.port), START_S):
            message = f"epmd did not answer on port {self.port}: {self._home.log_tail(20)}"
            raise ServiceError(message)

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            if not eventually(lambda: not process.running(), KILL_S):
                message = "epmd did not end although it was killed"
                raise ServiceError(message)
            process.ended()
        if self._home is not None:
            remove_home(self._keeper, self._home)
            self._home = None


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), TIMEOUT_S).close()
    except OSError:
        return False
    return True


class RabbitMQServer(PrivateServer):
    """A RabbitMQ server.

    Settings are those of ``rabbitmq.conf``; one whose name has dots is given in ``settings``. What
    is changed there counts from the next start on. Its user may do everything.
    """

    title = "RabbitMQ"
    ready_words = "startup complete"
    taken_words: ClassVar[str] = "eaddrinuse"

    def __init__(
        self,
        keeper: KeeperClient,
        launcher: Launcher,
        program: Program,
        *,
        names: Optional[Names] = None,
    ) -> None:
        super().__init__(keeper, launcher, program)
        self.name = f"rabbitmq-{'.'.join(map(str, program.version[:2]))}"
        self._own_names = Names(keeper, launcher) if names is None else None
        self._names = names or self._own_names
        self._nodes_port = free_port()

    @property
    def url(self) -> str:
        return self.url_for()

    def url_for(self, user: str = USER, password: str = PASSWORD, vhost: str = VHOST) -> str:
        """Return how another user reaches it, or another virtual host."""
        login = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"amqp://{login}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    @property
    def node(self) -> str:
        """Its name among other nodes."""
        return f"rabbit-{self.port}@localhost"

    # -- its processes ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.home.write(".erlang.cookie", COOKIE)
        self.home.write("enabled_plugins", "[].\n")

    def _write_settings(self) -> None:
        settings: dict[str, Setting] = {
            "listeners.tcp.1": f"{self.host}:{self.port}",
            "default_user": USER,
            "default_pass": PASSWORD,
            "log.console": True,
            "log.file": False,
            # A machine that is short of either is no business of a test that does not say so.
            "disk_free_limit.absolute": "1MB",
            "vm_memory_high_watermark.relative": "0.9",
            **self.settings,
        }
        lines = [f"{name} = {_text(value)}" for name, value in settings.items()]
        self.home.write("rabbitmq.conf", "\n".join([*lines, ""]))

    def _environment(self) -> Mapping[str, str]:
        assert self._names is not None
        folder, port = self.home.folder, self._nodes_port
        # Distribution from the very start: RabbitMQ looks for other nodes and waits otherwise.
        erlang = (
            f"-sname {self.node} -start_epmd false -kernel inet_dist_use_interface {{127,0,0,1}} "
            f"-kernel inet_dist_listen_min {port} inet_dist_listen_max {port}"
        )
        return {
            "ERL_EPMD_PORT": str(self._names.port),
            "ERL_CRASH_DUMP": "/dev/null",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": erlang,
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            # Nothing of /etc/rabbitmq.
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "none.config"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            # Bound to a core each, those of several servers would crowd on the same ones, and some
            # kernels leave a thread in that call for good.
            "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
            # One process in the foreground, which takes signals itself.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _command(self) -> Sequence[str]:
        return ["sh", "-c", SHELL, str(FILES), "rabbitmq-server"]

    def _start_once(self) -> bool:
        if self._own_names is None:
            return super()._start_once()
        self._own_names.start()
        started = False
        try:
            started = super()._start_once()
        finally:
            if not started:
                self._own_names.close()
        return started

    def _end(self, signals: Sequence[int]) -> None:
        try:
            super()._end(signals)
        finally:
            self._end_names()

    def kill(self) -> None:
        super().kill()
        self._end_names()

    def _end_names(self) -> None:
        if self._own_names is not None and not self.running:
            self._own_names.close()

    def close(self) -> None:
        super().close()
        # Somebody may have taken one of these instead of its port.
        self._nodes_port = free_port()
        if self._own_names is not None:
            self._own_names.port = free_port()

    def answers(self) -> bool:
        """Tell whether it begins to talk as brokers do, and has nothing left to start."""
        try:
            with closing(socket.create_connection((self.host, self.port), TIMEOUT_S)) as trial:
                trial.sendall(HEADER)
                method = trial.recv(1) == b"\x01"  # which is Connection.Start
            # It takes clients a little before that; what stops it then finds it half started.
            return method and self.call("init", "get_status")[0] == "started"
        except OSError:
            return False

    # -- its operator ----------------------------------------------------------------------------

    def call(self, module: str, function: str, *arguments: Term) -> Any:  # noqa: ANN401
        """Call a function of the server.

        Raises:
            ErlangError: It raised an error.
            OSError: The server does not answer.
        """
        with Node((self.host, self._nodes_port), COOKIE) as node:
            return node.call(module, function, *arguments)

    def add_user(self, user: str, password: str) -> None:
        """Add a user, who may do nothing yet."""
        self._do("rabbit_auth_backend_internal", "add_user", user, password, USER)

    def allow(
        self, user: str, vhost: str = VHOST, *, configure: str = "", write: str = "", read: str = ""
    ) -> None:
        """Let a user into a virtual host, with rights to what has names of these patterns."""
        patterns = (configure, write, read)
        self._do("rabbit_auth_backend_internal", "set_permissions", user, vhost, *patterns, USER)

    def forbid(self, user: str, vhost: str = VHOST) -> None:
        """Take back a user's way into a virtual host."""
        self._do("rabbit_auth_backend_internal", "clear_permissions", user, vhost, USER)

    def add_vhost(self, vhost: str) -> None:
        """Add a virtual host, where the server's own user may do everything."""
        self._do("rabbit_vhost", "add", vhost, USER)
        self.allow(USER, vhost, configure=EVERYTHING, write=EVERYTHING, read=EVERYTHING)

    def remove_vhost(self, vhost: str) -> None:
        """Remove a virtual host with all that is in it."""
        self._do("rabbit_vhost", "delete", vhost, USER)

    def connections(self) -> list[dict[str, Any]]:
        """Return the clients' connections: user, vhost, port of the client, state, heartbeat."""
        items = ["pid", "user", "vhost", "peer_port", "state", "timeout", "channels"]
        found = self.call("rabbit_networking", "connection_info_all", [Atom(x) for x in items])
        return [{**_named(one), "heartbeat": _named(one)["timeout"]} for one in found]

    def close_connection(self, connection: Mapping[str, Any], reason: str = "closed") -> None:
        """Close one of the connections, as an operator does."""
        pid = connection["pid"]
        assert isinstance(pid, Opaque)
        self._do("rabbit_networking", "close_connection", pid, [ord(x) for x in reason])

    def queues(self, vhost: str = VHOST) -> list[dict[str, Any]]:
        """Return the queues of a virtual host: name, durable, arguments, messages, consumers."""
        items = ["name", "durable", "arguments", "messages", "consumers", "type"]
        found = self.call("rabbit_amqqueue", "info_all", vhost, [Atom(x) for x in items])
        queues = [_named(one) for one in found]
        for queue in queues:
            queue["name"] = queue["name"][3]
            queue["arguments"] = {name: value for name, _type, value in queue["arguments"]}
        return sorted(queues, key=lambda queue: str(queue["name"]))

    def alarm(self, resource: str = "memory") -> None:
        """Have it block publishers as if it were short of ``memory`` or ``disk``."""
        self._alarm("set_alarm", (self._limit(resource), []))

    def end_alarm(self, resource: str = "memory") -> None:
        """Take back ``alarm()``."""
        self._alarm("clear_alarm", self._limit(resource))

    def _alarm(self, function: str, alarm: Term) -> None:
        # Its handler is told of it without waiting, so that this must wait.
        self.call("rabbit_alarm", function, alarm)
        wanted = function == "set_alarm"
        if not eventually(lambda: bool(self.alarms()) is wanted, TIMEOUT_S):
            message = f"{self} has the alarms {self.alarms()}"
            raise ServiceError(message)

    def alarms(self) -> list[str]:
        """Return what it is short of."""
        found = self.call("rabbit_alarm", "get_alarms")
        return [str(one[0][1]) for one in found if isinstance(one[0], tuple)]

    def _limit(self, resource: str) -> Term:
        return (Atom("resource_limit"), Atom(resource), Atom(self.node))

    def join(self, other: RabbitMQServer) -> None:
        """Give up what it has and become a node of another's cluster. They share ``Names``."""
        self._do("rabbit", "stop")
        if self.version < KHEPRI:
            self._do("rabbit_mnesia", "join_cluster", Atom(other.node), Atom("disc"))
        else:
            self._do("rabbit_db_cluster", "join", Atom(other.node), Atom("disc"))
        self._do("rabbit", "start")

    def _do(self, module: str, function: str, *arguments: Term) -> None:
        result = self.call(module, function, *arguments)
        if result != "ok":
            message = f"{self}: {module}:{function} answered {result!r}"
            raise ServiceError(message)


def _named(properties: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {str(name): value for name, value in properties}


def _text(value: Union[Setting, object]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
