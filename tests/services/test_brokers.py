"""RabbitMQ and NATS servers do what they are told, keep what they must, and leave nothing behind.

``LEASECRON_SYNC_LONG=1`` in the environment adds a cluster of RabbitMQ of each version.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Callable, Optional

import pytest

from tests.services.erlang import Atom, ErlangError, Node, decode, encode
from tests.services.fixtures import Own, had
from tests.services.keeper import below
from tests.services.nats import NatsServer
from tests.services.process import LocalProcess, ServiceError, eventually
from tests.services.programs import VERSIONS
from tests.services.rabbitmq import COOKIE, RabbitMQServer
from tests.services.server import PrivateServer, Server
from tests.services.services import Services, started
from tests.services.test_keeper import is_alive

LIMIT_S = 15.0
LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))


@pytest.fixture(scope="module", params=VERSIONS["rabbitmq"])
def broker(request: pytest.FixtureRequest, services: Services) -> Iterator[RabbitMQServer]:
    """A RabbitMQ server of this module, since it takes seconds to start."""
    server: RabbitMQServer = had(lambda: started(services.new_rabbitmq(request.param, heartbeat=7)))
    try:
        yield server
    finally:
        server.close()


def amqp(url: str) -> Any:  # noqa: ANN401 - pika has no types
    import pika

    return pika.BlockingConnection(pika.URLParameters(url))


def put(url: str, queue: str, message: bytes) -> None:
    """Put a message where it survives."""
    import pika

    with closing(amqp(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(queue, durable=True, arguments={"x-max-length": 1})
        lasting = pika.BasicProperties(delivery_mode=2)
        channel.basic_publish("", queue, message, lasting, mandatory=True)


def messages(server: RabbitMQServer, queue: str) -> int:
    """Return how many a queue holds; right after a start it may not be listed yet."""

    def listed() -> list[int]:
        return [int(one["messages"]) for one in server.queues() if one["name"] == queue]

    assert eventually(listed, 30)
    return listed()[0]


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def processes_of(server: PrivateServer) -> list[int]:
    process = server._at_work()
    if not isinstance(process, LocalProcess):
        pytest.skip("a container has its processes for itself")
    return [process.pid, *below(process.pid)]


# -- RabbitMQ ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_broker_keeps_lasting_messages_and_its_ports(
    broker: RabbitMQServer, namespace: str
) -> None:
    put(broker.url, namespace, b"first")
    url, before = broker.url, processes_of(broker)
    assert len(before) > 1
    broker.call("mnesia", "sync_log")  # a queue that was just declared may be lost with its broker
    broker.kill()
    assert not [one for one in before if is_alive(one)]
    assert refused(broker.port)
    broker.start()
    assert broker.url == url
    assert messages(broker, namespace) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1: starts take seconds")
def test_a_restarted_broker_keeps_lasting_messages(broker: RabbitMQServer, namespace: str) -> None:
    put(broker.url, namespace, b"first")
    broker.restart()
    assert messages(broker, namespace) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("version", VERSIONS["rabbitmq"] if LONG else VERSIONS["rabbitmq"][:1])
def test_a_stopped_broker_leaves_no_process_and_frees_its_ports(own: Own, version: str) -> None:
    server = own.rabbitmq(version)
    pids = processes_of(server)
    assert server._own_names is not None
    names = server._own_names._process
    assert isinstance(names, LocalProcess)
    pids.append(names.pid)
    ports = [server.port, server._nodes_port, server._own_names.port]
    folder = server.home.folder
    assert not [port for port in ports if refused(port)]
    server.stop()
    assert not server.running
    assert not [one for one in pids if is_alive(one)]
    assert all(refused(port) for port in ports)
    assert folder.exists()
    server.close()
    assert not folder.exists()


def test_a_paused_broker_is_silent_and_answers_afterwards(broker: RabbitMQServer) -> None:
    found: list[object] = []
    broker.pause()
    asker = threading.Thread(target=lambda: found.append(broker.queues()))
    asker.start()
    asker.join(0.3)
    assert asker.is_alive()
    assert broker.running
    broker.resume()
    asker.join(LIMIT_S)
    assert len(found) == 1


def test_settings_of_a_broker_reach_its_clients_and_its_operator_sees_them(
    broker: RabbitMQServer,
) -> None:
    with closing(amqp(broker.url)) as connection:
        (found,) = broker.connections()
        assert (found["user"], found["vhost"], found["heartbeat"]) == ("leasecron", "/", 7)
        assert connection.is_open
    assert eventually(lambda: broker.connections() == [], LIMIT_S)


def test_an_operator_closes_a_connection(broker: RabbitMQServer) -> None:
    from pika.exceptions import ConnectionClosedByBroker

    connection = amqp(broker.url)
    broker.close_connection(broker.connections()[0], "for a test")
    with pytest.raises(ConnectionClosedByBroker, match="for a test"):
        connection.process_data_events(LIMIT_S)


def test_users_may_do_what_they_are_allowed_to(broker: RabbitMQServer, namespace: str) -> None:
    from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

    broker.add_vhost(namespace)
    broker.add_user(namespace, "p@ss word")
    url = broker.url_for(namespace, "p@ss word", namespace)
    with pytest.raises(AMQPConnectionError):
        amqp(url)
    broker.allow(namespace, namespace, read=".*")
    with closing(amqp(url)) as connection, pytest.raises(ChannelClosedByBroker, match="refused"):
        connection.channel().queue_declare("anything")
    broker.allow(namespace, namespace, configure=".*", write=".*", read=".*")
    put(url, "anything", b"first")
    assert [one["name"] for one in broker.queues(namespace)] == ["anything"]
    broker.forbid(namespace, namespace)
    with pytest.raises(AMQPConnectionError):
        amqp(url)
    broker.remove_vhost(namespace)
    with pytest.raises(ServiceError, match="no_such_vhost"):
        broker.remove_vhost(namespace)


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_an_alarm_blocks_publishers_until_it_ends(
    broker: RabbitMQServer, namespace: str, resource: str
) -> None:
    put(broker.url, namespace, b"first")
    broker.alarm(resource)
    publisher = threading.Thread(target=put, args=(broker.url, namespace, b"second"))
    try:
        assert broker.alarms() == [resource]
        publisher.start()
        publisher.join(0.3)
        assert publisher.is_alive()
    finally:
        broker.end_alarm(resource)
    publisher.join(LIMIT_S)
    assert not publisher.is_alive()
    assert broker.alarms() == []


def test_a_broker_has_room_for_thousands_of_queues(broker: RabbitMQServer) -> None:
    told = bytes(broker.call("os", "cmd", [*b"ulimit -n"]))
    assert int(told) >= min(20_000, int(bytes(broker.call("os", "cmd", [*b"ulimit -Hn"]))))


def test_nobody_without_the_cookie_calls_a_broker(broker: RabbitMQServer) -> None:
    address = (broker.host, broker._nodes_port)
    with pytest.raises(ConnectionError), Node(address, "another") as node:
        node.call("erlang", "node")
    with Node(address, COOKIE) as node:
        assert node.call("erlang", "node") == broker.node
        with pytest.raises(ErlangError, match="undef"):
            node.call("nonsense", "nothing")


@pytest.mark.parametrize(
    "term",
    [
        [],
        [1, -1, 255, 256, 2**31, -(2**70), "text", b"\xff", True, None],
        (Atom("name"), (), [("a", [Atom("b")])]),
        "x" * 70_000,
    ],
)
def test_terms_of_erlang_are_read_as_they_were_written(term: Any) -> None:  # noqa: ANN401
    data = encode(term)
    assert decode(data, 0) == (term, len(data))


@pytest.mark.parametrize("kind", ["rabbitmq", "nats"] if LONG else ["nats"])
def test_a_broker_that_does_not_start_says_why(own: Own, kind: str) -> None:
    with pytest.raises(ServiceError, match="ended with status") as raised:
        getattr(own, kind)(nonsense="yes")
    assert "nonsense" in str(raised.value)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1: starts take seconds")
@pytest.mark.parametrize("version", VERSIONS["rabbitmq"])
def test_two_brokers_are_one_and_a_queue_is_where_it_was_declared(
    own: Own, version: str, namespace: str
) -> None:
    group = own.rabbitmq_cluster(version)
    first, second = group.nodes
    put(first.url, namespace, b"first")
    assert messages(second, namespace) == 1
    first.kill()
    put(second.url, f"{namespace}-other", b"first")
    first.start()
    group.wait_complete()
    assert messages(second, namespace) == 1
    assert messages(first, f"{namespace}-other") == 1


# -- NATS ----------------------------------------------------------------------------------------


def with_jetstream(server: NatsServer, does: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Do something with JetStream as its client sees it."""
    import nats

    async def talk() -> Any:  # noqa: ANN401
        client = await asyncio.wait_for(nats.connect(server.url, allow_reconnect=False), LIMIT_S)
        try:
            return await asyncio.wait_for(does(client.jetstream()), LIMIT_S)
        finally:
            await client.close()

    return asyncio.run(talk())


async def publish(stream: Any) -> int:  # noqa: ANN401
    await stream.add_stream(name="kept", subjects=["kept"])
    acknowledged = await stream.publish("kept", b"first")
    return int(acknowledged.seq)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_nats_server_keeps_its_streams_its_port_and_no_process(
    own: Own, nats_version: Optional[str], how: str
) -> None:
    server = own.nats(nats_version)
    assert server.streams() == {}
    assert with_jetstream(server, publish) == 1
    url, pids = server.url, processes_of(server)
    getattr(server, how)()
    assert refused(server.port)
    assert not [one for one in pids if is_alive(one)]
    server.start()
    assert server.url == url
    assert server.streams() == {"kept": 1}
    assert with_jetstream(server, publish) == 2
    folder = server.home.folder
    server.close()
    assert not folder.exists()


def test_a_paused_nats_server_is_silent_and_answers_afterwards(
    own: Own, nats_version: Optional[str]
) -> None:
    server = own.nats(nats_version)
    found: list[object] = []
    server.pause()
    asker = threading.Thread(target=lambda: found.append(server.streams()))
    asker.start()
    asker.join(0.3)
    assert asker.is_alive()
    server.resume()
    asker.join(LIMIT_S)
    assert found == [{}]


def test_a_nats_server_asks_for_its_password(own: Own, nats_version: Optional[str]) -> None:
    server = own.nats(nats_version, user="tester", password="secret")
    assert with_jetstream(server, publish) == 1
    server.restart()
    assert server.streams() == {"kept": 1}
    server.settings["password"] = "wrong"
    with pytest.raises(ConnectionError, match="Authorization Violation"):
        server.streams()


def test_jetstream_can_be_off(own: Own, nats_version: Optional[str]) -> None:
    from nats.js.errors import ServiceUnavailableError

    server = own.nats(nats_version, jetstream=False)
    with pytest.raises(ServiceUnavailableError):
        with_jetstream(server, publish)
    assert eventually(lambda: server.connections() == [], LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("version", VERSIONS["nats"] if LONG else VERSIONS["nats"][:1])
def test_three_nats_servers_keep_a_stream_together(own: Own, version: str) -> None:
    group = own.nats_cluster(version)

    async def make(stream: Any) -> None:  # noqa: ANN401
        await stream.add_stream(name="kept", subjects=["kept"], num_replicas=3)
        await stream.publish("kept", b"first")

    with_jetstream(group.nodes[0], make)
    leader = group.leader_of("kept")
    others = [node for node in group.nodes if node is not leader]
    assert [node.streams() for node in others] == [{"kept": 1}] * 2
    if not LONG:  # elections take seconds
        return
    leader.kill()
    group.wait_complete()

    def kept() -> bool:
        try:
            return others[0].streams() == {"kept": 1}
        except OSError:
            return False

    assert eventually(kept, LIMIT_S)
    leader.start()
    group.wait_complete()


# -- Redis 8 and all -----------------------------------------------------------------------------


def test_redis_8_has_idempotent_producers(own: Own, redis8_url: str, namespace: str) -> None:
    import redis

    client: Any = redis.Redis.from_url(redis8_url, decode_responses=True)
    add = ("XADD", namespace, "IDMP", "producer", "1", "*", "owner")
    assert client.execute_command(*add, "first") == client.execute_command(*add, "second")
    assert client.xlen(namespace) == 1
    client.close()
    server = own.redis8()
    server.do("XADD", "kept", "*", "a", "b")
    server.kill()
    server.start()
    assert server.do("XLEN", "kept") == 1


def test_shared_brokers_are_started_once_and_of_the_version_they_are_called(
    rabbitmq_server: Server, rabbitmq_version: Optional[str], services: Services
) -> None:
    assert services.rabbitmq(rabbitmq_version) is rabbitmq_server
    if rabbitmq_version is not None:
        assert rabbitmq_server.name == f"rabbitmq-{rabbitmq_version}"


def test_shared_nats_servers_are_started_once_and_of_the_version_they_are_called(
    nats_server: Server, nats_url: str, nats_version: Optional[str], services: Services
) -> None:
    assert services.nats(nats_version) is nats_server
    assert nats_server.url == nats_url
    if nats_version is not None:
        assert nats_server.name == f"nats-{nats_version}"
