"""Several RabbitMQ servers that are one broker."""

from __future__ import annotations

from collections.abc import Sequence

from tests.services.erlang import Atom
from tests.services.process import ServiceError, eventually
from tests.services.rabbitmq import KHEPRI, Names, RabbitMQServer

CLUSTER_S = 20.0
"""How long a node may take to join others."""


class RabbitMQCluster:
    """Servers that are one broker. A queue belongs to the node where it was declared.

    Attributes:
        nodes: The servers.
    """

    def __init__(self, nodes: Sequence[RabbitMQServer], names: Names) -> None:
        self.nodes = list(nodes)
        self._names = names

    @property
    def urls(self) -> list[str]:
        """How to reach each node."""
        return [node.url for node in self.nodes]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the nodes listen."""
        return [(node.host, node.port) for node in self.nodes]

    def start(self) -> None:
        """Start all, and return when every node knows the others.

        Raises:
            ServiceError: A node did not start, or did not join.
        """
        self._names.start()
        for node in self.nodes:
            node.settings["cluster_partition_handling"] = "ignore"
            node.start()
        # One by one, as an operator does: nodes that find each other wait for those to come.
        first, *others = self.nodes
        for node in others:
            node.join(first)
        self.wait_complete()

    def wait_complete(self) -> None:
        """Wait until every node knows the others.

        Raises:
            ServiceError: That took too long.
        """
        if not eventually(self._complete, CLUSTER_S, 0.1):
            message = f"the nodes did not become a cluster within {CLUSTER_S:.0f} s"
            raise ServiceError(message)

    def _complete(self) -> bool:
        wanted = sorted(node.node for node in self.nodes)

        def knows_all(node: RabbitMQServer) -> bool:
            if node.version < KHEPRI:
                found = node.call("rabbit_mnesia", "cluster_nodes", Atom("running"))
            else:
                found = node.call("rabbit_nodes", "list_running")
            return sorted(found) == wanted

        try:
            return all(knows_all(node) for node in self.nodes)
        except OSError:
            return False

    def members(self) -> list[RabbitMQServer]:
        """Return all servers."""
        return self.nodes

    def close(self) -> None:
        """End all."""
        errors = []
        for close in [node.close for node in self.nodes] + [self._names.close]:
            try:
                close()
            except ServiceError as error:
                errors.append(error)
        if errors:
            raise errors[0]
