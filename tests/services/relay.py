"""One connection through the proxy: what it reads, keeps, loses and sends. No threads here."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, Literal, Optional

CHUNK = 65_536

ROOM = 4 * 1024**2
"""How many bytes wait in one direction before the proxy stops reading, as a full network would."""

SEEN = 1024**2
"""How much of a request or reply a rule is shown."""

Direction = Literal["to_server", "to_client"]
How = Literal["reset", "cut", "silence"]


class Mode(Enum):
    """What happens to bytes in one direction."""

    FORWARD = "forward"
    DROP = "drop"
    HOLD = "hold"


@dataclass
class Weather:
    """The state of the network in one direction, for all connections."""

    mode: Mode = Mode.FORWARD
    delay_s: float = 0.0


def anything(data: bytes) -> bool:
    """Match every request, or a reply as soon as it begins."""
    return bool(data)


@dataclass(eq=False)
class Rule:
    """Which exchange of a request and its reply fails, and how.

    Attributes:
        loses: ``"reply"``: the server has got the request and answered. ``"request"``: from the
            bytes on that match, the server gets nothing.
        when: Tells of the bytes of a request so far whether it is meant.
        nth: The how-manieth of those is meant.
        connection: The number of the only connection that is meant; all if None.
        how: What the client is told: a reset, an end of file, or nothing at all.
        complete: Tells of the bytes of a reply so far whether the server is done.
        fired: Set when it has happened; the rule does nothing from then on.
    """

    loses: Literal["reply", "request"]
    when: Callable[[bytes], bool] = anything
    nth: int = 1
    connection: Optional[int] = None
    how: How = "reset"
    complete: Callable[[bytes], bool] = anything
    fired: threading.Event = field(default_factory=threading.Event)
    count: int = 0


class _Pipe:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, weather: Weather) -> None:
        self.source = source
        self.sink = sink
        self.weather = weather
        self.waiting: deque[tuple[float, bytes]] = deque()  # no bytes: the end
        self.size = 0
        self.damaged = False  # something was dropped: what follows would make no sense
        self.ended = False  # the source will send no more
        self.closed = False  # the sink was told

    def wants_to_read(self) -> bool:
        return not self.ended and self.size < ROOM

    def wants_to_write(self, now: float) -> bool:
        return (
            self.weather.mode is Mode.FORWARD
            and not self.damaged
            and bool(self.waiting)
            and self.waiting[0][0] <= now
        )

    def due(self, now: float) -> Optional[float]:
        """Return when what waits for its time may go; what waits for the sink has no time."""
        if self.weather.mode is Mode.FORWARD and not self.damaged and self.waiting:
            due = self.waiting[0][0]
            return due if due > now else None
        return None

    def put(self, data: bytes, now: float) -> None:
        """Take what the source has sent."""
        self.ended = self.ended or not data
        if self.weather.mode is Mode.DROP or self.damaged:
            self.damaged = True
            return
        self.waiting.append((now + self.weather.delay_s, data))
        self.size += len(data)

    def flush(self, now: float) -> None:
        """Send what is due, as far as the sink takes it."""
        while self.wants_to_write(now):
            due, data = self.waiting.popleft()
            if not data:
                self.closed = True
                with contextlib.suppress(OSError):  # it has gone itself
                    self.sink.shutdown(socket.SHUT_WR)
                return
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            self.size -= sent
            if sent < len(data):
                self.waiting.appendleft((due, data[sent:]))
                return

    def lose(self) -> None:
        """Drop what waits, and all that comes."""
        self.waiting.clear()
        self.size = 0
        self.damaged = True


class Exchanges:
    """Tells requests and replies of one connection apart, by whose turn it is, and applies rules.

    A request is what the client sends until the server begins to answer.
    """

    def __init__(self, number: int, rules: Sequence[Rule]) -> None:
        self.number = number
        self.requests = 0
        self.rule: Optional[Rule] = None  # the one that this exchange falls under
        self._rules = rules
        self._counted: set[Rule] = set()
        self._request = b""
        self._reply = b""
        self._answered = True

    def request(self, data: bytes) -> Optional[Rule]:
        """Take what the client has sent; return the rule by which it is not forwarded."""
        if self._answered:
            self.requests += 1
            self._answered = False
            self._request = self._reply = b""
            self._counted.clear()
        self._request = (self._request + data)[:SEEN]
        for rule in self._rules:
            if self.rule is None and self._falls_under(rule):
                self.rule = rule
        return self.rule if self.rule is not None and self.rule.loses == "request" else None

    def _falls_under(self, rule: Rule) -> bool:
        if rule.fired.is_set() or rule in self._counted:
            return False
        if rule.connection not in (None, self.number) or not rule.when(self._request):
            return False
        self._counted.add(rule)
        rule.count += 1
        return rule.count == rule.nth

    def reply(self, data: bytes) -> Optional[Rule]:
        """Take what the server has sent; return the rule by which all of the reply is now lost."""
        self._answered = True
        if self.rule is None:
            return None
        self._reply = (self._reply + data)[-SEEN:]
        # A server that ends in the middle answers no more.
        return self.rule if not data or self.rule.complete(self._reply) else None

    def pardon(self) -> bool:
        """Take the rule back; return whether a part of the reply is lost already."""
        lost = self.rule is not None and bool(self._reply)
        self.rule = None
        return lost


class Relay:
    """A client's connection and its counterpart to the server."""

    def __init__(
        self,
        number: int,
        client: socket.socket,
        server: socket.socket,
        weather: dict[Direction, Weather],
        rules: Sequence[Rule],
    ) -> None:
        self.number = number
        self.client = client
        self.server = server
        self.connecting = True
        self.open = True
        self.exchanges = Exchanges(number, rules)
        self._to_server = _Pipe(client, server, weather["to_server"])
        self._to_client = _Pipe(server, client, weather["to_client"])
        self._pipes = (self._to_server, self._to_client)

    # -- what the loop asks and tells ------------------------------------------------------------

    def wishes(self, side: socket.socket, now: float) -> tuple[bool, bool]:
        """Tell whether it wants to read from a socket and to write to it."""
        reads = any(pipe.wants_to_read() for pipe in self._pipes if pipe.source is side)
        writes = any(pipe.wants_to_write(now) for pipe in self._pipes if pipe.sink is side)
        if self.connecting:
            return reads and side is self.client, side is self.server
        return reads, writes

    def due(self, now: float) -> Optional[float]:
        """Return when it has something to do without being told, if it has."""
        times = [due for due in (pipe.due(now) for pipe in self._pipes) if due is not None]
        return min(times, default=None)

    def readable(self, side: socket.socket, now: float) -> None:
        """Read from one side."""
        try:
            data = side.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the peer has reset the connection, and the other one learns it so
            self.end(reset=True)
            return
        if side is self.client:
            self._from_client(data, now)
        else:
            self._from_server(data, now)
        self.flush(now)

    def writable(self, side: socket.socket, now: float) -> None:
        """Write to one side, or learn that the connection to the server is there."""
        if self.connecting and side is self.server:
            self.connecting = False
            if side.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.end(reset=True)
                return
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send what is due."""
        if self.connecting:
            return
        try:
            for pipe in self._pipes:
                pipe.flush(now)
        except OSError:
            self.end(reset=True)
        if all(pipe.closed for pipe in self._pipes):
            self.end(reset=False)

    def _from_client(self, data: bytes, now: float) -> None:
        rule = self.exchanges.request(data) if data else None
        if rule is not None:
            self._fire(rule)
            return
        self._to_server.put(data, now)

    def _from_server(self, data: bytes, now: float) -> None:
        rule = self.exchanges.reply(data)
        if rule is not None:
            self._fire(rule)
        elif self.exchanges.rule is None:
            self._to_client.put(data, now)

    def _fire(self, rule: Rule) -> None:
        rule.fired.set()  # first: a client that notices may look at once
        if rule.how == "silence":
            for pipe in self._pipes:
                pipe.lose()
            self.exchanges.rule = None
        else:
            self.end(reset=rule.how == "reset")

    # -- its end ---------------------------------------------------------------------------------

    def repair(self) -> None:
        """Go on without rules; a connection that lost bytes makes no sense any more and ends."""
        if self.exchanges.pardon() or any(pipe.damaged for pipe in self._pipes):
            self.end(reset=True)

    def end(self, *, reset: bool) -> None:
        """End it on both sides, with a reset or with an end of file."""
        if not self.open:
            return
        self.open = False
        for side in (self.client, self.server):
            if reset:
                linger = struct.pack("ii", 1, 0)  # close() sends a reset
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                with contextlib.suppress(OSError):  # nothing more to read, or not connected
                    # Bytes that nobody has read would turn the end of file into a reset.
                    for _ in range(ROOM // CHUNK):
                        if not side.recv(CHUNK):
                            break
                with contextlib.suppress(OSError):
                    # At once, although a forked process may have the socket too.
                    side.shutdown(socket.SHUT_RDWR)
            side.close()
