"""A TCP proxy that does to a connection what networks do."""

from __future__ import annotations

import contextlib
import errno
import queue
import selectors
import socket
import threading
import time
from concurrent.futures import Future
from typing import Callable, Literal, Optional, TypeVar, cast
from urllib.parse import urlsplit

from tests.services.ports import HOST
from tests.services.relay import Direction, How, Mode, Relay, Rule, Weather, anything

T = TypeVar("T")
Address = tuple[str, int]

CALL_S = 10.0
"""How long the proxy's thread may take to do what it is told."""

BACKLOG = 128
"""How many clients the system lets in while the proxy accepts none."""

Directions = Literal["to_server", "to_client", "both"]


def postgres_answered(reply: bytes) -> bool:
    """Tell whether PostgreSQL has done what it was asked for, and is ready for more.

    The begin of a reply proves nothing there: a long one is sent before the commit.
    """
    return reply[-6:-1] == b"Z\0\0\0\5"


class Proxy:
    """Forwards connections to a server until it is told otherwise.

    What it is told holds for all connections, those to come included, until ``forward()``. It takes
    effect before the call returns. Everything happens in one thread.

    Args:
        target: Where the server listens.
    """

    def __init__(self, target: Address) -> None:
        self.target = target
        self.accepted = 0
        self._past_requests = 0
        self._weather: dict[Direction, Weather] = {"to_server": Weather(), "to_client": Weather()}
        self._rules: list[Rule] = []
        self._relays: list[Relay] = []
        self._accepting = True
        self._closing = False
        self._error: Optional[BaseException] = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # It keeps the port while nobody listens there; clients are refused then.
        self._place = _bound((HOST, 0))
        self.host, self.port = self._place.getsockname()
        self._listener: Optional[socket.socket] = self._listening()
        self._bell, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def url_of(self, url: str) -> str:
        """Return a server's URL with the address of the proxy."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{credentials}{at}{self.host}:{self.port}").geturl()

    # -- what can be counted ---------------------------------------------------------------------

    @property
    def open(self) -> int:
        """How many connections of clients are open now; some of them may be silent."""
        return self._call(lambda: len(self._relays))

    @property
    def requests(self) -> int:
        """How many requests came so far: what a client sends until the server answers is one."""
        return self._call(
            lambda: self._past_requests + sum(x.exchanges.requests for x in self._relays)
        )

    # -- the state of the network ----------------------------------------------------------------

    def forward(self) -> None:
        """Forward again, with no delay and no rules.

        What was held is sent now. Connections that lost bytes are reset: what is said on them after
        that would make no sense.
        """

        def do() -> None:
            self._rules.clear()
            for weather in self._weather.values():
                weather.mode, weather.delay_s = Mode.FORWARD, 0.0
            for relay in self._relays:
                relay.repair()
            self._accepting = True
            if self._listener is None:
                self._listener = self._listening()

        self._call(do)

    def delay(self, *, to_server_ms: int = 0, to_client_ms: int = 0) -> None:
        """Deliver what is sent from now on later."""

        def do() -> None:
            self._weather["to_server"].delay_s = to_server_ms / 1000
            self._weather["to_client"].delay_s = to_client_ms / 1000

        self._call(do)

    def swallow(self, directions: Directions = "both") -> None:
        """Take all bytes and deliver none: the peer sees neither them nor an end or a reset."""
        self._set(directions, Mode.DROP)

    def hold(self, directions: Directions = "both") -> None:
        """Keep all bytes, and ends of connections, until ``forward()``, and deliver them then."""
        self._set(directions, Mode.HOLD)

    def _set(self, directions: Directions, mode: Mode) -> None:
        def do() -> None:
            for direction, weather in self._weather.items():
                if directions in (direction, "both"):
                    weather.mode = mode

        self._call(do)

    def stall(self) -> None:
        """Listen, but accept nobody: clients are connected, and nobody reads what they send."""

        def do() -> None:
            self._accepting = False

        self._call(do)

    def refuse(self) -> None:
        """Listen no more: new clients are refused. Connections that are open go on."""

        def do() -> None:
            if self._listener is not None:
                self._unwatch(self._listener)
                self._listener.close()
                self._listener = None

        self._call(do)

    def cut(self, connection: Optional[int] = None) -> None:
        """End open connections, or the one of this number, with an end of file on both sides."""
        self._end(connection, reset=False)

    def reset(self, connection: Optional[int] = None) -> None:
        """End open connections, or the one of this number, with a reset on both sides."""
        self._end(connection, reset=True)

    def _end(self, connection: Optional[int], *, reset: bool) -> None:
        def do() -> None:
            for relay in self._relays:
                if connection in (None, relay.number):
                    relay.end(reset=reset)

        self._call(do)

    # -- single requests -------------------------------------------------------------------------

    def lose_reply(
        self,
        when: Callable[[bytes], bool] = anything,
        *,
        nth: int = 1,
        connection: Optional[int] = None,
        how: How = "reset",
        complete: Callable[[bytes], bool] = anything,
    ) -> Rule:
        """Forward a request, wait until the server has answered, and lose the answer.

        Args:
            when: Tells of the bytes of a request so far whether it is meant.
            nth: The how-manieth of those that are meant.
            connection: The number of the only connection that is meant, 1 for the first accepted.
            how: What the client is told: a reset, an end of file, or nothing.
            complete: Tells of the bytes of the reply so far whether the server has done its work:
                when it begins (Redis), or ``postgres_answered``.

        Returns:
            The rule; its ``fired`` is set when it has happened.
        """
        rule = Rule("reply", when, nth, connection, how, complete)
        self._call(lambda: self._rules.append(rule))
        return rule

    def lose_request(
        self,
        when: Callable[[bytes], bool] = anything,
        *,
        nth: int = 1,
        connection: Optional[int] = None,
        how: How = "reset",
    ) -> Rule:
        """Lose a request before the server has got it. The arguments are those of the reply."""
        rule = Rule("request", when, nth, connection, how)
        self._call(lambda: self._rules.append(rule))
        return rule

    # -- the thread ------------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections and the thread.

        Raises:
            BaseException: What went wrong in the thread, if something did.
        """
        if self._thread.is_alive():
            self._closing = True
            self._ring()
            self._thread.join(CALL_S)
            assert not self._thread.is_alive(), "the thread of the proxy does not end"
        if self._error is not None:
            raise self._error

    def _call(self, function: Callable[[], T]) -> T:
        """Have the thread call a function, and return its result."""
        done: Future[T] = Future()

        def do() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

        self._calls.put(do)
        self._ring()
        if not self._thread.is_alive():
            message = f"the proxy has ended: {self._error}"
            raise RuntimeError(message)
        return done.result(CALL_S)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._bell.send(b"!")

    def _run(self) -> None:
        try:
            self._selector.register(self._ear, selectors.EVENT_READ)
            while not self._closing:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - close() raises it
            self._error = error
        finally:
            for relay in self._relays:
                relay.end(reset=False)
            self._relays.clear()
            self._selector.close()
            for one in (self._listener, self._place, self._bell, self._ear):
                if one is not None:
                    one.close()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        now = time.monotonic()
        if self._listener is not None:
            self._watch(self._listener, None, reads=self._accepting, writes=False)
        for relay in self._relays:
            for side in (relay.client, relay.server):
                reads, writes = relay.wishes(side, now)
                self._watch(side, relay, reads=reads, writes=writes)
        times = [due for due in (relay.due(now) for relay in self._relays) if due is not None]
        wait_s = max(0.0, min(times) - now) if times else None
        for key, events in self._selector.select(wait_s):
            side = cast("socket.socket", key.fileobj)
            if side is self._ear:
                self._ear.recv(4096)
            elif side is self._listener:
                self._accept()
            else:
                self._serve(key.data, side, events)
        for relay in self._relays:
            if relay.open:
                relay.flush(time.monotonic())
        self._do_calls()
        self._forget()

    def _serve(self, relay: Relay, side: socket.socket, events: int) -> None:
        now = time.monotonic()
        if relay.open and events & selectors.EVENT_WRITE:
            relay.writable(side, now)
        if relay.open and events & selectors.EVENT_READ:
            relay.readable(side, now)

    def _do_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()
            self._forget()

    def _forget(self) -> None:
        """Forget connections that have ended."""
        self._past_requests += sum(x.exchanges.requests for x in self._relays if not x.open)
        self._relays = [relay for relay in self._relays if relay.open]
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Relay) and not key.data.open:
                self._selector.unregister(key.fileobj)

    def _watch(
        self, side: socket.socket, relay: Optional[Relay], *, reads: bool, writes: bool
    ) -> None:
        events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
        if events == 0:
            self._unwatch(side)
        elif side not in self._selector.get_map():
            self._selector.register(side, events, relay)
        elif self._selector.get_key(side).events != events:
            self._selector.modify(side, events, relay)

    def _unwatch(self, side: socket.socket) -> None:
        if side in self._selector.get_map():
            self._selector.unregister(side)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone meanwhile
            return
        self.accepted += 1
        server = socket.socket()
        for side in (client, server):
            side.setblocking(False)  # noqa: FBT003
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        relay = Relay(self.accepted, client, server, self._weather, self._rules)
        self._relays.append(relay)
        if server.connect_ex(self.target) not in (0, errno.EINPROGRESS):
            relay.end(reset=True)

    def _listening(self) -> socket.socket:
        listener = _bound((self.host, self.port))
        listener.setblocking(False)  # noqa: FBT003
        listener.listen(BACKLOG)
        return listener


def _bound(address: Address) -> socket.socket:
    one = socket.socket()
    # So that two sockets may have the port, of which one listens.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one
