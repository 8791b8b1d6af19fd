"""What only the RabbitMQ backend does: its address, its gates, its connection, its errors."""

from __future__ import annotations

import builtins
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Callable, Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _rabbitmq_gates, rabbitmq
from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._rabbitmq_gates import ARGUMENTS, EXPIRES_MS
from leasecron_sync.backends._rabbitmq_place import gate_name
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.rabbitmq import GRANT, RabbitMQClaim
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.examine import examine
from leasecron_sync.doctor.finding import Level
from leasecron_sync.errors import (
    MissingDependency,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, Verdict
from leasecron_sync.testing.conformance._names import ODD_NAMES, SEPARATORS
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.rabbitmq import PASSWORD, USER, RabbitMQServer
from tests.services.relay import How
from tests.services.server import Server

WINDOW_MS = 60_000
LIMIT_S = 10.0
SHORT_MS = 300
PATIENCE_MS = 3_000  # for what takes SHORT_MS; less than any default of pika
SECRETS = ("alice", "s3cret", f"'{USER}'", f"{USER}:", PASSWORD)


# -- without a server -----------------------------------------------------------------------------


@pytest.mark.parametrize("url", [None, b"amqp://localhost", 5, object()])
def test_what_is_no_text_is_refused(url: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match="RabbitMQClaim needs a URL such as"):
        RabbitMQClaim(url)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://alice:s3cret@host", "is no AMQP URL"),
        ("amqp://alice:s3cret@host:port", "the host or the port cannot be read"),
        ("amqp://alice:s3cret@host:70000", "the host or the port cannot be read"),
        ("amqp://alice:s3@cret?x@host", "is no AMQP URL"),
        ("amqp://alice:s3cret@host/a#b", "is no AMQP URL"),
        ("amqp://alice:s3cret@one,two", "one host is named"),
        ("amqp://alice:s3cret@host/a/b", "write '/' in its name as %2F"),
        ("amqp://alice:s3cret@host?retry=1", "takes the parameters heartbeat, it has: retry"),
        ("amqp://alice:s3cret@host?verify=x", "takes the parameters heartbeat, it has: verify"),
        ("amqps://alice:s3cret@host?verify=x", "verify is verify_peer or verify_none"),
        ("amqps://alice:s3cret@host?cacertfile=/no", "cacertfile names no file"),
        ("amqp://alice:s3cret@host?heartbeat=0", "heartbeat is a number of seconds from 1"),
        ("amqp://alice:s3cret@host?heartbeat=1.5", "heartbeat is a number of seconds from 1"),
        ("amqp://alice:s3cret@host?heartbeat=65536", "heartbeat is a number of seconds from 1"),
    ],
)
def test_a_wrong_address_is_refused_without_showing_the_login(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        RabbitMQClaim(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)
    assert "\n" not in str(caught.value)


def test_the_login_is_shown_nowhere() -> None:
    backend = RabbitMQClaim("amqp://alice:s3cret@host/there?heartbeat=5")
    assert repr(backend) == "RabbitMQClaim('amqp://host/there')"
    assert "s3cret" not in repr(backend._place)


def test_a_missing_client_is_named_with_its_extra() -> None:
    real = builtins.__import__

    def without_pika(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if name == "pika":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    backend = RabbitMQClaim("amqp://localhost")
    missing = mock.patch.object(builtins, "__import__", without_pika)
    with missing, pytest.raises(MissingDependency, match=r"leasecron_sync\[rabbitmq\]"):
        backend.open(settings())


def test_nothing_is_connected_before_the_first_call() -> None:
    RabbitMQClaim("amqp://127.0.0.1:1").open(settings())


def test_a_window_that_outlives_half_a_gate_is_none() -> None:
    assert RabbitMQClaim.max_window_ms == 300_000
    assert 2 * RabbitMQClaim.max_window_ms == EXPIRES_MS == ARGUMENTS["x-expires"]


def test_no_two_runs_have_one_gate_whatever_their_names() -> None:
    names = [*ODD_NAMES, "a" * 200, "a" * 199 + "b", "é" * 200, "😀" * 200]
    names += [f"a{separator}b" for separator in SEPARATORS]
    names += [f"b{separator}c" for separator in SEPARATORS] + ["a", "b", "c", "1:a", "1:ab", "ab"]
    runs = [(space, RunKey(job, 1)) for space, job in product(set(names), repeat=2)]
    gates = {gate_name(space, run) for space, run in runs}
    assert len(gates) == len(runs)
    for gate in gates:
        assert gate.isascii()
        assert gate.startswith("leasecron.")
    longest = gate_name("😀" * 200, RunKey("😀" * 200, 253_402_300_799_999))
    assert len(longest) <= 255
    assert longest != gate_name("😀" * 200, RunKey("😀" * 200, 253_402_300_799_998))


# -- peers that are no broker ---------------------------------------------------------------------


def settings(call_timeout_ms: int = SHORT_MS, namespace: str = "space") -> BackendSettings:
    return BackendSettings(namespace, uuid.uuid4().hex, call_timeout_ms)


def intend(job: str = "job", *, ago_ms: int = 0, window_ms: int = WINDOW_MS) -> OnceClaim:
    scheduled_ms = SystemClock().now_ms() - ago_ms
    key = RunKey(job, scheduled_ms)
    return OnceClaim(key, scheduled_ms, "somebody", uuid.uuid4().hex, window_ms)


def ask(backend: RabbitMQClaim, claim: OnceClaim) -> ClaimReply:
    [reply] = backend.claim([claim])
    return reply


def error_of(call: Callable[[], object]) -> Optional[StoreError]:
    began_ms = SystemClock().steady_ms()
    try:
        call()
    except StoreError as error:
        told = error
    else:
        return None
    assert SystemClock().steady_ms() - began_ms < PATIENCE_MS
    assert not any(secret in str(told) for secret in SECRETS)
    return told


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def listening(backlog: int = 5) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield listener


@pytest.fixture
def unwatched(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a program that has set up logging, and nothing about pika."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


def calls_of(backend: RabbitMQClaim) -> list[Callable[[], object]]:
    return [backend.probe, partial(backend.claim, [intend()]), backend.tend]


@pytest.mark.parametrize("kind", ["refused", "silent", "full", "ends", "nonsense", "nowhere"])
def test_call_1_without_a_broker_every_call_ends_in_time_and_leaves_nothing(
    kind: str, unwatched: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as entered:
        listener = entered.enter_context(listening(0 if kind == "full" else 5))
        host, port = listener.getsockname()
        if kind == "refused":
            listener.close()
        elif kind == "full":  # the system answers nobody who comes after these
            for _ in range(2):
                other = entered.enter_context(socket.socket())
                other.settimeout(0)
                other.connect_ex((host, port))
        elif kind in ("ends", "nonsense"):
            serve(listener, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9 if kind == "nonsense" else b"")
        elif kind == "nowhere":
            host = "no-such-host.invalid"
        backend = RabbitMQClaim(f"amqp://alice:s3cret@{host}:{port}")
        backend.open(settings())
        error_of(backend.tend)
        threads, files = set(threading.enumerate()), open_files()
        for call in calls_of(backend):
            error = error_of(call)
            assert type(error) is StoreUnavailable, kind
            assert str(error).startswith(f"amqp://{host}:{port} cannot be reached: ")
        backend.close()
        assert eventually(lambda: set(threading.enumerate()) <= threads, LIMIT_S)
        assert open_files() <= files
    assert [record.getMessage() for record in unwatched.records if "pika" in record.name] == []


def serve(listener: socket.socket, answer: bytes) -> None:
    """Answer everybody with this, and an end, as long as the listener is open."""

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(8)
                peer.sendall(answer)

    threading.Thread(target=accept, daemon=True).start()


def test_call_1_a_name_service_that_hangs_ends_a_call_in_time_and_holds_up_nobody() -> None:
    go_on, real = threading.Event(), socket.getaddrinfo

    def slow(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not kwargs.get("flags"):  # it is asked for a name
            assert go_on.wait(LIMIT_S)
        return real(*args, **kwargs)

    backend = RabbitMQClaim("amqp://localhost:1")
    backend.open(settings())
    with mock.patch.object(socket, "getaddrinfo", slow):
        before = set(threading.enumerate())
        for call in calls_of(backend):
            assert type(error_of(call)) is StoreUnavailable
        waiting = set(threading.enumerate()) - before
        assert waiting
        assert all(thread.daemon for thread in waiting), "they would hold up the interpreter"
        go_on.set()
        for thread in waiting:
            thread.join(LIMIT_S)
    backend.close()


def test_without_another_thread_the_broker_is_out_of_reach() -> None:
    """As when the interpreter ends."""
    backend = RabbitMQClaim("amqp://localhost:1")
    backend.open(settings())
    refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more"))
    with refused:
        error = error_of(backend.tend)
    assert type(error) is StoreUnavailable
    assert "no more" in str(error)
    backend.close()


def test_what_pika_logs_for_the_application_is_left_alone(
    unwatched: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    backend = RabbitMQClaim(f"amqp://127.0.0.1:{port}")
    backend.open(settings())

    def lines() -> set[str]:
        return {record.levelname for record in unwatched.records if "pika" in record.name}

    assert error_of(backend.tend)
    assert lines() == set()
    import pika

    with pytest.raises(pika.exceptions.AMQPConnectionError):
        pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    assert "ERROR" in lines()
    unwatched.clear()
    monkeypatch.setattr(logging.getLogger("pika"), "level", logging.NOTSET)  # undone afterwards
    logging.getLogger("pika").setLevel(logging.ERROR)
    assert error_of(backend.tend)
    assert lines() == {"ERROR"}, "who sets a level wants to see it"
    backend.close()


# -- with a server --------------------------------------------------------------------------------


class Bench:
    """A namespace of a server, and backends on it that are closed in the end."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.server = server
        self.space = f"unit {uuid.uuid4().hex}"
        self._opened: list[RabbitMQClaim] = []

    def open(self, url: str = "", call_timeout_ms: int = 5_000) -> RabbitMQClaim:
        backend = RabbitMQClaim(url or self.server.url)
        backend.open(settings(call_timeout_ms, self.space))
        self._opened.append(backend)
        return backend

    def hurry(self, backend: RabbitMQClaim, call_timeout_ms: int = SHORT_MS) -> None:
        """Give calls less time from now on, after the one that makes the connection."""
        backend.open(settings(call_timeout_ms, self.space))

    def close(self) -> None:
        for backend in self._opened:
            backend.close()

    def gate(self, claim: OnceClaim) -> str:
        return gate_name(self.space, claim.key)

    def messages(self, vhost: str = "/") -> dict[str, int]:
        """Return the number of messages in the gates of this namespace."""
        start = gate_name(self.space, RunKey("", 0))[:30]
        found = self.server.queues(vhost)
        return {one["name"]: one["messages"] for one in found if one["name"].startswith(start)}

    def do(self, module: str, function: str, *arguments: Any) -> None:  # noqa: ANN401
        """Do what the operator's commands do."""
        assert self.server.call(module, function, *arguments) == "ok"

    def add_quorum_vhost(self, vhost: str) -> None:
        """Add a virtual host whose queues are of another type by default."""
        self.do("rabbit_vhost", "put_vhost", vhost, "", "", "quorum", None, USER)
        self.server.allow(USER, vhost, configure=".*", write=".*", read=".*")

    def connections(self) -> set[int]:
        """Return the client's ports of this process's connections."""
        return {one["peer_port"] for one in self.server.connections()}


@pytest.fixture
def bench(rabbitmq_server: RabbitMQServer) -> Iterator[Bench]:
    bench = Bench(rabbitmq_server)
    yield bench
    bench.close()


@pytest.fixture
def channel(bench: Bench) -> Iterator[Any]:
    """Somebody else's channel."""
    import pika

    with closing(pika.BlockingConnection(pika.URLParameters(bench.server.url))) as connection:
        yield connection.channel()


def verdicts(replies: Sequence[ClaimReply]) -> list[Verdict]:
    return [reply.verdict for reply in replies]


def test_the_probe_tells_the_version_and_leaves_nothing(bench: Bench) -> None:
    info = bench.open().probe()
    version = ".".join(map(str, bench.server.version))
    assert info.version == f"RabbitMQ {version}"
    assert (info.store_ms, info.warnings) == (None, ())
    assert bench.messages() == {}


def test_a_gate_is_as_the_format_has_it_and_holds_one_lasting_message(
    bench: Bench,
    channel: Any,  # noqa: ANN401
) -> None:
    claim = intend()
    assert ask(bench.open(), claim).verdict is Verdict.GRANTED
    assert ask(bench.open(), intend("other")).verdict is Verdict.GRANTED
    [gate] = [one for one in bench.server.queues() if one["name"] == bench.gate(claim)]
    assert gate["durable"] is True
    assert gate["arguments"] == ARGUMENTS
    assert (gate["messages"], gate["consumers"]) == (1, 0)
    _method, properties, body = channel.basic_get(bench.gate(claim))
    assert properties.delivery_mode == 2
    assert body == claim.decision_id.encode()


def test_a_gate_is_classic_where_queues_are_quorum_ones_by_default(bench: Bench) -> None:
    if bench.server.version < (4, 0):
        pytest.skip("a default type of queues is new in 3.11")
    import pika

    vhost = uuid.uuid4().hex
    url = bench.server.url_for(vhost=vhost)
    bench.add_quorum_vhost(vhost)
    try:
        backend = bench.open(url)
        backend.probe()
        assert ask(backend, intend()).verdict is Verdict.GRANTED
        with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
            connection.channel().queue_declare("plain", durable=True)
        types = {one["name"]: str(one["type"]) for one in bench.server.queues(vhost)}
        assert types.pop("plain") == "quorum"
        assert list(types.values()) == ["classic"]
        backend.close()
    finally:
        bench.server.remove_vhost(vhost)


# -- who may not, and what is refused -------------------------------------------------------------


def test_a_wrong_login_is_unavailable_and_no_vhost_is_unsupported(
    bench: Bench, unwatched: pytest.LogCaptureFixture
) -> None:
    for url in (bench.server.url_for(password="s3cret"), bench.server.url_for("alice", "s3cret")):
        error = error_of(bench.open(url).probe)
        assert type(error) is StoreUnavailable
        assert "refuses this user or password" in str(error)
    error = error_of(bench.open(bench.server.url_for(vhost="nowhere")).probe)
    assert type(error) is StoreUnsupported
    assert "there is no such vhost" in str(error)
    assert not any(secret in unwatched.text for secret in SECRETS)


@pytest.fixture
def alice(bench: Bench) -> Iterator[str]:
    """The URL of a user who may do nothing."""
    bench.server.add_user("alice", "s3cret")
    yield bench.server.url_for("alice", "s3cret")
    bench.do("rabbit_auth_backend_internal", "delete_user", "alice", USER)


@pytest.mark.usefixtures("alice")
def test_a_user_without_rights_is_told_so_at_the_start(bench: Bench, alice: str) -> None:
    error = error_of(bench.open(alice).probe)
    assert type(error) is StoreUnsupported
    assert "no access to it" in str(error)
    gates = "leasecron.*"
    for rights in ({"write": ".*"}, {"configure": ".*"}, {"configure": gates, "write": gates}):
        bench.server.allow("alice", **rights)
        error = error_of(bench.open(alice).probe)
        assert type(error) is StoreUnsupported, rights
        assert "does not let this user make a queue and write to it" in str(error)
        assert GRANT in str(error)
        assert not any(secret in str(error) for secret in SECRETS)
        told = examine(RabbitMQClaim(alice), settings(3_000))
        [advice] = {one.advice for one in told if one.level is Level.PROBLEM}
        assert advice == GRANT
    bench.server.allow("alice", configure=r"leasecron\..*", write=r"amq\.default")
    backend = bench.open(alice)
    backend.probe()
    assert ask(backend, intend()).verdict is Verdict.GRANTED


def test_rights_that_are_taken_away_refuse_every_claim_and_lose_none(
    bench: Bench, alice: str
) -> None:
    for kept in ({"write": ".*"}, {"configure": ".*"}):
        bench.server.allow("alice", configure=".*", write=".*")
        backend = bench.open(alice)
        assert ask(backend, intend()).verdict is Verdict.GRANTED
        bench.server.allow("alice", **kept)
        backend.close()  # the broker remembers rights for a while
        bench.hurry(backend, 5_000)
        claims = [intend(f"job {number}") for number in range(3)]
        error = error_of(partial(backend.claim, claims))
        assert type(error) is StoreRejected
        bench.server.allow("alice", configure=".*", write=".*")
        assert verdicts(backend.claim(claims)) == [Verdict.GRANTED] * 3


def test_a_gate_of_another_release_is_refused_alone(bench: Bench, channel: Any) -> None:  # noqa: ANN401
    claims = [intend(f"job {number}") for number in range(8)]
    others = {**ARGUMENTS, "x-expires": EXPIRES_MS * 2}
    for number in (0, 3, 4):
        channel.queue_declare(bench.gate(claims[number]), durable=True, arguments=others)
    ask(bench.open(), claims[1])
    backend = bench.open()
    replies = backend.claim([*claims, intend("early", ago_ms=-5_000)])
    rejected, granted = Verdict.REJECTED, Verdict.GRANTED
    wanted = [rejected, Verdict.TAKEN, granted, rejected, rejected, *[granted] * 3, Verdict.EARLY]
    assert verdicts(replies) == wanted
    assert "inequivalent arg 'x-expires'" in replies[0].reason
    assert ask(backend, intend()).verdict is granted, "the connection is still there"
    # Alone, too, and of others that are not decided yet none is refused with it.
    assert ask(backend, claims[0]).verdict is rejected
    for number in range(12):
        channel.queue_declare(bench.gate(intend_at(number)), durable=True, arguments=others)
    many = backend.claim([*map(intend_at, range(12)), intend("last")])
    assert set(verdicts(many)) <= {rejected, Verdict.DEFERRED}
    assert many[-1].verdict is Verdict.DEFERRED


def intend_at(number: int) -> OnceClaim:
    """A claim of the same run each time."""
    hour_ms = 3_600_000
    due_ms = SystemClock().now_ms() // hour_ms * hour_ms
    return OnceClaim(RunKey(f"many {number}", due_ms), due_ms, "me", uuid.uuid4().hex, 2 * hour_ms)


def test_a_policy_that_changes_gates_is_refused_at_the_start(bench: Bench) -> None:
    name = uuid.uuid4().hex
    start = gate_name(bench.space, RunKey("", 0))[:30].replace(".", r"\.")
    policy = [("max-length", 0)]
    bench.do("rabbit_policy", "set", "/", name, f"^{start}", policy, 0, "queues", USER)
    try:
        error = error_of(bench.open().probe)
        assert type(error) is StoreUnsupported
        assert "a policy of the broker" in str(error)
    finally:
        bench.do("rabbit_policy", "delete", "/", name, USER)
    bench.open().probe()


# -- between the declaration and the answer -------------------------------------------------------


def before_publishing(do: Callable[[], object]) -> Any:  # noqa: ANN401
    """Have something happen once between the answers to the declarations and the messages."""
    real, todo = _rabbitmq_gates._publish, [do]

    def published(*arguments: Any) -> None:  # noqa: ANN401
        while todo:
            todo.pop()()
        real(*arguments)

    return mock.patch.object(_rabbitmq_gates, "_publish", published)


def test_a_gate_that_expires_before_it_is_reached_is_asked_for_again(
    bench: Bench,
    channel: Any,  # noqa: ANN401
) -> None:
    backend, claims = bench.open(), [intend("one"), intend("gone")]
    with before_publishing(lambda: channel.queue_delete(bench.gate(claims[1]))):
        replies = backend.claim(claims)
    assert verdicts(replies) == [Verdict.GRANTED, Verdict.DEFERRED]
    assert verdicts(backend.claim(claims)) == [Verdict.GRANTED] * 2
    assert ask(bench.open(), intend_like(claims[1])).verdict is Verdict.TAKEN


def intend_like(claim: OnceClaim) -> OnceClaim:
    """Another decision about the same run."""
    return OnceClaim(claim.key, claim.due_ms, "other", uuid.uuid4().hex, claim.window_ms)


def test_another_one_who_is_first_in_between_wins(bench: Bench) -> None:
    backend, other, claim = bench.open(), bench.open(), intend()
    first: list[ClaimReply] = []
    with before_publishing(lambda: first.append(ask(other, intend_like(claim)))):
        assert ask(backend, claim).verdict is Verdict.TAKEN
    assert verdicts(first) == [Verdict.GRANTED]


def test_nothing_is_published_when_too_little_time_is_left_for_an_answer(bench: Bench) -> None:
    backend, claim = bench.open(), intend()
    backend.tend()
    bench.hurry(backend)
    waits = threading.Event()
    with before_publishing(lambda: waits.wait(SHORT_MS * 0.8 / 1000)):
        assert type(error_of(partial(ask, backend, claim))) is StoreUnavailable
    assert bench.messages() == {bench.gate(claim): 0}
    bench.hurry(backend, 5_000)
    assert ask(backend, claim).verdict is Verdict.GRANTED


def test_a_process_that_stood_still_for_two_windows_executes_nothing_old(bench: Bench) -> None:
    """Before it published, or before it read the answer: who won before may be forgotten."""
    backend, steady_ms = bench.open(), SystemClock().steady_ms
    backend.tend()
    passed = [0]
    clock = mock.Mock(wraps=SystemClock())
    clock.steady_ms.side_effect = lambda: steady_ms() + passed[0]
    with mock.patch.object(rabbitmq, "_clock", clock):
        claims = [intend("one"), intend("two", ago_ms=1_000, window_ms=1_000)]
        with before_publishing(lambda: passed.__setitem__(0, 2_000)):
            replies = backend.claim(claims)
    assert verdicts(replies) == [Verdict.GRANTED, Verdict.TOO_OLD]
    assert ask(backend, claims[1]).verdict is Verdict.TOO_OLD, "later, too"


# -- answers that are lost ------------------------------------------------------------------------


@pytest.fixture
def between(rabbitmq_server: Server, proxy: Callable[[Server], Proxy]) -> Proxy:
    return proxy(rabbitmq_server)


HOWS: tuple[How, ...] = ("reset", "cut", "silence")


@pytest.mark.parametrize("how", HOWS)
def test_a_lost_answer_is_unknown_for_good_and_taken_for_others(
    bench: Bench, between: Proxy, how: How
) -> None:
    backend = bench.open(between.url_of(bench.server.url))
    backend.tend()
    bench.hurry(backend)
    claims = [intend("one"), intend("two")]
    sent = claims[1].decision_id.encode()
    rule = between.lose_reply(lambda request: sent in request, how=how)
    replies = backend.claim(claims)
    assert rule.fired.wait(LIMIT_S)
    assert replies[0].verdict in (Verdict.UNKNOWN, Verdict.GRANTED)  # it may have been quicker
    assert replies[1].verdict is Verdict.UNKNOWN
    bench.hurry(backend, 5_000)
    assert verdicts(backend.claim(claims)) == verdicts(replies)
    others = [intend_like(claim) for claim in claims]
    assert verdicts(bench.open().claim(others)) == [Verdict.TAKEN] * 2
    assert verdicts(backend.claim(others)) == [Verdict.TAKEN] * 2
    assert ask(backend, intend("three")).verdict is Verdict.GRANTED


@pytest.mark.parametrize("exchange", [1, 2, 3])
def test_a_connection_that_is_cut_while_it_is_made_is_no_wrong_login(
    bench: Bench, between: Proxy, exchange: int
) -> None:
    """Pika guesses at a password, or at rights, by how far it had come."""
    hows: tuple[How, ...] = ("reset", "cut")
    for how in hows:
        backend = bench.open(between.url_of(bench.server.url))
        rule = between.lose_reply(connection=between.accepted + 1, nth=exchange, how=how)
        error = error_of(backend.probe)
        assert rule.fired.wait(LIMIT_S)
        assert type(error) is StoreUnavailable
        assert "cannot be reached: " in str(error)
        backend.probe()
        backend.close()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("loses", ["request", "reply"])
def test_a_connection_that_is_cut_while_declaring_is_asked_again(
    bench: Bench, between: Proxy, how: How, loses: str
) -> None:
    backend = bench.open(between.url_of(bench.server.url))
    backend.tend()
    bench.hurry(backend)
    claim = intend()
    gate = bench.gate(claim).encode()
    lose = between.lose_reply if loses == "reply" else between.lose_request
    rule = lose(lambda request: gate in request, how=how)
    error = error_of(partial(ask, backend, claim))
    assert rule.fired.wait(LIMIT_S)
    assert type(error) is StoreUnavailable
    bench.hurry(backend, 5_000)
    assert ask(backend, claim).verdict is Verdict.GRANTED
    assert ask(bench.open(), intend_like(claim)).verdict is Verdict.TAKEN


def test_an_answer_that_comes_after_its_call_has_ended_changes_nothing(
    bench: Bench, between: Proxy
) -> None:
    backend = bench.open(between.url_of(bench.server.url))
    backend.tend()
    bench.hurry(backend)
    claim = intend()
    between.hold("to_client")
    assert type(error_of(partial(ask, backend, claim))) is StoreUnavailable
    assert bench.messages() == {bench.gate(claim): 0}
    between.forward()
    bench.hurry(backend, 5_000)
    assert ask(backend, claim).verdict is Verdict.GRANTED


def test_an_error_inside_pika_leaves_no_claim_without_an_account(bench: Bench) -> None:
    """Of what was sent nobody knows what became of it; the rest was surely not asked for."""
    backend, claims = bench.open(), [intend("one"), intend("two")]
    backend.tend()
    link = backend._lane.connection
    assert link is not None
    transport = link._connection._transport
    real, sent = transport.write, list[bytes]()

    def write(data: bytes) -> None:
        if claims[1].decision_id.encode() in data:
            sent.append(data)
            raise ValueError
        real(data)

    with mock.patch.object(transport, "write", write):
        replies = backend.claim([*claims, intend("three")])
    assert sent
    assert verdicts(replies) == [Verdict.UNKNOWN] * 2 + [Verdict.DEFERRED]
    assert verdicts(backend.claim(claims)) == [Verdict.UNKNOWN] * 2


# -- alarms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_while_a_broker_is_short_of_memory_nothing_is_published(
    bench: Bench, resource: str
) -> None:
    """Neither on a connection from before, nor on a new one, nor when the alarm is over."""
    backend, claims = bench.open(), [intend(f"job {number}") for number in range(3)]
    backend.tend()
    bench.server.alarm(resource)
    try:
        for one in (backend, backend, bench.open()):
            error = error_of(partial(one.claim, claims))
            assert type(error) is StoreUnavailable
            assert "short of memory or disk" in str(error)
        error = error_of(bench.open().probe)
        assert type(error) is StoreUnavailable
        backend.tend()
        assert not any(bench.messages().values())
    finally:
        bench.server.end_alarm(resource)
    link = backend._lane.connection
    assert link is not None
    assert eventually(lambda: link.is_fresh() and not link.is_blocked, LIMIT_S)
    assert not any(bench.messages().values()), "nothing was sent later"
    assert verdicts(backend.claim(claims)) == [Verdict.GRANTED] * 3
    bench.open().probe()


def test_messages_that_meet_an_alarm_are_unknown_and_never_won_later(bench: Bench) -> None:
    backend, claims = bench.open(), [intend(f"job {number}") for number in range(3)]
    backend.tend()
    bench.hurry(backend, 1_000)
    with before_publishing(bench.server.alarm):
        try:
            replies = backend.claim(claims)
        finally:
            bench.server.end_alarm()
    assert set(verdicts(replies)) <= {Verdict.UNKNOWN, Verdict.GRANTED}
    assert Verdict.UNKNOWN in verdicts(replies)
    bench.hurry(backend, 5_000)
    assert verdicts(backend.claim(claims)) == verdicts(replies)


# -- the connection -------------------------------------------------------------------------------


def test_a_connection_that_the_operator_closed_is_made_anew_unnoticed(bench: Bench) -> None:
    backend = bench.open()

    def running() -> set[int]:
        connections = bench.server.connections()
        return {one["peer_port"] for one in connections if one["state"] == "running"}

    for use in (backend.tend, lambda: ask(backend, intend()), backend.probe):
        backend.tend()
        before = bench.connections()
        for connection in bench.server.connections():
            bench.server.close_connection(connection)
        assert eventually(lambda: not running(), LIMIT_S)
        use()
        assert eventually(lambda: len(bench.connections()) == 1, LIMIT_S)
        assert not bench.connections() & before


def test_a_channel_that_keeps_its_numbers_keeps_nothing_else(bench: Bench) -> None:
    backend, other = bench.open(), bench.open()
    claims = [intend(f"job {number}") for number in range(20)]
    for claim in claims[:10]:
        ask(other, claim)
    for _ in range(2):
        backend.claim(claims)
    link = backend._lane.connection
    assert link is not None
    assert link._channel is not None
    assert (link._channel._waiting, link._channel._returned) == ({}, set())
    assert len(backend._own) == 10
    later = SystemClock().steady_ms() + 3 * WINDOW_MS
    with mock.patch.object(rabbitmq, "_clock", mock.Mock(steady_ms=lambda: later)):
        backend._remember({}, [])
    assert backend._own == {}


def test_tending_makes_a_connection_and_says_when_it_is_wanted_again(bench: Bench) -> None:
    for heartbeat, wanted_ms in ((2, 666), (30, 10_000), (1_000, 20_000), (None, 20_000)):
        query = "" if heartbeat is None else f"?heartbeat={heartbeat}"
        backend = bench.open(bench.server.url + query)
        assert backend.tend() == wanted_ms
        assert len(bench.connections()) == 1
        backend.close()
    assert backend.tend() is None, "a closed one wants nothing"


def test_a_closed_backend_can_be_closed_and_opened_and_leaves_nothing(bench: Bench) -> None:
    threads, files = set(threading.enumerate()), open_files()
    backend = bench.open()
    for _ in range(3):
        assert ask(backend, intend(uuid.uuid4().hex)).verdict is Verdict.GRANTED
        backend.close()
        backend.close()
        assert type(error_of(partial(ask, backend, intend()))) is StoreUnavailable
        bench.hurry(backend, 5_000)
    backend.close()
    assert eventually(lambda: set(threading.enumerate()) <= threads, LIMIT_S)
    assert open_files() == files
    assert eventually(lambda: bench.connections() == set(), LIMIT_S)


def test_closing_while_a_call_is_under_way_waits_for_nobody(bench: Bench, between: Proxy) -> None:
    backend = bench.open(between.url_of(bench.server.url), 700)
    backend.tend()
    files = open_files()
    between.swallow()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, backend, intend())
        assert eventually(backend._lane._lock.locked, LIMIT_S)
        began_ms = SystemClock().steady_ms()
        backend.close()
        assert SystemClock().steady_ms() - began_ms < 700
        with pytest.raises(StoreUnavailable):
            call.result(LIMIT_S)
    assert backend._lane.connection is None, "the call has closed it"
    assert open_files() < files


def test_closing_a_connection_whose_peer_is_silent_is_bounded(bench: Bench, between: Proxy) -> None:
    backend = bench.open(between.url_of(bench.server.url))
    files = open_files()
    backend.tend()
    between.swallow()
    began_ms = SystemClock().steady_ms()
    backend.close()
    assert SystemClock().steady_ms() - began_ms < 2_000
    between.cut()  # the proxy's own sockets
    assert open_files() == files


def test_fork_a_child_leaves_the_connection_alone(bench: Bench) -> None:
    backend = bench.open()
    assert ask(backend, intend()).verdict is Verdict.GRANTED
    before = bench.connections()
    with backend._lane.held(Deadline(5_000)):  # as a thread may that the child has not
        child = os.fork()
        if child == 0:  # pragma: no cover - not measured there
            status = 1
            try:
                backend.discard()
                backend.open(settings(5_000, bench.space))
                if ask(backend, intend("child")).verdict is Verdict.GRANTED:
                    status = 0
                backend.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(backend, intend("parent")).verdict is Verdict.GRANTED
    assert bench.connections() == before
