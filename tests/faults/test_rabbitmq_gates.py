"""Gates of RabbitMQ that do not answer hold up nothing else, and cost their own runs nothing.

A broker says nothing to the declaration of a queue whose process stands still. Here that is
brought about by hand, on a single node. What a node does to its queues when it is killed, and comes
back, is played by ``test_failover_claims.py``.

``LEASECRON_SYNC_LONG=1`` in the environment plays it on each version, and leaves the gates alone
for as long as instances usually do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Optional, Protocol
from unittest import mock

import pytest

from leasecron_sync.backends import rabbitmq
from leasecron_sync.backends._rabbitmq_channel import Channel
from leasecron_sync.backends._rabbitmq_gates import ARGUMENTS
from leasecron_sync.backends._rabbitmq_place import gate_name
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.errors import StoreError
from leasecron_sync.model import OnceClaim, RunKey, Verdict
from leasecron_sync.testing.clock import ManualClock
from tests.faults.processes import LONG
from tests.faults.test_rabbitmq import LIMIT_S, Crew, now_ms
from tests.services.erlang import Atom, Opaque
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WINDOW_MS = 300_000
CALL_MS = 10_000
"""More than gates that stand still may cost a call here, also on a machine that is busy."""
MANY = 30
"""Gates that a call could not wait for one by one."""
STANDING_RUNS = 3 if LONG else 1
ALONE_MS = 15_000
"""So long nothing is asked of a gate that did not answer."""
SHORT_MS = ALONE_MS if LONG else 3_000
"""The same for instances that tests wait for."""
SHORT_CALL_MS = 1_780
"""A call that ends while gates are asked for apart, where each answer takes so long:"""
SLOW_MS = 200
AHEAD_MS = 3_000
"""So long before a run is due its gate is made, and stands still."""


@pytest.fixture(autouse=True)
def one_version(rabbitmq_version: Optional[str]) -> None:
    """The version that waits for queues of nodes that are down, unless there is time for all."""
    if rabbitmq_version == "3.10" and not LONG:
        pytest.skip("the older version only with LEASECRON_SYNC_LONG=1")


class Standing:
    """Gates that are there, and whose queues do nothing until they are let go on."""

    def __init__(self, server: RabbitMQServer) -> None:
        self._server = server
        self._pids: list[Opaque] = []

    def stop(self, namespace: str, runs: Sequence[RunKey]) -> None:
        """Make the gates of these runs, and have them stand still; once, for all of them."""
        import pika

        names = [gate_name(namespace, run) for run in runs]
        with closing(pika.BlockingConnection(pika.URLParameters(self._server.url))) as connection:
            channel = connection.channel()
            for name in names:
                channel.queue_declare(name, durable=True, arguments=ARGUMENTS)
        # A queue that stands still would not answer to this.
        items = [Atom("name"), Atom("pid")]
        queues = [dict(one) for one in self._server.call("rabbit_amqqueue", "info_all", "/", items)]
        self._pids = [queue["pid"] for queue in queues if queue["name"][3] in names]
        assert len(self._pids) == len(names)
        for pid in self._pids:
            assert self._server.call("sys", "suspend", pid) == "ok"

    def go_on(self) -> None:
        """Let them do what they were asked for meanwhile."""
        pids, self._pids = self._pids, []
        for pid in pids:
            assert self._server.call("sys", "resume", pid) == "ok"


@pytest.fixture
def standing(rabbitmq_server: RabbitMQServer) -> Iterator[Standing]:
    """Gates on the shared server, which go on when the test ends."""
    standing = Standing(rabbitmq_server)
    yield standing
    standing.go_on()


@pytest.fixture
def declared() -> Iterator[list[str]]:
    """The queues that backends ask for, one by one."""
    names: list[str] = []
    sound = Channel.declare

    def declare(channel: Channel, queue: str, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        names.append(queue)
        sound(channel, queue, *arguments, **options)

    with mock.patch.object(Channel, "declare", declare):
        yield names


@pytest.fixture
def steady() -> Iterator[ManualClock]:
    """The clock by which a gate is left alone, which stands still."""
    clock = ManualClock()
    with mock.patch.object(rabbitmq, "_clock", clock):
        yield clock


class Connect(Protocol):
    """Makes backends of instances."""

    def __call__(
        self, instance_id: str, *, way: Optional[Proxy] = None, call_ms: int = CALL_MS
    ) -> RabbitMQClaim:
        """Connect an instance to the shared server, by a proxy if there is one."""
        ...


@pytest.fixture
def connect(rabbitmq_server: RabbitMQServer, namespace: str) -> Iterator[Connect]:
    """Backends of instances by their ids, which are closed in the end."""
    backends: list[RabbitMQClaim] = []

    def opened(
        instance_id: str, *, way: Optional[Proxy] = None, call_ms: int = CALL_MS
    ) -> RabbitMQClaim:
        url = rabbitmq_server.url
        backend = RabbitMQClaim(url if way is None else way.url_of(url))
        backend.open(BackendSettings(namespace, instance_id, call_ms))
        backends.append(backend)
        return backend

    yield opened
    for backend in backends:
        backend.close()


class Due:
    """Runs that are due just now, and the claims of them."""

    def __init__(self) -> None:
        self._now_ms = now_ms()

    def run(self, job: str) -> RunKey:
        """Return the run of a job."""
        return RunKey(job, self._now_ms)

    def ask(self, backend: RabbitMQClaim, holder: str, *jobs: str) -> list[Verdict]:
        """Claim the runs of jobs in one call."""
        claims = [
            OnceClaim(self.run(job), self._now_ms, holder, f"{holder} {job}", WINDOW_MS)
            for job in jobs
        ]
        return [reply.verdict for reply in backend.claim(claims)]


@pytest.fixture
def due() -> Due:
    """Runs that are due just now."""
    return Due()


def channels(server: RabbitMQServer) -> list[int]:
    """Return the numbers of channels of the connections that there are."""
    return [one["channels"] for one in server.connections()]


GRANTED, TAKEN, DEFERRED = Verdict.GRANTED, Verdict.TAKEN, Verdict.DEFERRED


def test_claims_before_between_and_behind_gates_that_do_not_answer_are_decided_in_the_same_call(
    standing: Standing, connect: Connect, namespace: str, due: Due
) -> None:
    """And nothing is in a gate that stood still: the first who asks when it goes on wins."""
    standing.stop(namespace, [due.run("second"), due.run("fourth")])
    first, other = connect("first"), connect("other")
    jobs = ("first", "second", "third", "fourth", "fifth")
    replies = due.ask(first, "first", *jobs)
    assert replies == [GRANTED, DEFERRED, GRANTED, DEFERRED, GRANTED]
    assert due.ask(other, "other", "first", "third", "fifth") == [TAKEN, TAKEN, TAKEN]
    standing.go_on()
    assert due.ask(other, "other", "second", "fourth") == [GRANTED, GRANTED]


def test_many_gates_that_do_not_answer_hold_up_others_no_longer_than_one(
    standing: Standing, connect: Connect, namespace: str, due: Due
) -> None:
    """A call has no time to wait for one after the other, and the others must not wait for more."""
    stuck = [f"stuck {number}" for number in range(MANY)]
    standing.stop(namespace, [due.run(job) for job in stuck])
    backend = connect("instance")
    assert due.ask(backend, "instance", *stuck, "last") == [DEFERRED] * MANY + [GRANTED]
    standing.go_on()


def test_a_gate_that_does_not_answer_holds_up_nobody_where_a_connection_may_have_few_channels(
    monkeypatch: pytest.MonkeyPatch,
    standing: Standing,
    connect: Connect,
    namespace: str,
    due: Due,
) -> None:
    """Only as many others are asked for at once as there are channels for."""
    monkeypatch.setattr("pika.connection.Parameters.DEFAULT_CHANNEL_MAX", 8)
    others = [f"other {number}" for number in range(11)]
    standing.stop(namespace, [due.run("stuck")])
    backend = connect("instance")
    assert due.ask(backend, "instance", "stuck", *others) == [DEFERRED] + [GRANTED] * len(others)
    standing.go_on()


@pytest.mark.usefixtures("steady")
def test_gates_whose_answers_the_end_of_the_call_cut_off_are_asked_again_in_the_next_one(
    standing: Standing,
    connect: Connect,
    namespace: str,
    due: Due,
    *,
    rabbitmq_server: RabbitMQServer,
    proxy: Callable[[RabbitMQServer], Proxy],
) -> None:
    """They were not silent for as long as a gate is that does not answer."""
    standing.stop(namespace, [due.run("stuck")])
    way = proxy(rabbitmq_server)
    backend = connect("instance", way=way, call_ms=SHORT_CALL_MS)
    backend.tend()
    way.delay(to_client_ms=SLOW_MS)
    assert due.ask(backend, "instance", "stuck", "first", "second")[0] is not GRANTED
    way.forward()
    assert eventually(lambda: _is_back(backend), LIMIT_S)
    assert due.ask(backend, "instance", "first", "second") == [GRANTED, GRANTED]
    standing.go_on()


def _is_back(backend: RabbitMQClaim) -> bool:
    try:
        backend.probe()
    except StoreError:
        return False
    return True


def test_a_gate_that_does_not_answer_is_left_alone_for_15_seconds_and_then_asked_again(
    standing: Standing,
    connect: Connect,
    namespace: str,
    due: Due,
    *,
    declared: list[str],
    steady: ManualClock,
) -> None:
    """So long its run is deferred, and nobody waits for it; its end costs it nothing."""
    gate = gate_name(namespace, due.run("stuck"))
    standing.stop(namespace, [due.run("stuck")])
    backend = connect("instance")
    assert due.ask(backend, "one", "stuck", "beside") == [DEFERRED, GRANTED]
    for wait_ms in (0, ALONE_MS - 1):
        steady.advance(wait_ms)
        declared.clear()
        assert due.ask(backend, "one", "stuck", f"after {wait_ms}") == [DEFERRED, GRANTED]
        assert declared == [gate_name(namespace, due.run(f"after {wait_ms}"))]
    steady.advance(1)
    declared.clear()
    assert due.ask(backend, "one", "stuck") == [DEFERRED]
    assert declared == [gate]
    standing.go_on()
    declared.clear()
    assert due.ask(backend, "one", "stuck") == [DEFERRED], "nobody knows that it went on"
    assert declared == []
    steady.advance(ALONE_MS)
    assert due.ask(backend, "one", "stuck") == [GRANTED]
    assert due.ask(connect("other"), "other", "stuck") == [TAKEN]


def test_channels_that_were_left_with_a_gate_that_does_not_answer_are_closed_when_it_goes_on(
    standing: Standing,
    rabbitmq_server: RabbitMQServer,
    connect: Connect,
    namespace: str,
    due: Due,
    *,
    steady: ManualClock,
) -> None:
    """They do not gather on the connection, which stays the same one."""
    server = rabbitmq_server
    assert eventually(lambda: channels(server) == [], LIMIT_S), "of tests before"
    standing.stop(namespace, [due.run("stuck")])
    backend = connect("instance")
    backend.tend()
    [before] = server.connections()
    for number in range(3):
        replies = due.ask(backend, "instance", "stuck", f"beside {number}")
        assert replies == [DEFERRED, GRANTED]
        steady.advance(ALONE_MS)
    assert channels(server) == [1 + 3], "the broker closes none before it has an answer for it"
    standing.go_on()

    def alone() -> bool:
        backend.tend()  # reads what the broker says, as instances do
        return channels(server) == [1]

    assert eventually(alone, LIMIT_S), channels(server)
    assert due.ask(backend, "instance", "stuck", "last") == [GRANTED, GRANTED]
    [after] = server.connections()
    assert (after["peer_port"], after["channels"]) == (before["peer_port"], 1)


def test_instances_go_on_beside_gates_that_do_not_answer_and_execute_their_runs_afterwards(
    standing: Standing, rabbitmq_server: RabbitMQServer, tmp_path: Path
) -> None:
    """No run is missed, doubled or lost, and nobody takes it for an outage."""
    crew = Crew(rabbitmq_server, tmp_path)
    first_ms = -(-(now_ms() + AHEAD_MS) // 1_000) * 1_000
    stuck = {RunKey("job-0", first_ms + 1_000 * number) for number in range(STANDING_RUNS)}
    last_ms = max(run.scheduled_ms for run in stuck)
    standing.stop("default", sorted(stuck))
    assert now_ms() < first_ms, "too late: their gates may have been made by others"
    with mock.patch.object(rabbitmq, "STUCK_MS", SHORT_MS):
        try:
            crew.begin(window_ms=WINDOW_MS)
            beside = {RunKey("job-1", last_ms + 1_000 * number) for number in range(4)}
            assert eventually(lambda: beside <= set(crew.executed()), LIMIT_S)
            assert not stuck & set(crew.executed())
            standing.go_on()
            assert eventually(lambda: stuck <= set(crew.executed()), LIMIT_S)
            assert crew.judged() == {}
            assert crew.told("run_missed") == []
            assert crew.told("store_down") == []
        finally:
            crew.stop()
