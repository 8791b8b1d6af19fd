"""The proxy does to a connection what it is told, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Callable, Optional

import pytest

from tests.services.ports import HOST
from tests.services.process import eventually
from tests.services.proxy import Proxy, postgres_answered
from tests.services.relay import CHUNK, ROOM

LIMIT_S = 10.0


class LineServer:
    """Answers each line in two parts, ``did `` and the line; notes what came and how it ended."""

    def __init__(self) -> None:
        self.done: list[bytes] = []
        self.ends: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self._listener = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads: list[threading.Thread] = []
        self._clients: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            # Replies in parts would wait for each other.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients.append(client)
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        unread = b""
        with client:
            while True:
                try:
                    received = client.recv(CHUNK)
                except OSError:
                    self.ends.append("reset")
                    return
                if not received:
                    self.ends.append("end")
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    self.done.append(line)
                    with contextlib.suppress(OSError):
                        client.sendall(b"did ")
                        assert self.answers.wait(LIMIT_S)
                        client.sendall(line + b"\n")

    def close(self) -> None:
        self.answers.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT_S)
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)


class Client:
    """A client that waits for a limited time."""

    def __init__(self, proxy: Proxy) -> None:
        self.socket = socket.create_connection((proxy.host, proxy.port), LIMIT_S)
        self._unread = b""

    def send(self, line: bytes) -> None:
        self.socket.sendall(line + b"\n")

    def line(self) -> bytes:
        """Return the next line, or what came before the end of file."""
        while b"\n" not in self._unread:
            received = self.socket.recv(CHUNK)
            if not received:
                return self._unread
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def ask(self, line: bytes) -> bytes:
        self.send(line)
        return self.line()

    def hears_nothing(self, limit_s: float = 0.2) -> bool:
        self.socket.settimeout(limit_s)
        try:
            self.socket.recv(CHUNK)
        except (socket.timeout, TimeoutError):  # one is the other from Python 3.10 on
            return True
        finally:
            self.socket.settimeout(LIMIT_S)
        return False


@pytest.fixture
def server() -> Iterator[LineServer]:
    server = LineServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def proxy(server: LineServer) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def connect() -> Client:
        clients.append(Client(proxy))
        return clients[-1]

    yield connect
    for client in clients:
        client.socket.close()


Connect = Callable[[], Client]


def is_connected(client: Client) -> bool:
    return client.ask(b"ready") == b"did ready"


# -- forwarding ----------------------------------------------------------------------------------


def test_bytes_come_through_in_both_directions_in_order(connect: Connect) -> None:
    client = connect()
    assert [client.ask(b"%d" % n) for n in range(50)] == [b"did %d" % n for n in range(50)]


def test_more_bytes_than_fit_anywhere_come_through_to_a_client_that_reads_late(
    connect: Connect,
) -> None:
    client = connect()
    line = b"x" * 1_000
    count = 4 * ROOM // len(line)
    sender = threading.Thread(target=lambda: client.socket.sendall((line + b"\n") * count))
    sender.start()
    assert all(client.line() == b"did " + line for _ in range(count))
    sender.join(LIMIT_S)


def test_an_end_of_file_comes_through_and_the_other_direction_stays_open(
    connect: Connect, server: LineServer
) -> None:
    client = connect()
    server.answers.clear()
    client.send(b"last")
    client.socket.shutdown(socket.SHUT_WR)
    assert eventually(lambda: server.done == [b"last"], LIMIT_S)
    server.answers.set()
    assert client.line() == b"did last"
    assert client.line() == b""
    assert eventually(lambda: server.ends == ["end"], LIMIT_S)


def test_a_reset_comes_through(connect: Connect, server: LineServer, proxy: Proxy) -> None:
    client = connect()
    assert is_connected(client)
    linger = (1).to_bytes(4, "little") + bytes(4)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    client.socket.close()
    assert eventually(lambda: server.ends == ["reset"], LIMIT_S)
    assert proxy.open == 0


def test_a_client_of_a_server_that_is_down_is_reset() -> None:
    with socket.create_server((HOST, 0)) as nobody:
        address = nobody.getsockname()

    def ask(proxy: Proxy) -> None:
        client = Client(proxy)  # may be told already here
        with client.socket:
            client.ask(b"x")

    with Proxy(address) as proxy, pytest.raises(ConnectionResetError):
        ask(proxy)


def test_connections_are_counted(connect: Connect, proxy: Proxy) -> None:
    first, second = connect(), connect()
    assert is_connected(first)
    assert is_connected(second)
    assert is_connected(second)
    assert (proxy.accepted, proxy.open, proxy.requests) == (2, 2, 3)
    first.socket.close()
    assert eventually(lambda: proxy.open == 1, LIMIT_S)
    assert (proxy.accepted, proxy.requests) == (2, 3)


def test_it_can_lead_to_another_server(connect: Connect, proxy: Proxy, server: LineServer) -> None:
    assert is_connected(connect())
    other = LineServer()
    try:
        proxy.target = other.address
        assert connect().ask(b"x") == b"did x"
        assert (server.done, other.done) == ([b"ready"], [b"x"])
    finally:
        proxy.cut()
        other.close()


def test_nothing_is_left_after_the_end(server: LineServer) -> None:
    before = set(threading.enumerate())
    with Proxy(server.address) as proxy:
        client = Client(proxy)
        assert is_connected(client)
        assert {x.name for x in set(threading.enumerate()) - before} >= {f"proxy-{proxy.port}"}
    assert client.line() == b""
    client.socket.close()
    assert not [x for x in threading.enumerate() if x.name.startswith("proxy-")]
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)


def test_an_error_in_its_thread_is_not_lost(server: LineServer) -> None:
    proxy = Proxy(server.address)
    proxy.lose_reply(when=lambda data: len(data) < 1 / 0)
    client = Client(proxy)
    with client.socket:
        client.send(b"x")
        assert client.line() == b""
    with pytest.raises(ZeroDivisionError):
        proxy.close()


# -- delay ---------------------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.parametrize("direction", ["to_server_ms", "to_client_ms"])
def test_a_delay_holds_up_each_direction_by_itself(
    connect: Connect, proxy: Proxy, server: LineServer, direction: str
) -> None:
    client = connect()
    assert is_connected(client)
    proxy.delay(**{direction: 300})
    sent = time.monotonic()
    client.send(b"x")
    assert eventually(lambda: b"x" in server.done, LIMIT_S)
    done = time.monotonic()
    assert client.line() == b"did x"
    answered = time.monotonic()
    late = {"to_server_ms": done - sent, "to_client_ms": answered - done}
    assert late[direction] >= 0.25
    proxy.forward()
    began = time.monotonic()
    assert client.ask(b"y") == b"did y"
    assert time.monotonic() - began < late[direction]


def test_what_is_delayed_keeps_its_order(connect: Connect, proxy: Proxy) -> None:
    client = connect()
    proxy.delay(to_server_ms=20, to_client_ms=20)
    for number in range(20):
        client.send(b"%d" % number)
    assert [client.line() for _ in range(20)] == [b"did %d" % number for number in range(20)]


# -- ends ----------------------------------------------------------------------------------------


def test_a_cut_is_an_end_of_file_on_both_sides(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    first, second = connect(), connect()
    assert is_connected(first)
    assert is_connected(second)
    proxy.cut()
    assert (first.line(), second.line()) == (b"", b"")
    assert eventually(lambda: server.ends == ["end", "end"], LIMIT_S)
    assert is_connected(connect())


def test_a_cut_is_no_reset_although_the_server_has_sent_what_nobody_read(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client = connect()
    proxy.hold("to_client")
    client.send(b"x" * 100_000)
    assert eventually(lambda: server.done, LIMIT_S)
    proxy.cut()
    assert client.line() == b""
    assert eventually(lambda: server.ends == ["end"], LIMIT_S)


def test_a_reset_is_one_on_both_sides(connect: Connect, proxy: Proxy, server: LineServer) -> None:
    client = connect()
    assert is_connected(client)
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.line()
    assert eventually(lambda: server.ends == ["reset"], LIMIT_S)
    assert is_connected(connect())


def test_one_connection_is_ended_and_the_others_go_on(connect: Connect, proxy: Proxy) -> None:
    clients = [connect() for _ in range(3)]
    assert all(is_connected(client) for client in clients)
    proxy.cut(connection=2)
    proxy.reset(connection=3)
    assert is_connected(clients[0])
    assert clients[1].line() == b""
    with pytest.raises(ConnectionResetError):
        clients[2].line()


# -- silence -------------------------------------------------------------------------------------


def test_what_is_swallowed_to_the_server_never_arrives_and_nobody_is_told(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client = connect()
    assert is_connected(client)
    proxy.swallow("to_server")
    client.send(b"x")
    assert client.hears_nothing()
    client.socket.close()  # nor does the server learn this
    assert not eventually(lambda: server.done != [b"ready"] or server.ends, 0.2)
    assert proxy.open == 1


def test_what_is_swallowed_to_the_client_was_done_by_the_server(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client = connect()
    assert is_connected(client)
    proxy.swallow("to_client")
    client.send(b"x")
    assert eventually(lambda: server.done == [b"ready", b"x"], LIMIT_S)
    assert client.hears_nothing()


def test_connections_are_swallowed_that_come_later_too(connect: Connect, proxy: Proxy) -> None:
    proxy.swallow()
    client = connect()
    client.send(b"x")
    assert client.hears_nothing()
    assert eventually(lambda: proxy.open == 1, LIMIT_S)


def test_a_connection_that_lost_bytes_ends_when_the_network_is_back(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    hurt, whole = connect(), connect()
    assert is_connected(hurt)
    assert is_connected(whole)
    proxy.swallow()
    hurt.send(b"x")
    assert hurt.hears_nothing()
    proxy.forward()
    with pytest.raises(ConnectionResetError):
        hurt.line()
    assert is_connected(whole)
    assert b"x" not in server.done


def test_what_was_held_arrives_when_the_network_is_back(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client, gone = connect(), connect()
    assert is_connected(client)
    assert is_connected(gone)
    proxy.hold()
    client.send(b"x")
    gone.send(b"y")
    gone.socket.close()
    assert client.hears_nothing()
    assert (server.done, server.ends) == ([b"ready", b"ready"], [])
    proxy.forward()
    assert client.line() == b"did x"
    # A request of a client that has long given up is done all the same.
    assert eventually(lambda: sorted(server.done) == [b"ready", b"ready", b"x", b"y"], LIMIT_S)
    assert eventually(lambda: len(server.ends) == 1, LIMIT_S)


# -- nobody accepts, nobody listens --------------------------------------------------------------


def test_a_stalled_proxy_lets_clients_in_and_answers_nobody(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    before = connect()
    assert is_connected(before)
    proxy.stall()
    client = connect()
    client.send(b"x")
    assert client.hears_nothing()
    assert (proxy.accepted, server.done) == (1, [b"ready"])
    assert is_connected(before)
    proxy.forward()
    assert client.line() == b"did x"


def test_new_clients_are_refused_and_the_port_stays_taken(connect: Connect, proxy: Proxy) -> None:
    before = connect()
    assert is_connected(before)
    proxy.refuse()
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            connect()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((proxy.host, proxy.port))
    assert is_connected(before)
    assert proxy.accepted == 1
    proxy.forward()
    assert is_connected(connect())


def test_a_client_that_waits_is_reset_when_nobody_listens_any_more(
    connect: Connect, proxy: Proxy
) -> None:
    proxy.stall()
    client = connect()
    client.send(b"x")
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        client.line()


# -- single requests -----------------------------------------------------------------------------


def end_of(client: Client) -> Optional[str]:
    """Tell how a connection ends, or None if it does not."""
    try:
        if client.hears_nothing():
            return None
    except ConnectionResetError:
        return "reset"
    return "cut"


@pytest.mark.parametrize(("how", "end"), [("reset", "reset"), ("cut", "cut"), ("silence", None)])
def test_a_reply_is_lost_after_the_server_has_done_the_request(
    connect: Connect, proxy: Proxy, server: LineServer, how: str, end: Optional[str]
) -> None:
    client = connect()
    assert is_connected(client)
    rule = proxy.lose_reply(how=how)  # type: ignore[arg-type]  # one of the three
    client.send(b"x")
    assert rule.fired.wait(LIMIT_S)
    assert server.done == [b"ready", b"x"]
    assert end_of(client) == end
    assert connect().ask(b"again") == b"did again"


@pytest.mark.parametrize(("how", "end"), [("reset", "reset"), ("cut", "cut"), ("silence", None)])
def test_a_request_is_lost_before_the_server_has_seen_it(
    connect: Connect, proxy: Proxy, server: LineServer, how: str, end: Optional[str]
) -> None:
    client = connect()
    assert is_connected(client)
    rule = proxy.lose_request(how=how)  # type: ignore[arg-type]  # one of the three
    client.send(b"x")
    assert rule.fired.wait(LIMIT_S)
    assert end_of(client) == end
    assert connect().ask(b"again") == b"did again"
    assert server.done == [b"ready", b"again"]


def test_the_nth_request_that_is_meant_loses_its_reply(connect: Connect, proxy: Proxy) -> None:
    first, second = connect(), connect()
    rule = proxy.lose_reply(lambda request: request.startswith(b"claim"), nth=3)
    assert first.ask(b"claim 1") == b"did claim 1"
    assert first.ask(b"renew") == b"did renew"
    assert second.ask(b"claim 2") == b"did claim 2"
    assert second.ask(b"renew") == b"did renew"
    assert not rule.fired.is_set()
    first.send(b"claim 3")
    assert end_of(first) == "reset"
    assert rule.fired.is_set()
    assert second.ask(b"claim 4") == b"did claim 4"


def test_only_the_connection_that_is_meant_loses_a_reply(connect: Connect, proxy: Proxy) -> None:
    first, second = connect(), connect()
    assert is_connected(first)
    assert is_connected(second)
    rule = proxy.lose_reply(connection=2)
    assert is_connected(first)
    assert not rule.fired.is_set()
    second.send(b"x")
    assert end_of(second) == "reset"
    assert is_connected(first)


def test_a_reply_in_parts_is_lost_when_the_server_is_done_and_nothing_of_it_arrives(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client = connect()
    rule = proxy.lose_reply(complete=lambda reply: reply.endswith(b"\n"))
    server.answers.clear()
    client.send(b"x")
    assert client.hears_nothing()
    assert server.done == [b"x"]
    assert not rule.fired.is_set()
    server.answers.set()
    assert rule.fired.wait(LIMIT_S)
    with pytest.raises(ConnectionResetError):
        client.line()


def test_a_request_in_parts_is_one_request(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client = connect()
    rule = proxy.lose_reply(lambda request: b"end" in request)
    client.socket.sendall(b"begin ")
    assert client.hears_nothing(0.05)  # the parts do not travel together
    client.send(b"end")
    assert rule.fired.wait(LIMIT_S)
    assert server.done == [b"begin end"]
    assert end_of(client) == "reset"
    assert proxy.requests == 1


def test_rules_that_have_not_happened_are_forgotten_when_the_network_is_back(
    connect: Connect, proxy: Proxy, server: LineServer
) -> None:
    client = connect()
    assert is_connected(client)
    rule = proxy.lose_reply(lambda request: b"x" in request)
    server.answers.clear()
    proxy.hold("to_server")
    client.send(b"x")
    assert client.hears_nothing(0.05)
    proxy.forward()
    server.answers.set()
    assert client.line() == b"did x"
    assert not rule.fired.is_set()


def test_the_end_of_a_reply_of_postgresql_is_known() -> None:
    row, command = b"D\0\0\0\x0b\0\1\0\0\0\x011", b"C\0\0\0\x0dSELECT 1\0"
    ready = b"Z\0\0\0\x05"
    for status in (b"I", b"T", b"E"):
        assert postgres_answered(row + command + ready + status)
    for begin in (b"", row, row + command, row + command + ready):
        assert not postgres_answered(begin)
