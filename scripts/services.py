#!/usr/bin/env python3
"""Start the servers that the tests use, print where they are, and end them with Ctrl-C.

scripts/services.py                one server of each kind that this machine has, PostgreSQL,
                                   RabbitMQ and NATS in each version
scripts/services.py --groups       Redis and Valkey with sentinels and as clusters, a PostgreSQL
                                   replica, and clusters of RabbitMQ and NATS, too
scripts/services.py --docker       what this machine has not is run by docker (needs the package
                                   docker: .venv/test/bin/python scripts/services.py --docker)

They are new and empty, listen on 127.0.0.1, and lose their data when they end, also when this
script is killed. While they run, another terminal can use them: the variables below the table have
the tests take them instead of their own.

The status is 0 if at least one could be started.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, Optional, TypeVar, Union

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests.services of this checkout

from tests.services.nats import NatsCluster, NatsServer  # noqa: E402 - see above
from tests.services.postgres import PostgresServer  # noqa: E402 - see above
from tests.services.process import ServiceError, ServiceMissing  # noqa: E402 - see above
from tests.services.programs import VARIABLES  # noqa: E402 - see above
from tests.services.rabbitmq import RabbitMQServer  # noqa: E402 - see above
from tests.services.rabbitmq_cluster import RabbitMQCluster  # noqa: E402 - see above
from tests.services.redis_groups import Cluster, Sentinels  # noqa: E402 - see above
from tests.services.server import PrivateServer  # noqa: E402 - see above
from tests.services.services import Services, Sources  # noqa: E402 - see above

LOOK_S = 1.0
"""How often it looks whether its servers still run."""

Startable = Union[PrivateServer, Sentinels, Cluster, RabbitMQCluster, NatsCluster]
S = TypeVar("S", bound=Startable)


class Crew:
    """The servers that are started, and what is told about them."""

    def __init__(self, ended: threading.Event) -> None:
        self.rows: list[tuple[str, str]] = []
        self.servers: list[PrivateServer] = []
        self.variables: dict[str, str] = {}
        self._ended = ended

    def add(self, label: str, make: Callable[[], S], variable: str = "") -> Optional[S]:
        """Start a server, or several that belong together; return None if that cannot be done."""
        if self._ended.is_set():
            return None
        say(f"starting {label}")
        try:
            one = make()
            one.start()
        except (ServiceMissing, ServiceError) as error:
            self.rows.append((label, f"-- {error}"))
            return None
        members = [one] if isinstance(one, PrivateServer) else one.members()
        self.servers += members
        self.rows.append((f"{label} {'.'.join(map(str, members[-1].version))}", place_of(one)))
        if variable and variable not in self.variables:
            assert isinstance(one, PrivateServer)
            self.variables[variable] = one.url
        return one


def place_of(one: Startable) -> str:
    if isinstance(one, PrivateServer):
        return one.url
    addresses = " ".join(f"{host}:{port}" for host, port in one.addresses)
    return f"{addresses}  service {one.service}" if isinstance(one, Sentinels) else addresses


def start_all(services: Services, crew: Crew, *, groups: bool) -> None:
    # The newest PostgreSQL first: the variables are about that.
    for major in services.sources.majors():

        def new_postgres(major: Optional[int] = major) -> PostgresServer:
            return services.new_postgres(major)

        server = crew.add("PostgreSQL", new_postgres, VARIABLES["postgresql"])
        if server is not None:
            add_behind(services, crew, server, groups=groups)
    crew.add("Redis", services.new_redis, VARIABLES["redis"])
    crew.add("Valkey", services.new_valkey, VARIABLES["valkey"])
    crew.add("Redis with idmp", services.new_redis8, VARIABLES["redis8"])
    add_brokers(services, crew, groups=groups)
    if groups:
        for kind in ("redis", "valkey"):

            def new_sentinels(kind: str = kind) -> Sentinels:
                return services.new_sentinels(kind)

            def new_cluster(kind: str = kind) -> Cluster:
                return services.new_cluster(kind)

            crew.add(f"{kind.capitalize()} with sentinels", new_sentinels)
            crew.add(f"{kind.capitalize()} cluster", new_cluster)


def add_brokers(services: Services, crew: Crew, *, groups: bool) -> None:
    """Start RabbitMQ and NATS, the newest versions first: the variables are about these."""
    for version in services.sources.versions("rabbitmq"):

        def new_broker(version: Optional[str] = version) -> RabbitMQServer:
            return services.new_rabbitmq(version)

        crew.add("RabbitMQ", new_broker, VARIABLES["rabbitmq"])
    for version in services.sources.versions("nats"):

        def new_nats(version: Optional[str] = version) -> NatsServer:
            return services.new_nats(version)

        crew.add("NATS", new_nats, VARIABLES["nats"])
    if groups:
        crew.add("RabbitMQ cluster", services.new_rabbitmq_cluster)
        crew.add("NATS cluster", services.new_nats_cluster)


def add_behind(services: Services, crew: Crew, server: PostgresServer, *, groups: bool) -> None:
    """Start what belongs to a PostgreSQL server."""
    crew.add("pgbouncer", lambda: services.new_pgbouncer(server), VARIABLES["pgbouncer"])
    if groups:
        crew.add("PostgreSQL replica", lambda: services.new_replica(server))


def show(crew: Crew) -> None:
    width = max(len(what) for what, _ in crew.rows)
    for what, where in crew.rows:
        print(f"{what:{width}}  {where}")
    if crew.variables:
        print("\nFor tests in another terminal:")
    for name, value in crew.variables.items():
        print(f"export {name}={value}")
    sys.stdout.flush()


def wait(crew: Crew, ended: threading.Event) -> None:
    say("\nthey run until Ctrl-C")
    left = list(crew.servers)
    while not ended.wait(LOOK_S):
        for server in [server for server in left if not server.running]:
            say(f"{server} has ended: {server.log_tail()}")
            left.remove(server)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", action="store_true", help="several servers together, too")
    parser.add_argument("--docker", action="store_true", help="docker runs what is missing here")
    return parser.parse_args(arguments)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parse(arguments)
    ended = threading.Event()

    def end(*_details: object) -> None:
        if ended.is_set():  # a second time: at once
            raise KeyboardInterrupt
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    # Nothing that the environment names: these are new.
    services = Services(Sources(docker=options.docker, environment={}))
    crew = Crew(ended)
    try:
        start_all(services, crew, groups=options.groups)
        if not ended.is_set():
            show(crew)
            if crew.servers:
                wait(crew, ended)
    except KeyboardInterrupt:
        pass
    finally:
        services.close()
    return 0 if crew.servers or ended.is_set() else 1


if __name__ == "__main__":
    sys.exit(main())
