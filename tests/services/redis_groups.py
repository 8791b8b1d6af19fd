"""Several Redis or Valkey servers that belong together: with sentinels, or as a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from tests.services.ports import free_port
from tests.services.process import ServiceError, eventually
from tests.services.redis import RedisServer
from tests.services.resp import info

GROUP_S = 20.0
"""How long servers may take to find each other."""


class SentinelServer(RedisServer):
    """One sentinel. It writes its configuration itself from the first start on.

    It is encrypted if what it watches is.
    """

    title = "Sentinel"
    ready_words = "Sentinel ID is"

    def __init__(self, watched: RedisServer, service: str) -> None:
        tls = watched.tls is not None
        super().__init__(watched._keeper, watched._launcher, watched.program, tls=tls)
        self.executable = watched.executable
        self._first = (
            f"sentinel monitor {service} {watched.host} {watched.port} 2\n"
            f"sentinel down-after-milliseconds {service} {SENTINEL_DOWN_MS}\n"
            f"sentinel failover-timeout {service} {3 * SENTINEL_DOWN_MS}\n"
        )
        if watched.password:
            self._first += f"sentinel auth-pass {service} {watched.password}\n"

    def _prepare(self) -> None:
        super()._prepare()
        lines = [f"bind {self.host}", *self._port_lines(), f"dir {self.home.folder}"]
        self.home.write("server.conf", "\n".join([*lines, self._first]))

    def _write_settings(self) -> None:
        """Nothing: what it has learned stands there."""

    def _command(self) -> Sequence[str]:
        return [*super()._command(), "--sentinel"]


SENTINEL_DOWN_MS = 1_000
"""After how long without an answer a server is down for the sentinels."""


class Sentinels:
    """A primary, a replica, and three sentinels that make the replica the primary if need be.

    A failover takes about 2 s; the old primary becomes a replica about 10 s after its start.

    Attributes:
        service: The name under which sentinels know the primary.
        servers: The primary of the beginning, and its replica.
        sentinels: The three.
    """

    def __init__(self, primary: RedisServer, replica: RedisServer) -> None:
        self.service = "leasecron"
        self.servers = [primary, replica]
        self.sentinels: list[RedisServer] = []

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the sentinels listen."""
        return [(sentinel.host, sentinel.port) for sentinel in self.sentinels]

    def start(self) -> None:
        """Start all, and return when the sentinels know the servers and each other."""
        primary, replica = self.servers
        primary.start()
        replica.settings["replicaof"] = f"{primary.host} {primary.port}"
        # After a failover the old primary is a replica, and is told so at each of its starts.
        for server in self.servers:
            server.settings["masterauth"] = primary.password
            server.settings["requirepass"] = primary.password
        replica.start()
        self.sentinels = [SentinelServer(primary, self.service) for _ in range(3)]
        for sentinel in self.sentinels:
            sentinel.start()
        if not eventually(self._complete, GROUP_S):
            message = f"the sentinels did not find each other within {GROUP_S:.0f} s"
            raise ServiceError(message)

    def _complete(self) -> bool:
        def knows_all(sentinel: RedisServer) -> bool:
            reply = sentinel.do("SENTINEL", "MASTER", self.service)
            assert isinstance(reply, list)
            known = dict(zip(reply[::2], reply[1::2]))
            return (known["flags"], known["num-slaves"], known["num-other-sentinels"]) == (
                "master",
                "1",
                "2",
            )

        with self.servers[1].connect() as connection:
            follows = info(connection, "replication").get("master_link_status") == "up"
        return follows and all(knows_all(sentinel) for sentinel in self.sentinels)

    def primary(self) -> Optional[RedisServer]:
        """Return the server that is the primary for all sentinels that run, or None.

        They learn of a failover one after the other; until then a client may be led to either.
        """
        named = set()
        for sentinel in self.sentinels:
            if sentinel.running:
                reply = sentinel.do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                assert isinstance(reply, list)
                named.add(int(str(reply[1])))
        found = [server for server in self.servers if {server.port} == named]
        return found[0] if found else None

    def members(self) -> list[RedisServer]:
        """Return all servers."""
        return [*self.sentinels, *self.servers]

    def close(self) -> None:
        """End all."""
        _close(self.members())


class Cluster:
    """Three primaries that share the keys.

    Attributes:
        nodes: The servers.
    """

    def __init__(self, nodes: Sequence[RedisServer]) -> None:
        self.nodes = list(nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the nodes listen."""
        return [(node.host, node.port) for node in self.nodes]

    def start(self) -> None:
        """Start all, and return when every node knows the others and serves its keys."""
        for node in self.nodes:
            node.settings.update(
                {
                    "cluster_enabled": True,
                    "cluster_port": free_port(),
                    "cluster_node_timeout": CLUSTER_NODE_TIMEOUT_MS,
                }
            )
            node.start()
        first, *others = self.nodes
        share = -(-SLOTS // len(self.nodes))
        for number, node in enumerate(self.nodes):
            last = min((number + 1) * share, SLOTS) - 1
            node.do("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last))
            # Without an epoch of its own each node would settle later who has which slots.
            node.do("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for node in others:
            bus = str(node.settings["cluster_port"])
            first.do("CLUSTER", "MEET", node.host, str(node.port), bus)
        self.wait_complete()

    def wait_complete(self) -> None:
        """Wait until every node knows the others and serves its keys.

        Raises:
            ServiceError: That took too long.
        """
        if not eventually(self._complete, GROUP_S):
            message = f"the nodes did not become a cluster within {GROUP_S:.0f} s"
            raise ServiceError(message)

    def _complete(self) -> bool:
        def has_all(node: RedisServer) -> bool:
            text = node.do("CLUSTER", "INFO")
            assert isinstance(text, str)
            known = dict(line.split(":") for line in text.split())
            return (known["cluster_state"], known["cluster_size"]) == ("ok", str(len(self.nodes)))

        return all(has_all(node) for node in self.nodes)

    def node_of(self, key: str) -> RedisServer:
        """Return the node that has a key."""
        slot = self.nodes[0].do("CLUSTER", "KEYSLOT", key)
        assert isinstance(slot, int)
        return self.nodes[slot // -(-SLOTS // len(self.nodes))]

    def members(self) -> list[RedisServer]:
        """Return all servers."""
        return self.nodes

    def close(self) -> None:
        """End all."""
        _close(self.nodes)


SLOTS = 16_384
CLUSTER_NODE_TIMEOUT_MS = 2_000
"""After how long without an answer a node is down for the others."""


def _close(servers: Sequence[RedisServer]) -> None:
    errors = []
    for server in servers:
        try:
            server.close()
        except ServiceError as error:
            errors.append(error)
    if errors:
        raise errors[0]
