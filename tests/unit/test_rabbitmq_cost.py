"""What claims in RabbitMQ cost: a batch is two exchanges, however many runs it has."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Callable

import pytest

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._rabbitmq_gates import ARGUMENTS
from leasecron_sync.backends._rabbitmq_place import gate_name, place_of_url
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.model import OnceClaim, RunKey, Verdict
from tests.services.proxy import Proxy
from tests.services.server import Server

MANY = 30
SHORT_MS = 1_000


@pytest.fixture
def cut_off(rabbitmq_server: Server, proxy: Callable[[Server], Proxy]) -> Proxy:
    return proxy(rabbitmq_server)


@pytest.fixture
def backend(cut_off: Proxy, rabbitmq_url: str, namespace: str) -> Iterator[RabbitMQClaim]:
    backend = RabbitMQClaim(cut_off.url_of(rabbitmq_url))
    backend.open(BackendSettings(namespace, "instance", SHORT_MS))
    with closing(backend):
        backend.probe()  # and it is connected
        yield backend


@contextmanager
def channel_of(url: str) -> Iterator[Any]:
    import pika

    parameters = place_of_url(url).parameters(pika)
    with closing(pika.BlockingConnection(parameters)) as connection:
        yield connection.channel()


def test_a_batch_does_not_wait_for_an_answer_before_it_asks_for_the_next_gate(
    backend: RabbitMQClaim, cut_off: Proxy, rabbitmq_url: str, namespace: str
) -> None:
    now_ms = SystemClock().now_ms()
    runs = [RunKey(f"job {number}", now_ms) for number in range(MANY)]
    claims = [OnceClaim(run, now_ms, "somebody", uuid.uuid4().hex, 60_000) for run in runs]
    cut_off.hold("to_client")
    with pytest.raises(StoreUnavailable):
        backend.claim(claims)
    with channel_of(rabbitmq_url) as channel:
        for run in runs:  # a gate that is missing closes the channel
            gate = channel.queue_declare(gate_name(namespace, run), passive=True)
            assert gate.method.message_count == 0
    cut_off.forward()
    assert {reply.verdict for reply in backend.claim(claims)} == {Verdict.GRANTED}


def test_answers_are_told_apart_by_their_order(
    backend: RabbitMQClaim, rabbitmq_url: str, namespace: str
) -> None:
    """Every third gate has a message, and one in the middle was made by somebody else."""
    now_ms = SystemClock().now_ms()
    runs = [RunKey(f"job {number}", now_ms) for number in range(MANY)]
    with channel_of(rabbitmq_url) as channel:
        for run in runs[::3]:
            gate = gate_name(namespace, run)
            channel.queue_declare(gate, durable=True, arguments=ARGUMENTS)
            channel.basic_publish("", gate, b"another")
        other = {**ARGUMENTS, "x-max-length": 2}
        channel.queue_declare(gate_name(namespace, runs[MANY // 2 + 1]), arguments=other)
    claims = [OnceClaim(run, now_ms, "somebody", uuid.uuid4().hex, 60_000) for run in runs]
    verdicts = [reply.verdict for reply in backend.claim(claims)]
    wanted = [Verdict.GRANTED if number % 3 else Verdict.TAKEN for number in range(MANY)]
    wanted[MANY // 2 + 1] = Verdict.REJECTED
    assert verdicts == wanted


def test_a_channel_that_is_left_is_closed(rabbitmq_url: str, namespace: str) -> None:
    """A connection may have so many only, and a node may be down for days."""
    backend = RabbitMQClaim(rabbitmq_url)
    backend.open(BackendSettings(namespace, "instance", 5_000))
    with closing(backend.connected(Deadline(5_000))) as link:
        for _ in range(3):
            link.leave_channel()
            link.channel(Deadline(5_000))
        assert link.run(lambda: len(link._connection._channels) == 1, Deadline(5_000))
    backend.close()
